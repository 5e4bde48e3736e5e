"""The page: values are escaped, scripts and licenses are where they belong."""

from __future__ import annotations

import tomllib

from headrace.report.page import Stat, Summary, render_page, script_json, shown_text
from support.paths import ROOT

PACKAGE = ROOT / "src" / "headrace"
REPORT = PACKAGE / "report"


def tune_like(text: str, *, has_lines: bool = False) -> str:
    """A page whose every text is `text`."""
    summary = Summary(text, text, text, [text], [Stat(text, text, text, text)], [text])
    values = {
        **dict.fromkeys(("kicker", "source", "pace_unit"), text),
        **dict.fromkeys(("winner", "trials", "fields")),
        "summary": summary,
        "rows": {"caption": text, "look": "", "columns": [], "rows": []},
        "environment": {"command": text, "missing": [text], "machine": [(text, text)]}
        | {"settings": []},
    }
    return render_page("tune.html", values, has_lines=has_lines)


def test_text_is_escaped_everywhere() -> None:
    text = tune_like("<b x='\"'>&amp;")
    assert "<b x" not in text
    assert text.count("&lt;b x=&#39;&#34;&#39;&gt;&amp;amp;") >= 16


def test_invisible_and_endless_text() -> None:
    assert shown_text("a\u202eb\x00c\ud800") == "a\ufffdb\ufffdc\ufffd"
    assert len(shown_text("x" * 5000)) == 2000
    assert "\u202e" not in tune_like("a\u202eb")


def test_json_cannot_end_its_script() -> None:
    assert script_json({"a": "</script>&"}) == '{"a":"\\u003c/script\\u003e\\u0026"}'


def test_the_chart_library_is_only_in_pages_with_charts_and_brings_its_license() -> None:
    library, terms = (
        (REPORT / "static" / "vendor" / name).read_text(encoding="utf-8")
        for name in ("uPlot.iife.min.js", "uPlot.LICENSE")
    )
    without, with_charts = tune_like("x"), tune_like("x", has_lines=True)
    assert "var uPlot" not in without
    assert library in with_charts
    assert terms in with_charts


def test_the_wheel_has_every_template_script_and_style() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = {
        path
        for pattern in settings["tool"]["setuptools"]["package-data"]["headrace"]
        for path in PACKAGE.glob(pattern)
    }
    needed = {path for name in ("templates", "static") for path in (REPORT / name).rglob("*.*")}
    assert needed
    assert needed <= packed
