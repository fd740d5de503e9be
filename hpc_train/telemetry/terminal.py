"""Prints tables, colors and live lines in a terminal, in which the text of others is only text."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hpc_train.run.streams import CONTROLS, escaped, unescaped


class Terminal(Console):
    """A console that shows the control characters in what it prints. Its own colors reach the terminal."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout
        raw = unescaped(stream)
        if file is None and raw is not stream:
            file = raw
        super().__init__(stderr=stderr, file=file, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of ``renderable``; all that is printed passes here, also the cells of tables."""
        for segment in super().render(renderable, options):
            if segment.control is None and CONTROLS.search(segment.text):
                yield Segment(escaped(segment.text), segment.style)
            else:
                yield segment
