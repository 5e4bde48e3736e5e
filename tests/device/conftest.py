"""What the tests of several devices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.device import Device, open_device
from headrace.fake import fake_cuda
from support.training.devices import needs_cuda


@pytest.fixture(params=["emulated", needs_cuda])
def cuda(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "emulated":
        with fake_cuda():
            yield open_device("cuda")
    else:
        yield open_device(request.param)
