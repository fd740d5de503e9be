"""Makes the markup of the page from the templates beside this file, which escape every text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup as Html

if TYPE_CHECKING:
    from jinja2 import Environment

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")  # HTML does not allow them
TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors and cursor movements


@cache
def environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes 0.1 s

    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=printable,
        keep_trailing_newline=True,
    )


def printable(value: Any) -> Any:
    """Returns what a template shows of ``value``: nothing for None, and text without control characters."""
    if value is None:
        return ""
    if isinstance(value, Html):
        return value
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", TERMINAL.sub("", str(value)))


def text(value: object) -> Html:
    """Returns ``value`` as markup: markup itself unchanged, everything else escaped."""
    return Html.escape(printable(value))


def block(name: str, *values: object, **named: object) -> Html:
    """Returns the macro ``name`` of ``templates/blocks.html`` with these values, of which text is escaped."""
    macro = getattr(environment().get_template("blocks.html").module, name)
    return Html(macro(*values, **named).strip())


def joined(content: Iterable[object]) -> Html:
    return Html("").join(text(each) for each in content)


def paragraphs(lines: Iterable[object]) -> Html:
    return joined(block("paragraph", line) for line in lines)


def commands(lines: Sequence[str], label: str) -> Html:
    """Returns command lines as a block; what follows three spaces in a line is a comment.

    Args:
        label: what the block is for, unlike the labels of all other blocks of the page.
    """
    shown = [line.replace("   ", "   # ", 1) if "   " in line else line for line in lines]
    return block("preformatted", "\n".join(shown), label)


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], best: int | None = None, numbers: int = 0
) -> Html:
    """Returns a table whose first cell of each row is its heading.

    Args:
        best: the index of a row to mark.
        numbers: how many of the last columns hold numbers, which are aligned at the right.
    """
    return block("table", caption, columns, rows, best, numbers)


def section(title: str, *content: object) -> Html:
    """Returns a section of the page with its heading."""
    return block("section", _name(title), title, *content)


def picture(title: str, description: str, width: float, height: float, *shapes: Html) -> Html:
    """Returns an SVG picture with its description in words."""
    return block("picture", _name(title), title, description, width, height, *shapes)


def _name(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
