"""Markup: what is text is escaped, what is markup is not."""

from __future__ import annotations

from headrace.report.markup import Markup, json_script, tag


def test_markup() -> None:
    assert tag("p", "<b>", Markup("<i></i>"), None, ["x", 1]) == "<p>&lt;b&gt;<i></i>x1</p>"
    assert tag("a", class_="x", data_y='"', hidden=True, z=None) == (
        '<a class="x" data-y="&quot;" hidden></a>'
    )
    assert tag("br") == "<br>"
    assert json_script({"a": "</script>&"}, "d") == (
        '<script type="application/json" class="d">{"a":"\\u003c/script\\u003e\\u0026"}</script>'
    )
