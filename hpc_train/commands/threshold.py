"""Compares a metric of a run with that of a baseline: ``val_loss>1.02*baseline``, ``samples_per_s<0.9*baseline``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.errors import UserError
from hpc_train.runs.comparison import is_number

BASELINE = "baseline"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FORM = re.compile(
    rf"\s*(?P<metric>\w+)\s*(?P<sign><=|>=|<|>)\s*"
    rf"(?:(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<baseline>{BASELINE})|(?P<number>{_NUMBER}))\s*"
)
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Threshold:
    """Holds a condition on one metric.

    Attributes:
        factor: of the baseline's value; None compares with ``number``.
    """

    text: str
    metric: str
    sign: str
    factor: float | None
    number: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Raises UserError if ``text`` is not a condition."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UserError(
                f"{text!r} is not a condition",
                where="--fail-if",
                fix="METRIC, one of < <= > >=, and a number, baseline, or FACTOR*baseline: 'val_loss>1.02*baseline'",
            )
        factor = float(found["factor"] or 1.0) if found["baseline"] else None
        return cls(text.strip(), found["metric"], found["sign"], factor, float(found["number"] or 0.0))

    def verdict(self, metrics: Mapping[str, Any], baseline: Mapping[str, Any]) -> tuple[bool, str]:
        """Returns whether the condition holds, and the values in words. A value that is missing counts as held."""
        value = metrics.get(self.metric)
        limit = self.number if self.factor is None else baseline.get(self.metric)
        if not is_number(value):
            return True, f"{self.metric} is not known"
        if not is_number(limit):
            return True, f"{self.metric} of the baseline is not known"
        limit *= 1.0 if self.factor is None else self.factor
        holds = _SIGNS[self.sign](value, limit)
        return holds, f"{self.metric} {value:.6g} is {'' if holds else 'not '}{self.sign} {limit:.6g}"
