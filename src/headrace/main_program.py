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
from types import CodeType, FrameType, ModuleType, TracebackType
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
    `ProgramTerminated`) are raised at once."""
    folder = str(Path.cwd()) if as_module else str(Path(program).resolve().parent)
    process, others = os.getpid(), running_threads()
    with (
        _command_line([program, *arguments], folder),
        _working_directory(),
        _quiet_ends(),
        _python_error_hook(),
        _standard_streams(),
        _signals(),
        _exits_at_once(),
        _replacement_told(),
    ):
        try:
            exit_code = _run(program, as_module)
            while waited_for := running_threads() - others:
                waited_for.pop().join()
        except _ExitAtOnce as end:
            exit_code = end.status
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
    original, process, others = os._exit, os.getpid(), running_threads()

    def exit_at_once(status: int) -> NoReturn:
        if os.getpid() == process:
            before_exit()
        original(status)

    folder = str(Path.cwd()) if as_module else str(Path(program).resolve().parent)
    sys.argv[:] = [program, *arguments]
    if sys.path and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # what Python has put there for this command
        sys.path.insert(0, folder)
    os._exit = exit_at_once
    sys.excepthook = sys.__excepthook__
    try:
        with _replacement_told():
            exit_code: int | None = _run(program, as_module, stays=True)
    except KeyboardInterrupt as problem:
        print_error(problem)
        exit_code = None
    finally:
        os._exit = original
    while waited_for := running_threads() - others:
        waited_for.pop().join()
    return exit_code


def _run(program: str, as_module: bool, *, stays: bool = False) -> int:
    """Run the program and return its exit code. What `stays` is `__main__` to the end."""
    try:
        if stays:
            _run_for_good(Path(program).absolute(), program if as_module else None)
        elif as_module:
            _keep(runpy.run_module(program, _main_names(), run_name="__main__", alter_sys=True))
        else:
            _run_script(Path(program).absolute())
    except (ProgramEnded, KeyboardInterrupt, _ExitAtOnce):
        raise
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as problem:
        print_error(problem)
        return 1
    return 0


def print_error(problem: BaseException) -> None:
    """Print an error of the program's as Python does. Frames that are not the program's are left
    out: an error of the compiler has none, and one of `-m` is a single line."""
    cleared: set[int] = set()
    pending: list[BaseException | None] = [problem]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in cleared:
            cleared.add(id(one))
            one.__traceback__ = users_part(one.__traceback__)
            pending += [one.__cause__, one.__context__]
    inside = problem.__traceback__
    if inside is None and isinstance(problem, ImportError):  # no code of the program's has run
        print(f"{sys.executable}: {problem}", file=sys.stderr)  # noqa: T201
    else:
        sys.excepthook(type(problem), problem, inside)


def _run_script(path: Path) -> None:
    """Like `runpy.run_path`, but `sys.argv[0]` stays as it was typed while `path` is absolute, as
    with `python`: then lines can be read after the script's `os.chdir`, too."""
    if pkgutil.get_importer(str(path)) is not None:  # a zip file or a folder
        _keep(runpy.run_path(str(path), _main_names(), run_name="__main__"))
        return
    main, code = _main_module(path), _code(path)
    ours = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(code, vars(main))  # noqa: S102 - the program that the user named
    finally:
        sys.modules["__main__"] = ours
        _keep(vars(main))


def _run_for_good(path: Path, module: str | None) -> None:
    """Run a script or a module in a `__main__` that stays, as Python does."""
    main = _main_module(path)
    if module is not None or pkgutil.get_importer(str(path)) is not None:  # a zip file or a folder
        if module is None:
            sys.path[0] = str(path)
        sys.modules["__main__"] = main
        as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        as_main(module or "__main__", alter_argv=module is not None)
        return
    vars(main)["__loader__"] = SourceFileLoader("__main__", str(path))
    code = _code(path)
    sys.modules["__main__"] = main
    exec(code, vars(main))  # noqa: S102 - the program that the user named


def _main_module(path: Path) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(_main_names(), __file__=str(path), __cached__=None)
    return main


def _code(path: Path) -> CodeType:
    with io.open_code(str(path)) as file:
        # Not inherited: this file's `from __future__` imports.
        return compile(file.read(), str(path), "exec", dont_inherit=True)


def _main_names() -> dict[str, Any]:
    """What Python puts into `__main__` before a program runs, and `exec` does not. Whether
    `__annotations__` is among it depends on the version."""
    names: dict[str, Any] = {"__builtins__": builtins}
    has_annotations = "__annotations__" in vars(sys.modules["__main__"])
    return names | {"__annotations__": {}} if has_annotations else names


def _keep(names: dict[str, Any]) -> None:
    """Let what the module of a rank holds live until Python ends, as with `python`: a process group
    waits for its threads when it is deleted, and they may wait for Python meanwhile. What other
    programs hold goes now, while the device that they use is still there."""
    if "RANK" in os.environ:
        sys.modules[_KEPT] = kept = ModuleType(_KEPT)
        vars(kept).update(names)


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
    with _command_line([name], str(Path.cwd())), ExitStack() as afterwards:
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
def _command_line(arguments: list[str], folder: str) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the program expects them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = arguments
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


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


@contextmanager
def _exits_at_once() -> Iterator[None]:
    """Let `os._exit` in the main thread end the program, but not this process, which still has
    something to say."""
    original, process = os._exit, os.getpid()

    def exit_at_once(status: int) -> NoReturn:
        is_main = threading.current_thread() is threading.main_thread()
        if os.getpid() != process or not is_main:
            original(status)
        raise _ExitAtOnce(status)

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


@contextmanager
def _standard_streams() -> Iterator[None]:
    """Restore `sys.stdout` and `sys.stderr` after the block: a program may replace them."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def _python_error_hook() -> Iterator[None]:
    """Python's own `sys.excepthook` inside the block, which the program may replace."""
    ours, sys.excepthook = sys.excepthook, sys.__excepthook__
    try:
        yield
    finally:
        sys.excepthook = ours


@contextmanager
def _working_directory() -> Iterator[None]:
    """Return to the current directory after the block: the user's own paths are relative to it."""
    folder = Path.cwd()
    try:
        yield
    finally:
        if folder.is_dir():
            os.chdir(folder)


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
