"""For tests: a device that needs no GPU and finds stream races.

    def test_my_loop(fake_device):            # the pytest fixture; fails the test on a race
        my_loop(device=fake_device)

or, without pytest, `with FakeDevice() as device: …`.
"""

from __future__ import annotations

from headrace.testing.costs import Costs
from headrace.testing.fake import FakeDevice
from headrace.testing.faults import Hang
from headrace.testing.races import Access, HiddenWait, Race
from headrace.testing.streams import FakeEvent, FakeStream

__all__ = [
    "Access",
    "Costs",
    "FakeDevice",
    "FakeEvent",
    "FakeStream",
    "Hang",
    "HiddenWait",
    "Race",
]
