"""The page around the charts: one file, which may reach nothing outside itself."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import headrace
from headrace.report.markup import Child, Markup, tag

_SCRIPTS = ("page.js", "lines.js", "timelines.js")
# The hatches of style.css, in unscaled pixels: fills that can be told apart without colour.
_HATCHES = {
    "idle": "M-2 2l4 -4M0 8l8 -8M6 10l4 -4",
    "dots": "M2 2h2v2h-2zM6 6h2v2h-2z",
    "bars": "M0 0v8M4 0v8",
    "rows": "M0 2h8M0 6h8",
    "cross": "M0 0l8 8M8 0l-8 8",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a place in its contents. `lead` says in words what is to be seen."""

    anchor: str
    title: str
    lead: Child
    content: Child


@dataclass(frozen=True, slots=True)
class Stat:
    """A figure beside the verdict: what, before (if any), now."""

    name: str
    value: str
    before: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the page says first."""

    headline: str
    figure: str
    figure_label: str
    sentences: Sequence[str]
    stats: Sequence[Stat]
    warnings: Sequence[str] = ()


def page(kicker: str, verdict: Verdict, sections: Sequence[Section], source: str) -> str:
    """The whole file."""
    script, style = _script(), _style()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", **{"http-equiv": "Content-Security-Policy"}, content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"headrace {headrace.__version__}"),
        tag("title", f"{verdict.headline} · Headrace"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("a", "To the verdict", href="#verdict", class_="skip"),
        _defs(),
        _banner(kicker),
        tag(
            "div",
            _contents(sections),
            tag(
                "main",
                _verdict(verdict),
                [_section(section) for section in sections],
            ),
            class_="layout",
        ),
        tag(
            "footer",
            tag("p", f"Made by headrace {headrace.__version__} of {source}."),
            tag("p", "This file holds all it shows and asks nothing of any network."),
        ),
        tag("div", class_="tip", role="status", hidden=True),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _banner(kicker: str) -> Markup:
    wave = tag(
        "svg",
        tag("path", d="M1 4v15h26V4", class_="logo-channel"),
        tag("path", d="M2 10c4-4 8 4 12 0s8-4 12 0v8H2z", class_="logo-water"),
        viewBox="0 0 28 22",
        width=28,
        height=22,
        aria_hidden="true",
    )
    toggle = tag("button", "Theme", type="button", class_="theme", hidden=True)
    brand = tag("span", wave, tag("b", "headrace"), class_="brand")
    return tag("header", brand, tag("p", kicker), toggle)


def _contents(sections: Sequence[Section]) -> Markup:
    links = [("verdict", "Verdict"), *((part.anchor, part.title) for part in sections)]
    return tag(
        "nav",
        tag("ul", [tag("li", tag("a", title, href=f"#{anchor}")) for anchor, title in links]),
        aria_label="On this page",
    )


def _verdict(verdict: Verdict) -> Markup:
    return tag(
        "section",
        tag(
            "div",
            tag("h1", verdict.headline, id="verdict-title"),
            tag("p", tag("strong", verdict.figure), " ", verdict.figure_label, class_="figure"),
            class_="hero",
        ),
        [tag("p", tag("b", "Look out: "), text, class_="warning") for text in verdict.warnings],
        tag("dl", [_stat(stat) for stat in verdict.stats], class_="stats"),
        tag("div", [tag("p", text) for text in verdict.sentences], class_="sentences"),
        id="verdict",
        aria_labelledby="verdict-title",
    )


def _stat(stat: Stat) -> Markup:
    before = tag("span", stat.before, " →", class_="before") if stat.before is not None else None
    return tag(
        "div",
        tag("dt", stat.name),
        tag("dd", before, tag("b", stat.value)),
        tag("dd", stat.note, class_="note") if stat.note else None,
    )


def _section(part: Section) -> Markup:
    return tag(
        "section",
        tag("h2", part.title, id=f"{part.anchor}-title"),
        tag("p", part.lead, class_="lead") if part.lead else None,
        part.content,
        id=part.anchor,
        aria_labelledby=f"{part.anchor}-title",
    )


def _defs() -> Markup:
    patterns = [
        tag(
            "pattern",
            tag("rect", width=8, height=8, class_=f"hatch-ground {name}"),
            tag("path", d=drawn, class_=f"hatch-line {name}"),
            id=f"hatch-{name}",
            width=8,
            height=8,
            patternUnits="userSpaceOnUse",
        )
        for name, drawn in _HATCHES.items()
    ]
    return tag("svg", tag("defs", patterns), class_="defs", width=0, height=0, aria_hidden="true")


@cache
def _script() -> str:
    return "\n".join(_stored(name) for name in _SCRIPTS)


@cache
def _style() -> str:
    return _stored("style.css")


def _stored(name: str) -> str:
    return (files("headrace.report") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
