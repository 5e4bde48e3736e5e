"""Readings of a device's sensors, through its driver."""

from __future__ import annotations

import abc
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SensorReading:
    """One reading; None for what the driver does not measure.

    `use_share` is the share of the driver's last sampling period (up to a second) in which anything
    ran: 1 does not mean that the device was fully used. Memory counts all processes together.
    """

    use_share: float | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None


class Sensors(abc.ABC):
    """Made by `Device.sensors`. Any thread may read them; that does not wait for the device."""

    @abc.abstractmethod
    def read(self) -> SensorReading: ...

    @abc.abstractmethod
    def close(self) -> None: ...
