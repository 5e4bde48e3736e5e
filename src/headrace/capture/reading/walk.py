"""One walk over a function's instructions, with the objects that they may mean."""

from __future__ import annotations

import builtins
import os
import sys
import types
from typing import TYPE_CHECKING

from headrace.capture.reading.bytecode import Instruction, StackMachine
from headrace.capture.reading.known import (
    CONTAINERS,
    DEEPEST,
    ContainerMethod,
    Frame,
    Iteration,
    Known,
    MadeFunction,
    Super,
    Values,
)
from headrace.source_lines import Site

if TYPE_CHECKING:
    from headrace.capture.reading.reading import Reader


class Walk(StackMachine):
    """Runs each instruction of a frame's code with known objects in place of values."""

    def __init__(self, reader: Reader, frame: Frame) -> None:
        super().__init__(frame.code)
        self._reader = reader
        self._lookup = reader.lookup
        self._places = reader.places
        self._frame = frame
        self._keywords: tuple[str, ...] = ()

    def at_line(self, line: int) -> None:
        self._places.reach(Site(self._frame.code.co_filename, line))

    def use(self, values: Values) -> None:
        self._reader.whole(values)

    # --- variables --------------------------------------------------------------------------------

    def _load_fast(self, one: Instruction) -> None:
        self.push(self._frame.variables.get(one.value, ()))

    _load_fast_check = _load_fast_and_clear = _load_fast

    def _store_fast(self, one: Instruction) -> None:
        values, before = self.pop(), self._frame.variables.get(one.value, ())
        self._frame.variables[one.value] = self._reader.known((*before, *values))

    def _load_const(self, one: Instruction) -> None:
        self.push((Known(one.value, repr(one.value)[:40]),))

    def _return_const(self, one: Instruction) -> None:
        pass

    def _load_deref(self, one: Instruction) -> None:
        frame = self._frame.find(one.value)
        cell = self._frame.cell(one.value)
        if frame is not None or cell is None:
            self.push(() if frame is None else frame.variables[one.value])
            return
        found = self._lookup.slot(cell, "cell_contents", one.value)
        self.push(self._reader.known(found))

    _load_classderef = _load_from_dict_or_deref = _load_deref

    def _store_deref(self, one: Instruction) -> None:
        values, cell = self.pop(), self._frame.cell(one.value)
        if cell is not None:
            self._places.stored(cell, "cell_contents", one.value)
            return
        frame = self._frame.find(one.value) or self._frame
        before = frame.variables.get(one.value, ())
        frame.variables[one.value] = self._reader.known((*before, *values))

    def _load_closure(self, one: Instruction) -> None:
        self.push(())

    def _load_global(self, one: Instruction) -> None:
        if sys.version_info >= (3, 11) and one.arg & 1:
            self.push(())
        name, space = one.value, self._frame.globals
        if name not in space and hasattr(builtins, name):
            self._places.absent(space, name, name)
            self.push((Known(getattr(builtins, name), name),))
            return
        self.push(self._reader.known(self._lookup.entry(space, name, name)))

    _load_name = _load_global

    def _store_global(self, one: Instruction) -> None:
        self.pop()
        self._places.stored(self._frame.globals, one.value, one.value)

    def _import_name(self, one: Instruction) -> None:
        level, wanted = self.take(2)
        package = self._frame.globals.get("__package__") or ""
        depth = level[0].value if level else 0
        parts = package.split(".")
        prefix = ".".join(parts[: len(parts) - depth + 1]) if depth else ""
        name = ".".join(filter(None, (prefix, one.value)))
        found = self._lookup.entry(sys.modules, name, name)
        if not wanted or not wanted[0].value:  # `import a.b` gives `a`
            found = self._lookup.entry(sys.modules, name.partition(".")[0], name.partition(".")[0])
        self.push(self._reader.known(found))

    def _import_from(self, one: Instruction) -> None:
        module = self.stack[-1] if self.stack else ()
        self.push(self._lookup.attributes(module, one.value))

    # --- attributes and items ---------------------------------------------------------------------

    def _load_attr(self, one: Instruction) -> None:
        if sys.version_info >= (3, 12) and one.arg & 1:
            self._load_method(one)
            return
        self.push(self._attribute(self.pop(), one.value))

    def _load_method(self, one: Instruction) -> None:
        owner = self.pop()
        self.push((), self._attribute(owner, one.value))

    def _attribute(self, owners: Values, name: str) -> Values:
        found = self._lookup.attributes(owners, name)
        for owner in owners:
            if isinstance(owner.value, CONTAINERS) or owner.value is os.environ:
                method = Known(ContainerMethod(owner, name), f"{owner.name}.{name}")
                found = (*found, method) if hasattr(type(owner.value), name) else found
        return found

    def _load_super_attr(self, one: Instruction) -> None:
        owner, kind, _ = self.pop(), self.pop(), self.pop()
        supers = tuple(
            Known(Super(k.value, o.value), o.name)
            for k in kind
            for o in owner
            if isinstance(k.value, type)
        )
        found = self._lookup.attributes(supers, one.value)
        self.push(*(((), found) if one.arg & 1 else (found,)))

    def _store_attr(self, one: Instruction) -> None:
        owner, stored = self.pop(), self.pop()
        for known in owner:
            name = f"{known.name}.{one.value}"
            self._lookup.by_syntax(known, one.value, stored)  # a property
            self._lookup.attribute(known, one.value)
            self._places.mark_stored(known.value, one.value, name)

    def _binary_subscr(self, one: Instruction) -> None:
        key, owner = self.pop(), self.pop()
        if len(key) == 1 and isinstance(key[0].value, str | int) and owner:
            self.push(self._lookup.item(owner, key[0].value))
        else:
            self._reader.whole((*owner, *key))
            self.push(())

    def _store_subscr(self, one: Instruction) -> None:
        key, owner, stored = self.pop(), self.pop(), self.pop()
        for known in owner:
            value = known.value
            self._lookup.by_syntax(known, "__setitem__", key, stored)
            is_entry = isinstance(value, dict | list) and len(key) == 1
            if is_entry and isinstance(key[0].value, str | int):
                name = f"{known.name}[{key[0].value!r}]"
                self._places.stored(value, key[0].value, name)
            else:
                self._reader.whole((known,))
                self._places.changed_at(value)

    def _delete_subscr(self, one: Instruction) -> None:
        key, owner = self.pop(), self.pop()
        self.push((), owner, key)
        self._store_subscr(one)

    # --- calls ------------------------------------------------------------------------------------

    def _kw_names(self, one: Instruction) -> None:
        self._keywords = self._frame.code.co_consts[one.arg]

    def _call(self, one: Instruction) -> None:
        names, self._keywords = self._keywords, ()
        self._calls(one.arg, names)

    def _call_kw(self, one: Instruction) -> None:
        names = self.pop()
        self._calls(one.arg, names[0].value if names else ())

    def _calls(self, count: int, names: tuple[str, ...]) -> None:
        args = self.take(count)
        upper, lower = self.pop(), self.pop()
        called = upper or lower
        if upper and lower:  # a comprehension, which is given its iterator in place of `self`
            called, args = lower, [upper, *args]
        split = len(args) - len(names)
        keywords = dict(zip(names, args[split:], strict=False))
        self.push(self._reader.calls.result_of(self._frame, called, args[:split], keywords))

    def _call_function_ex(self, one: Instruction) -> None:
        for values in self.take(1 + (one.arg & 1)):
            self._reader.whole(values)
        upper, lower = self.pop(), self.pop()
        self.push(self._reader.calls.result_of(self._frame, upper or lower, [], {}))

    def _make_function(self, one: Instruction) -> None:
        code = self.pop()
        self.take((one.arg or 0).bit_count())
        if not code or not isinstance(code[0].value, types.CodeType):
            self.push(())
            return
        made = Known(MadeFunction(code[0].value, self._frame), code[0].value.co_name)
        self._reader.calls.call(made, [], {})  # it may be called from elsewhere
        self.push((made,))

    def _return_value(self, one: Instruction) -> None:
        self.returned += self.pop()

    # --- loops and the stack ----------------------------------------------------------------------

    def _get_iter(self, one: Instruction) -> None:
        values = self.pop()
        items = self._reader.iterated(values)
        if items:  # what is read of each item is seen in the loop
            for known in values:
                self._reader.items(known, DEEPEST)
        else:
            self._reader.whole(values)
        self.push((Known(Iteration(items), "items"),))

    def _for_iter(self, one: Instruction) -> None:
        top = self.stack[-1] if self.stack else ()
        found = [item for o in top if isinstance(o.value, Iteration) for item in o.value.items]
        self.push(tuple(found))
