"""Fixtures for the tests of the fake device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.fake import FakeDevice


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """The fake device alone, on which races fail the test."""
    with FakeDevice() as fake:
        yield fake
