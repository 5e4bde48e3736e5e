"""What `headrace doctor` found, as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from headrace.machine.device_speed import DeviceSpeed
from headrace.text_table import text_table


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """A problem or a limit of this machine, and what to do about it.

    A "problem" keeps Headrace from working properly; a "note" is a limit. `remedy` is a command
    or an action.
    """

    level: Literal["problem", "note"]
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device. `measured` is None on the CPU, and if nothing was to be measured."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int
    measured: DeviceSpeed | None


@dataclass(frozen=True, slots=True)
class MachineReport:
    """Everything that `doctor` found."""

    headrace: str
    python: str
    platform: str
    torch: str
    torch_built_for: str
    driver: str | None
    cpu_cores: int
    usable_cores: int
    memory_bytes: int
    devices: tuple[DeviceFacts, ...]
    findings: tuple[MachineFinding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.level == "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "healthy": self.healthy}

    def text(self) -> str:
        """The diagnosis as a table and sentences."""
        rows: list[tuple[str, str]] = [
            ("headrace", self.headrace),
            ("python", f"{self.python} on {self.platform}"),
            ("torch", f"{self.torch}, built for {self.torch_built_for}"),
            ("GPU driver", self.driver or "none"),
            ("CPU", f"{self.usable_cores} of {self.cpu_cores} cores usable"),
            ("memory", gib(self.memory_bytes)),
        ]
        for device in self.devices:
            rows.append(("device", f"{device.name}: {device.description}"))
            rows.append(("", f"{gib(device.free_bytes)} of {gib(device.total_bytes)} free"))
            if device.measured is not None:
                rows += [("", line) for line in _measured_lines(device.measured)]
        lines = [text_table(("", "found"), rows), ""]
        for finding in self.findings:
            lines += [f"{finding.level}: {finding.what}", f"  fix: {finding.remedy}"]
        lines.append("No problems found." if not self.findings else "")
        return "\n".join(lines).rstrip()


def _measured_lines(measured: DeviceSpeed) -> list[str]:
    return [
        f"host to device {measured.pinned_to_device_gb_per_s:.1f} GB/s pinned, "
        f"{measured.pageable_to_device_gb_per_s:.1f} pageable",
        f"device to host {measured.device_to_pinned_gb_per_s:.1f} GB/s pinned",
        f"copies overlap compute: {measured.overlap_share:.0%}",
        f"kernel launch {measured.launch_us:.1f} µs of host time",
    ]


def gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
