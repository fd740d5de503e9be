"""Defines the interface of a model that can be split and sharded, and the canonical names of its parameters.

A model is checked for completeness, since a missing method would otherwise fail in the middle of a build, and hidden
states of a wrong shape would abort the workers of a pipeline in the communication library without a message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.data.dataset import Batch, Ragged
from hpc_train.errors import UserError
from hpc_train.models.own_loss import Gather, alone, call_loss, mixes_samples


@dataclass(frozen=True)
class FlopTerms:
    """Holds the terms of the FLOPs of one sample on which conventions differ.

    Attributes:
        masked: FLOPs that ``flops_per_sample`` counts for pairs of tokens that a causal mask excludes; None if no mask
            is causal.
        embedding: FLOPs of the embedding as a matrix product, which ``flops_per_sample`` does not count.
    """

    masked: float | None
    embedding: float


@dataclass(frozen=True)
class TokenShares:
    """Describes which tokens of each sequence a context-parallel rank holds.

    Ranks that exchange heads hold consecutive shards. Of ``2 * ring`` chunks, rank ``r`` of a ring holds the chunks
    ``r`` and ``2 * ring - 1 - r`` (zigzag). With both, the ranks that exchange heads hold shards of these two chunks.

    Attributes:
        ranks: the number of context-parallel ranks.
        rank: the position of this rank among them.
        ring: the number of ranks of a ring, whose neighbors are ``ranks / ring`` apart; 1 without one.
    """

    ranks: int = 1
    rank: int = 0
    ring: int = 1

    @property
    def unit(self) -> int:
        """Returns the number of which the number of tokens must be a multiple."""
        return self.ranks * (2 if self.ring > 1 else 1)

    def of_rank(self, sequences: Tensor, dim: int) -> Tensor:
        """Returns the tokens of this rank, which are along ``dim``."""
        exchanging = self.ranks // self.ring
        if self.ring > 1:
            chunks = sequences.chunk(2 * self.ring, dim)
            first = self.rank // exchanging
            sequences = torch.cat((chunks[first], chunks[-1 - first]), dim)
        return sequences.chunk(exchanging, dim)[self.rank % exchanging]

    def joined(self, shares: Sequence[Tensor], dim: int) -> Tensor:
        """Returns whole sequences from the tokens of all ranks."""
        sequences = torch.cat([*shares], dim)
        if self.ring == 1:
            return sequences
        chunks = sequences.chunk(2 * self.ring, dim)
        return torch.cat((*chunks[::2], *reversed(chunks[1::2])), dim)


Observe = Callable[[Any, Tensor], None]  # (outputs, targets)


class Head(nn.Module):
    """Implements the last part of a model, which computes the loss from hidden states. ``observe`` is called with the
    outputs and targets of each micro-batch in an evaluation with metrics."""

    observe: Observe | None = None

    @property
    def own_count(self) -> bool:
        """Returns whether the count that ``loss`` returns may differ from the number of targets that are not
        ``IGNORED``.

        If it cannot differ, the count of the global batch is known before the step, and the gradients need no
        correction. A head whose ``loss`` counts exactly these targets may override this with ``own_count = False``.
        """
        return True

    @abstractmethod
    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a sum of losses and a count, both scalars on the device.

        The loss of a step and its gradient are sums over all ranks and micro-batches, divided once by the sum of the
        counts. A count may be a number of targets or samples, or a sum of weights. No gradient flows through it.
        Targets that are ``IGNORED`` (padding) must not contribute to either. A loss that compares the samples of the
        batch has a third parameter, ``gather``, and no accuracy; see ``models/own_loss.py``.
        """

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor | None:
        """Returns the number of correct top-1 predictions; None if the model has no accuracy.

        The accuracy is this number divided by the count of ``loss``, so both have the same unit.
        """
        return None

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the results of ``loss`` and ``correct``, and calls ``observe``. A head with large logits overrides
        this method to compute the logits only once."""
        if self.observe is not None:
            self.observe(self(hidden), targets)
        return (*call_loss(self.loss, False, hidden, targets, alone), self.correct(hidden, targets))


class Model(nn.Module):
    """A model in three parts: ``stem``, ``layers`` (with the keys "0", "1", …) and ``head``.

    A pipeline stage holds some of the parts: an absent stem or head is ``None``, and absent layers are not in the dict.
    Parameter names such as ``layers.7.attention.wq.weight`` are global, so a checkpoint loads into every layout. Models
    are built on the ``meta`` device, cut and sharded, and then get memory and values.
    """

    stem: nn.Module | None
    layers: nn.ModuleDict
    head: Head | None
    tied: Mapping[str, str] = {}  # alias -> canonical name, both global; instances may override
    config: Any = None  # the config of a model that a family builds
    family: str | None = None  # the ``model.kind`` of the family; None for a custom model
    hidden_dtype: torch.dtype | None = (
        None  # dtype of hidden states between layers; None keeps the dtype of the stem's output
    )
    # whether checkpoints contain the parameters that do not train; False if their values are read from files again
    saves_frozen: bool = True
    sequence_shards: int = 1  # set by tensor parallelism: hidden states hold 1/sequence_shards of the sequence
    # set by context parallelism: the tokens of inputs and hidden states; the context of a batch covers full sequences
    token_shares: TokenShares = TokenShares()
    gather: Gather = staticmethod(alone)  # set by the engine, for a loss that compares samples

    @property
    def own_count(self) -> bool:
        """Returns ``Head.own_count``, or True if the model overrides ``forward`` and therefore may return another
        count."""
        return getattr(self.head, "own_count", True) or type(self).forward is not Model.forward

    @property
    def mixes_samples(self) -> bool:
        """Returns whether the loss compares the samples of a batch."""
        return self.head is not None and mixes_samples(self.head.loss)

    def forward(
        self, hidden: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """Runs the parts that this module holds.

        Args:
            hidden: the inputs of the model if the stem is present, else the hidden states of the previous stage.
            context: tensors that every layer gets.
            targets: the targets of the loss. A stage without the head uses them only for ``batch_context``.

        Returns:
            Without the head, hidden states. With the head but without ``targets``, logits. Otherwise the sum of losses
            and the count, and in evaluation mode also the number of correct predictions.

        Raises:
            UserError: the head does not return a sum and a count.
        """
        context = self.prepare(hidden, context)
        if targets is not None:
            context = {**self.batch_context(targets), **context}
        if self.stem is not None:
            hidden = self.stem(hidden, context)  # a user's stem may also return integers, or several tensors
            if self.hidden_dtype is not None and isinstance(hidden, Tensor) and hidden.is_floating_point():
                hidden = hidden.to(self.hidden_dtype)
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        if self.head is None:
            return hidden
        return self.run_head(self.head, hidden, targets)

    def run_head(
        self, head: Head, hidden: Tensor, targets: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """Returns what ``forward`` returns with ``head``; under ZeRO a function that gathers the head replaces it."""
        if targets is None:
            logits: Tensor = head(hidden)
            return logits
        if not self.training and not self.mixes_samples:
            return head.evaluate(hidden, targets)
        sums = call_loss(head.loss, self.mixes_samples, hidden, targets, self.gather)
        if self.training:
            return sums
        return (*sums, None)

    def prepare(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns ``context`` with the tensors that all layers share, such as rotary tables."""
        return context

    def batch_context(self, targets: Tensor) -> Mapping[str, Tensor]:
        """Returns what the layers read of ``targets``, added to the context on every pipeline stage. Under context
        parallelism these are the targets of whole sequences."""
        return {}

    @abstractmethod
    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Returns the shape of the hidden states between layers for a micro-batch of ``inputs``."""

    @abstractmethod
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills ``value`` (the full parameter ``name``, never a shard) in place with its initial values."""

    def starts_on_host(self, name: str) -> bool:
        """Returns whether the initial values of the parameter ``name`` are read from files or drawn on the CPU.
        Replicas then get them from the first replica."""
        return False

    def stored_box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        """Returns a box of the parameter ``name`` whose values are read from files, in any dtype.

        By default it returns None, so that ``init_parameter`` fills the full parameter. A rank that holds a shard calls
        it with the box of its shard, so that the rank needs memory for this shard only.
        """
        return None

    @abstractmethod
    def init_buffers(self, device: torch.device) -> None:
        """Recomputes the buffers that are not in checkpoints, after a build on ``meta``."""

    @abstractmethod
    def flops_per_sample(self, inputs: Tensor) -> float:
        """Returns the FLOPs of forward and backward pass for one sample; subclasses document the formula.

        The count covers the full model, also on a pipeline stage. ``inputs`` is a micro-batch of which only the shape
        is read, so it may be on ``meta``; a language model's count depends on the sequence length.
        """

    def flop_terms(self, inputs: Tensor) -> FlopTerms | None:
        """Returns the terms that other conventions add to ``flops_per_sample`` or omit; None if they are unknown."""
        return None

    def block_flops(self, inputs: Tensor) -> tuple[float, ...] | None:
        """Returns the parts of ``flops_per_sample`` in the stem, each layer and the head; None if they are unknown."""
        return None

    def forward_flops(self, inputs: Tensor) -> tuple[float, ...] | None:
        """Returns the FLOPs of the forward pass in the parts of ``block_flops``: a third of them if all parameters
        train."""
        blocks = self.block_flops(inputs)
        if blocks is None:
            return None
        return tuple(flops / 3 for flops in blocks)

    def attention_backends(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> dict[int | None, str]:
        """Returns window (None without a window) -> description of the attention implementation for ``batch``, for the
        log.

        Modules of the class ``Attention`` are not included. Queries, keys and values have ``dtype``.
        """
        return {}


def refuse_ragged(batch: Batch) -> None:
    """Raises UserError if the micro-batch is ragged, since the parts of a model need one row per item."""
    if isinstance(batch.inputs, Ragged):
        raise UserError(
            "data.collate returns Ragged, which models with a stem, layers and a head do not take, and so neither do "
            "pipelines, tensor and context parallelism",
            where="data.collate, model",
            fix="an nn.Module without these parts under strategy=single, dp, zero1, zero2, zero3 or hsdp; or pad to "
            "one row per item",
        )


WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")  # DDP, torch.compile, activation checkpointing


def canonical_name(raw: str) -> str:
    """Returns ``layers.0.norm.weight`` for ``layers.0._checkpoint_wrapped_module.norm.weight``.

    DDP's ``module.`` is removed only at the start, since a user's model may have a part of that name.
    """
    name = raw.removeprefix(WRAPPERS[0])
    for wrapper in WRAPPERS[1:]:
        name = name.replace(wrapper, "")
    return name


def aliases(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns alias -> canonical name of the tensors that have several names in ``named``. The first name is
    canonical."""
    first: dict[int, str] = {}
    canonical = [(canonical_name(raw), first.setdefault(id(tensor), canonical_name(raw))) for raw, tensor in named]
    return {name: canonical_of for name, canonical_of in canonical if name != canonical_of}


def named_parameters(parts: Iterable[nn.Module], tied: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """Returns the parameters of ``parts`` by canonical name, without those that ``Model.saves_frozen`` excludes.
    ``tied`` maps the alias of a tied copy to its canonical name."""
    parameters: dict[str, nn.Parameter] = {}
    for part in parts:
        for raw, parameter in part.named_parameters():
            if parameter.requires_grad or getattr(part, "saves_frozen", True):
                name = canonical_name(raw)
                parameters.setdefault(tied.get(name, name), parameter)
    return parameters


def named_buffers(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Returns canonical name -> buffer for the buffers that are saved in checkpoints."""
    return {name: buffer for part in parts for name, buffer in _persistent(part)}


def _persistent(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in part.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{prefix}.{name}" if prefix else name), buffer


@contextmanager
def keep_shared(module: nn.Module) -> Iterator[None]:
    """Shares parameters again after this context replaced them module by module (``to_empty``, ``parallelize_module``).

    Names that referred to the same parameter before the context refer to the replacement of its first name afterwards.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    yield
    for first, *others in groups.values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, module.get_parameter(first))


METHODS = ("hidden_shape", "init_parameter", "init_buffers", "flops_per_sample")


def check_parts(model: Model, where: str) -> None:
    """Checks the methods and parts of a complete model. Raises UserError if a method is not implemented, or if the
    stem, the layers or the head cannot be used."""
    problems = [f"{name} is not implemented" for name in METHODS if getattr(type(model), name) is getattr(Model, name)]
    problems += _problems_of_parts(model)
    if problems:
        raise UserError(
            f"the model {type(model).__name__} is not complete: {'; '.join(problems)}",
            where=where,
            fix="see hpc_train.models.model.Model, and examples/own_pipeline_model.py for a complete model",
        )


def _problems_of_parts(model: Model) -> Iterator[str]:
    parts: dict[str, Any] = {name: getattr(model, name, None) for name in ("stem", "layers", "head")}
    yield from (f"{name} is not set" for name, part in parts.items() if part is None)
    stem, layers, head = parts.values()
    if stem is not None and not isinstance(stem, nn.Module):
        yield f"stem is a {type(stem).__name__}, but must be an nn.Module"
    if layers is not None and not isinstance(layers, nn.ModuleDict):
        yield f'layers is a {type(layers).__name__}, but must be an nn.ModuleDict with the keys "0", "1", ...'
    elif layers is not None and list(layers) != [str(index) for index in range(len(layers))]:
        yield f'the keys of layers are {", ".join(layers)}, but must be "0", "1", ... in this order'
    if head is not None and not isinstance(head, Head):
        yield f"head is a {type(head).__name__}, but must derive from hpc_train.models.model.Head"
    elif head is not None and type(head).loss is Head.loss:
        yield f"the head {type(head).__name__} does not implement loss"


def check_hidden_shape(model: Model, inputs: Tensor, context: Mapping[str, Tensor]) -> None:
    """Runs the stem and the layers on ``meta``, which computes only shapes, and compares each with ``hidden_shape``.

    ``model`` is complete and on ``meta``; a model that cannot run there is not checked. ``inputs`` and ``context`` of a
    micro-batch may be on any device. Raises UserError if a shape differs from ``hidden_shape``, the shape of the
    messages between pipeline stages.
    """
    inputs = inputs.to("meta", torch.float32) if inputs.is_floating_point() else inputs.to("meta")
    stated = _stated_shape(model, inputs)
    for part, shape in _shapes(model, inputs, {name: value.to("meta") for name, value in context.items()}):
        if shape != stated:
            raise UserError(
                f"{part} of the model {type(model).__name__} returns hidden states of shape {shape}, but hidden_shape "
                f"returns {stated} for inputs of shape {tuple(inputs.shape)}",
                where=f"{type(model).__name__}.hidden_shape",
                fix="return a tensor of the shape that hidden_shape returns from the stem and from each layer",
            )


def _stated_shape(model: Model, inputs: Tensor) -> tuple[int, ...]:
    stated = model.hidden_shape(inputs)
    if isinstance(stated, tuple) and len(stated) > 1 and all(isinstance(size, int) for size in stated):
        return tuple(stated)
    raise UserError(
        f"hidden_shape of the model {type(model).__name__} returns {stated!r} for inputs of shape "
        f"{tuple(inputs.shape)}",
        where=f"{type(model).__name__}.hidden_shape",
        fix="return a tuple of two or more integers that begins with the number of samples: (len(inputs), width)",
    )


def _shapes(model: Model, inputs: Tensor, context: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Yields each part with the shape, or the type, of its result; ends early if a part cannot run on ``meta``."""
    hidden: Any = inputs
    parts = {"stem": model.stem} | {f"layers.{key}": layer for key, layer in model.layers.items()}
    training = model.training
    model.eval()  # without dropout, which draws random numbers
    try:
        with torch.no_grad():
            context = model.prepare(inputs, context)
            for name, part in parts.items():
                assert part is not None
                hidden = part(hidden, context)
                yield name, tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
    except UserError:
        raise
    except Exception:  # the training itself reports an error that is not due to meta
        return
    finally:
        model.train(training)
