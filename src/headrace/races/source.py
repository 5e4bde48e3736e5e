"""What the user's source says: the name that a new object gets, and `# headrace:` comments."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

from headrace.races.frames import Frames
from headrace.races.race import Access
from headrace.source_lines import Site

# A piece of source: line, last line, column, last column.
_Position = tuple[int | None, int | None, int | None, int | None]

# Methods that return their tensor or a view of it; those that change it end with "_".
_VIEWS = frozenset(
    {
        *("detach", "expand", "flatten", "permute", "reshape", "squeeze", "t", "transpose"),
        *("unflatten", "unsqueeze", "view", "view_as"),
    }
)

_ORDERED = re.compile(r"#\s*headrace:\s*ordered-by\b[:\s]*(.*)")


def source_line(site: Site) -> str:
    """The text of a line without its indentation; "" if the file cannot be read."""
    return linecache.getline(site.file, site.line).strip()


def name_of_new_object(frames: Frames) -> str | None:
    """The name of what the innermost call makes: `self.copies` for `self.copies =
    torch.cuda.Stream()`, and also `copies` for each of `copies = [torch.cuda.Stream(), …]`. None if
    it gets none."""
    if not frames:
        return None
    line, _, column, _ = _position(frames)
    return _name_at(frames[0][0].co_filename, line or 0, column)


def assigned_name(frames: Frames) -> str | None:
    """The name that the innermost call gives to its result, or to a view of it. None if it gives
    none: the result may be a part of a larger expression."""
    return _name_of_value(frames[0][0].co_filename, _position(frames)) if frames else None


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


def _position(frames: Frames) -> _Position:
    code, instruction = frames[0]
    return next(islice(code.co_positions(), instruction // 2, None))


@lru_cache(maxsize=1024)
def _name_of_value(file: str, position: _Position) -> str | None:
    line, _, column, _ = position
    for node in _path_to(file, line or 0, column):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = list(_assigned(node.targets[0], node.value))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            pairs = list(_assigned(node.target, node.value))
        for target, value in pairs:
            if position in map(_position_of, _same_memory(value)):
                return ast.unparse(target)
    return None


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with its value."""
    if isinstance(target, ast.Tuple):
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for one, part in zip(target.elts, value.elts, strict=True):
                yield from _assigned(one, part)
    elif isinstance(value, ast.IfExp):
        yield from ((target, value.body), (target, value.orelse))
    elif isinstance(value, ast.BoolOp):
        yield from ((target, part) for part in value.values)
    else:
        yield target, value


def _same_memory(value: ast.expr) -> Iterator[ast.expr]:
    """An expression, and those inside of it whose result it is or views."""
    yield value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr in _VIEWS or value.func.attr.endswith("_"):
            yield from _same_memory(value.func.value)
    elif isinstance(value, ast.Subscript | ast.Await):
        yield from _same_memory(value.value)


def _position_of(node: ast.expr) -> _Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


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
