"""PyTorch's settings that decide which kernels run: read, written, and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.capture.guards.kernel_settings import KernelSettings
from headrace.device import Device

_FP16: Any = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("owner", "name", "other"),
    [
        (torch.backends.cudnn, "enabled", False),
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cudnn.conv, "fp32_precision", "ieee"),  # type: ignore[attr-defined]
        (_FP16, "fp32_precision", "tf32"),
        (_FP16, "allow_fp16_reduced_precision_reduction", (False, False)),
    ],
)
def test_a_setting_is_seen_set_and_put_back(
    fake_device: Device, owner: Any, name: str, other: Any
) -> None:
    settings, before = KernelSettings(fake_device), getattr(owner, name)
    plain = settings.now()
    setattr(owner, name, other)
    try:
        changed = settings.now()
        assert changed != plain
    finally:
        setattr(owner, name, before)
    assert settings.now() == plain
    with settings.set(changed):
        assert settings.now() == changed
        assert getattr(owner, name) == (other[0] if isinstance(other, tuple) else other)
    assert settings.now() == plain


def test_autocast(fake_device: Device) -> None:
    settings = KernelSettings(fake_device)
    plain = settings.now()
    with torch.autocast("cpu", torch.float16):
        inside = settings.now()
        assert settings.without_autocast() != inside
        assert settings.now() == inside
    assert inside != plain
    with settings.set(inside):
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    assert not torch.is_autocast_enabled("cpu")
