"""Random loops with `speed_up`: the numbers of the eager loop, bit for bit."""

from __future__ import annotations

import pytest

from headrace.device import Device
from support.random_loops import random_loop
from support.sped_up import compare


@pytest.mark.parametrize("seed", range(24))
def test_a_random_loop_is_equal(capturing: Device, seed: int) -> None:
    report = compare(capturing, lambda device: random_loop(seed, device), steps=9)
    assert sum(part.replays for part in report.parts) > 0
    reasons = [part.why for part in report.parts if part.why is not None]
    assert all("a hook of parameter" in why for why in reasons), str(report)
