"""Renders a page: a template and its values become one HTML file that loads nothing else.

Names of plans, kernels and files come from users. Jinja2 escapes every value, and `shown_text`
replaces characters that a reader cannot see.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import headrace

# Control characters, halves of surrogate pairs, and the marks that reverse the direction of text:
# with those, one name could pose as another.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_MAX_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Stat:
    """A figure below the headline: its name, its value and, if there is one, the value before."""

    name: str
    value: str
    before: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The first screen of a page: a headline, one large figure, sentences and stats."""

    headline: str
    figure: str
    figure_label: str
    sentences: Sequence[str]
    stats: Sequence[Stat]
    warnings: Sequence[str] = ()


def render_page(
    template: str,
    values: Mapping[str, object],
    *,
    has_lines: bool = False,
    has_timelines: bool = False,
) -> str:
    """The HTML of a page. Scripts of line charts and timelines are left out where it has none."""
    style = _style(has_lines)
    script = _script(has_lines, has_timelines)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            values,
            version=headrace.__version__,
            policy=policy,
            style=Markup(style),  # noqa: S704 our own files
            script=Markup(script),  # noqa: S704
        )
    )


def shown_text(text: str) -> str:
    """The text as a page may show it: at most 2,000 characters, and none that cannot be seen."""
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[: _MAX_CHARACTERS - 1]}…"
    return _INVISIBLE.sub("\ufffd", text)


def script_json(content: object) -> Markup:
    """JSON for a `<script>` element. It has no `<`, so nothing in it can end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704 escaped above


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("headrace.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["script_json"] = script_json
    return environment


def _finalize(value: Any) -> Any:
    if value is None:
        return ""
    return shown_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


@cache
def _script(has_lines: bool, has_timelines: bool) -> str:
    names = ["page.js"]
    if has_lines:
        names += ["vendor/uPlot.iife.min.js", "lines.js"]
    if has_timelines:
        names += ["timelines.js"]
    texts = [_static(name) for name in names]
    if has_lines:  # its license asks to be kept with every copy
        texts.insert(1, f"/*\n{_static('vendor/uPlot.LICENSE')}\n*/")
    return "\n".join(texts)


@cache
def _style(has_lines: bool) -> str:
    names = ["vendor/uPlot.min.css", "style.css"] if has_lines else ["style.css"]
    return "\n".join(_static(name) for name in names)


def _static(name: str) -> str:
    return (files("headrace.report") / "static" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
