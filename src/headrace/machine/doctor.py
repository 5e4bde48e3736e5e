"""`headrace doctor`: what this machine has, which problems it has, and how to fix them."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import torch

import headrace
from headrace.child_processes import child_environment
from headrace.device import Device, available_devices, open_device
from headrace.extras import install_command
from headrace.machine.device_speed import measure_speed
from headrace.machine.machine_report import DeviceFacts, MachineFinding, MachineReport, gib

_SHM = Path("/dev/shm")  # noqa: S108 (only its size is read)
_ENOUGH_SHM_BYTES = 1 << 30


def diagnose(*, measure: bool = True) -> MachineReport:
    """Examine this machine. With `measure`, also time each accelerator (about two seconds)."""
    opened = [open_device(name) for name in available_devices()]
    devices = tuple(_facts(device, measure) for device in opened)
    driver = driver_version()
    return MachineReport(
        headrace=headrace.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        torch_built_for=_built_for(),
        driver=driver,
        cpu_cores=psutil.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        devices=devices,
        findings=tuple(_findings(devices, driver)),
    )


def _facts(device: Device, measure: bool) -> DeviceFacts:
    memory = device.memory()
    return DeviceFacts(
        name=str(device),
        description=device.description(),
        total_bytes=memory.total,
        free_bytes=memory.free,
        measured=measure_speed(device) if measure and device.asynchronous else None,
    )


def _findings(devices: tuple[DeviceFacts, ...], driver: str | None) -> list[MachineFinding]:
    found = [
        *_accelerator_findings(devices, driver),
        *_machine_findings(devices),
    ]
    return sorted(found, key=lambda finding: finding.level != "problem")


def _accelerator_findings(
    devices: tuple[DeviceFacts, ...], driver: str | None
) -> list[MachineFinding]:
    if len(devices) > 1:
        slow = [d for d in devices if d.measured and d.measured.overlap_share < 0.5]
        return [
            MachineFinding(
                "note",
                f"on {device.name} copies hardly overlap compute, so prefetching gains little",
                "check whether another program uses the GPU (nvidia-smi), then run doctor again",
            )
            for device in slow
        ]
    if driver is not None:
        return [
            MachineFinding(
                "problem",
                f"an NVIDIA driver ({driver}) is installed, but this PyTorch "
                f"(built for {_built_for()}) sees no GPU",
                "pip install --force-reinstall torch   # a build with CUDA",
            )
        ]
    if _built_for() != "the CPU only":
        return [
            MachineFinding(
                "problem",
                f"PyTorch was built for {_built_for()}, but no driver answers",
                "install the GPU driver; in a container, pass the GPU through",
            )
        ]
    return [
        MachineFinding(
            "note",
            "no GPU: every plan runs on the CPU, and none is faster than another",
            "use a machine with a GPU and a PyTorch built for it",
        )
    ]


def _machine_findings(devices: tuple[DeviceFacts, ...]) -> list[MachineFinding]:
    found = []
    if len(devices) > 1 and importlib.util.find_spec("pynvml") is None:
        found.append(
            MachineFinding(
                "note",
                "GPU utilization cannot be sampled without NVML",
                install_command("pynvml"),
            )
        )
    if _SHM.is_dir() and shutil.disk_usage(_SHM).total < _ENOUGH_SHM_BYTES:
        found.append(
            MachineFinding(
                "note",
                f"shared memory is small ({gib(shutil.disk_usage(_SHM).total)}): loader workers "
                "may crash with a bus error",
                "docker run --shm-size=8g …   # or train with --workers 0",
            )
        )
    if len(devices) == 1 and not _cpu_bf16_works():
        found.append(
            MachineFinding(
                "note",
                "bf16 crashes PyTorch on this CPU, which reports AMX but does not run it",
                "export ONEDNN_MAX_CPU_ISA=AVX512_CORE",
            )
        )
    return found


def _cpu_bf16_works() -> bool:
    """Try it in another process, because a failure kills the process."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "amx_bf16" not in cpuinfo.read_text(errors="replace"):
        return True
    attempt = (
        "from headrace.child_processes import end_with_parent; "
        f"end_with_parent({os.getpid()}); "
        "import torch; x = torch.ones(32, 32, dtype=torch.bfloat16); "
        "torch.nn.functional.linear(x, x)"
    )
    done = subprocess.run(  # noqa: S603 (a fixed command)
        [sys.executable, "-c", attempt],
        capture_output=True,
        check=False,
        env=child_environment(),
    )
    return done.returncode == 0


def driver_version() -> str | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    finally:
        pynvml.nvmlShutdown()


def _built_for() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "XPU" if torch.xpu._is_compiled() else "the CPU only"


def usable_cores() -> int:
    """Cores that this process may run on. In a container these are often fewer than all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
