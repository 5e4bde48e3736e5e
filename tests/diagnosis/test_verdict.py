"""What diagnose says to code that trained for too few steps, and whether its advice works."""

from __future__ import annotations

import pytest

from headrace.diagnosis.explanation import explain
from headrace.diagnosis.session import Measurements, Observations, Settings
from headrace.diagnosis.steps import Period
from headrace.diagnosis.verdict import windows_for
from headrace.records import Environment

MS = 1_000_000


def sentences(seen: Observations) -> str:
    return "\n".join(explain(seen, "", None, Environment()).verdict)


@pytest.mark.parametrize("is_fake", [True, False])
def test_the_advised_windows_fit_into_the_steps(is_fake: bool) -> None:
    for steps in range(60):
        windows = windows_for(steps, Settings(), is_fake=is_fake)
        assert (windows is None) is (steps < (5 if is_fake else 8))
        if windows is not None:
            assert sum(windows.values()) <= steps
            assert windows.get("clean", 2) >= 2
            assert min(windows.values()) >= 1
            assert all(value <= getattr(Settings(), name) for name, value in windows.items())


def test_a_block_is_told_in_terms_of_keyword_arguments() -> None:
    seen = Observations(steps=9, calls=9, period=Period((0,), 0, 1), is_block=True)
    assert sentences(seen) == (
        "The block ended after 9 steps, too few to measure.\n"
        "Let it train for at least 48 steps, or pass warmup=4, clean=2, profiled=1, lines=1."
    )
    assert 'step_line="FILE:LINE"' in sentences(Observations(is_block=True))
    assert 'step_line="FILE:LINE"' in sentences(Observations(calls=1, is_block=True))
    seen = Observations(calls=4000, period=Period((0,), 0, 1, repeats=False), is_block=True)
    (note,) = explain(seen, "", None, Environment()).notes
    assert 'step_line="FILE:LINE" names a better place' in note
    assert "--" not in note


def test_a_block_that_trains_on_the_cpu_is_told_of_its_own_option() -> None:
    seen = Observations(steps=9, calls=9, on_cpu=True, is_block=True)
    for is_block, where in ((True, "inside fake_cuda()"), (False, "with --fake")):
        seen.is_block = is_block
        verdict = explain(seen, "", None, Environment(), races=0).verdict
        assert verdict[1].endswith(f"torch.cuda.is_available() is True {where}.")


def test_a_script_that_ends_in_the_clean_window_is_told_what_it_takes() -> None:
    seen = Observations(
        steps=24,
        calls=24,
        period=Period((0,), 0, 1),
        measured=Measurements(window="clean", clean_ns=[5 * MS] * 14, clean_total_ns=70 * MS),
    )
    assert sentences(seen) == (
        "A step takes 5.0 ms. The script ended after 24 steps, before the GPU's work was traced.\n"
        "Let it train for at least 48 steps, or pass --warmup 6 --steps 10 --profiled 4 --lines 2."
    )


def test_too_few_steps_of_several_optimizer_steps_say_so() -> None:
    period = Period((0,) * 8 + (1,) * 8, 1, 8)
    text = sentences(Observations(steps=6, calls=96, period=period, calls_per_step=16))
    assert text.startswith("The script ended after 6 steps of 16 optimizer steps, too few")
    assert text.endswith(
        "less than that, name a line that runs once per step: --step-line FILE:LINE."
    )


def test_windows_that_are_short_enough_are_not_advised_again() -> None:
    settings = Settings(warmup=4, clean=2, profiled=1, lines=1)
    seen = Observations(steps=8, calls=8, period=Period((0,), 0, 1), settings=settings)
    assert sentences(seen).endswith("Let it train for at least 9 steps.")


def test_optimizers_without_an_order_need_a_line() -> None:
    assert sentences(Observations(calls=7)) == (
        "The script made 7 optimizer steps and graph replays, and no sequence of them repeats for "
        "long enough: it is not known what a step is.\n"
        "Let it train for longer, or name a line that runs once per step: --step-line FILE:LINE."
    )
