"""The losses on a bench page."""

from __future__ import annotations

from typing import Any

from headrace.records import BenchResult, PlanResult
from headrace.report.bench_labels import is_reference, plans_in
from headrace.report.charts import Cell, Cells, Table, figure, table
from headrace.report.figures import brief
from headrace.report.lines import Axis, Line, LineChart
from headrace.report.thinning import evenly_spaced

_STEPS_IN_TABLE = 50


def losses_view(result: BenchResult) -> dict[str, Any] | None:
    lines, differences = _loss_lines(result)
    if not lines:
        return None
    equality = _equality_words(result)
    reference = next((row for row in result.rows if is_reference(result, row)), result.rows[0])
    return {
        "equality": equality,
        "reference": reference.plan,
        "chart": LineChart(
            f"Losses of {len(lines)} plans in one chart. {equality}",
            lines,
            x=Axis("step"),
            y=Axis("loss"),
            sync="losses",
        ),
        "differences": LineChart(
            "Each plan's loss minus the reference's",
            differences,
            x=Axis("step"),
            y=Axis("loss − reference"),
            sync="losses",
        )
        if differences
        else None,
        "table": _losses_table(result),
        "equality_table": _equality_table(result),
    }


def _loss_lines(result: BenchResult) -> tuple[list[Line], list[Line]]:
    """The losses of each plan, and the differences from the reference of plans that have some."""
    rows = [row for row in result.rows if any(loss is not None for loss in row.losses)]
    base = next((row.losses for row in rows if is_reference(result, row)), None)
    lines, differences = [], []
    for index, row in enumerate(rows):
        points = [(float(at), loss) for at, loss in enumerate(row.losses, 1) if loss is not None]
        same = [other.plan for other in rows if other.losses == row.losses]
        strand = (same.index(row.plan), len(same)) if len(same) > 1 else None
        lines.append(Line(row.plan, points, index, 4.0 if strand else 2.0, strand=strand))
        pairs = zip(row.losses, row.reference_losses or base or (), strict=False)
        both = [
            (at, own, other)
            for at, (own, other) in enumerate(pairs, 1)
            if own is not None and other is not None
        ]
        if any(own != other for _, own, other in both):
            apart = [(float(at), own - other) for at, own, other in both]
            differences.append(Line(row.plan, apart, index))
    return lines, differences


def _equality_words(result: BenchResult) -> str:
    """Whether the plans compute the same, in a sentence or two."""
    by_verdict: dict[str, list[PlanResult]] = {}
    for row in result.rows:
        by_verdict.setdefault(row.equal.verdict, []).append(row)
    sentences = []
    if same := by_verdict.get("identical"):
        sentences.append(f"{plans_in(same)} gave the reference's losses bit for bit.")
    if within := by_verdict.get("within"):
        worst = max(within, key=lambda row: row.equal.largest or 0.0)
        sentences.append(
            f"{plans_in(within)} stayed within the tolerance of {brief(worst.equal.tolerance)}; "
            f"the largest difference is {brief(worst.equal.largest)} ({worst.plan})."
        )
        sentences += [
            f"({row.plan}: {row.equal.why}.)" for row in within if row.equal.why and not row.is_peer
        ]
    for row in by_verdict.get("unequal", ()):
        step = "" if row.equal.first_step is None else f" from step {row.equal.first_step} on"
        sentences.append(
            f"The losses of {row.plan} differ{step}, by up to {brief(row.equal.largest)}."
        )
    if apart := by_verdict.get("not compared"):
        sentences.append(f"{plans_in(apart)}: not compared.")
    return " ".join(sentences) or "Nothing was compared."


def _losses_table(result: BenchResult) -> Table:
    rows = [row for row in result.rows if row.losses]
    steps = evenly_spaced(max((len(row.losses) for row in rows), default=0), _STEPS_IN_TABLE)
    chosen = f" ({_STEPS_IN_TABLE} steps, evenly spread)" if len(steps) == _STEPS_IN_TABLE else ""
    body: list[Cells] = []
    for step in steps:
        found = [row.losses[step] if step < len(row.losses) else None for row in rows]
        cells = [Cell("–") if loss is None else Cell(f"{loss:.6g}", loss) for loss in found]
        body.append([f"{step + 1}", *cells])
    return table(f"Loss of each step{chosen}", ("step", *(row.plan for row in rows)), body)


def _equality_table(result: BenchResult) -> Table:
    return table(
        "How each plan's losses compare with the reference's",
        ("plan", "verdict", "largest difference", "tolerance", "first at step", "why"),
        [
            [
                row.plan,
                row.equal.verdict,
                figure(row.equal.largest, brief),
                figure(row.equal.tolerance, brief),
                "–" if row.equal.first_step is None else str(row.equal.first_step),
                row.equal.why or "–",
            ]
            for row in result.rows
        ],
    )
