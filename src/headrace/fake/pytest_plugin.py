"""The pytest plugin: a test with the fixture `fake_device` or `fake_cuda` fails if the code under
test has a stream race.

pytest finds it by itself once Headrace is installed; from a source tree, name it in `conftest.py`:
`pytest_plugins = ["headrace.fake.pytest_plugin"]`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headrace.fake import FakeCuda, FakeDevice

# What the fixtures of a test made, with the number of races that the test has failed for.
_WATCHED = pytest.StashKey[list[tuple[Any, int]]]()


@pytest.fixture
def fake_device(request: pytest.FixtureRequest) -> Iterator[FakeDevice]:
    """A `FakeDevice` that watches the whole test, which fails if there are races."""
    # Imported here because every pytest run loads this file, also those that never use PyTorch.
    from headrace.fake import FakeDevice

    with FakeDevice(check=False) as device:
        _watch(request, device)
        yield device
    _check_again(request, device)


@pytest.fixture
def fake_cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    """A CUDA device for the whole test, on a machine without one; see
    `headrace.fake.fake_cuda`. The test fails if there are races."""
    from headrace.fake import fake_cuda

    with fake_cuda(check=False) as device:
        _watch(request, device)
        yield device
    _check_again(request, device)


def _watch(request: pytest.FixtureRequest, device: FakeDevice) -> None:
    request.node.stash.setdefault(_WATCHED, []).append((device, 0))


# The old form of a wrapper: an older pytest that does not know the new one would refuse the plugin.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Let the test itself fail for its races, not the end of its fixture."""
    outcome = yield
    watched = item.stash.get(_WATCHED, [])
    for index, (device, _) in enumerate(watched):
        if outcome.excinfo is None:
            try:
                device.check()
            except AssertionError as races:
                # Without a traceback: the report has the lines that matter.
                outcome.force_exception(pytest.fail.Exception(str(races), pytrace=False))
        watched[index] = device, len(device.races)


def _check_again(request: pytest.FixtureRequest, device: FakeDevice) -> None:
    """Raise for races that came after the test's function, when other fixtures ended."""
    __tracebackhide__ = True
    known = [count for watched, count in request.node.stash[_WATCHED] if watched is device]
    if len(device.races) > sum(known):
        device.check()
