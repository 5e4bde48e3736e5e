"""Values that a step reads in some way, and that change while its graph is in use.

Each trap is a name, code that sets things up, an expression that the step reads (or the body of a
function), and code that changes it. `FOUND_BEFORE` must be noticed before the next replay,
`FOUND_LATER` when the graph is checked again, and `REFUSED` never captured.
"""

from __future__ import annotations

Trap = tuple[str, str, str, str]

_CLASS = """
class Config:
    beta = 1.0
    def __init__(self):
        self.own = 1.0
        self.inner = None
    @property
    def scaled(self):
        return self.own * 2
    def method(self):
        return self.own
    @classmethod
    def of_class(cls):
        return cls.beta
    @staticmethod
    def of_nothing():
        return offset
class Derived(Config):
    def method(self):
        return super().method() + 1
offset = 1.0
c = Config()
c.inner = Config()
d = Derived()
"""
_MODULE = """
import torch
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = 1.0
        self.cfg = {"gain": 1.0}
        self.sizes = [1.0, 2.0]
    def scale(self):
        return self.gain
    def forward(self):
        return self.scale() * self.cfg["gain"] * sum(self.sizes)
layer = Layer()
inner = torch.nn.ModuleList([Layer(), Layer()])
"""

FOUND_BEFORE: list[Trap] = [
    ("a global", "beta = 1.0", "beta", "beta = 2.0"),
    ("a global of another type", "beta = 1", "beta", "beta = 1.5"),
    ("the sign of zero", "zero = 0.0", "1.0 if str(zero) == '0.0' else 2.0", "zero = -0.0"),
    ("None", "beta = None", "1.0 if beta is None else beta", "beta = 2.0"),
    ("a bool", "flag = True", "1.0 if flag else 2.0", "flag = False"),
    ("text", "mode = 'a'", "1.0 if mode == 'a' else 2.0", "mode = 'b'"),
    ("bytes", "data = b'a'", "float(data[0])", "data = b'b'"),
    ("an attribute", _CLASS, "c.own", "c.own = 2.0"),
    ("an attribute of an attribute", _CLASS, "c.inner.own", "c.inner.own = 2.0"),
    ("an object replaced", _CLASS, "c.inner.own", "c.inner = Config(); c.inner.own = 2.0"),
    ("an attribute of the class", _CLASS, "c.beta", "Config.beta = 2.0"),
    ("an attribute that hides the class's", _CLASS, "c.beta", "c.beta = 2.0"),
    ("an attribute that is deleted", _CLASS + "c.beta = 2.0", "c.beta", "del c.beta"),
    ("an attribute of a base class", _CLASS, "d.beta", "Config.beta = 2.0"),
    ("an attribute that hides the base's", _CLASS, "d.beta", "Derived.beta = 2.0"),
    ("a property", _CLASS, "c.scaled", "c.own = 2.0"),
    ("a method", _CLASS, "c.method()", "c.own = 2.0"),
    ("a method that calls super()", _CLASS, "d.method()", "d.own = 2.0"),
    ("a class method", _CLASS, "c.of_class()", "Config.beta = 2.0"),
    ("a static method", _CLASS, "c.of_nothing()", "offset = 2.0"),
    ("a bound method", _CLASS + "m = c.method", "m()", "c.own = 2.0"),
    ("a method replaced in the object", _CLASS, "c.method()", "c.method = lambda: 2.0"),
    ("a method replaced in the class", _CLASS, "c.method()", "Config.method = lambda self: 2.0"),
    ("a local name for an object", _CLASS, "it = c.inner\nreturn it.own", "c.inner.own = 2.0"),
    ("one of two objects", _CLASS, "it = c if offset else d\nreturn it.own", "c.own = 2.0"),
    ("getattr", _CLASS, "getattr(c, 'own')", "c.own = 2.0"),
    ("getattr with a default", _CLASS, "getattr(c, 'cold', 1.0)", "c.cold = 2.0"),
    ("hasattr", _CLASS, "1.0 if hasattr(c, 'cold') else 2.0", "c.cold = 2.0"),
    ("an item", "box = {'a': 1.0}", "box['a']", "box['a'] = 2.0"),
    ("an item of an item", "box = {'a': {'b': 1.0}}", "box['a']['b']", "box['a']['b'] = 2.0"),
    ("an inner dict replaced", "box = {'a': {'b': 1.0}}", "box['a']['b']", "box['a'] = {'b': 2.0}"),
    ("dict.get", "box = {'a': 1.0}", "box.get('a')", "box['a'] = 2.0"),
    ("dict.get of nothing", "box = {}", "box.get('a', 1.0)", "box['a'] = 2.0"),
    ("in a dict", "box = {}", "1.0 if 'a' in box else 2.0", "box['a'] = 2.0"),
    ("a dict's values", "box = {'a': 1.0}", "sum(box.values())", "box['b'] = 2.0"),
    ("a dict's items", "box = {'a': 1.0}", "sum(v for k, v in box.items())", "box['a'] = 2.0"),
    (
        "a dict's order",
        "box = {'a': 1.0, 'b': 2.0}",
        "next(iter(box.values())) if 1 else 0",
        "box['a'] = box.pop('a')",
    ),
    ("an item by a name", "box = {'a': 1.0}\nkey = 'a'", "box[key]", "box['a'] = 2.0"),
    ("the name of an item", "box = {'a': 1.0, 'b': 2.0}\nkey = 'a'", "box[key]", "key = 'b'"),
    ("an index", "row = [1.0]", "row[0]", "row[0] = 2.0"),
    ("the last index", "row = [1.0, 1.0]", "row[-1]", "row[-1] = 2.0"),
    (
        "a loop over a list",
        "row = [1.0]",
        "t = 0.0\nfor one in row: t += one\nreturn t",
        "row.append(2.0)",
    ),
    ("the sum of a list", "row = [1.0]", "sum(row)", "row[0] = 2.0"),
    ("the length of a list", "row = [1.0]", "float(len(row))", "row.append(2.0)"),
    (
        "a list replaced by an equal one, then changed",
        "row = [1.0]",
        "sum(row)",
        "row = [1.0]; step_again(); row.append(1.0)",
    ),
    ("a tuple", "row = (1.0, 2.0)", "sum(row)", "row = (1.0, 3.0)"),
    (
        "a tuple that is unpacked",
        "row = (1.0, 2.0)",
        "a, b = row\nreturn a * b",
        "row = (1.0, 3.0)",
    ),
    ("a set", "names = {'a'}", "1.0 if 'a' in names else 2.0", "names.clear()"),
    ("a deque", "from collections import deque\nrow = deque([1.0])", "sum(row)", "row.append(1.0)"),
    ("a list of lists", "rows = [[1.0]]", "sum(map(sum, rows))", "rows[0][0] = 2.0"),
    (
        "a list of objects",
        _CLASS + "cs = [c, d]",
        "t = 0.0\nfor one in cs: t += one.own\nreturn t",
        "d.own = 2.0",
    ),
    ("an object in a list", _CLASS + "cs = [c, d]", "cs[1].own", "d.own = 2.0"),
    ("an object in a dict", _CLASS + "cs = {'d': d}", "cs['d'].own", "d.own = 2.0"),
    ("a comprehension", _CLASS + "cs = [c, d]", "sum([one.own for one in cs])", "d.own = 2.0"),
    ("a generator expression", "row = [1.0]\nk = 1.0", "sum(one * k for one in row)", "k = 2.0"),
    ("a helper", "beta = 1.0\ndef helper(): return beta", "helper()", "beta = 2.0"),
    (
        "a helper's helper",
        "beta = 1.0\ndef a(): return beta\ndef b(): return a()",
        "b()",
        "beta = 2.0",
    ),
    ("a helper's argument", _CLASS + "def of(it): return it.own", "of(c)", "c.own = 2.0"),
    (
        "a helper's named argument",
        _CLASS + "def of(*, it): return it.own",
        "of(it=c)",
        "c.own = 2.0",
    ),
    ("what a helper returns", _CLASS + "def get(): return c", "get().own", "c.own = 2.0"),
    ("a helper replaced", "def helper(): return 1.0", "helper()", "def helper(): return 2.0"),
    (
        "a helper's code",
        "def helper(): return 1.0",
        "helper()",
        "helper.__code__ = (lambda: 2.0).__code__",
    ),
    ("a default", "def helper(beta=1.0): return beta", "helper()", "helper.__defaults__ = (2.0,)"),
    (
        "a default by name",
        "def helper(*, beta=1.0): return beta",
        "helper()",
        "helper.__kwdefaults__['beta'] = 2.0",
    ),
    ("an object as default", _CLASS + "def helper(it=c): return it.own", "helper()", "c.own = 2.0"),
    (
        "a closure",
        "def make():\n    beta = 1.0\n    def get(): return beta\n    def put(v):\n"
        "        nonlocal beta\n        beta = v\n    return get, put\nget, put = make()",
        "get()",
        "put(2.0)",
    ),
    (
        "an object in a closure",
        _CLASS + "def make(it):\n    return lambda: it.own\nget = make(c)",
        "get()",
        "c.own = 2.0",
    ),
    ("a lambda made in the step", _CLASS, "(lambda: c.own)()", "c.own = 2.0"),
    ("a function made in the step", _CLASS, "def get(): return c.own\nreturn get()", "c.own = 2.0"),
    ("a function attribute", "def get(): return 1.0\nget.beta = 1.0", "get.beta", "get.beta = 2.0"),
    (
        "a partial",
        "import functools\ndef get(it): return it['a']\nbox = {'a': 1.0}\n"
        "p = functools.partial(get, box)",
        "p()",
        "box['a'] = 2.0",
    ),
    (
        "a wrapped function",
        "import functools\nbeta = 1.0\ndef wrap(f):\n    @functools.wraps(f)\n"
        "    def call(*a): return f(*a)\n    return call\n@wrap\ndef get(): return beta",
        "get()",
        "beta = 2.0",
    ),
    (
        "a callable object",
        "class Get:\n    beta = 1.0\n    def __call__(self): return self.beta\nget = Get()",
        "get()",
        "get.beta = 2.0",
    ),
    (
        "a slot",
        "class S:\n    __slots__ = ('beta',)\ns = S()\ns.beta = 1.0",
        "s.beta",
        "s.beta = 2.0",
    ),
    (
        "a dataclass",
        "from dataclasses import dataclass\n@dataclass\nclass D:\n    beta: float = 1.0\nd = D()",
        "d.beta",
        "d.beta = 2.0",
    ),
    (
        "a frozen dataclass",
        "from dataclasses import dataclass, replace\n@dataclass(frozen=True)\n"
        "class D:\n    beta: float = 1.0\nd = D()",
        "d.beta",
        "d = replace(d, beta=2.0)",
    ),
    (
        "a named tuple",
        "from typing import NamedTuple\nclass N(NamedTuple):\n    beta: float\nn = N(1.0)",
        "n.beta",
        "n = N(2.0)",
    ),
    (
        "a namespace",
        "from types import SimpleNamespace as S\ns = S(beta=1.0)",
        "s.beta",
        "s.beta = 2.0",
    ),
    (
        "a dict with attributes",
        "class Box(dict):\n    __getattr__ = dict.__getitem__\nbox = Box(beta=1.0)",
        "box.beta",
        "box['beta'] = 2.0",
    ),
    (
        "an object that forwards",
        "class F:\n    def __init__(self): self.kept = {'beta': 1.0}\n"
        "    def __getattr__(self, name): return self.kept['beta']\nf = F()",
        "f.beta",
        "f.kept['beta'] = 2.0",
    ),
    (
        "an Enum's class",
        "from enum import Enum\nclass E(Enum):\n    A = 1.0\n    B = 2.0\nmode = E.A",
        "mode.value",
        "mode = E.B",
    ),
    (
        "an environment variable",
        "import os\nos.environ['HEADRACE_TRAP'] = '1'",
        "float(os.environ['HEADRACE_TRAP'])",
        "os.environ['HEADRACE_TRAP'] = '2'",
    ),
    (
        "os.getenv",
        "import os\nos.environ['HEADRACE_TRAP'] = '1'",
        "float(os.getenv('HEADRACE_TRAP'))",
        "os.environ['HEADRACE_TRAP'] = '2'",
    ),
    (
        "os.environ.get",
        "import os\nos.environ['HEADRACE_TRAP'] = '1'",
        "float(os.environ.get('HEADRACE_TRAP', '1'))",
        "os.environ['HEADRACE_TRAP'] = '2'",
    ),
    ("a module", "import trapped", "trapped.beta", "trapped.beta = 2.0"),
    (
        "a module imported inside",
        "import trapped",
        "import trapped\nreturn trapped.beta",
        "trapped.beta = 2.0",
    ),
    (
        "a module under another name",
        "import trapped",
        "import trapped as t\nreturn t.beta",
        "trapped.beta = 2.0",
    ),
    (
        "a module in a package, under another name",
        "import trapped.inner",
        "import trapped.inner as t\nreturn t.beta",
        "trapped.inner.beta = 2.0",
    ),
    (
        "a module in a package",
        "import trapped.inner",
        "import trapped.inner\nreturn trapped.inner.beta",
        "trapped.inner.beta = 2.0",
    ),
    (
        "a name imported inside",
        "import trapped",
        "from trapped import beta\nreturn beta",
        "trapped.beta = 2.0",
    ),
    (
        "an object imported inside",
        "import trapped",
        "from trapped import cfg\nreturn cfg.beta",
        "trapped.cfg.beta = 2.0",
    ),
    (
        "a function imported inside",
        "import trapped",
        "from trapped import get\nreturn get()",
        "trapped.get = lambda: 2.0",
    ),
    (
        "sys.modules with a name",
        "import sys, trapped",
        "sys.modules['trapped'].beta",
        "trapped.beta = 2.0",
    ),
    ("a small array", "import numpy\na = numpy.ones(3)", "float(a.sum())", "a[0] = 2.0"),
    (
        "a tensor on the host",
        "import torch\nt = torch.ones(3)",
        "float(len(t)) * t.tolist()[0]",
        "t.fill_(2.0)",
    ),
    (
        "try and except",
        "beta = 1.0",
        "try:\n    return beta\nexcept KeyError:\n    return 0.0",
        "beta = 2.0",
    ),
    (
        "with",
        "import contextlib\nbeta = 1.0",
        "with contextlib.suppress(KeyError):\n    return beta\nreturn 0.0",
        "beta = 2.0",
    ),
    ("while", "count = 1", "n = 0\nwhile n < count: n += 1\nreturn float(n)", "count = 2"),
    ("and, or", "a, b = 1.0, 2.0", "a and b or a", "b = 3.0"),
    ("a conditional", "a, b, c = 1.0, 2.0, True", "a if c else b", "c = False"),
    (
        "a match by value",
        "mode = 'a'",
        "match mode:\n    case 'a': return 1.0\n    case _: return 2.0",
        "mode = 'b'",
    ),
    ("an f-string", "beta = 1.0", "float(f'{beta}')", "beta = 2.0"),
    (
        "several arguments",
        "def add(*a): return sum(a)\nrow = [1.0]",
        "add(*row)",
        "row.append(1.0)",
    ),
    ("a walrus", _CLASS, "(it := c).own", "c.own = 2.0"),
    ("a global that hides a builtin", "", "float(abs(-1.0))", "abs = lambda value: 2.0"),
    ("a module's attribute", _MODULE, "layer()", "layer.gain = 2.0"),
    ("an item of a module", _MODULE, "layer()", "layer.cfg['gain'] = 2.0"),
    ("a list of a module", _MODULE, "layer()", "layer.sizes.append(1.0)"),
    ("a module in a list", _MODULE, "inner[1]()", "inner[1].gain = 2.0"),
    ("modules in a loop", _MODULE, "sum(one() for one in inner)", "inner[0].gain = 2.0"),
    ("a module's mode", _MODULE, "1.0 if layer.training else 2.0", "layer.eval()"),
    ("a module's forward", _MODULE, "layer()", "layer.forward = lambda: 2.0"),
    ("a module replaced", _MODULE, "inner[0]()", "inner[0] = Layer(); inner[0].gain = 2.0"),
    ("a module's method", _MODULE, "layer()", "Layer.scale = lambda self: 2.0"),
    (
        "a function by a key",
        "beta = 1.0\ndef one(): return beta\ntable = {'a': one}\nkey = 'a'",
        "table[key]()",
        "beta = 2.0",
    ),
    (
        "a context variable",
        "import contextvars\nv = contextvars.ContextVar('v', default=1.0)",
        "v.get()",
        "v.set(2.0)",
    ),
    ("a ctypes number", "import ctypes\nn = ctypes.c_double(1.0)", "n.value", "n.value = 2.0"),
    ("an array of numbers", "import array\na = array.array('d', [1.0])", "a[0]", "a[0] = 2.0"),
    ("a bytearray", "b = bytearray(b'1')", "float(b[0])", "b[0] = 2"),
    ("a memoryview", "b = bytearray(b'1')\nm = memoryview(b)", "float(m[0])", "b[0] = 2"),
    (
        "an item of an object",
        "class N:\n    beta = 1.0\n    def __getitem__(self, k):\n"
        "        return self.beta\nn = N()",
        "n[0]",
        "N.beta = 2.0",
    ),
    ("a proxy", _CLASS + "import weakref\nw = weakref.proxy(c)", "w.own", "c.own = 2.0"),
]

FOUND_LATER: list[Trap] = [
    (
        "a file",
        "open(PATH, 'w').write('1')",
        "float(open(PATH).read())",
        "open(PATH, 'w').write('2')",
    ),
    (
        "a module by its name",
        "import importlib, trapped",
        "importlib.import_module('trapped').beta",
        "trapped.beta = 2.0",
    ),
    (
        "sys.modules with a computed name",
        "import sys, trapped",
        "sys.modules['trap' + str('ped')].beta",
        "trapped.beta = 2.0",
    ),
    (
        "a lazily imported name",
        "import trapped",
        "from trapped import late\nreturn late",
        "trapped.cfg.late = 2.0",
    ),
    (
        "StringIO",
        "import io\nf = io.StringIO('1')",
        "float(f.getvalue())",
        "f.seek(0); f.write('2')",
    ),
    (
        "BytesIO",
        "import io\nf = io.BytesIO(b'1')",
        "float(f.getvalue())",
        "f.seek(0); f.write(b'2')",
    ),
    (
        "a large array",
        "import numpy\na = numpy.ones(100_000)",
        "float(a[99_999])",
        "a[99_999] = 2.0",
    ),
    ("a large list", "row = [1.0] * 2000", "sum(row)", "row[0] = 2.0"),
    (
        "a computed name",
        "from types import SimpleNamespace as S\ns = S(w_0=1.0)\ni = 0",
        "getattr(s, f'w_{i}')",
        "s.w_0 = 2.0",
    ),
    (
        "vars()",
        "from types import SimpleNamespace as S\ns = S(beta=1.0)",
        "vars(s)['beta']",
        "s.beta = 2.0",
    ),
    ("globals()", "beta = 1.0", "globals()['beta']", "beta = 2.0"),
    ("eval", "beta = 1.0", "eval('beta')", "beta = 2.0"),
    (
        "attrgetter",
        "import operator\nfrom types import SimpleNamespace as S\ns = S(beta=1.0)\n"
        "get = operator.attrgetter('beta')",
        "get(s)",
        "s.beta = 2.0",
    ),
    (
        "methodcaller",
        _CLASS + "import operator\nget = operator.methodcaller('method')",
        "get(c)",
        "c.own = 2.0",
    ),
    (
        "a ChainMap",
        "from collections import ChainMap\nm = ChainMap({'a': 1.0})",
        "m['a']",
        "m['a'] = 2.0",
    ),
    (
        "a UserDict",
        "from collections import UserDict\nm = UserDict(a=1.0)",
        "m['a']",
        "m['a'] = 2.0",
    ),
    (
        "a MappingProxyType",
        "from types import MappingProxyType\nbox = {'a': 1.0}\nm = MappingProxyType(box)",
        "m['a']",
        "box['a'] = 2.0",
    ),
    (
        "a ConfigParser",
        "import configparser\np = configparser.ConfigParser()\np.read_dict({'a': {'b': '1'}})",
        "p.getfloat('a', 'b')",
        "p.set('a', 'b', '2')",
    ),
    (
        "a WeakKeyDictionary",
        _CLASS + "import weakref\nw = weakref.WeakKeyDictionary({c: 1.0})",
        "sum(w.values())",
        "w[c] = 2.0",
    ),
    ("a weak reference", _CLASS + "import weakref\nw = weakref.ref(c)", "w().own", "c.own = 2.0"),
    (
        "an event",
        "import threading\ne = threading.Event()",
        "2.0 if e.is_set() else 1.0",
        "e.set()",
    ),
    (
        "a thread's own",
        "import threading\nt = threading.local()\nt.beta = 1.0",
        "vars(t)['beta']",
        "t.beta = 2.0",
    ),
    ("a queue", "import queue\nq = queue.Queue()", "1.0 + q.qsize()", "q.put(1)"),
    (
        "an operator",
        "class N:\n    beta = 1.0\n    def __add__(self, o): return self.beta + o\nn = N()",
        "n + 1.0",
        "N.beta = 2.0",
    ),
    (
        "the length of an object",
        "class N:\n    n = 1\n    def __len__(self): return self.n\nn = N()",
        "float(len(n))",
        "N.n = 2",
    ),
    (
        "the truth of an object",
        "class N:\n    b = True\n    def __bool__(self): return self.b\nn = N()",
        "1.0 if n else 2.0",
        "N.b = False",
    ),
    (
        "a context manager",
        "class N:\n    beta = 1.0\n    def __enter__(self): return self.beta\n"
        "    def __exit__(self, *e): pass\nn = N()",
        "with n as beta: return beta",
        "N.beta = 2.0",
    ),
    (
        "an object made in the step",
        "start = 1.0\nclass N:\n    def __init__(self):\n        self.beta = start\n",
        "N().beta",
        "start = 2.0",
    ),
    (
        "a descriptor",
        "class D:\n    beta = 1.0\n    def __get__(self, o, k): return D.beta\n"
        "class C: x = D()\nc = C()",
        "c.x",
        "D.beta = 2.0",
    ),
    (
        "a match by name",
        "class P: pass\np = P()\np.x = 1.0",
        "match p:\n    case P(x=1.0): return 1.0\nreturn 2.0",
        "p.x = 2.0",
    ),
    (
        "singledispatch",
        "import functools\nbeta = 1.0\n@functools.singledispatch\ndef f(v): return 0\n"
        "@f.register\ndef _(v: float): return v * beta",
        "f(1.0)",
        "beta = 2.0",
    ),
    (
        "sorted by a key",
        "order = {1: 1, 2: 2}\ndef rank(k): return order[k]",
        "float(sorted((1, 2), key=rank)[0])",
        "order[1] = 3",
    ),
    (
        "map",
        "beta = 1.0\ndef times(v): return v * beta",
        "sum(map(times, (1.0, 2.0)))",
        "beta = 2.0",
    ),
    ("the time", "import trapped", "trapped.clock.now()", "trapped.clock.tick()"),
    ("a folder", "import os", "float(len(os.listdir(FOLDER)) + 1)", "open(PATH, 'w').close()"),
    (
        "json",
        "import json\nopen(PATH, 'w').write('[1.0]')",
        "json.load(open(PATH))[0]",
        "open(PATH, 'w').write('[2.0]')",
    ),
    (
        "sqlite",
        "import sqlite3\nd = sqlite3.connect(':memory:')\nd.execute('create table t (v)')\n"
        "d.execute('insert into t values (1.0)')",
        "d.execute('select v from t').fetchone()[0]",
        "d.execute('update t set v = 2.0')",
    ),
    (
        "a decimal context",
        "import decimal",
        "float(decimal.getcontext().prec)",
        "decimal.getcontext().prec = 7",
    ),
    (
        "the recursion limit",
        "import sys\nlimit = sys.getrecursionlimit()",
        "float(sys.getrecursionlimit())",
        "sys.setrecursionlimit(limit + 1)",
    ),
    (
        "a deep container",
        "box = [[[[[[1.0]]]]]]",
        "sum(str(box).count(c) for c in '1') + 0.0",
        "box[0][0][0][0][0][0] = 11",
    ),
    (
        "an object in an array",
        "import numpy\nclass P: x = 1.0\np = P()\na = numpy.array([p], dtype=object)",
        "a.tolist()[0].x",
        "p.x = 2.0",
    ),
    (
        "pandas",
        "import pandas\nf = pandas.DataFrame({'a': [1.0]})",
        "float(f['a'].iloc[0])",
        "f.loc[0, 'a'] = 2.0",
    ),
]

REFUSED: list[Trap] = [
    ("a global counter", "n = 0", "global n\nn += 1\nreturn float(n)", ""),
    (
        "a closure's counter",
        "def make():\n    n = 0\n    def count():\n        nonlocal n\n"
        "        n += 1\n        return float(n)\n    return count\ncount = make()",
        "count()",
        "",
    ),
    ("an object's counter", _CLASS, "c.own += 1\nreturn c.own", ""),
    ("a class's counter", _CLASS, "Config.beta += 1\nreturn c.beta", ""),
    ("an item's counter", "box = {'n': 0}", "box['n'] += 1\nreturn float(box['n'])", ""),
    ("a counter that nothing reads", _CLASS, "c.own += 1\nreturn 1.0", ""),
    ("a list that grows", "row = []", "row.append(1.0)\nreturn sum(row)", ""),
    ("a list that shrinks", "row = [1.0] * 40", "row.pop()\nreturn sum(row)", ""),
    ("a set that grows", "s = set()", "s.add(len(s))\nreturn float(len(s))", ""),
    (
        "a deque that turns",
        "from collections import deque\nd = deque([1.0, 2.0, 3.0])",
        "d.rotate(1)\nreturn d[0]",
        "",
    ),
    ("an iterator", "i = iter(range(99))", "float(next(i))", ""),
    ("a count", "import itertools\ni = itertools.count()", "float(next(i))", ""),
    ("a generator", "def g():\n    yield from range(99)\ni = g()", "float(next(i))", ""),
    ("Python's generator", "import random", "random.random()", ""),
    ("NumPy's generator", "import numpy", "float(numpy.random.rand())", ""),
    ("a generator of one's own", "import random\nr = random.Random(1)", "r.random()", ""),
    ("NumPy's new generator", "import numpy\nr = numpy.random.default_rng(1)", "r.random()", ""),
    ("PyTorch's generator of the host", "import torch", "float(torch.rand(()))", ""),
    ("a module's counter", _MODULE, "layer.gain += 1\nreturn layer()", ""),
    (
        "a method's counter",
        "class N:\n    n = 0\n    def count(self):\n        self.n += 1\n"
        "        return float(self.n)\nc = N()",
        "c.count()",
        "",
    ),
    (
        "a file that is read on",
        "open(PATH, 'w').write('1\\n' * 99)\nf = open(PATH)",
        "float(next(f)) if f else 0.0",
        "",
    ),
]
