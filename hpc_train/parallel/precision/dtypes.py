"""Defines the dtypes of a run, with the same policy for every strategy.

Parameters, gradients and optimizer state are fp32. ``bf16`` and ``fp16`` run the forward pass under autocast, which
casts the inputs of matrix products and keeps norms, softmax and losses in fp32; weights are cast once per step
(``kept_casts.py``). ZeRO (``fsdp.py``) gathers the parameters in the compute dtype, which halves the traffic; gradients
are reduced in fp32 unless ``strategy.compression`` says otherwise. ``precision.weights=bf16`` keeps weights and
gradients in bf16, with fp32 masters for the optimizer (``masters.py``), and ``precision.fp8`` computes products in fp8
(``float8.py``). ``fp64`` is for exact comparisons.

So that the strategies compute the same numbers, the hidden states between the layers of a model (its residual stream)
have one dtype, ``precision.residual``, whether the parameters were cast or not; they also travel between pipeline
stages in it. The norms of the built-in models round their weights to the compute dtype, as ZeRO does. Two differences
remain, both in the rounding of gradients: a rank sums the gradient of an embedding in the dtype in which the parameter
is used, and a rank that casts whole weights computes some projections together (``models/projections.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from hpc_train.config.schema import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.models.model import Model

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameter_dtype(name: str) -> torch.dtype:
    """Returns the type of parameters, gradients and optimizer state under precision ``name``."""
    if name == "fp64":
        return torch.float64
    return torch.float32


def compute_dtype(name: str) -> torch.dtype | None:
    """Returns the type to which autocast casts, or None without autocast."""
    return COMPUTE_DTYPES.get(name)


def autocast(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Returns the context of a forward pass under precision ``name``."""
    dtype = compute_dtype(name)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def choose_tf32(precision: PrecisionConfig, device: torch.device) -> None:
    """Sets for this process whether fp32 products on a GPU use TF32; torch's defaults differ for convolutions.

    These are torch's older settings: the newer ones fail in releases whose compiler reads the older ones.
    """
    chosen = precision.tf32
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if chosen else "highest")
        torch.backends.cudnn.allow_tf32 = chosen


def set_hidden_dtype(model: nn.Module, precision: PrecisionConfig) -> None:
    """Makes ``model`` convert the output of its stem under autocast, if it has the parts of a ``Model``.

    Raises:
        UserError: ``precision.residual`` is set for a module without these parts.
    """
    if compute_dtype(precision.name) is None:
        return
    if isinstance(model, Model):
        model.hidden_dtype = hidden_dtype(precision)
    elif precision.residual != "compute":
        raise UserError(
            f"precision.residual={precision.residual} is the format of hidden states between the layers of a Model, "
            "but this model is a module without stem, layers and head, whose forward decides",
            where="precision.residual, model",
            fix="precision.residual=compute",
        )


def kept_dtype(precision: PrecisionConfig, layout: Layout) -> torch.dtype | None:
    """Returns the dtype of the casts that a step keeps (``kept_casts.py``); None if weights are in it already."""
    if layout.shards_state or precision.weights == "bf16":
        return None
    return compute_dtype(precision.name)


def hidden_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Returns the dtype of the hidden states between layers and between pipeline stages, under every strategy."""
    narrow = compute_dtype(precision.name) if precision.residual == "compute" else None
    return narrow or parameter_dtype(precision.name)
