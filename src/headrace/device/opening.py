"""Opening a device by its name."""

from __future__ import annotations

import torch

from headrace.device.base import Device
from headrace.device.cpu import CpuDevice
from headrace.device.ledger import Ledger
from headrace.errors import DeviceNotFoundError

# Accelerators with several streams, events and pinned memory. MPS has one stream.
_STREAMING_KINDS = ("cuda", "xpu")


def available_devices() -> list[str]:
    """The names that `open_device` accepts on this machine, the CPU last."""
    names = []
    for kind in _STREAMING_KINDS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            names += [f"{kind}:{index}" for index in range(module.device_count())]
    return [*names, "cpu"]


def open_device(
    device: str | torch.device | Device = "auto", *, ledger: Ledger | None = None
) -> Device:
    """Open a device by its name: "auto", "cpu", "cuda", "cuda:1", "xpu", or a `torch.device`.

    "auto" is the first accelerator, or the CPU if there is none. A `Device` is returned as it is.
    Host waits are counted in `ledger`, or in a new one. Raises `DeviceNotFoundError`, which
    lists the devices there are, if this machine has no such device.
    """
    if isinstance(device, Device):
        return device
    here = available_devices()
    wanted = _parse(device, here)
    if wanted.type == "cpu" and wanted.index in (None, 0):
        return CpuDevice(ledger)
    if wanted.type in _STREAMING_KINDS and wanted.index is None:
        # Without an accelerator, name index 0 in the error.
        module = torch.get_device_module(wanted)
        index = module.current_device() if module.is_available() else 0
        wanted = torch.device(wanted.type, index)
    if str(wanted) not in here:
        raise DeviceNotFoundError(_missing(device, here))
    if wanted.type == "cuda":
        from headrace.device.cuda import CudaDevice

        return CudaDevice(wanted, ledger)
    from headrace.device.accelerator import AcceleratorDevice

    return AcceleratorDevice(wanted, ledger)


def _parse(device: str | torch.device, here: list[str]) -> torch.device:
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(here[0] if device == "auto" else device)
    except (RuntimeError, TypeError) as problem:
        raise DeviceNotFoundError(_missing(device, here)) from problem


def _missing(device: object, here: list[str]) -> str:
    message = f"no device {str(device)!r} on this machine; here: {', '.join(here)}"
    if str(device).startswith("cuda") and len(here) == 1:
        built_for = torch.version.cuda or torch.version.hip
        message += (
            " (this PyTorch was built without CUDA: see `headrace doctor`)"
            if built_for is None
            else f" (PyTorch was built for CUDA {built_for}, but finds no driver: "
            "see `headrace doctor`)"
        )
    return message
