"""How it is said that nodes differ."""

from __future__ import annotations

from collections.abc import Mapping

SHOWN = 4


def who_has_what(values: Mapping[str, str]) -> str:
    """``values`` by node as ``2.12 on n3, 2.13 on n1, n2``, what is rarest first."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    rarest = sorted(nodes.items(), key=lambda item: len(item[1]))
    return ", ".join(f"{value} on {_listed(names)}" for value, names in rarest[:SHOWN])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
