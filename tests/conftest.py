"""Fixtures for all tests. Tests that take `device` run on the CPU, the fake and, if any, CUDA."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace

# Some virtual machines announce AMX and then refuse it, which kills the process at the first bf16
# product. Must be set before PyTorch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# As many tests run at once as there are cores: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from headrace.bench import contestants, runner
from headrace.bench.tune import measurer
from headrace.device import Device, open_device
from headrace.fake import FakeDevice
from support import torchvision_ops
from support.training.devices import needs_cuda
from support.translation.corpora import write_corpus

# Temporary files of the tests' own, for their children, too. Locks on the machine are among them:
# a benchmark that runs beside the tests must not make them wait. Pytest's folders stay where they
# are found, since they outlive the tests.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
TEMPORARY = os.environ["TMPDIR"] = tempfile.mkdtemp(
    prefix="headrace-tests-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]
)
tempfile.tempdir = None  # else the folder found above
# After `multiprocessing` has removed its own folder in there, which has the priority -100.
Finalize(None, shutil.rmtree, (TEMPORARY, True), exitpriority=-1000)
# Under `nohup` and in some CI systems Ctrl-C is ignored, and children inherit that.
for number in (signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )

# A busy machine is no failure: no example is held to a time. And the same examples each time.
hypothesis.settings.register_profile("headrace", deadline=None, derandomize=True)
hypothesis.settings.load_profile("headrace")

pytest_plugins = ["headrace.fake.pytest_plugin"]
torchvision_ops.define_missing()


@pytest.fixture(scope="module", autouse=True)
def frozen_modules() -> Iterator[None]:
    """Garbage collections pass over what was loaded before this test module.

    The bench collects before each measurement, hundreds of times in a test, and unfreezes objects
    between them. It may not here: each collection would look at all of PyTorch's modules again.
    """
    importlib.import_module("torch._dynamo")  # else the first optimizer loads it

    gc.collect()
    gc.freeze()
    collector = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        for module in (contestants, measurer, runner):
            patch.setattr(module, "gc", collector)
        yield


@pytest.fixture(params=["cpu", "fake", needs_cuda])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Each kind of device in turn. On the fake, races fail the test."""
    if request.param == "fake":
        with FakeDevice() as fake:
            yield fake
    else:
        yield open_device(request.param)


@pytest.fixture(params=["fake", needs_cuda])
def capturing(request: pytest.FixtureRequest) -> Iterator[Device]:
    """A device that captures graphs."""
    if request.param == "fake":
        with FakeDevice() as fake:
            yield fake
    else:
        yield open_device(request.param)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sentences that `support.translation.trainers` trains on."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as worth a line in the summary, whatever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(str(line))
