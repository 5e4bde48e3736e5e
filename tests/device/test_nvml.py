"""NVML sensors, with a fake driver."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

from headrace.device import SensorReading
from headrace.device.nvml import NvmlAbsent, NvmlSensors


class NvmlError(Exception):
    pass


def nvml(**answers: Any) -> Any:
    """A driver with one GPU. Sensors without a value here are not supported."""

    def ask(name: str) -> Callable[..., Any]:
        def answer(*given: Any) -> Any:
            calls.append((name, given))
            if name not in answers:
                raise NvmlError(name)
            found = answers[name]
            return found(*given) if callable(found) else found

        return answer

    calls: list[Any] = []
    names = ("Init", "Shutdown", *(f"DeviceGet{what}" for what in (
        "HandleByUUID", "HandleByPciBusId", "UtilizationRates", "MemoryInfo", "PowerUsage",
        "ClockInfo", "Temperature",
    )))  # fmt: skip
    return types.SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        calls=calls,
        **{f"nvml{name}": ask(name) for name in names},
    )


class TestNvml:
    def test_a_reading(self) -> None:
        driver = nvml(
            Init=None, Shutdown=None, DeviceGetHandleByUUID="handle",
            DeviceGetUtilizationRates=types.SimpleNamespace(gpu=93),
            DeviceGetMemoryInfo=types.SimpleNamespace(used=5 << 30),
            DeviceGetPowerUsage=412_500, DeviceGetClockInfo=1980, DeviceGetTemperature=61,
        )  # fmt: skip
        sensors = NvmlSensors("GPU-1", None, driver)
        assert sensors.read() == SensorReading(0.93, 5 << 30, 412.5, 1980, 61)
        sensors.close()
        assert driver.calls[-1][0] == "Shutdown"

    def test_found_by_its_address_where_the_driver_is_old(self) -> None:
        driver = nvml(Init=None, Shutdown=None, DeviceGetHandleByPciBusId=lambda pci: pci)
        NvmlSensors("GPU-1", "00000000:3B:00.0", driver)
        assert driver.calls[-1] == ("DeviceGetHandleByPciBusId", ("00000000:3B:00.0",))

    def test_missing_sensors_are_asked_for_once(self) -> None:
        driver = nvml(
            Init=None,
            Shutdown=None,
            DeviceGetHandleByUUID="handle",
            DeviceGetPowerUsage=1000,
        )
        sensors = NvmlSensors("GPU-1", None, driver)
        assert sensors.read() == sensors.read() == SensorReading(power_w=1.0)
        asked = [name for name, _ in driver.calls]
        assert (asked.count("DeviceGetTemperature"), asked.count("DeviceGetPowerUsage")) == (1, 2)

    @pytest.mark.parametrize("answers", [{}, {"Init": None, "Shutdown": None}])
    def test_no_driver_or_no_such_gpu(self, answers: dict[str, Any]) -> None:
        with pytest.raises(NvmlAbsent):
            NvmlSensors("GPU-1", None, nvml(**answers))
