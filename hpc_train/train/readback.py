"""Copies the few scalars of a logged step to the host, without making the host wait for the device.

The copy from a GPU goes to page-locked memory and an event marks its end. The host reads the values one step later,
when it has already launched the next step, so the device always has work.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Readback:
    """Holds scalars that are being copied from ``device``; later changes of the tensors do not affect them.

    Args:
        values: scalar tensors on ``device``; fp64 represents all of them exactly.
    """

    def __init__(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        self._names = tuple(values)
        together = torch.stack([value.detach().to(torch.float64) for value in values.values()])
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._values = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = together

    @property
    def ready(self) -> bool:
        """Returns whether ``read`` would not wait."""
        return self._copied is None or self._copied.query()

    def read(self) -> dict[str, float]:
        """Returns name -> value; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._names, self._values.tolist(), strict=True))
