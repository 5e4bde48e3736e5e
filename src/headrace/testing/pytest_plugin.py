"""The pytest plugin: a test with the fixture `fake_device` or `fake_cuda` fails if the code under
test has a stream race.

pytest finds it by itself once Headrace is installed; from a source tree, name it in `conftest.py`:
`pytest_plugins = ["headrace.testing.pytest_plugin"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.testing import FakeCuda, FakeDevice


@pytest.fixture
def fake_device() -> Iterator[FakeDevice]:
    """A `FakeDevice` that watches the whole test and raises all its races at the end."""
    # Imported here because every pytest run loads this file, also those that never use PyTorch.
    from headrace.testing import FakeDevice

    with FakeDevice(check=False) as device:
        yield device
    device.check()


@pytest.fixture
def fake_cuda() -> Iterator[FakeCuda]:
    """A CUDA device for the whole test, on a machine without one. Raises all its races at the end;
    see `headrace.testing.fake_cuda`."""
    from headrace.testing import fake_cuda

    with fake_cuda(check=False) as device:
        yield device
    device.check()
