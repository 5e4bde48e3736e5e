"""Plain text tables, wrapped lines and counted nouns, the same for every command."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

_WIDTH = 118


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """1 epoch, 8 epochs. `plural` is for nouns that need more than an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Collection[str] = (),
    dense: bool = False,
) -> str:
    """Format `rows` under `columns` as plain text, as wide as its content.

    Columns of numbers, and those named in `right`, are right-aligned. `dense` puts one space less
    between columns. The text has no colors or control codes, so it looks the same in a terminal, a
    log and a file.
    """
    # Imported here because rich takes 50 ms to import.
    import io

    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [list(row) for row in rows]
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0) if dense else (0, 1),
    )
    for index, column in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        justify = "right" if numeric or column in right else "left"
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in cells:
        table.add_row(*[_text(cell) for cell in row])
    # rich cuts off what does not fit, so give it more width than any row needs.
    console = Console(
        file=io.StringIO(), width=10_000, no_color=True, highlight=False, markup=False
    )
    console.print(table, end="")
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip())


def wrap_line(line: str, indent: str = "") -> str:
    """Wrap a long line at 118 columns, without breaking a path. `indent` begins every line after
    the first."""
    return textwrap.fill(
        line,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _text(cell: object) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:,.3f}" if abs(cell) < 100 else f"{cell:,.1f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
