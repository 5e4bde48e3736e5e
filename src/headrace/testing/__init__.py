"""A fake device for tests: it needs no GPU and finds stream races.

In: any code that takes a `Device`. Out: the same numbers, computed on the CPU, and a report of
every race and every hidden host wait, which a real device would pass over in silence. This room
imports only `device/` and the ground files. Its names are loaded on first use, which keeps the
pytest plugin light.

    def test_my_loop(fake_device):            # the pytest fixture; fails the test on a race
        my_loop(device=fake_device)

or, without pytest, `with FakeDevice() as device: …`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.testing.costs import Costs
    from headrace.testing.cuda import FakeCuda, fake_cuda
    from headrace.testing.fake import FakeDevice
    from headrace.testing.faults import Hang
    from headrace.testing.findings import CodeLine, Finding, race_report
    from headrace.testing.orders import ordered
    from headrace.testing.pages import race_page
    from headrace.testing.program import ProgramResult, run_program
    from headrace.testing.races import Access, HiddenWait, Race
    from headrace.testing.streams import FakeEvent, FakeStream

_HOMES = {
    "Access": "races",
    "CodeLine": "findings",
    "Costs": "costs",
    "FakeCuda": "cuda",
    "FakeDevice": "fake",
    "FakeEvent": "streams",
    "FakeStream": "streams",
    "Finding": "findings",
    "Hang": "faults",
    "HiddenWait": "races",
    "ProgramResult": "program",
    "Race": "races",
    "fake_cuda": "cuda",
    "ordered": "orders",
    "race_page": "pages",
    "race_report": "findings",
    "run_program": "program",
}

__all__ = [
    "Access",
    "CodeLine",
    "Costs",
    "FakeCuda",
    "FakeDevice",
    "FakeEvent",
    "FakeStream",
    "Finding",
    "Hang",
    "HiddenWait",
    "ProgramResult",
    "Race",
    "fake_cuda",
    "ordered",
    "race_page",
    "race_report",
    "run_program",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
