"""Makes the tables that commands print in a terminal or into a pipe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 200  # columns; rich would squeeze the table of a pipe into 80


def wide(console: Console) -> Console:
    """Returns ``console``, which is made wide if it prints into a pipe or a file."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def text_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = (), folded: Collection[str] = ()
) -> Table:
    """Returns a table without lines, whose cells are printed as they are.

    Args:
        numbers: the columns that are aligned at the right.
        folded: the columns whose cells continue in the next line if they are wide.
    """
    table = Table(box=None, pad_edge=False)
    for name in columns:
        overflow = "fold" if name in folded else "ellipsis"
        table.add_column(name, justify="right" if name in numbers else "left", overflow=overflow)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*map(Text, row))
    return table
