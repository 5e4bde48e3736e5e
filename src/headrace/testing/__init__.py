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

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.testing.costs import Costs as Costs
    from headrace.testing.cuda import FakeCuda as FakeCuda
    from headrace.testing.cuda import fake_cuda as fake_cuda
    from headrace.testing.fake import FakeDevice as FakeDevice
    from headrace.testing.faults import Hang as Hang
    from headrace.testing.findings import CodeLine as CodeLine
    from headrace.testing.findings import Finding as Finding
    from headrace.testing.findings import race_report as race_report
    from headrace.testing.orders import ordered as ordered
    from headrace.testing.pages import race_page as race_page
    from headrace.testing.program import ProgramResult as ProgramResult
    from headrace.testing.program import run_program as run_program
    from headrace.testing.races import Access as Access
    from headrace.testing.races import HiddenWait as HiddenWait
    from headrace.testing.races import Race as Race
    from headrace.testing.streams import FakeEvent as FakeEvent
    from headrace.testing.streams import FakeStream as FakeStream

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
