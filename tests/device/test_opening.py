"""Opening a device: by name, automatically, and the errors if there is none."""

from __future__ import annotations

import pytest
import torch

from headrace.device import Ledger, available_devices, open_device
from headrace.errors import DeviceNotFoundError


class TestOpening:
    def test_auto_opens_the_first_device(self) -> None:
        assert str(open_device()) == available_devices()[0]
        assert str(open_device("auto")) == available_devices()[0]

    def test_cpu_by_name_and_by_torch_device(self) -> None:
        assert open_device("cpu").torch_device == torch.device("cpu")
        assert open_device(torch.device("cpu")).torch_device == torch.device("cpu")

    def test_a_device_is_returned_as_it_is(self) -> None:
        device = open_device("cpu")
        assert open_device(device) is device

    def test_it_uses_the_ledger_that_was_passed(self) -> None:
        ledger = Ledger()
        open_device("cpu", ledger=ledger).synchronize("test")
        assert ledger.statistics()["test"].count == 1

    @pytest.mark.parametrize("name", ["cuda:99", "gpu", "", "cuda:x", "mps", "meta"])
    def test_a_device_that_is_not_here(self, name: str) -> None:
        with pytest.raises(DeviceNotFoundError, match=f"no device '{name}'.*here: .*cpu"):
            open_device(name)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
    def test_the_message_says_why_there_is_no_cuda(self) -> None:
        with pytest.raises(DeviceNotFoundError, match=r"headrace doctor"):
            open_device("cuda")
