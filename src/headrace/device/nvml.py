"""Sensors of NVIDIA GPUs, through NVML (the package nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from headrace.device.sensors import SensorReading, Sensors
from headrace.extras import install_command


class NvmlSensors(Sensors):
    """The sensors of one GPU, found by its UUID or PCI address.

    Not by its index: with CUDA_VISIBLE_DEVICES, PyTorch and NVML number GPUs differently. `nvml` is
    the module `pynvml`.

    Raises `NvmlAbsent` if there is no driver, or it does not know the GPU.
    """

    def __init__(self, uuid: str | None, pci: str | None, nvml: ModuleType | None = None) -> None:
        self._nvml: Any = nvml if nvml is not None else _nvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as problem:
            raise NvmlAbsent(f"NVML failed to start: {problem}") from problem
        self._handle = self._find(uuid, pci)
        # Sensors that this GPU does not have: each is asked for once.
        self._unsupported: set[str] = set()

    def _find(self, uuid: str | None, pci: str | None) -> Any:
        problem: Exception | None = None
        for given, find in (
            (uuid, self._nvml.nvmlDeviceGetHandleByUUID),
            (pci, self._nvml.nvmlDeviceGetHandleByPciBusId),
        ):
            if given is not None:
                try:
                    return find(given)
                except self._nvml.NVMLError as found:
                    problem = found
        self._nvml.nvmlShutdown()
        raise NvmlAbsent(f"NVML knows no GPU {uuid or pci}: {problem}")

    def read(self) -> SensorReading:
        nvml, handle = self._nvml, self._handle
        use = self._ask("use", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        power_mw = self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return SensorReading(
            use_share=None if use is None else use / 100,
            memory_bytes=self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            power_w=None if power_mw is None else power_mw / 1e3,
            sm_clock_mhz=self._ask(
                "clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            temperature_c=self._ask(
                "temperature",
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            ),
        )

    def _ask(self, what: str, question: Callable[[], int]) -> int | None:
        if what in self._unsupported:
            return None
        try:
            return int(question())
        except self._nvml.NVMLError:
            self._unsupported.add(what)
            return None

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class NvmlAbsent(Exception):  # noqa: N818 - never reaches a user
    """There is no NVML here, or not for this GPU."""


def _nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as problem:
        raise NvmlAbsent(f"{problem}; {install_command('pynvml')}") from problem
    module: ModuleType = pynvml
    return module
