"""Tries the optimizer and the schedule of a config on small parameters, in a separate process before a submission.

``python -m hpc_train.train.optimizers.probe`` reads a config as JSON from standard input and prints the first mistake
as JSON. For a model family, the small parameters have the names and the numbers of dimensions of the model's
parameters. The parameters of a custom model are unknown unless it is built, so only the signatures are checked.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from hpc_train.config.extensions import from_plain, load_family
from hpc_train.config.schema import CustomModelConfig, OptimConfig
from hpc_train.errors import UserError
from hpc_train.layout.optimizers import check_matches, own_targets, parameter_groups
from hpc_train.models.build import build_model
from hpc_train.train.optimizers import own
from hpc_train.train.optimizers.learning_rate import learning_rates
from hpc_train.train.optimizers.optimizer import Optimizer

SIZE = 4  # the largest dimension of a small parameter
UPDATES = 2
FURTHEST = 10_000  # a scheduler class is stepped to the last step only in runs of at most this many steps


def check(model: Any, optim: OptimConfig, steps: int) -> None:
    """Tries the optimizer and the schedule on small parameters.

    Args:
        model: the config of the model.
        steps: the number of steps of the run.

    Raises:
        UserError: the optimizer, its groups or the schedule cannot be used.
    """
    for target in own_targets(optim):
        own.check_signature(target)
        own.check_elementwise(target)
    rate = learning_rates(optim, optim.base_batch, steps)
    for step in {0, steps - 1} if steps <= FURTHEST else {0}:
        rate(step)
    if isinstance(model, CustomModelConfig):
        return
    built = build_model(model, 0)
    names = [name for name, parameter in built.named_parameters() if parameter.requires_grad]
    check_matches(parameter_groups(optim), names)
    small = {
        name: nn.Parameter(torch.randn([min(SIZE, size) for size in parameter.shape]))
        for name, parameter in built.named_parameters()
    }
    optimizer = Optimizer(optim, small)
    with suppress(ImportError, NotImplementedError, RuntimeError):  # for example, kernels that exist only on GPUs
        for _ in range(UPDATES):
            for parameter in small.values():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step(1e-3, torch.tensor(True))


def main() -> None:
    given = json.load(sys.stdin)
    mistake: dict[str, str] = {}
    try:
        model: Any = from_plain(load_family(given["model"]["kind"]).schema, given["model"])
        check(model, OptimConfig(**given["optim"]), given["steps"])
    except UserError as error:
        mistake = {"what": error.what, "where": error.where, "fix": error.fix}
    print(json.dumps(mistake))


if __name__ == "__main__":
    main()
