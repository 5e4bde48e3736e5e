"""Which steps count as before, and which as after."""

from __future__ import annotations

from headrace.fake import FakeDevice
from headrace.run.step_clock import Counts, StepClock


def test_ordinary_steps_before_and_replayed_ones_after(fake_device: FakeDevice) -> None:
    times = StepClock(fake_device, before_end=6)
    counts = [Counts(0, 0)] * 5 + [Counts(0, 1), Counts(2, 2)]  # watched, captured
    counts += [Counts(4, 2), Counts(6, 2), Counts(8, 3), Counts(10, 3)]  # one of them checked
    for one in counts:
        times.ended(one)
    assert times.steps == 11
    assert (len(times._before), len(times._after)) == (3, 3)
    fake_device.synchronize("test")
    before, after = times.medians()
    assert before is not None
    assert after is not None


def test_too_few_steps_have_no_time(fake_device: FakeDevice) -> None:
    times = StepClock(fake_device, before_end=6)
    for _ in range(3):
        times.ended(Counts(0, 0))
    fake_device.synchronize("test")
    assert times.medians() == (None, None)
