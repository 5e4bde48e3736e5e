"""The tables of a diagnosis's page."""

from __future__ import annotations

from headrace.records import DiagnosedLine, DiagnosisResult, HostLine, LineRecord, RankFigures
from headrace.report.diagnosis_tables import line_table, python_table, rank_table

LINE = LineRecord("train.py", 12, "step", "loss.item()")


def test_nothing_found_is_no_table() -> None:
    assert rank_table(DiagnosisResult()) is None
    assert line_table(DiagnosisResult()) is None
    assert python_table(DiagnosisResult()) is None


def test_a_rank_is_shown_with_its_longest_line() -> None:
    ranks = (
        RankFigures(0, "node0", 25.0, None, 20.0),
        RankFigures(1, "node1", 25.0, 5.0, 0.1, (HostLine(LINE, 20.0),)),
    )
    found = rank_table(DiagnosisResult(ranks=ranks))
    assert found is not None
    texts = [[str(cell.text) for cell in row] for row in found.rows]
    assert texts[0][0] == "rank 0"
    assert texts[0][-1] == "–"
    assert texts[1][-1].startswith("train.py:12 (20")


def test_lines_have_times_if_they_are_known() -> None:
    timed = DiagnosedLine(title=".item()", line=LINE, per_step=1.0, blocked_ms=2.0)
    for line, columns in ((timed, 6), (DiagnosedLine(line=LINE), 3)):
        found = line_table(DiagnosisResult(lines=(line,)))
        assert found is not None
        assert len(found.rows[0]) == columns
