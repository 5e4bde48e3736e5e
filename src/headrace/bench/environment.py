"""Describes this machine for a stored result."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import torch

import headrace
from headrace.device import Device
from headrace.machine import driver_version, usable_cores
from headrace.records import Environment


def environment_of(device: Device, command: str) -> Environment:
    """The machine, the versions and the command that a result was measured with."""
    accelerator = device.asynchronous
    return Environment(
        command=command,
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        headrace=headrace.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        device=str(device),
        device_name=device.description(),
        device_memory_bytes=device.memory().total if accelerator else None,
        driver=driver_version() if accelerator else None,
        cpu=_cpu_name(),
        cores=usable_cores(),
        platform=f"{platform.system()} {platform.machine()}",
        float32_switches=device.float32_switches(),
    )


def _cpu_name() -> str:
    """The CPU's model name from Linux; elsewhere the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()
