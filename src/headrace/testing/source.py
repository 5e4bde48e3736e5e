"""What the user's source says: the name that a new object gets, and `# headrace:` comments."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache

from headrace.source_lines import Site
from headrace.testing.races import calling_site

_ORDERED = re.compile(r"#\s*headrace:\s*ordered-by\b[:\s]*(.*)")


def source_line(site: Site) -> str:
    """The text of a line without its indentation; "" if the file cannot be read."""
    return linecache.getline(site.file, site.line).strip()


def name_of_new_object() -> str | None:
    """The name that the running line gives to the object it makes: `self.copies` for
    `self.copies = torch.cuda.Stream()`. None if it gives none."""
    return assigned_name(calling_site())


def ordered_by(site: Site) -> str | None:
    """The reason in a comment `# headrace: ordered-by <reason>` at the statement of this line; None
    if there is no such comment."""
    statement = _statement(site.file, site.line)
    lines = range(site.line, site.line + 1)
    if statement is not None and not isinstance(statement, _BLOCKS):
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    for line in lines:
        found = _ORDERED.search(linecache.getline(site.file, line))
        if found:
            return found[1].strip() or "a comment"
    return None


_BLOCKS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.With,
    ast.For,
    ast.While,
    ast.If,
)


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _path_to(file: str, line: int) -> list[ast.AST]:
    """The nodes that contain a line, the outermost first. Of several on one line, the last."""
    node: ast.AST | None = _tree(file)
    path: list[ast.AST] = []
    while node is not None:
        path.append(node)
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if getattr(child, "lineno", line + 1) <= line <= (getattr(child, "end_lineno", 0) or 0)
        ]
        node = inside[-1] if inside else None
    return path


def _statement(file: str, line: int) -> ast.stmt | None:
    statements = [node for node in _path_to(file, line) if isinstance(node, ast.stmt)]
    return statements[-1] if statements else None


@lru_cache(maxsize=1024)
def assigned_name(site: Site) -> str | None:
    """The name that a line gives to what it makes; None if it gives none."""
    for node in reversed(_path_to(site.file, site.line)):
        if isinstance(node, ast.keyword) and node.arg is not None:
            return node.arg
        if isinstance(node, ast.NamedExpr | ast.AnnAssign):
            return ast.unparse(node.target)
        if isinstance(node, ast.Assign):
            return ast.unparse(node.targets[0])
        if isinstance(node, ast.stmt):
            return None
    return None
