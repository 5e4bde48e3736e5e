"""A fake device and an emulated `torch.cuda`: they need no GPU and find stream races.

In: any code that takes a `Device`, or a program that uses `torch.cuda`. Out: the same numbers,
computed on the CPU, and a report of every race and every hidden host wait, which a real device
would pass over in silence. This package imports only `races/`, `device/` and the ground files. Its
names are loaded on first use, which keeps the pytest plugin light.

    def test_my_loop(fake_device):            # the pytest fixture; fails the test on a race
        my_loop(device=fake_device)

or, without pytest, `with FakeDevice() as device: …`.
"""

from __future__ import annotations

from headrace.lazy import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from headrace.fake.costs import Costs as Costs
    from headrace.fake.cuda import FakeCuda as FakeCuda
    from headrace.fake.cuda import fake_cuda as fake_cuda
    from headrace.fake.device import FakeDevice as FakeDevice
    from headrace.fake.faults import Hang as Hang
    from headrace.fake.orders import ordered as ordered
    from headrace.fake.program import ProgramResult as ProgramResult
    from headrace.fake.program import run_program as run_program
    from headrace.fake.streams import FakeEvent as FakeEvent
    from headrace.fake.streams import FakeStream as FakeStream

__all__, __getattr__, __dir__ = lazy(__name__, __file__)
