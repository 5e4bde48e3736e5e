"""The pytest plugin: `def test_x(fake_device): …` fails when `x` has a stream race.

Installed with Headrace, it is found by itself; from a source tree, name it in `conftest.py`:
`pytest_plugins = ["headrace.testing.pytest_plugin"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headrace.testing import FakeDevice


@pytest.fixture
def fake_device() -> Iterator[FakeDevice]:
    """A `FakeDevice` that follows the whole test and raises all its races at the end."""
    # Imported here: other people's pytest runs load this file without wanting PyTorch.
    from headrace.testing import FakeDevice

    with FakeDevice(check=False) as device:
        yield device
    device.check()
