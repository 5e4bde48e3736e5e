"""How a result was measured: the command, the machine and the settings, at the end of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.records import BenchSettings, Environment, WorkRecord
from headrace.report.figures import moment, plain, size, words

Entries = list[tuple[str, str]]


def environment_view(
    environment: Environment, settings: Mapping[str, Any], missing: Sequence[str] = ()
) -> dict[str, Any]:
    """What the macro `measured` shows."""
    return {
        "command": environment.command,
        "missing": missing,
        "machine": _machine(environment),
        "settings": entries(settings),
    }


def kicker(kind: str, work: WorkRecord, environment: Environment) -> str:
    """The line in the banner of a bench or tune page: what was measured, where and when."""
    device = environment.device_name or environment.device
    named = ": ".join(dict.fromkeys(filter(None, (work.name, work.description))))
    return " · ".join(filter(None, (kind, named, device, moment(environment.date))))


def entries(values: Mapping[str, Any]) -> Entries:
    """Settings as pairs of text."""
    return [(words(str(name)), plain(value)) for name, value in values.items()]


def recorded(record: Environment | BenchSettings) -> dict[str, Any]:
    """The fields of a record that its file had, by name."""
    return {name: value for name, value in asdict(record).items() if value not in (None, "", ())}


def _machine(environment: Environment) -> Entries:
    shown = recorded(environment)
    shown.pop("command", None)
    if environment.device_memory_bytes is not None:
        shown["device_memory_bytes"] = size(environment.device_memory_bytes)
    if environment.date:
        shown["date"] = moment(environment.date)
    return entries(shown)
