"""Tables for the terminal, as text: one way to draw them for every command."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

_WIDTH = 118


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str | None = None,
    right: Collection[str] = (),
    dense: bool = False,
) -> str:
    """Draw `rows` under `columns` as plain text, as wide as it needs to be.

    A column whose cells all are numbers, or whose name is in `right`, is set flush right;
    `dense` leaves a space less between columns. No colour, no terminal control codes: the text
    looks the same in a terminal, a log and a file.
    """
    # Imported here: rich takes 50 ms that `import headrace` need not pay.
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
        flush = "right" if numeric or column in right else "left"
        table.add_column(column, justify=flush, no_wrap=True)  # type: ignore[arg-type]
    for row in cells:
        table.add_row(*[_text(cell) for cell in row])
    # rich leaves out what does not fit: ask for all the width the longest row could need.
    console = Console(
        file=io.StringIO(), width=10_000, no_color=True, highlight=False, markup=False
    )
    console.print(table, end="")
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in drawn.splitlines() if line.strip())


def filled(line: str, indent: str = "") -> str:
    """A sentence in lines that fit 120 columns; a path is left whole."""
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
