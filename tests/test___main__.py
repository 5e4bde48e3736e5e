"""How the program starts: Ctrl-C while it still imports, outputs that cannot show or take all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import headrace.cli
from headrace import __main__ as entry

# `headrace …` that gets a SIGINT when it begins to import the module named first.
INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *others):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupt())
from headrace.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "headrace.cli.tune", "numpy", "torch.nn"])
def test_ctrl_c_in_an_import_ends_the_program_without_a_traceback(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, "train", "--resume", "nowhere"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handler")
def test_an_ignored_ctrl_c_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup. Otherwise the program handles it until its results are printed."""
    seen: list[Any] = []
    monkeypatch.setattr(headrace.cli, "main", lambda: seen.append(signal.getsignal(signal.SIGINT)))
    for before, during, after in (
        (signal.SIG_IGN, signal.SIG_IGN, signal.SIG_IGN),
        (signal.default_int_handler, entry._exit_or_raise, signal.SIG_DFL),
    ):
        signal.signal(signal.SIGINT, before)
        entry.main()
        assert seen.pop() is during
        assert signal.getsignal(signal.SIGINT) is after


def test_ctrl_c_elsewhere_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        entry._exit_or_raise(signal.SIGINT, sys._getframe())
    monkeypatch.setattr(entry, "_is_importing", lambda frame: True)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a forked worker leaves it to PyTorch
    with pytest.raises(KeyboardInterrupt):
        entry._exit_or_raise(signal.SIGINT, None)


@pytest.mark.parametrize(
    "encoding",
    [  # ascii, a Windows console, and the C locale without Python's own remedy
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "cp1252"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""},
    ],
)
def test_characters_that_the_output_lacks_are_replaced(encoding: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "plan"], capture_output=True, env=os.environ | encoding
    )
    assert (done.returncode, done.stderr) == (0, b"")
    line = done.stdout.splitlines()[1]  # below the heading
    # Click takes ASCII for a wrong setting, and prints UTF-8.
    assert b"?????" in line or "─────" in line.decode()


def test_a_closed_pipe_is_no_traceback() -> None:
    """As `headrace plan | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "plan"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
