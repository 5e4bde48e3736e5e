"""What a device's driver says of it at one moment."""

from __future__ import annotations

import abc
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SensorReading:
    """None is what the driver does not tell.

    `use_share` is the share of the driver's last period (up to a second) in which anything at all
    ran: 1 does not mean that the device was full. Memory is what all processes hold together.
    """

    use_share: float | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None


class Sensors(abc.ABC):
    """Made by `Device.sensors`. May be read from any thread; reading waits for no device work."""

    @abc.abstractmethod
    def read(self) -> SensorReading: ...

    @abc.abstractmethod
    def close(self) -> None: ...
