"""Computes the loss that the config of a transformers model requests, as a sum and a count, from the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config import hf_config
from hpc_train.config.hf_config import CLASSIFIERS, MULTI, REGRESSION, SINGLE
from hpc_train.data.dataset import IGNORED
from hpc_train.errors import UserError
from hpc_train.models.transformer import count_correct, cross_entropy, squared_error, widened

_SPECIAL_RULE = ("deberta", "deberta-v2")  # without a problem_type these learn from float targets in a different way


class ConfiguredLoss:
    """Computes the loss of ``module``, a model of transformers, for ``task``.

    The sum is over the elements of the targets that are not ``IGNORED``, and the count is their number, so the mean
    equals the loss of transformers. ``balance`` is the coefficient of the load-balancing loss that the config of a
    mixture of experts requests; 0 without one. Raises UserError if the config requests a loss that is not implemented.
    """

    def __init__(self, module: nn.Module, task: str) -> None:
        config: Any = module.config
        values: dict[str, Any] = config.to_dict()
        hf_config.check_loss(values, task)
        self._classifies_samples = task in CLASSIFIERS
        self._problem: str | None = values.get("problem_type")
        self._labels: int = config.num_labels
        self._kind: str = config.model_type
        self._smoothing = hf_config.label_smoothing(values)
        self.balance = load_balancing(module) if task == "causal_lm" else 0.0

    def __call__(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the sum, the count, and the number of correct predictions, which a regression does not have.

        A language model has logits ``[micro, seq, vocabulary]`` and targets ``[micro, seq]`` of token ids. A classifier
        has logits ``[micro, num_labels]`` and targets ``[micro]`` of classes; a regression with several outputs, or a
        model with several labels per sample, has targets ``[micro, num_labels]`` of numbers. Raises UserError if the
        shapes do not fit together.
        """
        problem = self._problem_of(targets) if self._classifies_samples else SINGLE
        if problem != SINGLE:
            if targets.numel() != logits.numel():
                raise _other_shape(logits, targets, problem)
            compute = squared_error if problem == REGRESSION else _binary
            return (*compute(logits, targets.reshape(logits.shape)), None)
        classes = targets.flatten() if self._classifies_samples else targets
        if classes.shape != logits.shape[:-1] or classes.is_floating_point():
            raise _other_shape(logits, targets, problem)
        loss, count = cross_entropy(logits, classes)
        if self._smoothing:
            losses = -F.log_softmax(widened(logits), -1).mean(-1)
            loss = (1 - self._smoothing) * loss + self._smoothing * (losses * (classes != IGNORED)).sum()
        return loss, count, count_correct(logits, classes)

    def _problem_of(self, targets: Tensor) -> str:
        """Returns the ``problem_type``. If the config has none, it depends on the targets, as in transformers."""
        if self._problem is not None:
            return self._problem
        if self._labels == 1:
            return REGRESSION
        if not targets.is_floating_point():
            return SINGLE
        if self._kind in _SPECIAL_RULE:
            raise UserError(
                f"the targets have the dtype {targets.dtype}, for which a {self._kind} uses a special loss unless its "
                "problem_type is set",
                where="model.config",
                fix=f"+model.config.problem_type={MULTI}, {SINGLE} or {REGRESSION}",
            )
        return MULTI


def load_balancing(module: nn.Module) -> float:
    """Returns the coefficient of the load-balancing loss that ``module`` adds in transformers; 0 if it adds none."""
    config: Any = module.config
    parts = [config, getattr(config, "text_config", None)]
    if not any(getattr(part, "output_router_logits", False) for part in parts):
        return 0.0
    places = [module, *parts]
    coefficients = (getattr(place, name, None) for place in places for name in hf_config.COEFFICIENTS)
    return float(next((value for value in coefficients if value is not None), 0.0))


def refuse_unless(module: nn.Module, loss: str) -> None:
    """Checks that ``model.loss`` is the loss that the config of a transformers model in ``model=custom`` requests.
    Raises UserError if it requests another loss."""
    if not hasattr(module, "base_model_prefix"):
        return
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        return
    values: Mapping[str, Any] = config.to_dict()
    setting = ""
    if values.get("problem_type") in (REGRESSION, MULTI) and "Classification" in type(module).__name__:
        setting = f"problem_type={values['problem_type']}"
        if values["problem_type"] == REGRESSION and loss == "mse":
            setting = ""
    if load_balancing(module):
        setting = "output_router_logits=True"
    if hf_config.label_smoothing(values):
        setting = f"label_smoothing={values['label_smoothing']}"
    if setting:
        raise UserError(
            f"the config of {type(module).__name__} has {setting}, but model.loss={loss} computes the loss without it",
            where="model._target_, model.loss",
            fix="model=hf, which computes this loss; or give the model a method loss(outputs, targets) -> (sum, count)",
        )


def _binary(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the binary cross-entropies of each label, and the number of labels that count."""
    wide = widened(logits)
    counts = targets != IGNORED
    clean_targets = targets.to(wide.dtype).masked_fill(~counts, 0.0)
    losses = F.binary_cross_entropy_with_logits(wide, clean_targets, reduction="none")
    return (losses * counts).sum(), counts.sum()


def _other_shape(logits: Tensor, targets: Tensor, problem: str) -> UserError:
    shape = list(logits.shape)
    numbers = "numbers"
    if problem == SINGLE:
        shape = shape[:-1]
        numbers = "integers"
    return UserError(
        f"the targets have the shape {list(targets.shape)} and the dtype {targets.dtype}, but {problem} with outputs "
        f"of shape {list(logits.shape)} needs {numbers} of shape {shape}",
        where="data, model.config.problem_type, model.config.num_labels",
        fix="return such targets, or set +model.config.problem_type and +model.config.num_labels",
    )
