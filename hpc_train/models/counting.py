"""Counts what a model computes and keeps, by running it on tensors without values.

``python -m hpc_train.models.counting FILE`` reads a pickled ``Config`` from standard input. It writes the counts to
FILE as JSON, or the reason why the model cannot be counted. ``planner/work.py`` starts it as a process, since it
imports torch and code of the user.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hpc_train.config.schema import Config, HFModelConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import Batch, Ragged
from hpc_train.data.feed import example_micro_batch
from hpc_train.errors import UserError
from hpc_train.layout.counted import Block, Counts, file_hash, has_own_samples, sample_shape, versions
from hpc_train.layout.layout import Layout
from hpc_train.models.build import build_model
from hpc_train.models.hf.nf4 import NF4Linear
from hpc_train.models.linear_layers import calls_of, products_of
from hpc_train.models.model import Model, keep_shared
from hpc_train.models.wrapped import WrappedModel

SAMPLES = 2  # the samples of the micro-batch: a norm over a batch needs more than one
MEMORY = 16 << 30  # bytes that the process may allocate, for models that cannot be built without values
STEM, HEAD = "stem", "head"
_ATEN = torch.ops.aten
_PAIRS = (_ATEN.bmm, _ATEN.baddbmm)  # products of two activations
_FUSED = {
    _ATEN._scaled_dot_product_flash_attention: 1,
    _ATEN._scaled_dot_product_efficient_attention: 1,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: 1,
    _ATEN._scaled_dot_product_flash_attention_backward: 2,
    _ATEN._scaled_dot_product_efficient_attention_backward: 2,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: 2,
}


def count(config: Config) -> Counts:
    """Returns the counts of the model of ``config`` for one sample.

    A module of the user whose operations depend on values is run with values instead, which takes time and memory.
    Raises UserError if the model or its data cannot be built, or the operations of a ``Model`` depend on values.
    """
    batch = _batch(config)
    try:
        return _without_values(config, batch)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        model = None
        if config.model.kind == "custom":
            model = build_model(config.model, config.train.seed)
        if not isinstance(model, WrappedModel):
            raise UserError(
                f"its operations depend on values of tensors ({error.func}), and it is counted without values",
                where="model",
                fix="operations whose shapes follow from those of the inputs, or a ModelFamily with parameters, "
                "activations and flops_per_sample (docs/extend.md)",
            ) from error
        return _counts(config, model, batch)


def _without_values(config: Config, batch: Batch) -> Counts:
    model_config = config.model
    if isinstance(model_config, HFModelConfig) and model_config.lora.rank is None:
        model_config = replace(model_config, pretrained=False)  # the counts do not depend on the values
    model = build_model(model_config, config.train.seed, values=False)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with keep_shared(model):
            model.to_empty(device=torch.device("cpu"))
        batch = batch.map(mode.from_tensor)
        return _counts(config, model, batch)


def _batch(config: Config) -> Batch:
    """Returns a micro-batch of ``SAMPLES`` samples, read from the data if the config does not define their shape."""
    if has_own_samples(config.data):
        layout = Layout(1, 1, 1, 1, "ddp", "sequential", 1, 1, SAMPLES)
        dataset = build_dataset(config.data, "train", config.train.seed, config.precision.name)
        example = example_micro_batch(dataset, layout, torch.device("cpu"))
        if isinstance(example.inputs, Ragged):
            raise UserError(
                "data.collate returns Ragged, so the size of a sample is not known, and the model is not counted",
                where="data.collate",
                fix="train without an estimate, and measure (train.steps=10)",
            )
        return example
    shape = (SAMPLES, *sample_shape(config.data))
    if len(shape) > 2:
        return Batch(torch.zeros(shape), torch.zeros(SAMPLES, dtype=torch.int64))
    return Batch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


class _Block:
    """Collects the counts of one block for a micro-batch."""

    def __init__(self) -> None:
        self.products = self.attention = self.backward = self.results = 0
        self.kernels = self.input_bytes = self.hidden = 0
        self.kept: list[tuple[int, int]] = []  # bytes and elements of each kept tensor


class _Trace:
    """Counts the forward and backward pass of a micro-batch by block."""

    def __init__(
        self, model: Model | WrappedModel, batch: Batch, compute: torch.dtype | None, hidden: torch.dtype | None
    ) -> None:
        self.names = block_names(model)
        self.blocks = {name: _Block() for name in (STEM, *self.names, HEAD)}
        self.current = STEM
        self.backward = False
        self.alive: list[Any] = []  # keeps storages, so that no address is used twice
        self.known = {self._address(tensor) for tensor in (*model.parameters(), *model.buffers())}
        if isinstance(model, Model):
            model.hidden_dtype = hidden
        model.train()
        with ExitStack() as stack:
            for name in self.names:
                self._follow(model.get_submodule(name), name, stack)
            self.calls = stack.enter_context(calls_of(model, self._address))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            stack.enter_context(_Operations(self))
            if isinstance(next(batch.tensors), FakeTensor):
                stack.enter_context(_Substitutes(compute))
            with nullcontext() if compute is None else torch.autocast("cpu", dtype=compute):
                total = model(batch.inputs, batch.context, batch.targets)[0]
            self.backward = True
            total.backward()
        model.zero_grad(set_to_none=True)

    def _follow(self, module: nn.Module, name: str, stack: ExitStack) -> None:
        def begin(_: nn.Module, inputs: Sequence[Any]) -> None:
            self.current = name
            given = next((value for value in inputs if isinstance(value, Tensor)), None)
            if given is not None:
                block = self.blocks[name]
                block.input_bytes = given.nbytes
                block.hidden = given.numel()

        def end(*_: Any) -> None:
            self.current = HEAD

        stack.callback(module.register_forward_pre_hook(begin).remove)
        stack.callback(module.register_forward_hook(end).remove)

    def _address(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.alive.append(storage)
        return storage._cdata

    def _pack(self, tensor: Tensor) -> tuple[Tensor, str]:
        address = self._address(tensor)
        if address not in self.known:
            self.known.add(address)
            size = tensor.untyped_storage().nbytes()
            self.blocks[self.current].kept.append((size, size // tensor.element_size()))
        return tensor, self.current

    def _unpack(self, packed: tuple[Tensor, str]) -> Tensor:
        tensor, self.current = packed  # the backward of this block follows
        return tensor

    def saw(self, function: Any, operation: Any, arguments: Sequence[Any], results: Any) -> None:
        """Counts one operation."""
        block = self.blocks[self.current]
        first = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
        if operation is _ATEN._to_copy and isinstance(first, nn.Parameter):
            self.known.add(self._address(results))  # the estimate counts the casts of parameters separately
        flops = _flops(operation, arguments, results)
        if self.backward:
            block.backward += flops
            return
        block.kernels += not function.is_view and function.namespace == "aten" and operation is not _ATEN._unsafe_view
        if flops and (operation in _FUSED or operation in _PAIRS):
            block.attention += flops
        else:
            block.products += flops
        if flops:
            block.results += (results[0] if isinstance(results, tuple) else results).numel()


def _flops(operation: Any, arguments: Sequence[Any], results: Any) -> int:
    """Returns the operations of one call: two per multiplication and addition; fused attention is not halved."""
    if operation in _FUSED:
        query, key, value = arguments[:3] if _FUSED[operation] == 1 else arguments[1:4]
        *heads, length, width = query.shape
        pairs = length * key.shape[-2]
        for size in heads:
            pairs *= size
        return 2 * _FUSED[operation] * pairs * (width + value.shape[-1])
    count = flop_registry.get(operation)
    if count is None:
        return 0
    return int(count(*arguments, out_val=results))


class _Operations(TorchDispatchMode):
    """Reports each operation to a trace."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.trace.saw(function, function._overloadpacket, args, results)
        return results


_IN_FP32 = {
    F.layer_norm,
    F.softmax,
    F.log_softmax,
    torch.softmax,
    torch.log_softmax,
    Tensor.softmax,
    Tensor.log_softmax,
}


class _Substitutes(TorchFunctionMode):
    """Computes like a GPU if the CPU differs, and handles operations whose shape depends on values.

    Attention is fused, autocast keeps norms and softmax in fp32, and a boolean mask selects all elements.
    """

    def __init__(self, compute: torch.dtype | None) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if function is F.rms_norm:
            weight = kwargs.get("weight")
            if weight is not None and args[0].dtype == weight.dtype:  # the fused kernel of GPUs requires equal dtypes
                return _FusedRMSNorm.apply(args[0], weight)
        if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return args[0].flatten(0, args[1].ndim - 1)
        if function in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = tuple(
                value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
                for value in args
            )
        return function(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if self.compute is not None and torch.is_autocast_enabled("cpu"):
            query, key, value = (tensor.to(self.compute) for tensor in (query, key, value))
        if attn_mask is None:
            return _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if key.shape[1] != query.shape[1]:
            key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
        bias = attn_mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])
        results = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
        return results[0]


class _FusedRMSNorm(torch.autograd.Function):
    """Saves the same tensors as the kernel of GPUs: its inputs and the reciprocal of each row's norm."""

    @staticmethod
    def forward(context: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(inputs, weight, torch.empty(inputs.shape[:-1]))
        return torch.empty_like(inputs)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        inputs, weight, _ = context.saved_tensors
        return torch.empty_like(inputs), torch.empty_like(weight)


def block_names(model: Model | WrappedModel) -> tuple[str, ...]:
    """Returns the names of the layers, or of the blocks that are sharded and recomputed one by one."""
    if isinstance(model, Model):
        return tuple(f"layers.{key}" for key in model.layers)
    return model.block_names


def _counts(config: Config, model: Model | WrappedModel, batch: Batch) -> Counts:
    rounded = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    if model.saves_frozen:
        rounded = {parameter for parameter in rounded if parameter.itemsize == 2}
    packed = {part.packed: part.weights for part in model.modules() if isinstance(part, NF4Linear)}
    for parameter in rounded.difference(packed):
        parameter.data = parameter.data.float()  # for the passes in fp32
    wide = _Trace(model, batch, None, None)
    hidden_dtype = torch.float32 if config.precision.residual == "fp32" else torch.bfloat16
    narrow = _Trace(model, batch, torch.bfloat16, hidden_dtype)
    is_model = isinstance(model, Model)
    seen = set[int]()
    # a shared parameter belongs to its first block, and parameters outside of blocks belong to the stem or the head
    owned: dict[str, list[nn.Parameter]] = {STEM: [], **{name: [] for name in wide.names}, HEAD: []}
    outside = STEM
    for path, parameter in model.named_parameters():
        inside = next((name for name in wide.names if path.startswith(f"{name}.")), None)
        if is_model:
            outside = HEAD if path.startswith("head.") else STEM
        elif inside:
            outside = HEAD
        if id(parameter) not in seen:
            owned[inside or outside].append(parameter)
        seen.add(id(parameter))
    blocks = [_block(wide.blocks[name], narrow.blocks[name], owned[name], rounded, packed) for name in wide.blocks]
    hidden = wide.blocks[wide.names[0]].hidden // SAMPLES if wide.names else 0
    inputs = batch.inputs
    is_tokens = isinstance(inputs, Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    tokens = inputs.shape[1] if is_tokens else 1
    tied = isinstance(model, Model) and bool(model.tied)
    products = products_of(wide.calls, wide.names, SAMPLES)
    files = {str(path): file_hash(path) for path in sorted(set(_own_modules()))}
    return Counts(tuple(blocks), hidden, tokens, products, isinstance(model, Model), tied, files, versions())


def _block(
    wide: _Block,
    narrow: _Block,
    parameters: Sequence[nn.Parameter],
    rounded: Collection[nn.Parameter],
    packed: Mapping[nn.Parameter, int],
) -> Block:
    largest = max(wide.kept, default=(0, 0), key=lambda entry: entry[0])
    counts = {parameter: packed.get(parameter, parameter.numel()) for parameter in parameters}
    return Block(
        parameters=sum(counts.values()),
        trained=sum(counts[parameter] for parameter in parameters if parameter.requires_grad),
        narrow=sum(counts[parameter] for parameter in parameters if parameter in rounded),
        quantized=sum(counts[parameter] for parameter in parameters if parameter in packed),
        products=wide.products / SAMPLES,
        attention=wide.attention / SAMPLES,
        backward=wide.backward / SAMPLES,
        results=wide.results / SAMPLES,
        kernels=wide.kernels,
        largest=largest[1] / SAMPLES,
        wide_bytes=sum(size for size, _ in wide.kept) / SAMPLES,
        narrow_bytes=sum(size for size, _ in narrow.kept) / SAMPLES,
        wide_input=wide.input_bytes / SAMPLES,
        narrow_input=narrow.input_bytes / SAMPLES,
    )


def _own_modules() -> Iterator[Path]:
    """Yields the files of modules that are neither installed nor part of hpc_train."""
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    package = Path(__file__).parents[1]
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py"):
            path = Path(file)
            if (
                path.is_absolute()
                and path.exists()
                and not any(path.is_relative_to(folder) for folder in (*installed, package))
            ):
                yield path


def main() -> None:
    config = pickle.load(sys.stdin.buffer)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    try:
        answer: dict[str, Any] = {"counts": asdict(count(config))}
    except UserError as error:
        answer = {"what": error.what, "where": error.where, "fix": error.fix}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
