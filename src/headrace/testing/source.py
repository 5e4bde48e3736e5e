"""What the user's source says: the name that a new object gets, and `# headrace:` comments."""

from __future__ import annotations

import ast
import linecache
import re
from functools import lru_cache
from itertools import islice
from typing import Any

from headrace.source_lines import Site
from headrace.testing.races import Access, calling_frames

_ORDERED = re.compile(r"#\s*headrace:\s*ordered-by\b[:\s]*(.*)")


def source_line(site: Site) -> str:
    """The text of a line without its indentation; "" if the file cannot be read."""
    return linecache.getline(site.file, site.line).strip()


def name_of_new_object() -> str | None:
    """The name that the running call gives to the object it makes: `self.copies` for
    `self.copies = torch.cuda.Stream()`. None if it gives none."""
    frames = calling_frames()
    if not frames:
        return None
    code, instruction = frames[0]
    line, _, column, _ = next(islice(code.co_positions(), instruction // 2, None))
    return _name_at(code.co_filename, line or 0, column)


def assigned_name(site: Site) -> str | None:
    """The name that a line gives to what it makes; None if it gives none."""
    return _name_at(site.file, site.line, None)


def accepted_because(first: Access, second: Access) -> str | None:
    """The reason in a comment `# headrace: ordered-by …` at one of a race's lines; None if there is
    no such comment."""
    for access in (first, second):
        for site in (access.site, access.forward_site, access.captured_at):
            reason = None if site is None else ordered_by(site)
            if reason is not None:
                return reason
    return None


@lru_cache(maxsize=1024)
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


def _path_to(file: str, line: int, column: int | None = None) -> list[ast.AST]:
    """The nodes that contain a line, or a place in it, the outermost first. Without a column, no
    further than the statement."""
    node: ast.AST | None = _tree(file)
    path: list[ast.AST] = []
    while node is not None:
        path.append(node)
        inside = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.expr | ast.keyword | ast.excepthandler)
            and _contains(child, line, column)
            and (column is not None or isinstance(child, ast.stmt | ast.excepthandler))
        ]
        node = inside[-1] if inside else None
    return path


def _contains(node: Any, line: int, column: int | None) -> bool:
    if column is None:
        return bool(node.lineno <= line <= node.end_lineno)
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return bool(start <= (line, column) < end)


def _statement(file: str, line: int) -> ast.stmt | None:
    statements = [node for node in _path_to(file, line) if isinstance(node, ast.stmt)]
    return statements[-1] if statements else None


@lru_cache(maxsize=1024)
def _name_at(file: str, line: int, column: int | None) -> str | None:
    path = _path_to(file, line, column)
    for node in reversed(path):
        if isinstance(node, ast.keyword) and node.arg is not None:
            return node.arg
        if isinstance(node, ast.NamedExpr | ast.AnnAssign):
            return ast.unparse(node.target)
        if isinstance(node, ast.Assign):
            return _target(node, path)
        if isinstance(node, ast.stmt):
            return None
    return None


def _target(node: ast.Assign, path: list[ast.AST]) -> str | None:
    """What an assignment gives its value to; of `a, b = f(), g()`, the one on this path."""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Tuple):
        return ast.unparse(target)
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        for name, part in zip(target.elts, value.elts, strict=True):
            if part in path:
                return ast.unparse(name)
    return None
