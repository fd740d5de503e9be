"""States which linear layers ``precision.fp8`` computes in fp8. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.config.schema import PrecisionConfig

WHERE = "precision.fp8"
OFF = "precision.fp8=null"
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}  # of which both sizes of a matrix must be one


@dataclass(frozen=True)
class Products:
    """Linear layers that train and have the same input, together with their like in other layers of the model.

    Attributes:
        names: of each linear layer, its full name in each layer of the model.
        inputs: their ``in_features``.
        outputs: the ``out_features`` of each.
        rows: of the input, for one sample.
    """

    names: tuple[tuple[str, ...], ...]
    inputs: int
    outputs: tuple[int, ...]
    rows: float

    def chosen(self, precision: PrecisionConfig) -> list[int]:
        """Returns in how many layers each linear layer computes in fp8."""
        return [
            sum(not why_not_float8(name, self.inputs, outputs, precision) for name in names)
            for names, outputs in zip(self.names, self.outputs, strict=True)
        ]


def why_not_float8(name: str, inputs: int, outputs: int, precision: PrecisionConfig) -> str:
    """Returns why the linear layer ``name`` computes in bf16; an empty string if it computes in fp8."""
    if any(re.search(pattern, name) for pattern in precision.fp8_skip):
        return "precision.fp8_skip"
    multiple = MULTIPLES[str(precision.fp8)]
    return f"sizes that are not multiples of {multiple}" if inputs % multiple or outputs % multiple else ""
