"""What a step is, in every kind of loop."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from headrace.diagnosis.steps import (
    StepFinder,
    StepLine,
    find_period,
    watch_backward,
    watch_line,
    watch_steps,
)
from headrace.errors import ProgramError
from headrace.main_program import run_as_main


def ends(calls: str) -> list[int]:
    finder = StepFinder()
    return [at for at, key in enumerate(calls) if finder.on_call(key)]


@pytest.mark.parametrize(
    ("calls", "period", "last"),
    [
        ("aaa", "a", "a"),
        ("dgdgdg", "dg", "g"),
        ("dddddg" * 3, "dddddg", "g"),
        ("abcdefgh" * 3, "abcdefgh", "h"),  # an optimizer per parameter, in backward
        ("eeerrrrrr", "r", "r"),  # three eager steps, then a graph
        ("xxdgdgdgdgdg", "dg", "g"),
        ("aabaabaab", "aab", "b"),
        ("abb" * 3, "abb", "a"),  # `a` occurs once: the step ends with it
    ],
)
def test_the_period(calls: str, period: str, last: str) -> None:
    found = find_period(calls)
    assert found is not None
    assert ("".join(map(str, found.calls)), found.last, found.count) == (period, last, 1)


@pytest.mark.parametrize("calls", ["", "a", "aa", "abc", "abab", "dddddg", "abcd" * 2])
def test_no_period_before_three_rounds(calls: str) -> None:
    assert find_period(calls) is None


@given(st.text("abcd", min_size=1, max_size=6), st.text("wxyz", max_size=5), st.integers(8, 12))
def test_a_step_ends_once_a_round_whatever_came_before(
    block: str, before: str, rounds: int
) -> None:
    found = find_period(before + block * rounds)
    assert found is not None
    assert len(block) % len(found.calls) == 0
    assert found.calls * (len(block) // len(found.calls)) in {
        tuple(block[at:] + block[:at]) for at in range(len(block))
    }


def test_the_finder_ends_steps_with_the_last_call() -> None:
    assert ends("aaaaaa") == [3, 4, 5]
    assert ends("dg" * 6) == [7, 9, 11]
    # g was skipped once: one step is longer, the later ones are not shifted.
    assert ends("dgdgdgdgddgdg") == [7, 10, 12]


def test_the_finder_starts_anew_when_another_optimizer_appears() -> None:
    finder = StepFinder()
    found = [finder.on_call(key) for key in "ddd" + "dddddg" * 6]
    assert finder.period is not None
    assert "".join(map(str, finder.period.calls)) == "dddddg"
    assert found[-1]


@pytest.mark.parametrize(
    ("before", "after", "period", "last"),
    [
        ("a" * 10, "aa" + "b" * 13, "b", "b"),  # a second phase, or a graph after eager steps
        ("d" * 10, "g" + ("d" * 10 + "g") * 3, "ddddddddddg", "g"),  # many discriminator steps
        ("a" * 10, "a" * 20 + "b" + "a" * 20 + "b", "a", "a"),  # a rare one
        ("ab" * 10, "ac" * 30, "ac", "c"),  # a new optimizer instead of the last one
    ],
)
def test_a_settled_period_gives_way_to_another(
    before: str, after: str, period: str, last: str
) -> None:
    finder = StepFinder()
    for key in before:
        finder.on_call(key)
    finder.settle()
    losses = 0
    for key in after:
        finder.on_call(key)
        losses += finder.is_lost
    assert losses == (0 if before.startswith(period) else 1)
    assert finder.period is not None
    assert "".join(map(str, finder.period.calls)) == period
    assert finder.period.last == last


def test_a_step_has_as_many_calls_as_were_seen() -> None:
    finder = StepFinder()
    for key in "dddg" * 4:
        finder.on_call(key)
    assert finder.calls_per_step == 4
    finder.settle()
    for key in "dg" * 3 + "d":
        finder.on_call(key)
    assert finder.calls_per_step == 2


def test_calls_that_never_repeat_fall_back_to_the_most_frequent() -> None:
    finder = StepFinder()
    calls = ["a" if (at * at) % 7 < 3 or at % 11 == 0 else at for at in range(4000)]
    for call in calls:
        finder.on_call(call)
    assert finder.period is not None
    assert (finder.period.last, finder.period.repeats) == ("a", False)
    assert finder.steps == calls.count("a")


def test_optimizer_steps_are_seen() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    one, other = torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([weight])
    seen: list[Hashable] = []
    with watch_steps(seen.append):
        for _ in range(2):
            one.step()
            other.step()
    one.step()
    assert seen == [0, 1, 0, 1]


def test_an_optimizer_that_replaces_another_has_its_number() -> None:
    def fold(size: int) -> None:
        weight = torch.nn.Parameter(torch.ones(size))
        weight.grad = torch.ones(size)
        optimizer, other = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
        for one in (optimizer, other, optimizer):
            one.step()
        del optimizer, other, one

    seen: list[Hashable] = []
    with watch_steps(seen.append):
        for size in (2, 2, 3):
            fold(size)
            gc.collect()  # the first exception of a process may keep the first optimizer
    assert seen[:3] == [0, 1, 0]
    assert seen[3:6] == [0, 1, 0]
    assert seen[6:] == [2, 3, 2]


def test_optimizers_without_shapes_are_counted() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.ones(1))], {})
            del self.param_groups[0]["params"]

        def step(self, closure: Any = None) -> None:
            pass

    lazy = torch.optim.SGD(torch.nn.LazyLinear(1).parameters(), lr=0.1)
    seen: list[Hashable] = []
    with watch_steps(seen.append):
        for one in (lazy, Own(), lazy):
            one.step()
    assert seen == [0, 1, 0]


def test_steps_and_backward_passes_are_told_in_order() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([weight], max_iter=2)
    seen: list[Hashable] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        # A checkpoint's backward pass has another one inside.
        loss = checkpoint(torch.square, weight, use_reentrant=True).sum()
        loss.backward()
        return loss

    with (
        watch_steps(seen.append, lambda: seen.append("before")),
        watch_backward(lambda: seen.append("backward")),
    ):
        torch.autograd.backward(weight.sum())
        optimizer.step(closure)  # type: ignore[arg-type]
        closure()
    closure()
    assert seen == ["backward", "before", "backward", "backward", 0, "backward"]


def test_a_line_of_the_script_is_a_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def main():\n    for i in range(4):\n        print(i)\nmain()\nx = 1\n")
    seen: list[Hashable] = []
    with watch_line(StepLine.parse(f"{script}:3"), seen.append):
        assert run_as_main(str(script), [], as_module=False) == 0
    assert seen == ["line"] * 4


MANY_LINES = """\
def step(x):
    return x
def main():
    for i in range(4):
        step(  # 4
            i,  # 4
        )
    k = 0
    while True:
        if step(  # 4
            k,
        ) > 2: break
        k += 1
    for pair in zip(  # 4
        range(4),  # 4
    ):
        pass
    for outer in range(2):  # 2
        for inner in range(3):  # 6
            if inner: continue
        else: k = 0
    for one in range(5):  # 3
        if one == 2: break
    for none in ():  # 0
        pass
    while k < 3:  # 3
        k += 1
    while True:  # 2
        if (k := k + 1) > 4: break
main()
"""


def test_a_line_begins_once_for_each_run_of_its_statement_or_its_body(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MANY_LINES, encoding="utf-8")
    for number, line in enumerate(MANY_LINES.splitlines(), 1):
        _, marked, count = line.partition("# ")
        if marked:
            seen: list[Hashable] = []
            with watch_line(StepLine.parse(f"{script}:{number}"), seen.append):
                assert run_as_main(str(script), [], as_module=False) == 0
            assert len(seen) == int(count[0]), line


@pytest.mark.parametrize("text", ["train.py", ":3", "train.py:x", "missing.py:3", "train.py:0"])
def test_a_mistyped_step_line_is_an_error(text: str) -> None:
    with pytest.raises(ProgramError, match=r"train\.py:120"):
        StepLine.parse(text)
