"""Run somebody's script or module as `python` would run it."""

from __future__ import annotations

import builtins
import io
import logging
import os
import pkgutil
import runpy
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import thread as executors
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, NoReturn

from headrace.errors import ProgramError

#: The name of a module that holds what a program has held.
_KEPT = "headrace_program"
#: The folders whose code watches a program, and PyTorch's files through which it is called.
_HERE = Path(__file__).parent
_WATCHING = tuple(
    str(_HERE / package) + os.sep for package in ("capture", "diagnosis", "fake", "races", "run")
)
_MACHINERY = tuple(
    str(Path("torch", file)) for file in ("_compile.py", "_dynamo/eval_frame.py", "_ops.py")
)


def require_program(program: str, *, as_module: bool) -> None:
    """Raise `ProgramError` if there is no such script or module."""
    expected = "expected a Python script, or -m and a module"
    if not as_module and Path(program).is_dir():
        if not Path(program, "__main__.py").is_file():
            raise ProgramError(f"{program}: is a folder without a __main__.py; {expected}")
    elif not as_module and not Path(program).is_file():
        raise ProgramError(f"{program}: no such file; {expected}")
    if as_module and not _is_module(program):
        raise ProgramError(f"{program}: no such module; expected one that `python -m` would find")


class ProgramEnded(SystemExit):
    """Raise this inside a program to end it. No `except Exception` catches it, and a thread that
    raises it ends without a traceback."""


class ProgramTerminated(ProgramEnded):
    """SIGTERM has ended the program."""

    exit_code = 128 + signal.SIGTERM


def run_as_main(program: str, arguments: Sequence[str], *, as_module: bool) -> int:
    """Run a script, or a module as `python -m` does. Returns its exit code when its threads have
    ended, too; after its `os._exit` at once. An error of the program's is printed as Python prints
    it. Ctrl-C, `ProgramEnded` and, unless the program has a handler of its own, SIGTERM (as
    `ProgramTerminated`) are raised at once. What the program has set is as before afterwards."""
    process = os.getpid()
    with _put_back(), _quiet_ends(), _signals(), _telling_exits(_raise_exit), _replacement_told():
        sys.path.insert(0, _folder(program, as_module))
        try:
            exit_code = _run(program, arguments, as_module)
        except _ExitAtOnce as end:
            exit_code = end.status
        if "RANK" in os.environ:
            # As with `python`, what the module of a rank holds lives until Python ends: a process
            # group waits for its threads when it is deleted, and they may wait for Python.
            sys.modules[_KEPT] = sys.modules["__main__"]
    if os.getpid() != process:  # the program has forked, and this is the child
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def run_as_python(
    program: str, arguments: Sequence[str], *, as_module: bool, before_exit: Callable[[], object]
) -> int | None:
    """Run a script, or a module as `python -m` does, as the last thing that this process does: what
    the program has set stays, and signals are its own. Returns its exit code when its threads have
    ended; None if Ctrl-C has ended it. `before_exit` is called before it leaves by `os._exit`."""
    if sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = _folder(program, as_module)  # Python has put another there for this command
    others = running_threads()
    with _telling_exits(lambda status: before_exit()), _replacement_told():
        try:
            return _run(program, arguments, as_module)
        except KeyboardInterrupt as problem:
            print_error(problem)
            _wait_for_threads(others)
            return None


def _folder(program: str, as_module: bool) -> str:
    """What Python puts first into `sys.path`."""
    return str(Path.cwd() if as_module else Path(program).resolve().parent)


def _run(program: str, arguments: Sequence[str], as_module: bool) -> int:
    """Run the program in a `__main__` of its own, and wait for its threads. Returns its exit
    code."""
    others = running_threads()
    sys.argv = [program, *arguments]
    sys.excepthook = sys.__excepthook__
    try:
        _run_in_main(Path(program).absolute(), program if as_module else None)
        exit_code = 0
    except (ProgramEnded, KeyboardInterrupt, _ExitAtOnce):
        raise
    except SystemExit as end:
        exit_code = _exit_code(end.code)
    except BaseException as problem:
        print_error(problem)
        exit_code = 1
    _wait_for_threads(others)
    return exit_code


def _wait_for_threads(others: set[threading.Thread]) -> None:
    """Wait for all threads for which Python would wait, but the `others`."""
    while waited_for := running_threads() - others:
        waited_for.pop().join()


def print_error(problem: BaseException) -> None:
    """Print an error of the program's as Python does. Frames that are not the program's are left
    out: an error of the compiler has none."""
    cleared: set[int] = set()
    pending: list[BaseException | None] = [problem]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in cleared:
            cleared.add(id(one))
            one.__traceback__ = users_part(one.__traceback__)
            pending += [one.__cause__, one.__context__]
    sys.excepthook(type(problem), problem, problem.__traceback__)


def _run_in_main(path: Path, module: str | None) -> None:
    """Run a script, a module, or the `__main__.py` of a zip file or a folder, in a new `__main__`.

    `sys.argv[0]` stays as it was typed while `path` is absolute, as with `python`: then lines can
    be read after the script's `os.chdir`, too."""
    main, is_file = ModuleType("__main__"), pkgutil.get_importer(str(path)) is None
    # What Python puts there before a program runs, and `exec` does not. Whether `__annotations__`
    # is among it depends on the version.
    if "__annotations__" in vars(sys.modules["__main__"]):
        vars(main)["__annotations__"] = {}
    vars(main).update(__builtins__=builtins, __file__=str(path), __cached__=None)
    if module is None and is_file:
        vars(main)["__loader__"] = SourceFileLoader("__main__", str(path))
        with io.open_code(str(path)) as file:
            # Not inherited: this file's `from __future__` imports.
            code = compile(file.read(), str(path), "exec", dont_inherit=True)
        sys.modules["__main__"] = main
        exec(code, vars(main))  # noqa: S102 - the program that the user named
        return
    if module is None:
        sys.path[0] = str(path)
    sys.modules["__main__"] = main
    as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    as_main(module or "__main__", alter_argv=module is not None)


def running_threads() -> set[threading.Thread]:
    """The threads that Python waits for before it ends. Those of an executor are left out: an idle
    one ends only with the interpreter."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread not in executors._threads_queues
    }


def _is_module(name: str) -> bool:
    """Whether `python -m` would find it. Imports nothing: its package belongs to the program."""
    with _put_back(), ExitStack() as afterwards:
        sys.path.insert(0, str(Path.cwd()))
        parts, where = name.split("."), None
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            found = (one.find_spec(package, where) for one in sys.meta_path)
            spec = next((one for one in found if one is not None), None)
            if spec is None:
                return False
            where = spec.submodule_search_locations
            if where is None and end < len(parts):
                return False
            if spec.loader is None and package not in sys.modules:
                # A folder without an __init__.py, which runs no code. Python finds another one in
                # it only if it is loaded.
                sys.modules[package] = module_from_spec(spec)
                afterwards.callback(sys.modules.pop, package)
    return True


@contextmanager
def _put_back() -> Iterator[None]:
    """After the block, all that a program may set is as before. The user's own paths are relative
    to the current directory."""
    names = ("argv", "stdout", "stderr", "excepthook")
    before = {name: getattr(sys, name) for name in names}
    path, main, folder = list(sys.path), sys.modules["__main__"], Path.cwd()
    try:
        yield
    finally:
        vars(sys).update(before)
        sys.path[:], sys.modules["__main__"] = path, main
        if folder.is_dir():
            os.chdir(folder)


def _is_no_end(record: logging.LogRecord) -> bool:
    """Lets asyncio log all errors but `ProgramEnded`. It may do so after the program's end, when
    it deletes the task."""
    return not (record.exc_info and record.exc_info[0] is ProgramEnded)


@contextmanager
def _quiet_ends() -> Iterator[None]:
    """Let a thread that raises `ProgramEnded` end without a traceback, and raise
    `KeyboardInterrupt` in the main thread, which may be waiting for work of that thread."""
    original = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not ProgramEnded:
            original(arguments)
        elif (main := threading.main_thread().ident) is not None:
            signal.pthread_kill(main, signal.SIGINT)

    logging.getLogger("asyncio").addFilter(_is_no_end)
    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:  # else the program has set its own
            threading.excepthook = original


class _ExitAtOnce(SystemExit):
    """Raised by a program's `os._exit`."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status & 0xFF


def _raise_exit(status: int) -> None:
    """Let `os._exit` in the main thread end the program, but not this process, which still has
    something to say."""
    if threading.current_thread() is threading.main_thread():
        raise _ExitAtOnce(status)


@contextmanager
def _telling_exits(tell: Callable[[int], object]) -> Iterator[None]:
    """Call `tell` with the status before `os._exit` ends this process."""
    original, process = os._exit, os.getpid()

    def exit_at_once(status: int) -> NoReturn:
        if os.getpid() == process:
            tell(status)
        original(status)

    os._exit = exit_at_once
    try:
        yield
    finally:
        os._exit = original


@contextmanager
def _replacement_told() -> Iterator[None]:
    """Say so if the program lets another one take its place: nobody watches that one, and nothing
    is reported. `os.execvp` and such call one of the two functions."""
    process = os.getpid()

    def telling(original: Any) -> Any:
        def replace(path: Any, arguments: Any, *environment: Any) -> Any:
            # `os.execvp` tries one folder after the other.
            is_there = os.path.exists(path)  # noqa: PTH110 - it may be bytes, or a descriptor
            if is_there and os.getpid() == process:
                command = shlex.join(map(os.fsdecode, arguments))
                message = "headrace: the program is replaced by another, which is not watched: "
                print(message + command, file=sys.stderr, flush=True)  # noqa: T201
            return original(path, arguments, *environment)

        return replace

    originals = os.execv, os.execve
    os.execv, os.execve = map(telling, originals)
    try:
        yield
    finally:
        os.execv, os.execve = originals


@contextmanager
def _signals() -> Iterator[None]:
    """Raise `ProgramTerminated` on SIGTERM, which would otherwise end this process, too. After the
    block, stop the timers that the program has set and restore the handlers that it has replaced:
    they would run in code that is not the program's."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    if handlers[signal.SIGTERM] is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate_in(os.getpid()))
    try:
        yield
    finally:
        if hasattr(signal, "setitimer"):  # Windows has no timers
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _terminate_in(process: int) -> Callable[[int, FrameType | None], None]:
    """A handler of SIGTERM. A second one ends the process at once, and so does the first in a
    process that the program has forked, such as a loader's worker."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == process:
            raise ProgramTerminated
        os.kill(os.getpid(), number)

    return handle


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that ran the program and those that watch what it calls; None
    if there are no others."""
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    first = next((at for at, file in enumerate(files) if not _runs_programs(file)), len(files))
    is_ours = [at < first or file.startswith(_WATCHING) for at, file in enumerate(files)]
    # PyTorch calls what watches it through functions that are in no other traceback.
    for order in (range(first, len(files)), reversed(range(first, len(files)))):
        beside = False
        for at in order:
            beside = is_ours[at] = is_ours[at] or (beside and files[at].endswith(_MACHINERY))
    kept = None
    for entry, ours in zip(reversed(entries), reversed(is_ours), strict=True):
        if not ours:
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _runs_programs(file: str) -> bool:
    return file == __file__ or file.startswith(("<frozen ", *_WATCHING))
