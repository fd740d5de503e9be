"""Prints tables, colors and live lines to a terminal or a pipe, and makes control characters in texts harmless."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import IO, Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hpc_train.run.streams import CONTROLS, escaped, unescaped


class Terminal(Console):
    """Console that makes the control characters in its output visible. Its own colors reach the terminal."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        raw = unescaped(stream)
        if file is None and raw is not stream:
            file = raw
        super().__init__(stderr=stderr, file=file, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of ``renderable``; all output passes through here, including the cells of tables."""
        for segment in super().render(renderable, options):
            if segment.control is None and CONTROLS.search(segment.text):
                yield Segment(escaped(segment.text), segment.style)
            else:
                yield segment


PIPE_WIDTH = 200  # columns; rich would squeeze the table of a pipe into 80


def wide(console: Console) -> Console:
    """Returns ``console``, which is made wide if it prints into a pipe or a file."""
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def text_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = (), folded: Collection[str] = ()
) -> Table:
    """Returns a table without lines, whose cells are printed as they are, each row in a line.

    Args:
        numbers: the columns that are aligned at the right.
        folded: the columns whose cells continue in the next line if they are wide.
    """
    table = Table(box=None, pad_edge=False)
    for name in columns:
        overflow = "fold" if name in folded else "ellipsis"
        table.add_column(name, justify="right" if name in numbers else "left", overflow=overflow)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(escaped(cell).replace("\n", "\\n")) for cell in row))
    return table


def print_fitting(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    numbers: Collection[str],
    folded: Mapping[str, int],
    least_needed: Iterable[str],
) -> None:
    """Prints a table without the columns for which ``console`` has no room, and their names.

    Numbers are never cut or wrapped. What the table still lacks in width after columns are left out is cut by rich.

    Args:
        numbers: the columns that are aligned at the right.
        folded: the columns whose cells continue in the next line, and the width that they need at least.
        least_needed: the columns that may be left out, those that are needed least first.
    """
    longest = {name: max([len(name), *(len(row[number]) for row in rows)]) for number, name in enumerate(columns)}
    needed = {name: min(length, folded.get(name, length)) for name, length in longest.items()}
    left_out = list[str]()
    for name in least_needed:
        if sum(needed.values()) + len(needed) - 1 <= console.width:
            break
        if needed.pop(name, None) is not None:
            left_out.append(name)
    roomy = sum(longest[name] + 2 for name in needed) - 2 <= console.width
    table = Table(box=None, pad_edge=False, collapse_padding=not roomy)
    for name, least in needed.items():
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name not in folded, min_width=least)
    shown = [number for number, name in enumerate(columns) if name in needed]
    for row in rows:
        table.add_row(*(Text(row[number]) for number in shown))
    console.print(table)
    if left_out:
        names = ", ".join(left_out)
        console.print(f"left out of this narrow table, but in --json: {names}", markup=False, highlight=False)
