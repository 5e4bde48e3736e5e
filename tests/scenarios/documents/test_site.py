"""The pages of the site: all in the navigation, none too long, links and blocks right."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import headrace as hr
from headrace.cli import app
from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
#: Pages that are files of the root.
FILES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
MAX_WORDS = 1500
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROGRAM: Any = typer.main.get_command(app)


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def prose_of(page: str) -> str:
    return _BLOCK.sub("", text_of(page))


def navigation(entries: Any) -> Iterator[tuple[str, str]]:
    """Every page of the navigation, with its section."""
    for entry in entries:
        if isinstance(entry, str):
            yield "", entry
        else:
            ((section, pages),) = entry.items()
            yield from (
                [(section, pages)]
                if isinstance(pages, str)
                else [(section, page) for _, page in navigation(pages)]
            )


NAVIGATION = list(
    navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
)
REFERENCE = {page for section, page in NAVIGATION if section in ("Reference", "Project")}


def test_each_page_is_in_the_navigation_once() -> None:
    assert sorted(page for _, page in NAVIGATION) == PAGES


@pytest.mark.parametrize("page", [page for page in PAGES if page not in REFERENCE])
def test_no_page_is_too_long(page: str) -> None:
    words = len(prose_of(page).split())
    assert words <= MAX_WORDS, f"docs/{page} has {words} words: divide it"


def slug(title: str) -> str:
    title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title))


def anchors(path: Path) -> set[str]:
    plain = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    return {slug(title) for title in re.findall(r"^#+ (.*)$", plain, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", prose_of(page)):
        path = (DOCS / page).parent / target if target else DOCS / page
        assert path.exists(), f"docs/{page}: {target}"
        if anchor:
            assert anchor in anchors(path), f"docs/{page}: {target}#{anchor}"


def blocks(page: str, language: str) -> list[str]:
    found = []
    for _, name, text in _BLOCK.findall(text_of(page)):
        if name == language:
            found.append(textwrap.dedent(text))
    return found


CODE = [(page, code) for page in PAGES for code in blocks(page, "python") if "│" not in code]


@pytest.mark.parametrize(("page", "code"), CODE)
def test_code_is_python_and_its_names_exist(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "hr"
        ):
            assert getattr(hr, node.attr) is not None, f"docs/{page}: hr.{node.attr}"


@pytest.mark.parametrize("page", PAGES)
def test_its_commands_are_typed_right(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed, with all options, and not run. Scripts of the project are there."""
    monkeypatch.chdir(tmp_path)
    for console in blocks(page, "console"):
        for line in console.replace("\\\n", " ").splitlines():
            if not line.startswith("$ "):
                continue
            words = shlex.split(line[2:], comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["headrace"] and "…" not in line:
                check_command(words[1:], tmp_path)
            if words[:1] == ["python"] and words[1].startswith(("benchmarks/", "docs/")):
                assert (ROOT / words[1]).is_file(), f"docs/{page}: {line}"


def check_command(words: list[str], folder: Path) -> None:
    if words[:1] == ["--version"]:
        return
    name, *rest = words
    rest = rest[: next((at for at, word in enumerate(rest) if word in (">", "|", "&&")), None)]
    PROGRAM.commands[name].make_context(name, rest)


def test_the_api_page_has_every_public_name() -> None:
    shown = set(re.findall(r"^::: headrace\.(\w+)$", text_of("api.md"), re.MULTILINE))
    elsewhere = {"HeadraceError", "PRESETS", "__version__"}  # errors, plan fields
    assert shown | elsewhere == set(hr.__all__)


@pytest.mark.parametrize(("page", "file"), FILES.items())
def test_a_file_of_the_root_has_a_page_that_is_only_its_title(page: str, file: str) -> None:
    title = (ROOT / file).read_text(encoding="utf-8").splitlines()[0]
    assert text_of(page).strip() == title


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("zh/")])
def test_a_chinese_page_has_the_code_of_the_english_one(page: str) -> None:
    def without_comments(code: str) -> str:
        return re.sub(r" *#.*", "", code)

    english = [without_comments(code) for code in blocks(page.removeprefix("zh/"), "python")]
    chinese = [without_comments(code) for code in blocks(page, "python")]
    assert [code for code in chinese if code not in english] == []
