"""How a result was measured, as every page ends: the command, the machine, the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.report.charts import empty
from headrace.report.figures import moment, plain, size, words
from headrace.report.markup import Markup, tag


def bullets(lines: Sequence[str]) -> Markup | None:
    return tag("ul", [tag("li", line) for line in lines], class_="notes") if lines else None


def command_block(command: object) -> Markup:
    """The command, to be copied; nothing where it is not known."""
    if not isinstance(command, str) or not command:
        return empty("The command was not recorded.")
    copy = tag("button", "Copy", type="button", class_="copy", hidden=True)
    return tag("div", tag("pre", tag("code", command), tabindex=0), copy, class_="command")


def machine_list(environment: Mapping[str, Any]) -> Markup:
    """Where and when it was measured; the command stands by itself."""
    shown = {key: value for key, value in environment.items() if key != "command"}
    memory = shown.get("device_memory_bytes")
    if isinstance(memory, int | float) and not isinstance(memory, bool):
        shown["device_memory_bytes"] = size(memory)
    if "date" in shown:
        shown["date"] = moment(shown["date"])
    return settings_list(shown)


def settings_list(values: Mapping[str, Any]) -> Markup:
    """Names and values, whatever they are."""
    if not values:
        return empty("Nothing was recorded.")
    entries = [
        tag("div", tag("dt", words(str(name))), tag("dd", plain(value)))
        for name, value in values.items()
    ]
    return tag("dl", entries, class_="settings")
