"""Random loops with `speed_up`: the numbers of the eager loop, bit for bit."""

from __future__ import annotations

import pytest

from headrace.device import Device
from support.graphs.random_loops import random_loop
from support.graphs.sped_up import compare

# In these a check falls between two calls of one backward, which adds to gradients that are there.
CHECKED = (145, 166, 201, 290, 292, 802, 2049, 2061)


@pytest.mark.parametrize("seed", [*range(16), *range(10_000, 10_008), *CHECKED])
def test_a_random_loop_is_equal(capturing: Device, seed: int) -> None:
    steps = 11 if seed in CHECKED else 9
    report = compare(capturing, lambda device: random_loop(seed, device), steps=steps)
    reasons = [part.why for part in report.parts if part.why is not None]
    assert sum(part.replays for part in report.parts) > 0 or reasons
    assert all("a hook of parameter" in why for why in reasons), str(report)
