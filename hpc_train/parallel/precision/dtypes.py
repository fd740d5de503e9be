"""Defines the dtypes of a run, with the same policy for every strategy, and casts weights once per step.

Parameters, gradients and optimizer state are fp32. ``bf16`` and ``fp16`` run the forward pass under autocast, which
casts the inputs of matrix products and keeps norms, softmax and losses in fp32; weights are cast once per step
(``KeptCasts``), and the frozen weights of adapters when they are read (``set_parameter_dtypes``). ZeRO (``fsdp.py``)
gathers the parameters in the compute dtype, which halves the traffic; gradients are reduced in fp32 unless
``strategy.compression`` says otherwise. ``precision.weights=bf16`` keeps weights and gradients in bf16, with fp32
masters for the optimizer (``masters.py``), and ``precision.fp8`` computes products in fp8 (``float8.py``). ``fp64`` is
for exact comparisons.

So that the strategies compute the same numbers, the hidden states between the layers of a model (its residual stream)
have one dtype, ``precision.residual``, whether the parameters were cast or not; they also travel between pipeline
stages in it. The norms of the built-in models round their weights to the compute dtype, as ZeRO does. Two differences
remain, both in the rounding of gradients: a rank sums the gradient of an embedding in the dtype in which the parameter
is used, and a rank that casts whole weights computes some projections together (``models/linear_layers.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.config.schema import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.models.linear_layers import CASTS, JOINED, Together, can_join, product_dtype
from hpc_train.models.model import Model, keep_shared
from hpc_train.models.moe import Experts
from hpc_train.parallel.precision.float8 import Float8Linear

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


def set_parameter_dtypes(
    model: nn.Module, precision: PrecisionConfig, is_sharded: bool, device: torch.device | None = None
) -> None:
    """Converts parameters and buffers in place to ``parameter_dtype``, or frozen weights to the compute dtype.

    A frozen weight needs no more precision than the forward pass uses. It is held in the compute dtype if

    - no checkpoint would lose its value: checkpoints do not contain it, since it is read from files again (the base
      model of adapters), or ``model`` already holds it in this dtype; and
    - each use casts it in any case, so that the numbers are those of a weight in fp32: with ZeRO, which gathers all
      parameters in the compute dtype, always; otherwise in linear layers, convolutions and the embeddings of a stem.

    Args:
        model: a model or stage, sharded or not, after ``set_hidden_dtype``.
        is_sharded: whether ZeRO shards or will shard its parameters.
        device: the device to move it to; None leaves it where it is.
    """
    wide = parameter_dtype(precision.name)
    narrow = compute_dtype(precision.name)
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    if getattr(model, "saves_frozen", True):
        frozen = {parameter for parameter in frozen if parameter.dtype == narrow}
    if not is_sharded:
        for module in model.modules():
            if not _casts_on_use(model, module, narrow):
                frozen -= {*module.parameters(recurse=False)}

    def convert(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.to(device=device)
        if narrow is not None and value in frozen:
            return value.to(device=device, dtype=narrow)
        return value.to(device=device, dtype=wide)

    with keep_shared(model):
        model._apply(convert)


def _casts_on_use(model: nn.Module, module: nn.Module, narrow: torch.dtype | None) -> bool:
    """Returns whether ``module``, a part of ``model``, only uses its weights in the compute dtype ``narrow``."""
    if isinstance(model, Model) and type(module).forward is nn.Embedding.forward:
        return model.hidden_dtype == narrow and model.stem is not None and module in {*model.stem.modules()}
    return type(module).forward in _FORWARDS and "forward" not in module.__dict__


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
    """Returns the dtype of ``KeptCasts``; None if weights are in it already."""
    if layout.shards_state or precision.weights == "bf16":
        return None
    return compute_dtype(precision.name)


def hidden_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Returns the dtype of the hidden states between layers and between pipeline stages, under every strategy."""
    narrow = compute_dtype(precision.name) if precision.residual == "compute" else None
    return narrow or parameter_dtype(precision.name)


_FIRST = torch.iinfo(
    torch.int64
).max  # the priority in autograd's queue; only the accumulation of gradients has a higher one


def _convolution(module: Any, input: Tensor) -> Tensor:
    result: Tensor = module._conv_forward(input, *_operands(module, input))
    return result


def _operands(module: Any, input: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the casts of weight and bias, or the parameters if the caller has left autocast."""
    casts: tuple[Tensor, Tensor | None] = module.kept_casts
    if casts[0].dtype == product_dtype(input):
        return casts
    return module.weight, module.bias


# by the forward of the class, since a subclass that overrides it may read its weight in any way
_FORWARDS: dict[Any, Callable[[Any, Tensor], Tensor]] = {
    nn.Linear.forward: lambda module, input: F.linear(input, *_operands(module, input)),
    Float8Linear.forward: Float8Linear.forward,  # which reads its casts itself
    nn.Conv1d.forward: _convolution,
    nn.Conv2d.forward: _convolution,
    nn.Conv3d.forward: _convolution,
}


class KeptCasts:
    """Casts each matrix to the compute dtype once per optimizer step, for the strategies that do not shard parameters.

    Autocast forgets its casts after the forward pass of a micro-batch, a recomputation casts again, a frozen weight is
    cast at every use, and compiled code casts in every call. Here linear layers and convolutions get copies of their
    weights and biases that live until the last backward pass of a step; projections of the same input are cast into
    one tensor (``models/linear_layers.py``). The numbers are the same as with autocast: the gradient of a micro-batch
    is summed in the compute dtype and then added to the parameter's. Norms still cast their vectors in each call, so
    that the gradients of several calls (of the head for chunks of the loss) are summed in fp32.

    Args:
        parts: the modules that this rank trains, after they are wrapped and have their values.
        dtype: the dtype in which matrix products are computed; None casts nothing.
    """

    def __init__(self, parts: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        modules = [module for part in parts for module in part.modules()] if dtype is not None else []
        self._modules = [module for module in modules if _casts_weight(module, dtype)]
        self._experts = [module for module in modules if isinstance(module, Experts)]
        self._owners = [module for module in modules if isinstance(getattr(module, "together", None), Together)]

    def leave_out(self, written: Iterable[nn.Parameter]) -> None:
        """Stops keeping casts of the parameters ``written``, since the forward pass itself writes to them."""
        left_out = set(written)

        def keeps(module: nn.Module) -> bool:
            return not any(parameter in left_out for parameter in module.parameters())

        self._modules = [module for module in self._modules if keeps(module)]
        self._owners = [owner for owner in self._owners if keeps(owner)]
        self._experts = [experts for experts in self._experts if keeps(experts)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context for all forward and backward passes of a step.

        A weight may change once no pass of the step needs it.
        """
        try:
            self._begin()
            yield
        finally:
            for module in (*self._modules, *self._owners, *self._experts):
                for name in (CASTS, "forward", JOINED):
                    module.__dict__.pop(name, None)

    def _begin(self) -> None:
        casts: dict[Tensor | None, Tensor | None] = {None: None}  # by parameter, since modules may share one
        joined = {projection for owner in self._owners for projection in self._join(owner)}
        for module in (module for module in self._modules if module not in joined):
            parameters = [module._parameters[name] for name in ("weight", "bias")]
            for parameter in parameters:
                if parameter not in casts:
                    assert parameter is not None
                    casts[parameter] = self._cast(parameter)
            module.__dict__[CASTS] = tuple(casts[parameter] for parameter in parameters)
            module.__dict__["forward"] = MethodType(_FORWARDS[type(module).forward], module)

        for experts in self._experts:
            experts.__dict__[CASTS] = tuple(self._cast(parameter) for parameter in experts.parameters())

    def _join(self, owner: Any) -> list[nn.Module]:
        """Casts the weights of the projections of ``owner`` into one tensor, and returns these projections."""
        projections: list[nn.Module] = owner.together.of(owner)
        if not (can_join(projections) and all(_casts_weight(projection, self._dtype) for projection in projections)):
            return []
        owner.__dict__[JOINED] = tuple(self._cast_together(projections, name) for name in ("weight", "bias"))
        return projections

    def _cast_together(self, projections: Iterable[nn.Module], name: str) -> Tensor | None:
        parameters = (projection._parameters[name] for projection in projections)
        casts = [self._cast(parameter) for parameter in parameters if parameter is not None]
        if casts:
            return _first(torch.cat(casts))
        return None

    def _cast(self, parameter: Tensor) -> Tensor:
        return _first(parameter.to(self._dtype))


def kept_by(module: nn.Module) -> Iterator[Tensor]:
    """Yields the casts that ``module`` and its submodules currently keep."""
    for inner in module.modules():
        for name in (CASTS, JOINED):
            yield from (cast for cast in inner.__dict__.get(name, ()) if cast is not None)


def _casts_weight(module: nn.Module, dtype: torch.dtype | None) -> bool:
    """Returns whether ``module`` only uses its weight in ``dtype``, and whether the weight is itself a parameter."""
    weight = module._parameters.get("weight")
    is_plain = type(module).forward in _FORWARDS and "forward" not in module.__dict__ and "bias" in module._parameters
    return is_plain and weight is not None and weight.dtype in (torch.float32, dtype)


def _first(copy: Tensor) -> Tensor:
    """Gives the node of ``copy`` the highest priority in the backward pass.

    Autograd runs the newest of the nodes that are ready first. A cast is older than every node of the later
    micro-batches, so the gradients of all weights would wait in the compute dtype for the end of the backward pass, and
    their reduction could not overlap with it.
    """
    if copy.grad_fn is not None:
        copy.grad_fn._set_sequence_nr(_FIRST)  # type: ignore[attr-defined]
    return copy
