"""The tables of a bench result: scores, all rows, plans, environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.report.bench_labels import plan_label
from headrace.report.bench_result import BenchResult, Row
from headrace.report.charts import Cell, Cells, empty, meter, table
from headrace.report.figures import moment, number, plain, share, size, times, words
from headrace.report.markup import Child, Markup, tag
from headrace.report.page import Section

#: The most that each of the six parts of a score can give; together 100.
WEIGHTS = {
    "gain": 30,
    "effort": 25,
    "complexity": 15,
    "maintainability": 15,
    "memory": 10,
    "risk": 5,
}


def score_section(result: BenchResult) -> Section:
    title, anchor = "Scores", "score"
    rows = [row for row in result.rows if row.score]
    if not rows:
        return Section(anchor, title, "", empty("This result holds no scores."))
    rows.sort(key=lambda row: -row.score.get("total", 0.0))
    columns: list[Child] = ["plan", "total, of 100"]
    columns += [[name, " ", tag("small", f"of {weight}")] for name, weight in WEIGHTS.items()]
    body = [
        [
            plan_label(result, row),
            _part(row, "total", 100, "plain"),
            *(_part(row, name, weight, "compute") for name, weight in WEIGHTS.items()),
        ]
        for row in rows
    ]
    lead = (
        "Each plan's score with six weights: what it gains and what memory it takes are measured "
        "here; effort, complexity, maintainability and risk are the plan's own. More is better."
    )
    return Section(anchor, title, lead, table("Scores, best first", columns, body, class_="scores"))


def _part(row: Row, name: str, weight: float, look: str) -> Cell:
    value = row.score.get(name)
    if value is None:
        return Cell("–")
    return Cell(meter(value / weight, number(value), look), value)


def rows_section(result: BenchResult) -> Section:
    columns = (
        *("plan", "ms a step", "speed", f"{result.unit} a second", "waits a step"),
        *("host blocked ms", "data ms", "GPU busy", "NVML", "CPU cores", "power W"),
        *("peak memory", "reserved", "over GPU's own", "two streams", "losses"),
    )
    body = [_all_of(result, row) for row in result.rows]
    lead = "Every row of the result. What stands as – could not be seen where it was measured."
    noted = [f"{row.plan}: {note}" for row in result.rows for note in row.notes]
    content = [table("All rows", columns, body, class_="wide"), bullets(noted)]
    return Section("rows", "All figures", lead, content)


def _all_of(result: BenchResult, row: Row) -> list[Cell | Child]:
    gpu = row.gpu
    busy = None if gpu is None else gpu.busy_share
    over = None if gpu is None else gpu.over_busy_share
    median = None if row.pace is None else row.pace.median
    waits = None if row.waits is None else row.waits.per_step
    equal: Child = row.error or ("–" if row.equal is None else row.equal.verdict)
    return [
        plan_label(result, row),
        Cell(number(median), median),
        Cell(times(row.speedup), row.speedup),
        Cell(number(row.per_s), row.per_s),
        Cell(number(waits), waits),
        Cell(number(row.host_blocked_ms), row.host_blocked_ms),
        Cell(number(row.data_wait_ms), row.data_wait_ms),
        Cell(share(busy), busy),
        Cell(share(row.nvml_share), row.nvml_share),
        Cell(number(row.cpu_share), row.cpu_share),
        Cell(number(row.power_w), row.power_w),
        Cell(size(row.peak_memory_bytes), row.peak_memory_bytes),
        Cell(size(row.reserved_memory_bytes), row.reserved_memory_bytes),
        Cell(share(over), over),
        Cell(share(row.overlap_share), row.overlap_share),
        equal,
    ]


def plans_section(result: BenchResult) -> Section:
    title, anchor = "Plans", "plans"
    rows = [row for row in result.rows if row.fields]
    names = list(dict.fromkeys(name for row in rows for name in row.fields if name != "name"))
    differing = [name for name in names if len({plain(row.fields.get(name)) for row in rows}) > 1]
    if not rows:
        return Section(anchor, title, "", empty("This result does not hold the plans' fields."))
    if not differing:
        return Section(anchor, title, "", empty("No field differs between the plans."))
    body: list[Cells] = []
    for name in differing:
        first = plain(rows[0].fields.get(name))
        values = [plain(row.fields.get(name)) for row in rows]
        cells = [Cell(value, look=None if value == first else "changed") for value in values]
        body.append([name, *cells])
    lead = f"The fields in which the plans differ; bold is what differs from {rows[0].plan}."
    columns = ("field", *(row.plan for row in rows))
    return Section(anchor, title, lead, table("Fields that differ", columns, body, class_="plans"))


def environment_section(result: BenchResult) -> Section:
    content = [
        command_block(result.environment.get("command")),
        [tag("h3", "What could not be seen"), bullets(result.missing)] if result.missing else None,
        tag("h3", "Machine"),
        machine_list(result.environment),
        tag("h3", "Settings"),
        settings_list(result.settings | result.work_options),
    ]
    return Section("environment", "How it was measured", "", content)


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
