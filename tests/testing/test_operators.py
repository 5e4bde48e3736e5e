"""Hidden waits follow CUDA's code paths: one table, for the fake device and for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.testing import FakeDevice, fake_cuda
from support.host_waits import CASES, Case, Inputs


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
                differences.append((case.code, [wait.operation for wait in device.hidden_waits]))
    assert differences == []
    assert len(CASES) >= 160


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


def waits_on_cuda(case: Case) -> bool:
    inputs = Inputs(torch.device("cuda"))
    case.run(inputs)  # the first call loads libraries, which waits
    inputs = Inputs(torch.device("cuda"))
    torch.cuda.synchronize()
    try:
        with waits_are_errors():
            case.run(inputs)
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return True
    return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_table_is_what_cuda_does() -> None:
    assert [case.code for case in CASES if waits_on_cuda(case) != case.waits] == []
