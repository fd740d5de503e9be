"""A hook of your own: it ends the run when a target is reached, and records how far the weights have moved.

    python -m hpc_train +strategy=zero3 train.eval_every=10 +hooks.target._target_=examples.own_hook.ReachLoss \
        +hooks.target.args.loss=2.5

Every method is optional. All ranks call it at the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpc_train.hooks import Hook, HookContext


class ReachLoss(Hook):
    """Ends the run as done as soon as the validation loss is at most ``loss``.

    Args:
        loss: the target.
    """

    def __init__(self, loss: float) -> None:
        self.loss = loss
        self.history: list[list[float]] = []  # (step, squared norm of the weights) at each evaluation

    def start(self, context: HookContext) -> None:
        if context.rank == 0:
            print(f"step {context.step}: training until val_loss is {self.loss}")

    def evaluation(self, context: HookContext) -> None:
        self.history.append([context.step, self.squared_norm(context)])
        if context.metrics["val_loss"] <= self.loss:
            context.stop(f"val_loss is {context.metrics['val_loss']:.4f}, at most {self.loss}")

    def squared_norm(self, context: HookContext) -> float:
        """Returns the sum of the squared weights of the whole model, under a strategy that shards all or nothing."""
        weights = context.parameters.values()
        parts = [value.to_local() if isinstance(value, DTensor) else value for value in weights]
        total = sum((part.detach().double().square().sum() for part in parts), start=parts[0].new_zeros(()).double())
        if any(isinstance(value, DTensor) for value in weights):
            dist.all_reduce(total)
        return float(total)

    def end(self, context: HookContext) -> None:
        context.log_text("weights", "\n".join(f"step {step:.0f}: {norm:.6g}" for step, norm in self.history))

    def state_dict(self) -> Mapping[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = state["history"]
