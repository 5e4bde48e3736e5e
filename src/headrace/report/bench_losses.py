"""The losses of a bench result, laid over each other: are they the same?"""

from __future__ import annotations

from headrace.report.bench_labels import is_reference, names_of
from headrace.report.bench_result import BenchResult, Row
from headrace.report.charts import Cell, as_table, empty, table
from headrace.report.figures import brief
from headrace.report.lines import Axis, Line, line_chart, line_legend
from headrace.report.markup import Child, Markup, tag
from headrace.report.page import Section
from headrace.report.thinning import spread


def losses_section(result: BenchResult) -> Section:
    title, anchor = "The same losses", "losses"
    lines, differences = _loss_lines(result)
    if not lines:
        return Section(anchor, title, "", empty("No losses were recorded, so none are compared."))
    reference = next((row for row in result.rows if is_reference(result, row)), result.rows[0])
    chart = line_chart(
        lines,
        label=f"Losses of {len(lines)} plans, laid over each other. {_equality_words(result)}",
        x=Axis("step"),
        y=Axis("loss"),
    )
    content: list[Child] = [line_legend(lines), chart]
    if differences:
        content += [
            tag("h3", f"Difference from {reference.plan}"),
            line_legend(differences),
            line_chart(
                differences,
                label="Each plan's loss minus the reference's",
                x=Axis("step"),
                y=Axis("loss − reference", written=brief),
            ),
        ]
    content.append(as_table("As a table", _losses_table(result)))
    content.append(as_table("How they compare", _equality_table(result)))
    figure = tag("figure", content, class_="chart")
    return Section(anchor, title, _equality_words(result), figure)


def _loss_lines(result: BenchResult) -> tuple[list[Line], list[Line]]:
    """The losses of each plan, and how far they are from the reference's where they are."""
    rows = [row for row in result.rows if any(loss is not None for loss in row.losses)]
    base = next((row.losses for row in rows if is_reference(result, row)), None)
    lines, differences = [], []
    for index, row in enumerate(rows):
        points = [(float(at), loss) for at, loss in enumerate(row.losses, 1) if loss is not None]
        strand = (index, len(rows)) if len(rows) > 1 else None
        lines.append(Line(row.plan, points, index, 4.0, strand=strand))
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
    by_verdict: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.equal is not None:
            by_verdict.setdefault(row.equal.verdict, []).append(row)
    said = []
    if same := by_verdict.get("identical"):
        said.append(f"{names_of(same)} gave the reference's losses bit for bit.")
    if within := by_verdict.get("within"):
        worst = max(within, key=lambda row: (row.equal and row.equal.largest) or 0.0)
        assert worst.equal is not None
        said.append(
            f"{names_of(within)} stayed within the tolerance of {brief(worst.equal.tolerance)}; "
            f"the largest difference is {brief(worst.equal.largest)} ({worst.plan})."
        )
        said += [
            f"({row.plan}: {row.equal.why}.)"
            for row in within
            if row.equal is not None and row.equal.why and not row.is_peer
        ]
    for row in by_verdict.get("unequal", ()):
        assert row.equal is not None
        step = "" if row.equal.first_step is None else f" at step {row.equal.first_step}"
        said.append(
            f"{row.plan} is not the same: it first differs{step}, by up to "
            f"{brief(row.equal.largest)}."
        )
    if apart := by_verdict.get("not compared"):
        said.append(f"{names_of(apart)}: not compared.")
    return " ".join(said) or "Nothing was compared."


def _losses_table(result: BenchResult) -> Markup:
    rows = [row for row in result.rows if row.losses]
    steps = spread(max((len(row.losses) for row in rows), default=0), 50)
    return table(
        "Loss of each step" + ("" if len(steps) < 50 else " (a choice of 50 steps)"),
        ("step", *(row.plan for row in rows)),
        [
            [
                f"{step + 1}",
                *(
                    Cell(f"{loss:.6g}", loss) if loss is not None else "–"
                    for loss in (
                        row.losses[step] if step < len(row.losses) else None for row in rows
                    )
                ),
            ]
            for step in steps
        ],
    )


def _equality_table(result: BenchResult) -> Markup:
    return table(
        "How each plan's losses compare with the reference's",
        ("plan", "verdict", "largest difference", "tolerance", "first at step", "why"),
        [
            [
                row.plan,
                row.equal.verdict,
                Cell(brief(row.equal.largest), row.equal.largest),
                Cell(brief(row.equal.tolerance), row.equal.tolerance),
                "–" if row.equal.first_step is None else str(row.equal.first_step),
                row.equal.why or "–",
            ]
            for row in result.rows
            if row.equal is not None
        ],
    )
