"""What the foreign libraries need before they are imported, and between two tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

# No test downloads anything, and none may try.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest

from frameworks.training import forget_accelerators
from headrace.device import Device, open_device
from headrace.fake import FakeDevice


@pytest.fixture(params=["cpu", "fake"])
def place(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The CPU, and the fake device, on which races fail the test. The arithmetic is the same."""
    if request.param == "cpu":
        yield open_device("cpu")
        return
    with FakeDevice() as device:
        yield device


@pytest.fixture(autouse=True)
def _a_new_accelerator() -> Iterator[None]:
    yield
    forget_accelerators()
