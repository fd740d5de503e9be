"""Values from a peer whose fields have other types than they should."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from hpc_train.run.exits import Failure
from hpc_train.run.rows import check_fields


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Outer:
    count: int = 1
    share: float = 0.5
    name: str | None = None
    pairs: tuple[tuple[str, int], ...] = (("a", 1),)
    inner: Inner | None = Inner(1)
    more: dict[str, Inner] | None = None
    kind: Failure = Failure.HANG
    free: Any = None


@pytest.mark.parametrize(
    "right", [{}, {"share": 1}, {"inner": None}, {"more": {"a": Inner(2)}}, {"free": [object]}], ids=repr
)
def test_values_of_the_right_types(right: dict[str, Any]) -> None:
    check_fields(Outer(**right))


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": True},
        {"count": 1.0},
        {"share": float("nan")},
        {"share": float("inf")},
        {"share": "1"},
        {"name": 1},
        {"pairs": [("a", 1)]},
        {"pairs": (("a", 1, 2),)},
        {"pairs": (("a", "1"),)},
        {"inner": {"number": 1}},
        {"inner": Inner("1")},  # type: ignore[arg-type]
        {"more": {1: Inner(2)}},
        {"more": {"a": Inner(None)}},  # type: ignore[arg-type]
        {"kind": "hang"},
    ],
    ids=repr,
)
def test_values_of_other_types(wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"^Outer\.{next(iter(wrong))} is |^Inner\.number is '1'"):
        check_fields(Outer(**wrong))
