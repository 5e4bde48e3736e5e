"""Hidden waits follow CUDA's code paths: one table, for the fake device and for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.device import chrome_trace
from headrace.fake import FakeDevice, fake_cuda
from support.races.host_waits import CASES, Case, Inputs


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("inference", [False, True])
def test_the_fake_device_waits_where_cuda_waits(inference: bool) -> None:
    differences = []
    with FakeDevice(check=False) as device:
        for case in CASES:
            if case.needs_cuda or (inference and case.needs_grad):
                continue
            inputs = Inputs(device.torch_device)
            device.hidden_waits.clear()
            with torch.inference_mode(inference):
                case.run(inputs)
            if bool(device.hidden_waits) != case.waits:
                found = [wait.operation for wait in device.hidden_waits]
                differences.append(f"{case.code}: found {found}")
    assert not differences, "\n".join(differences)
    assert len(CASES) >= 180


@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_the_fake_cuda_waits_where_cuda_waits() -> None:
    with fake_cuda(check=False) as device:
        for case in CASES:
            if not case.needs_cuda:
                continue
            inputs = Inputs(torch.device("cuda"))
            device.hidden_waits.clear()
            case.run(inputs)
            assert bool(device.hidden_waits) == case.waits, case.code


@contextmanager
def waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs_on_cuda() -> Inputs:
    inputs = Inputs(torch.device("cuda"))
    torch.cuda.synchronize()
    return inputs


def waits_of_pytorch(case: Case) -> bool:
    inputs = inputs_on_cuda()
    try:
        with waits_are_errors():
            case.run(inputs)
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    return False


def waits_in_trace(case: Case) -> list[str]:
    """The synchronizing calls of the driver, also those of thrust, which PyTorch does not know of.
    Calls for the whole device are the profiler's own."""
    inputs = inputs_on_cuda()
    with chrome_trace() as content:
        case.run(inputs)
    names = (str(event.get("name", "")) for event in content["traceEvents"])
    return [name for name in names if name in ("cudaStreamSynchronize", "cudaEventSynchronize")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_table_is_what_cuda_does() -> None:
    """A library may wait inside an operator that the table says does not wait: no program may
    rely on that."""
    wrong = []
    for case in CASES:
        case.run(inputs_on_cuda())  # the first call loads libraries, which waits
        seen = waits_of_pytorch(case)
        if seen != case.waits and not (case.waits and waits_in_trace(case)):
            wrong.append(f"{case.code}: expected {case.waits}, trace {waits_in_trace(case)}")
    assert not wrong, "\n".join(wrong)
