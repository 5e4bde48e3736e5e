"""What `make docs` adds to the pages: help texts, files of the root, links out of docs/."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Pages that are files of the root.
FILES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")


def command_line(*arguments: str) -> str:
    """What a `headrace` command prints."""
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["COLUMNS"] = "80"
    from headrace.cli import app

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        app(list(arguments), prog_name="headrace", standalone_mode=False)
    return printed.getvalue().strip("\n")


def commands() -> list[str]:
    """The names of all commands, in the order of `headrace --help`."""
    listed = command_line("--help").partition("\nCommands:")[2].partition("\nExamples:")[0]
    return re.findall(r"^  (\w+)  ", listed, re.MULTILINE)


def help_page() -> str:
    """A section for each command, with its help."""
    parts = [f"```\n{command_line('--help')}\n```\n"]
    for name in commands():
        parts.append(f"## headrace {name}\n\n```\n{command_line(name, '--help')}\n```\n")
    return "\n".join(parts)


def inside(link: re.Match[str], folder: str) -> str:
    """The link, as a page in docs/`folder` must write it. Files that the site does not have are
    named, not linked: their path is shown when one points at the text."""
    picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    path = Path(os.path.normpath(ROOT / folder / target))
    docs = ROOT / "docs"
    if not path.is_relative_to(ROOT):  # a page of the forge, such as ../../issues
        return text
    place = path.relative_to(ROOT).as_posix()
    page = next((page for page, file in FILES.items() if file == place), None)
    if place == "README.md":
        page = "index.md"
    if page is not None:
        return f"{picture}[{text}]({page}{anchor})"
    if path.is_relative_to(docs):
        return f"{picture}[{text}]({path.relative_to(docs).as_posix()}{anchor})"
    if text.strip("`") in (place, path.name, path.stem):
        return f"`{place}`"
    return f'<abbr title="{place}">{text}</abbr>'


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_path
    folder = "docs"
    if name in FILES:
        markdown, folder = (ROOT / FILES[name]).read_text(encoding="utf-8"), ""
    elif name.startswith("zh/"):
        return markdown
    markdown = markdown.replace("<!-- help -->", help_page() if "<!-- help -->" in markdown else "")
    if "<!-- plan -->" in markdown:
        markdown = markdown.replace("<!-- plan -->", f"```\n{command_line('plan', 'max')}\n```")
    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        piece if piece.startswith("```") else _LINK.sub(lambda found: inside(found, folder), piece)
        for piece in pieces
    )
