"""Plain loops in which something changes in mid-run: with `speed_up`, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.device import Device
from support.graphs.loop_changes import CHANGES, Loop
from support.graphs.sped_up import Made, compare


@pytest.mark.parametrize("name", CHANGES)
def test_a_loop_with_changes_is_equal(capturing: Device, name: str) -> None:
    def make(device: Device) -> Made:
        loop = Loop(device)

        def step(at: int) -> Any:
            return CHANGES[name](loop, at)

        return (loop.model, loop.other, loop.optimizer), step

    compare(capturing, make, 12)
