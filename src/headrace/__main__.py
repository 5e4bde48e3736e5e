"""Starts the command line, for `headrace` and for `python -m headrace`.

Importing PyTorch takes seconds, and Ctrl-C inside an import would print a traceback. So `main`
handles Ctrl-C before it imports anything but this.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # not from `typing`, which takes long to import
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130 and without a traceback."""
    # `nohup` and `&` in a script make the process ignore Ctrl-C, and it stays so.
    is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if not is_ignored:
        signal.signal(signal.SIGINT, _exit_or_raise)
    try:
        from headrace.cli import main as run_program

        run_program()
    finally:
        if not is_ignored:
            # The result is printed. While Python ends, Ctrl-C may end it at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


_PROCESS = os.getpid()


def _exit_or_raise(number: int, frame: FrameType | None) -> None:
    """Exit at once inside an import; raise KeyboardInterrupt anywhere else.

    Packages do not expect an exception in their imports: some print it, some swallow it.
    """
    children = sys.modules.get("headrace.child_processes")
    own = (_PROCESS, getattr(children, "command_process", None))
    is_forked = os.getpid() not in own  # a loader's worker has inherited this handler
    if not is_forked and _is_importing(frame):
        os.write(2, b"interrupted\n")
        os._exit(130)
    signal.default_int_handler(number, frame)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    main()
