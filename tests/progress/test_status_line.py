"""What a command says it does: messages, log records, and what comes in their way."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import warnings

import pytest
from rich.console import Console

from headrace.progress import StatusLine
from support.processes.terminals import Terminal, new_console

log = logging.getLogger("headrace")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def on(terminal: io.StringIO, *, is_terminal: bool = True, **options: object) -> StatusLine:
    return StatusLine(console=new_console(terminal, is_terminal=is_terminal), **options)  # type: ignore[arg-type]


def test_a_message_is_printed_above_the_line(terminal: Terminal) -> None:
    with on(terminal) as line:
        line.status("training")
        line.message("two\nlines, \x1b[31mred\r")
        log.warning("%s not finite at batch %d", "loss", 7)
        assert terminal.screen() == [
            "two",
            "lines, ?[31mred?",
            "warning: loss not finite at batch 7",
            "training",
        ]
        line.message("a long message is not cut: " + "x" * 200)
        assert terminal.screen()[-2].endswith("x" * 200)
    assert terminal.screen()[-1] == ""
    assert not terminal.is_cursor_hidden


def test_a_status_has_a_bar_where_its_length_is_known(terminal: Terminal) -> None:
    with on(terminal) as line:
        line.status("read train", 5_000, 0)
        assert terminal.screen() == ["read train 5,000"]
        line.status("encode train", 7_250, 29_000)
        assert terminal.screen() == ["encode train 7,250/29,000 " + "━" * 10 + "╺" + "━" * 29]
    assert terminal.screen() == [""]


def test_a_status_that_is_over_is_removed(terminal: Terminal) -> None:
    with on(terminal) as line:
        line.status("encode train", 9, 9)
        line.end_status()
        line.message("9 pairs")
        assert terminal.screen() == ["9 pairs", ""]
        line.status("validating")
        assert terminal.screen() == ["9 pairs", "validating"]


def test_a_final_line_is_the_last_one(terminal: Terminal) -> None:
    with on(terminal) as line:
        line.status("training")
        line.final("stopped")
        assert terminal.screen() == ["stopped", ""]  # as `os._exit` would leave it


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, 5), (False, 2)])
def test_a_count_is_not_shown_each_time(terminal: Terminal, is_terminal: bool, shown: int) -> None:
    clock = Clock()
    with on(terminal, is_terminal=is_terminal, clock=clock, every_s=0.5) as line:
        for done in range(1, 1001):
            clock.now_s += 1 / 1024
            line.status("reading", done, 1_000)
        assert terminal.getvalue().count("reading") == shown
        line.status("sorting", 1, 10)
        assert "sorting 1/10" in terminal.screen()[-1 if is_terminal else -2]


def test_a_stage_may_have_many_texts(terminal: Terminal) -> None:
    clock = Clock()
    with on(terminal, is_terminal=False, clock=clock) as line:
        for plan in ("baseline", "event", "pipeline"):
            line.status(f"first runs: {plan}", stage="first runs")
        clock.now_s += 11
        line.status("first runs: graph", stage="first runs")
        line.status("finals: graph", stage="finals")
    assert terminal.getvalue().splitlines() == [
        "first runs: baseline",
        "first runs: graph",
        "finals: graph",
    ]


def test_messages_of_other_threads_stay_whole(terminal: Terminal) -> None:
    def talk() -> None:
        for _ in range(50):
            log.info("x" * 40)

    with on(terminal) as line:
        threads = [threading.Thread(target=talk) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(200):
            line.status(f"status {number}")
        for thread in threads:
            thread.join()
    assert sum(text == "x" * 40 for text in terminal.screen()) == 200


def test_what_others_write_to_stderr_is_printed_above_the_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with on(terminal) as line:
        line.status("training")
        print("printed [bold]as it is[/bold]", file=sys.stderr)
        assert terminal.screen() == ["printed [bold]as it is[/bold]", "training"]
    assert sys.stderr is terminal


def test_stdout_is_left_alone_unless_it_is_a_terminal(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    with on(terminal) as line:
        line.status("training")
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.getvalue()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_worker_prints_without_the_line(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stderr", terminal)
    with on(terminal) as line, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        line.status("training")
        before = len(terminal.getvalue())
        child = os.fork()
        if child == 0:
            line.message("of the worker")
            print("printed", file=sys.stderr)
            os.write(write, terminal.getvalue()[before:].encode())
            os._exit(0)
        os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "of the worker\nprinted\n"


# --- terminals that are not as they should be ---------------------------------------------------


def test_a_dumb_terminal_gets_plain_lines() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, _environ={"TERM": "dumb"})
    with StatusLine(console=console) as line:
        line.status("reading", 1, 2)
    assert file.getvalue() == "reading 1/2\n"


def test_no_color_leaves_out_the_colors() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"NO_COLOR": "1"})
    with StatusLine(console=console) as line:
        line.message("careful", logging.WARNING)
        line.status("reading", 1, 2)
    assert "\x1b[3" not in file.getvalue()
    assert file.getvalue().count("━") == 20  # of 40: what is left is blank


def test_a_pipe_is_no_terminal_even_if_colors_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with StatusLine() as line:
        line.status("reading", 1, 2)
    assert capsys.readouterr().err == "reading 1/2\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_that_knows_only_ascii(is_terminal: bool) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    console = Console(file=file, force_terminal=is_terminal, width=60, _environ={})
    with StatusLine(console=console) as line:
        line.status("compiling… 3 × 4", 1, 3)
        line.message("数据 – ok")
    assert b"compiling... 3 x 4 1/3" in raw.getvalue()
    assert b"?? - ok\n" in raw.getvalue()


def test_a_terminal_that_goes_away_does_not_stop_the_command(terminal: Terminal) -> None:
    with on(terminal) as line:
        line.status("training")
        terminal.close()
        line.status("validating")
        log.warning("nobody reads this")


# --- log records ----------------------------------------------------------------------------------


def test_the_logger_is_left_as_it_was(terminal: Terminal) -> None:
    before = (log.level, list(log.handlers))
    with on(terminal, is_terminal=False):
        log.info("seen")
        log.debug("not seen")
    log.warning("not seen either")
    assert (log.level, log.handlers) == before
    assert terminal.getvalue() == "seen\n"


def test_a_command_may_show_warnings_only(terminal: Terminal) -> None:
    with on(terminal, is_terminal=False, log_level=logging.WARNING) as line:
        log.info("not seen")
        log.warning("seen")
        line.status("still shown")
        line.message("this, too")
    assert terminal.getvalue() == "warning: seen\nstill shown\nthis, too\n"


def test_a_level_that_was_set_is_kept(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "level", logging.ERROR)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    with on(terminal, is_terminal=False):
        log.warning("not seen")
        log.error("seen")
    log.manager._clear_cache()  # type: ignore[attr-defined]
    assert terminal.getvalue() == "error: seen\n"


def test_a_record_that_cannot_be_formatted_does_not_stop_the_command(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    log.propagate = False  # pytest's own handler would raise
    try:
        with on(terminal, is_terminal=False):
            log.warning("%d", "no number")
    finally:
        log.propagate = True
    assert "no number" in capsys.readouterr().err
