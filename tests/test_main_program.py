"""Somebody's script or module, run as `python` would."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import main_program
from headrace.errors import ProgramError
from headrace.fake import fake_cuda
from headrace.main_program import ProgramEnded, require_program, run_as_main


def test_a_program_sees_its_own_command_line_and_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n", encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, beside\nprint(__name__, beside.NAME, sys.argv[1:])\n"
        "sys.exit(int(sys.argv[1]))",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv), list(sys.path)
    assert run_as_main("program.py", ["7", "--x"], as_module=False) == 7
    assert run_as_main("program", ["0"], as_module=True) == 0
    assert capsys.readouterr().out == "__main__ beside ['7', '--x']\n__main__ beside ['0']\n"
    assert (list(sys.argv), list(sys.path)) == before


@pytest.mark.parametrize("command", [("program.py",), ("-m", "program"), (".",)])
def test_a_program_has_the_names_that_python_gives_it(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "print(sorted(globals()), globals().get('__annotations__'), type(__builtins__))"
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    (tmp_path / "__main__.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    plain = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, timeout=60
    )
    assert run_as_main(command[-1], [], as_module="-m" in command) == 0
    assert capsys.readouterr().out == plain.stdout


def test_a_program_has_its_own_future_imports_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("class A:\n    x: float = 0\nprint(A.__annotations__)", encoding="utf-8")
    assert run_as_main(str(program), [], as_module=False) == 0
    assert capsys.readouterr().out == "{'x': <class 'float'>}\n"


def test_an_error_is_printed_without_our_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text("def fail():\n    raise ValueError('its own')\nfail()\n", encoding="utf-8")
    assert run_as_main(str(program), [], as_module=False) == 1
    text = capsys.readouterr().err
    assert text.endswith("ValueError: its own\n")
    assert "main_program.py" not in text
    assert "runpy" not in text


def test_an_error_of_an_operator_is_printed_without_the_frames_that_watch_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "layer = torch.nn.Linear(3, 3).cuda()\n"
        "def double(grad): return grad @ torch.ones(2, 2, device='cuda')\n"
        "layer.weight.register_hook(double)\n"
        "try:\n"
        "    layer(torch.ones(2, 2, device='cuda'))\n"
        "except RuntimeError:\n"
        "    layer(torch.ones(3, 3, device='cuda')).sum().backward()\n",
        encoding="utf-8",
    )
    with fake_cuda():
        assert run_as_main(str(program), [], as_module=False) == 1
    text = capsys.readouterr().err
    assert str(Path(main_program.__file__).parent) not in text
    assert "_ops.py" not in text
    frames = [line.partition(", line ") for line in text.splitlines() if ", line " in line]
    assert [line for file, _, line in frames if "program.py" in file] == [
        "6, in <module>",
        "8, in <module>",
        "3, in double",
    ]
    assert any("linear.py" in file for file, _, _ in frames)


def test_each_error_of_a_chain_has_its_own_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "class Equal(Exception):\n"
        "    __eq__, __hash__ = (lambda self, other: True), None\n"
        "try: torch.ones(2, device='cuda') @ torch.ones(3, device='cuda')\n"
        "except RuntimeError: raise Equal\n",
        encoding="utf-8",
    )
    with fake_cuda():
        assert run_as_main(str(program), [], as_module=False) == 1
    text = capsys.readouterr().err
    assert text.count("Traceback") == 2
    assert str(Path(main_program.__file__).parent) not in text


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (
            "x = (\n",
            "  File \"{file}\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n",
        ),
        (
            "class Stop(BaseException): ...\nraise Stop('now')\n",
            'Traceback (most recent call last):\n  File "{file}", line 2, in <module>\n'
            "    raise Stop('now')\nStop: now\n",
        ),
        (
            "import sys\ndef show(kind, problem, trace):\n"
            "    sys.stderr.write(f'own: {problem}\\n')\n"
            "sys.excepthook = show\n1 / 0\n",
            "own: division by zero\n",
        ),
    ],
)
def test_an_error_is_printed_as_python_prints_it(
    code: str, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(code, encoding="utf-8")
    before = sys.excepthook
    assert run_as_main(str(program), [], as_module=False) == 1
    assert capsys.readouterr().err == printed.replace("{file}", str(program))
    assert sys.excepthook is before


def test_a_package_that_is_no_program_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no_program").mkdir()
    (tmp_path / "no_program" / "__init__.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run_as_main("no_program", [], as_module=True) == 1
    assert capsys.readouterr().err == (
        f"{sys.executable}: No module named no_program.__main__; 'no_program' is a package and "
        "cannot be directly executed\n"
    )


def test_its_threads_are_waited_for_and_its_chdir_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import concurrent.futures, inspect, os, threading\n"
        "left = concurrent.futures.ThreadPoolExecutor(1)\n"
        "left.submit(int).result()  # its thread is idle from now on\n"
        "os.makedirs('elsewhere'); os.chdir('elsewhere')\n"
        "go = threading.Event()\n"
        "def work():\n"
        "    go.wait()\n"
        "    print(inspect.getsource(work).splitlines()[0])\n"
        "threading.Thread(target=work).start()\n"
        "threading.Thread(target=go.set).start()\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    assert run_as_main("program.py", [], as_module=False) == 0
    assert capsys.readouterr().out == "def work():\n"
    assert Path.cwd() == tmp_path


def test_a_coroutine_that_ends_the_program_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\nfrom headrace.main_program import ProgramEnded\n"
        "async def end(): raise ProgramEnded\n"
        "async def main(): await asyncio.gather(end())\n"
        "asyncio.run(main())\n",
        encoding="utf-8",
    )
    with pytest.raises(ProgramEnded):
        run_as_main(str(program), [], as_module=False)
    gc.collect()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("as_module", [False, True])
def test_what_a_rank_holds_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_module: bool
) -> None:
    """A process group may wait for its threads when it is deleted, and they for Python."""
    held: Any = threading.main_thread()
    (tmp_path / "holds.py").write_text(
        "import threading, weakref\n"
        "class Held: pass\n"
        "held = Held()\n"
        "threading.main_thread().held = weakref.ref(held)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    for rank in ("", "0"):
        if rank:
            monkeypatch.setenv("RANK", rank)
        assert run_as_main("holds" if as_module else "holds.py", [], as_module=as_module) == 0
        gc.collect()
        assert (held.held() is not None) is bool(rank)
    del sys.modules["headrace_program"]


def test_exiting_at_once_waits_for_nobody(tmp_path: Path) -> None:
    program = tmp_path / "exits.py"
    program.write_text(
        "import os, threading\n"
        "pause = threading.Event()\n"
        "threading.Thread(target=pause.wait).start()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(3)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "threading.main_thread().pause = pause\n"
        "os._exit(256 + 4 + status)\n",
        encoding="utf-8",
    )
    original = os._exit
    assert run_as_main(str(program), [], as_module=False) == 7
    assert os._exit is original
    threading.main_thread().pause.set()  # type: ignore[attr-defined]


def test_a_program_that_another_one_replaces_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "try: os.execv('/no/such/file', ['file'])\n"
        "except FileNotFoundError: print('none', flush=True)\n"
        "os.execl(sys.executable, 'python', '-c', 'print(8 + 9)')\n",
        encoding="utf-8",
    )
    call = f"run_as_main({str(program)!r}, [], as_module=False)"
    code = f"from headrace.main_program import run_as_main; {call}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["none", "17"]
    assert run.stderr == (
        "headrace: the program is replaced by another, which is not watched: "
        "python -c 'print(8 + 9)'\n"
    )


def test_timers_and_handlers_end_with_the_program(tmp_path: Path) -> None:
    program = tmp_path / "signals.py"
    program.write_text(
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 1000)\n",
        encoding="utf-8",
    )
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM)
    assert run_as_main(str(program), [], as_module=False) == 0
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_folder_with_a_main_file_is_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ProgramError, match="is a folder without a __main__"):
        require_program(str(folder), as_module=False)
    (folder / "__main__.py").write_text("print('here')\n", encoding="utf-8")
    require_program(str(folder), as_module=False)
    assert run_as_main(str(folder), [], as_module=False) == 0
    assert capsys.readouterr().out == "here\n"


def test_ctrl_c_is_raised(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise KeyboardInterrupt\n", encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        run_as_main(str(program), [], as_module=False)


@pytest.mark.parametrize(("name", "as_module"), [("no.py", False), ("no.such", True)])
def test_a_program_that_is_not_there_is_an_error(name: str, as_module: bool) -> None:
    with pytest.raises(ProgramError, match="no such"):
        require_program(name, as_module=as_module)


def test_folders_without_an_init_file_are_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder_only" / "inner").mkdir(parents=True)
    (tmp_path / "folder_only" / "inner" / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    require_program("folder_only.inner.train", as_module=True)
    with pytest.raises(ProgramError, match="no such module"):
        require_program("folder_only.inner.other", as_module=True)
    assert not [name for name in sys.modules if name.startswith("folder_only")]


def test_looking_for_a_module_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package must be imported where the program runs: it may ask whether there is a GPU."""
    package = tmp_path / "looked_for"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit(5)", encoding="utf-8")
    (package / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    require_program("looked_for.train", as_module=True)
    with pytest.raises(ProgramError):
        require_program("looked_for.other", as_module=True)
    with pytest.raises(ProgramError):
        require_program("looked_for.train.more", as_module=True)
    assert run_as_main("looked_for.train", [], as_module=True) == 5
