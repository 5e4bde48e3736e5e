"""What a run shows, on a terminal and in files, by a clock of the test's own."""

from __future__ import annotations

import logging
import math
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from headrace.data import Cursor
from headrace.device import LedgerStatistics
from headrace.engine import DeferredValues, EpochResult, EpochStatistics, Progress
from headrace.progress import Gauges, ProgressLine
from support.processes.terminals import Terminal, new_console

GAUGES = Gauges(9 << 29, 0.01, 0.04, 0.97)
log = logging.getLogger("headrace")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.now_s


class Watched:
    """A progress, the clock it runs by, and what it wrote."""

    def __init__(
        self, epochs: int = 10, *, width: int = 160, terminal: bool = True, **options: Any
    ) -> None:
        self.clock = Clock()
        self.terminal = Terminal()
        console = new_console(self.terminal, width=width, is_terminal=terminal)
        options = {"gauges": lambda: GAUGES} | options
        self.progress = ProgressLine(epochs, console=console, clock=self.clock, **options)
        self._done = 0

    def epoch_begins(self, epoch: int, batches: int | None, **options: Any) -> None:
        self._done = options.get("first_batch", 0)
        self.progress.epoch_begins(epoch, batches, **options)

    def batch(self, tokens: float | None = 1800.0, loss: float = 3.0) -> None:
        self._done += 1
        values = {"loss": loss} | ({} if tokens is None else {"weight": tokens})
        arrived = (DeferredValues(self._done, values),)
        self.progress.on_step(Progress(0, self._done, 0, Cursor(self._done), arrived=arrived))

    def train(self, batches: int, seconds: float = 1 / 16) -> None:
        for _ in range(batches):
            self.clock.now_s += seconds
            self.batch()

    @property
    def written(self) -> str:
        return self.terminal.getvalue()

    def screen(self) -> list[str]:
        return self.terminal.screen()

    def live_line(self) -> list[str]:
        """The words of the live line, without its bar."""
        return self.screen()[-1].replace("━", "").replace("╸", "").replace("╺", "").split()


def result(epoch: int = 0, batches: int = 480, loss: float = 3.125) -> EpochResult:
    elapsed_s = batches / 16
    statistics = EpochStatistics(
        batches=batches,
        updates=batches,
        replays=0,
        samples=batches * 30,
        elapsed_s=elapsed_s,
        batches_per_s=16.0,
        updates_per_s=16.0,
        samples_per_s=480.0,
        weight_per_s=28_800.0,
        host_blocked_share=0.043,
        data_wait_share=0.012,
        peak_memory_bytes=5 << 30,
    )
    waits = LedgerStatistics((), 0, 0, 0.0, 0.0)
    return EpochResult(epoch, "max", "cuda:0", (), (), loss, {}, (), waits, statistics)


EXTRA = {"valid_loss": 2.5, "bleu": 27.314, "gpu_use_share": 0.96, "lr": 3e-4, "best": True}


# --- on a terminal --------------------------------------------------------------------------------


def test_the_live_line_and_the_line_that_stays() -> None:
    watched = Watched(width=160)
    with watched.progress as progress:
        watched.epoch_begins(2, 480)
        watched.train(240)
        assert watched.screen() == [
            "epoch 3/10  mem 4.5G  tok/s 28.8k  loss 3.0000  data 1%  host 4%  GPU 97%  "
            "batch 240/480  time 0:15  left 3:45 " + "━" * 20 + "╺" + "━" * 19,
        ]
        watched.train(240)
        progress.epoch_ends(result(2), EXTRA)
    assert watched.screen() == [
        "epoch 3/10  mem 5.0G  tok/s 28.8k  loss 3.1250  valid 2.5000  BLEU 27.31  data 1%  "
        "host 4%  GPU 96%  batch 480/480  time 0:30  left 3:30",
        "      lr 0.0003  best True",
        "",
    ]


@pytest.mark.parametrize(
    ("width", "names", "bar_width"),
    [
        (200, "epoch mem tok/s loss data host GPU batch time left", 40),
        (112, "epoch mem tok/s loss data host GPU batch left", 9),
        (80, "epoch tok/s loss GPU batch left", 0),
        (60, "epoch loss batch left", 0),
        (40, "epoch loss left", 0),
        (16, "epoch", 0),
    ],
)
def test_a_narrow_terminal_gets_fewer_values(width: int, names: str, bar_width: int) -> None:
    watched = Watched(width=width)
    with watched.progress as progress:
        watched.epoch_begins(0, 480)
        watched.train(480)
        progress.epoch_ends(result(), {"bleu": 27.3})
        watched.epoch_begins(1, 480)
        watched.train(480)
        assert watched.live_line()[::2] == names.split()
        assert watched.screen()[-1].count("━") == bar_width
    shown = watched.screen() + watched.terminal.drawn
    assert all(cell_len(text.rstrip()) <= width - len("^C") - 1 for text in shown)


def test_values_that_are_not_known_are_not_shown() -> None:
    watched = Watched(gauges=Gauges)
    with watched.progress as progress:
        watched.epoch_begins(0, 480)
        watched.train(480)
        assert watched.live_line()[::2] == ["epoch", "tok/s", "loss", "batch", "time", "left"]
        progress.epoch_ends(result(), {"valid_loss": 2.5})
    assert "  valid 2.5000  " in watched.screen()[0]


def test_large_numbers_do_not_wrap() -> None:
    watched = Watched(10_000, width=60, gauges=lambda: Gauges(1 << 50, 1.0, 1.0, 1.0))
    drawn = watched.terminal.drawn
    with watched.progress as progress:
        watched.epoch_begins(9_000, 10**9)
        watched.clock.now_s += 1e6
        watched.batch(tokens=1e14, loss=-1e30)
        progress.status("数据" * 100)
        progress.epoch_ends(result(9_000, loss=math.nan), {"bleu": 100.0})
    assert max(cell_len(line.rstrip()) for line in drawn) == 57
    assert "loss nan" in watched.screen()[0]


def test_drawn_at_most_five_times_a_second() -> None:
    watched = Watched()
    with watched.progress:
        watched.epoch_begins(0, 1000)
        drawn = len(watched.terminal.drawn)
        watched.train(1024, 1 / 1024)
        assert len(watched.terminal.drawn) - drawn == 4  # every 205th batch


def test_a_slow_terminal_is_drawn_on_less_often() -> None:
    """Drawing takes 50 ms here: one per cent of the time is once in five seconds."""

    def slow() -> Gauges:
        watched.clock.now_s += 0.05
        return GAUGES

    watched = Watched(gauges=slow)
    with watched.progress:
        watched.epoch_begins(0, 1000)
        drawn = len(watched.terminal.drawn)
        watched.train(1200, 0.01)
        assert len(watched.terminal.drawn) - drawn == 3


def test_a_batch_that_is_not_drawn_costs_little() -> None:
    watched = Watched()
    arrived = (DeferredValues(0, {"loss": 3.0, "weight": 1800.0}),)
    info = Progress(0, 6, 6, Cursor(6), arrived=arrived)
    with watched.progress as progress:
        watched.epoch_begins(0, 480)
        fastest_s = math.inf
        for _ in range(20):
            begun = time.perf_counter()
            for _ in range(100):
                progress.on_step(info)
            fastest_s = min(fastest_s, (time.perf_counter() - begun) / 100)
    assert fastest_s < 20e-6


def test_validation_is_in_the_row_of_its_own_epoch_only() -> None:
    watched = Watched(width=160)
    with watched.progress as progress:
        watched.epoch_begins(0, 480)
        watched.train(480)
        progress.epoch_ends(result(), {"valid_loss": 2.5, "bleu": 27.3})
        watched.epoch_begins(1, 480)
        watched.train(480)
        row, live = watched.screen()[0], watched.screen()[-1]
        assert "valid 2.5000  BLEU 27.30" in row
        assert "valid" not in live


def test_the_loss_shown_is_that_of_recent_batches() -> None:
    watched = Watched(1)
    with watched.progress:
        watched.epoch_begins(0, 1000)
        for loss in [9.0] * 500 + [2.0] * 50:
            watched.clock.now_s += 1
            watched.batch(loss=loss)
        assert "  loss 2.0000  " in watched.screen()[-1]


def test_details_are_cut_to_the_terminal_and_whole_elsewhere() -> None:
    line = "  > " + "翻译" * 30
    for terminal, expected in ((True, "  > " + "翻译" * 5 + "翻…"), (False, line)):
        watched = Watched(width=30, terminal=terminal)
        with watched.progress as progress:
            progress.details([line])
        assert watched.screen()[0] == expected if terminal else watched.written == f"{line}\n"


# --- time left ------------------------------------------------------------------------------------


def left(watched: Watched, row: int = -1) -> str:
    found = re.search(r"left (\S+)", watched.screen()[row])
    return "-" if found is None else found[1]


def test_time_left_follows_recent_batches() -> None:
    watched = Watched(1)
    with watched.progress:
        watched.epoch_begins(0, 10_000)
        assert left(watched) == "-"
        watched.train(1000, 1.0)
        assert left(watched) == "2:30:00"
        watched.train(1000, 0.1)
        assert left(watched) == "13:20"


def test_time_left_counts_validation_once_it_is_known() -> None:
    watched = Watched(3)
    with watched.progress as progress:
        watched.epoch_begins(0, 100)
        watched.train(100, 1.0)
        assert left(watched) == "3:20"
        progress.status("validating…")
        watched.clock.now_s += 30
        progress.epoch_ends(result(batches=100))
        assert left(watched, 0) == "4:20"
        watched.clock.now_s += 10  # a checkpoint
        watched.epoch_begins(1, 100)
        assert left(watched) == "4:40"
        watched.train(50, 1.0)
        assert left(watched) == "3:50"


def test_time_left_knows_that_a_run_may_end_before_its_last_epoch() -> None:
    watched = Watched(10)
    with watched.progress as progress:
        watched.epoch_begins(0, 100, limit=150)
        watched.train(50, 1.0)
        assert left(watched) == "1:40"
        watched.train(50, 1.0)
        watched.clock.now_s += 30
        progress.epoch_ends(result(batches=100))
        assert left(watched, 0) == "1:20"  # 50 batches, and validation once more
        watched.epoch_begins(1, 100, limit=50)
        watched.train(50, 1.0)
        assert left(watched) == "0:00"


def test_time_left_of_a_run_that_was_resumed_near_its_last_batch() -> None:
    watched = Watched(10)
    with watched.progress:
        watched.epoch_begins(3, 100, first_batch=60, limit=20)
        watched.train(10, 1.0)
        assert left(watched) == "0:10"


def test_time_left_ends_with_the_time_limit() -> None:
    watched = Watched(10, ends_at_s=1060.0)
    with watched.progress:
        watched.epoch_begins(0, 100)
        watched.train(20, 1.0)
        assert left(watched) == "0:40"


def test_time_spent_on_something_else_is_not_held_against_the_batches() -> None:
    watched = Watched(1)
    with watched.progress as progress:
        watched.epoch_begins(0, 100)
        progress.status("compiling…")
        watched.clock.now_s += 300
        progress.status("capturing…")
        watched.clock.now_s += 300
        watched.train(10, 0.5)
        assert left(watched) == "0:40"  # nine batches' time for ten: the first was in the pause


def test_a_loader_of_unknown_length() -> None:
    watched = Watched(3)
    with watched.progress as progress:
        watched.epoch_begins(0, None)
        watched.train(100, 1.0)
        assert watched.live_line()[-4:] == ["batch", "100", "time", "1:40"]
        progress.epoch_ends(result(batches=100))
        watched.epoch_begins(1, None)
        watched.train(50, 1.0)
        assert watched.live_line()[-5::2] == ["50", "0:50", "2:30"]


def test_a_loader_longer_than_it_said() -> None:
    watched = Watched(1)
    with watched.progress:
        watched.epoch_begins(0, 10)
        watched.train(20, 1.0)
        assert watched.live_line()[-5::2] == ["20/10", "0:20", "0:00"]


def test_a_resumed_epoch_goes_on_where_it_was() -> None:
    watched = Watched(1)
    with watched.progress as progress:
        watched.epoch_begins(0, 480, first_batch=400)
        watched.clock.now_s += 1
        arrived = tuple(DeferredValues(i, {"loss": 4.0, "weight": 900.0}) for i in range(2))
        progress.on_step(Progress(0, 401, 1, Cursor(401), arrived=arrived))
        watched.clock.now_s += 1
        progress.on_step(Progress(0, 402, 2, Cursor(402)))
        cells = watched.live_line()
        assert cells[5:8:2] == ["900", "4.0000"]
        assert cells[-5::2] == ["402/480", "0:02", "1:18"]


def test_the_mean_loss_is_by_weight_and_skips_empty_batches() -> None:
    watched = Watched(1)
    with watched.progress:
        watched.epoch_begins(0, 4)
        for loss, tokens in ((1.0, 300.0), (5.0, 100.0), (math.nan, 0.0)):
            watched.clock.now_s += 1
            watched.batch(tokens, loss)
        assert "2.0000" in watched.screen()[-1]


@settings(max_examples=50)
@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1e5), st.booleans()), max_size=30),
    batches=st.none() | st.integers(0, 20),
    width=st.integers(1, 120),
)
def test_whatever_happens_lines_fit(
    steps: list[tuple[int, float, bool]], batches: int | None, width: int
) -> None:
    watched = Watched(3, width=width)
    with watched.progress as progress:
        watched.epoch_begins(0, batches)
        for what, seconds, known in steps:
            watched.clock.now_s += seconds
            if what == 0:
                watched.epoch_begins(1, batches if known else None)
            elif what == 1:
                progress.status("…")
            elif what == 2:
                progress.epoch_ends(result(), {"bleu": None} if known else None)
            else:
                watched.batch(seconds if known else None, seconds)
    assert all(cell_len(line.rstrip()) < max(width, 2) for line in watched.terminal.drawn)


# --- elsewhere ------------------------------------------------------------------------------------


def test_plain_lines_without_a_terminal() -> None:
    watched = Watched(terminal=False)
    with watched.progress as progress:
        progress.status("compiling the step…")
        watched.epoch_begins(0, 480)
        watched.train(479)
        log.info("graphs: 3 shapes")
        progress.epoch_ends(result(), EXTRA)
        progress.final("done")
    assert watched.written.splitlines() == [
        "compiling the step…",
        "epoch 1/10  mem 4.5G  tok/s 28.8k  loss 3.0000  data 1%  host 4%  GPU 97%  "
        "batch 160/480  time 0:10  left 4:50",
        "epoch 1/10  mem 4.5G  tok/s 28.8k  loss 3.0000  data 1%  host 4%  GPU 97%  "
        "batch 320/480  time 0:20  left 4:40",
        "graphs: 3 shapes",
        "epoch 1/10  mem 5.0G  tok/s 28.8k  loss 3.1250  valid 2.5000  BLEU 27.31  data 1%  "
        "host 4%  GPU 96%  batch 479/480  time 0:30  left 4:30  lr 0.0003  best True",
        "done",
    ]
    assert all(character.isprintable() or character == "\n" for character in watched.written)


def test_plain_lines_as_often_as_wanted() -> None:
    watched = Watched(terminal=False, every_s=60.0, gauges=Gauges)
    with watched.progress:
        watched.epoch_begins(0, None)
        watched.train(300, 1.0)
    assert [line.split("batch")[1] for line in watched.written.splitlines()] == [
        f" {batches}  time {batches // 60}:00" for batches in (60, 120, 180, 240, 300)
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet(terminal: bool) -> None:
    watched = Watched(terminal=terminal, quiet=True)
    with watched.progress as progress:
        progress.status("compiling…")
        for epoch in range(2):
            watched.epoch_begins(epoch, 480)
            watched.train(480)
            progress.message("hello")
            log.info("not this")
            progress.epoch_ends(result(epoch))
        log.warning("but this")
        progress.message("and this", logging.ERROR)
        progress.final("weights in runs/train/exp")
        progress.final("done")
    lines = watched.written.splitlines()
    assert lines[:2] == ["warning: but this", "error: and this"]
    assert lines[2].startswith("epoch 2/10  mem 5.0G")
    assert lines[3:] == ["weights in runs/train/exp", "done"]


def test_quiet_without_final_lines_shows_the_last_epoch() -> None:
    watched = Watched(quiet=True)
    with watched.progress as progress:
        watched.epoch_begins(0, 480)
        progress.epoch_ends(result(loss=math.inf))
    assert "loss inf" in watched.written
