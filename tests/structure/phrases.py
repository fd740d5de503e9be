"""Prints phrases of messages, help and docstrings that the field would put otherwise, by kind.

``python -m tests.structure.phrases [KIND]`` prints the counts, or the places of one kind. ``test_shape.py`` holds the
total, which may only fall.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.structure.shape import REPOSITORY, nodes_of

# kind -> (pattern, what to write instead)
KINDS = {
    "of one's own": (r"\b(?:of (?:your|the user's|their|its|one's) own|code of users?)\b", "custom, separate, local"),
    "is no": (
        r"(?<!there )\b(?:is|are|was|were) no (?!longer|more|less|such|later|earlier)\w+",
        "is not a ..., there is no ...",
    ),
    "that of those of": (r"\b(?:that|those) of (?:that|those|the one|what)\b", "name the thing again"),
    "and those of": (r"\band (?:that|those) (?:of|that)\b", "name the thing again"),
    "tell": (r"\b(?:tells?|told|telling)\b", "report, describe, warn, distinguish"),
    "for want of": (r"\bfor want of\b", "because ... is missing"),
    "beside": (r"\bbeside\b", "next to, during, while"),
    "as far as": (r"\bas far as\b", "if, where"),
    "what is kept": (r"\b(?:is|are) kept (?:beside|there|by)\b", "is stored, is retained"),
    "of which": (r"\b(?:of|for|by|to) which (?:there is|it has|they have|one)\b", "a sentence of its own"),
    "nothing of": (r"\bnothing (?:of|is told|is said)\b", "state what happens"),
    "has no say": (r"\b(?:has no say|knows nothing of|makes no difference between)\b", "does not affect, ignores"),
    "whole": (r"\b(?:a|the) whole (?:one|ones)\b", "full, complete"),
    "whatever becomes": (r"\bwhatever (?:becomes|comes|is)\b", "its failure does not ..."),
    "in words": (r"\bin words\b", "as text"),
    "asked for": (r"\b(?:was|is|are|were) asked for\b", "requested"),
    "found": (r"\bthe (?:found|asked|known|wanted|kept|told) \w+\b", "name the thing"),
}


def texts(path: Path, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each string of a module, docstrings included; f-strings without their values."""
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield node.lineno, " X ".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, " ".join(node.value.split())


def phrases(root: Path = REPOSITORY) -> dict[str, list[str]]:
    """Returns the places of each kind, as ``file:line: phrase``."""
    places: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path, nodes in nodes_of(root).items():
        for line, text in texts(path, nodes):
            for kind, (pattern, _) in KINDS.items():
                for match in re.finditer(pattern, text):
                    around = text[max(0, match.start() - 40) : match.end() + 40]
                    places[kind].append(f"{path.relative_to(root)}:{line}: {around}")
    return places


if __name__ == "__main__":
    all_places = phrases()
    for kind, found in all_places.items():
        if sys.argv[1:] == [kind]:
            print(*found, sep="\n")
        elif not sys.argv[1:]:
            print(f"{len(found):5} {kind:20} -> {KINDS[kind][1]}")
    if not sys.argv[1:]:
        print(f"{sum(map(len, all_places.values())):5} in all")
