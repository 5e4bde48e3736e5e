"""The fenced blocks of a document.

A block of output follows a line that says where it comes from: `<!-- output: … -->` or
`<!-- bench: RESULT.json -->`. All other blocks are commands or code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.paths import ROOT

_BLOCK = re.compile(r"(?:<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block. `source` is what the line before says about its origin."""

    source: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[Block]:
    return [Block(*found.groups(default="")) for found in _BLOCK.finditer(read(name))]


def only(name: str, start: str, language: str = "python") -> Block:
    """The one block in this language that begins so."""
    (block,) = (b for b in blocks(name) if b.language == language and b.text.startswith(start))
    return block


def output(name: str, source: str) -> Block:
    (block,) = (block for block in blocks(name) if block.source == f"output: {source}")
    return block
