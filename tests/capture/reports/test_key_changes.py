"""Which part of a batch makes each one new."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.capture.reports.key_changes import KeyChanges
from headrace.device import Device

BATCHES: dict[str, tuple[Callable[[int], Any], str | None]] = {
    "a file name": (lambda i: {"path": [f"{i}.jpg"]}, "batch['path'][0] is another each time"),
    "an index": (lambda i: (torch.ones(2), i), "batch[1] is another each time (28, then 29)"),
    "shapes": (lambda i: torch.ones(i + 1), "pad to a few shapes"),
    "nothing": (lambda i: torch.ones(2), None),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_part_is_named(fake_device: Device, name: str) -> None:
    make, expected = BATCHES[name]
    changes = KeyChanges("plan graph", fake_device)
    for at in range(29):
        changes.add({"batch": make(at)})
    assert changes.why is None
    changes.add({"batch": make(29)})
    assert (changes.why is None) if expected is None else (expected in str(changes.why))


def test_a_key_that_comes_again_begins_anew(fake_device: Device) -> None:
    changes = KeyChanges("plan graph", fake_device)
    for at in range(80):
        changes.add({"batch": at})
        if at % 20 == 19:
            changes.seen()
    assert changes.why is None
