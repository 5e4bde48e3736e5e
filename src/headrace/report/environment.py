"""How a result was measured, as every page ends: the command, the machine, the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.report.charts import empty
from headrace.report.figures import moment, plain, size, words
from headrace.report.markup import Markup, tag
from headrace.runs.records import BenchSettings, Environment


def bullets(lines: Sequence[str]) -> Markup | None:
    return tag("ul", [tag("li", line) for line in lines], class_="notes") if lines else None


def command_block(command: str) -> Markup:
    """The command, to be copied; nothing where it is not known."""
    if not command:
        return empty("The command was not recorded.")
    copy = tag("button", "Copy", type="button", class_="copy", hidden=True)
    return tag("div", tag("pre", tag("code", command), tabindex=0), copy, class_="command")


def machine_list(environment: Environment) -> Markup:
    """Where and when it was measured; the command stands by itself."""
    shown = {key: value for key, value in recorded(environment).items() if key != "command"}
    if environment.device_memory_bytes is not None:
        shown["device_memory_bytes"] = size(environment.device_memory_bytes)
    if environment.date:
        shown["date"] = moment(environment.date)
    return settings_list(shown)


def recorded(record: Environment | BenchSettings) -> dict[str, Any]:
    """The fields of a record that its file had, by name."""
    return {name: value for name, value in asdict(record).items() if value not in (None, "", ())}


def settings_list(values: Mapping[str, Any]) -> Markup:
    """Names and values, whatever they are."""
    if not values:
        return empty("Nothing was recorded.")
    entries = [
        tag("div", tag("dt", words(str(name))), tag("dd", plain(value)))
        for name, value in values.items()
    ]
    return tag("dl", entries, class_="settings")
