"""How a result was measured: the command, the machine and the settings, at the end of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.report.figures import moment, plain, size, words

Entries = list[tuple[str, str]]


def environment_view(
    environment: Mapping[str, Any], settings: Mapping[str, Any], missing: Sequence[str] = ()
) -> dict[str, Any]:
    """What the macro `measured` shows."""
    command = environment.get("command")
    return {
        "command": command if isinstance(command, str) else "",
        "missing": missing,
        "machine": _machine(environment),
        "settings": entries(settings),
    }


def kicker(kind: str, work: str, description: str, environment: Mapping[str, Any]) -> str:
    """The line in the banner of a bench or tune page: what was measured, where and when."""
    device = str(environment.get("device_name") or environment.get("device") or "")
    named = ": ".join(dict.fromkeys(filter(None, (work, description))))
    return " · ".join(filter(None, (kind, named, device, moment(environment.get("date")))))


def entries(values: Mapping[str, Any]) -> Entries:
    """Settings as pairs of text."""
    return [(words(str(name)), plain(value)) for name, value in values.items()]


def _machine(environment: Mapping[str, Any]) -> Entries:
    shown = {key: value for key, value in environment.items() if key != "command"}
    memory = shown.get("device_memory_bytes")
    if isinstance(memory, int | float) and not isinstance(memory, bool):
        shown["device_memory_bytes"] = size(memory)
    if "date" in shown:
        shown["date"] = moment(shown["date"])
    return entries(shown)
