"""NVIDIA's driver, asked through NVML (the package nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from headrace.device.sensors import SensorReading, Sensors


class NvmlSensors(Sensors):
    """One GPU, found by its UUID or PCI address: its number in NVML is another than in PyTorch as
    soon as CUDA_VISIBLE_DEVICES is set. `nvml` is the module `pynvml`.

    Raises `NvmlAbsent` where there is no driver, or it does not know the GPU.
    """

    def __init__(self, uuid: str | None, pci: str | None, nvml: ModuleType | None = None) -> None:
        self._nvml: Any = nvml if nvml is not None else _nvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as problem:
            raise NvmlAbsent(f"NVML does not start: {problem}") from problem
        self._handle = self._find(uuid, pci)
        # What this GPU does not have is asked for once.
        self._unknown: set[str] = set()

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
        if what in self._unknown:
            return None
        try:
            return int(question())
        except self._nvml.NVMLError:
            self._unknown.add(what)
            return None

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class NvmlAbsent(Exception):  # noqa: N818 - no error of a user's: caught in the seam
    """There is no NVML here, or not for this GPU."""


def _nvml() -> ModuleType:
    try:
        import pynvml
    except ImportError as problem:
        raise NvmlAbsent(f"{problem}; pip install nvidia-ml-py") from problem
    module: ModuleType = pynvml
    return module
