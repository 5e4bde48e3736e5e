"""HTML and SVG that cannot be broken by what is put into it.

`tag` escapes every child and attribute that is no `Markup`. Names of plans, kernels and files come
from users: nothing reaches the page but through here.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable

# What no page should show: control characters, halves of surrogate pairs, and the marks that turn
# the direction of text around, behind which a name could pose as another.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_WITHOUT_END = frozenset({"meta", "input", "br"})
_LONGEST = 2000


class Markup(str):
    """Text that is markup already and is not escaped again."""

    __slots__ = ()


Child = Markup | str | int | float | None | Iterable["Child"]


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. `class_="a"`, `data_tip="b"` and `aria_label="c"` are written with a hyphen;
    an attribute that is None or False is left out, one that is True has no value."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _WITHOUT_END:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Child) -> Markup:
    """Children one after the other; what is no markup is escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int | float):
        return escape(str(children))
    return Markup("".join(join(child) for child in children))


def escape(text: str) -> Markup:
    return Markup(html.escape(shown_text(text), quote=True))


def shown_text(text: str) -> str:
    """The text as it may be shown: bounded, and without characters that cannot be seen."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    return _UNSEEN.sub("\ufffd", text)


def json_script(content: object, class_: str) -> Markup:
    """Data for the page's script. No `<` in it, so that nothing in it can end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(f'<script type="application/json" class="{html.escape(class_)}">{text}</script>')


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    if isinstance(value, Markup):  # a path, which may be long
        return f' {name}="{value}"'
    return f' {name}="{html.escape(shown_text(str(value)), quote=True)}"'
