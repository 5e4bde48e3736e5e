"""Hidden waits follow CUDA's code paths: one table, for the fake device and for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace.testing import FakeDevice
from support.host_waits import CASES, Case, Inputs


@pytest.mark.parametrize("inference", [False, True])
def test_the_fake_device_waits_where_cuda_waits(inference: bool) -> None:
    differences = []
    with FakeDevice(check=False) as device:
        for case in CASES:
            if inference and case.needs_grad:
                continue
            inputs = Inputs(device.torch_device)
            device.hidden_waits.clear()
            with torch.inference_mode(inference):
                case.run(inputs)
            if bool(device.hidden_waits) != case.waits:
                differences.append((case.code, [wait.operation for wait in device.hidden_waits]))
    assert differences == []
    assert len(CASES) >= 160


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
        assert "synchronizing CUDA operation" in str(error), f"{case}: {error}"
        return True
    return False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_table_is_what_cuda_does() -> None:
    assert [case.code for case in CASES if waits_on_cuda(case) != case.waits] == []
