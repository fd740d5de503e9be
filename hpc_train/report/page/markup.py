"""HTML and SVG as values: text is escaped when an element is made, and an element is never escaped again."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff\ud800-\udfff]")  # HTML does not allow them
TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colors and cursor movements
VOID = frozenset({"meta", "br", "hr"})


class Html(str):
    """Holds markup; every other string is text."""

    __slots__ = ()


def text(value: object) -> Html:
    """Returns ``value`` as markup: markup itself unchanged, everything else escaped."""
    if isinstance(value, Html):
        return value
    plain = TERMINAL.sub("", str(value))
    return Html(html.escape(CONTROL.sub("\N{REPLACEMENT CHARACTER}", plain)))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """Returns an element. In the names of attributes ``_`` stands for ``-``, and a last one is left out (``class_``).

    Args:
        content: markup, or text that is escaped; None and "" are left out.
        attributes: those with the value None are left out.
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    head = "".join(f' {key}="{text(value)}"' for key, value in pairs)
    if name in VOID:
        return Html(f"<{name}{head}>")
    return Html(f"<{name}{head}>{joined(content)}</{name}>")


def joined(content: Iterable[object]) -> Html:
    return Html("".join(text(each) for each in content if each is not None))


def paragraphs(lines: Iterable[object]) -> Html:
    return joined(tag("p", line) for line in lines)


def listed(lines: Iterable[object]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))


def commands(lines: Sequence[str], label: str) -> Html:
    """Returns command lines as a block; what follows three spaces in a line is a comment.

    Args:
        label: what the block is for, unlike the labels of all other blocks of the page.
    """
    shown = [line.replace("   ", "   # ", 1) if "   " in line else line for line in lines]
    return preformatted("\n".join(shown), label)


def preformatted(content: str, label: str) -> Html:
    """Returns a block that scrolls if it is wide, also with the keyboard."""
    return tag("pre", tag("code", content), tabindex=0, role="region", aria_label=label)


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Returns a list of names with values; pairs with an empty value are left out."""
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs if value not in (None, "")]
    return tag("dl", *shown) if shown else Html()


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], best: int | None = None, numbers: int = 0
) -> Html:
    """Returns a table whose first cell of each row is its heading.

    Args:
        best: the index of a row to mark.
        numbers: how many of the last columns hold numbers, which are aligned at the right.
    """
    first = len(columns) - numbers
    kinds = [None if index < first else "number" for index in range(len(columns))]
    head = tag("tr", *(tag("th", each, scope="col", class_=kind) for each, kind in zip(columns, kinds, strict=True)))
    body = []
    for index, row in enumerate(rows):
        cells = [tag("td", each, class_=kind) for each, kind in zip(row[1:], kinds[1:], strict=True)]
        name = tag("th", row[0], scope="row", class_=kinds[0])
        body.append(tag("tr", name, *cells, class_="best" if index == best else None))
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    return tag("div", whole, class_="wide", tabindex=0, role="region", aria_label=caption)


def section(title: str, *content: object) -> Html:
    """Returns a section of the page with its heading."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return tag("section", tag("h2", title, id=name), *content, aria_labelledby=name)


def picture(title: str, description: str, width: float, height: float, *content: object) -> Html:
    """Returns an SVG picture with the words that a screen reader says instead; it shrinks to the width of the page."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    words = tag("title", title, id=f"{name}-title"), tag("desc", description, id=f"{name}-desc")
    box = f"0 0 {width:g} {height:g}"
    labels = f"{name}-title {name}-desc"
    drawn = tag("svg", *words, *content, viewBox=box, role="img", aria_labelledby=labels)
    return tag("div", drawn, class_="picture", style=f"max-width:{1.15 * width:g}px")
