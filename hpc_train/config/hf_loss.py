"""Says how the config of a Hugging Face model changes its loss. Imports no torch.

transformers computes the mean loss of a batch inside the model. hpc_train takes the logits and computes the loss as a
sum and a count, which any number of ranks and micro-batches can add up, so it needs to know each key that changes the
loss. The keys are those that transformers 5.23 reads for the tasks of ``hf_config.TASKS``:

- ``problem_type`` and ``num_labels`` choose the loss of a classifier (``models/hf/loss.py``),
- ``label_smoothing`` smooths the targets of a cross-entropy,
- ``output_router_logits`` adds the load-balancing loss of a mixture of experts, which is not a sum over samples,
- those of ``REFUSED`` are not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_train.config import hf_config
from hpc_train.errors import UserError

CLASSIFIERS = ("sequence_classification", "image_classification")
REGRESSION, SINGLE, MULTI = "regression", "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = (REGRESSION, SINGLE, MULTI)
SMOOTHING = "label_smoothing"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # of the load-balancing loss, in different families
WHERE = "model.name_or_path, model.config"


@dataclass(frozen=True)
class RefusedKey:
    """Describes a key that changes the loss of causal language models in a way that is not implemented.

    Attributes:
        default: the value of configs that lack the key.
        inactive: the value with which it changes nothing.
        effect: what it does to the loss, for messages.
        families: the model types that read it; empty for all.
    """

    key: str
    default: Any
    inactive: Any
    effect: str
    families: tuple[str, ...] = ()


_PROPHETNET = ("prophetnet", "xlm-prophetnet")
REFUSED = (
    RefusedKey("z_loss_coefficient", 0, 0, "adds a z-loss over all positions", ("bamba",)),
    RefusedKey("eps", 0, 0, "smooths the targets", _PROPHETNET),
    RefusedKey("disable_ngram_loss", False, True, "adds the losses of later tokens", _PROPHETNET),
)


def check_loss(values: Mapping[str, Any], task: str) -> None:
    """Checks the keys of a config.json, or of a config object of transformers, that change the loss of ``task``.

    Raises:
        UserError: a key asks for a loss that is not implemented; the message names it.
    """
    problem = values.get("problem_type")
    if task in CLASSIFIERS and problem is not None and problem not in PROBLEM_TYPES:
        raise UserError(
            f"the config of the model has problem_type={problem!r}, which transformers does not know",
            where=WHERE,
            fix="+model.config.problem_type=" + ", ".join(PROBLEM_TYPES[:-1]) + f" or {PROBLEM_TYPES[-1]}",
        )
    kind, smoothing = values.get("model_type"), values.get(SMOOTHING)
    if smoothing and task == "causal_lm" and kind in hf_config.DECODERS:
        raise _refused(SMOOTHING, smoothing, f"which is not implemented for models of type {kind}", 0)
    if task != "causal_lm":
        return
    for row in REFUSED:
        value = values.get(row.key, row.default)
        if value != row.inactive and (not row.families or kind in row.families):
            raise _refused(row.key, value, f"which {row.effect} in transformers, and is not implemented", row.inactive)


def label_smoothing(values: Mapping[str, Any]) -> float:
    """Returns the share of each target that a cross-entropy distributes evenly over all classes."""
    return float(values.get(SMOOTHING) or 0.0)


def balances_experts(values: Mapping[str, Any], task: str) -> bool:
    """Returns whether ``values`` ask for a load-balancing loss.

    A config.json may lack the coefficient; whether its family has a default is only known to transformers.
    """
    parts = [values, values.get("text_config")]
    found = [part for part in parts if isinstance(part, Mapping)]
    asks = any(part.get("output_router_logits") for part in found)
    return task == "causal_lm" and asks and any(part.get(name) for part in found for name in COEFFICIENTS)


def _refused(key: str, value: Any, why: str, inactive: Any) -> UserError:
    return UserError(
        f"the config of the model has {key}={value}, {why}",
        where=WHERE,
        fix=f"+model.config.{key}={str(inactive).lower()}, which trains without it",
    )
