"""Defines the interface of a model that can be split and sharded, and the canonical names of its parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlopTerms:
    """Operations for one sample: of ``attention`` (queries with keys, weights with values) without regard to a mask,
    and what an ``embedding`` table would take as a matrix product, which ``flops_per_sample`` does not count."""

    attention: float
    causal: bool
    embedding: float


class Head(nn.Module):
    """The last part of a model: from hidden states to the loss."""

    @property
    def own_count(self) -> bool:
        """Whether the count that ``loss`` returns may differ from the number of targets that are not ``IGNORED``.

        If not, the count of the global batch is known before the step and the gradients need no correction after it;
        a head whose ``loss`` counts exactly those targets may override this with ``own_count = False``.
        """
        return True

    @abstractmethod
    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A sum of losses and a count, both scalars on the device.

        The loss of a step, and its gradient, are the sum over all ranks and micro-batches divided once by the sum of
        their counts. A count may be a number of targets or of samples or a sum of weights; no gradient flows through
        it. Targets may be ``IGNORED`` (padding): they must add nothing to either.
        """

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor | None:
        """Right top-1 predictions in the unit of the count of ``loss``, by which they are divided to give the accuracy;
        None where that has no meaning."""
        return None

    def evaluate(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """``loss`` and ``correct`` together; a head with costly logits overrides it to compute them once."""
        return (*self.loss(hidden, targets), self.correct(hidden, targets))


class Model(nn.Module):
    """A model in three parts: ``stem``, ``layers`` (keyed "0", "1", …) and ``head``.

    A pipeline stage holds some of them: absent parts are ``None`` and absent layers missing from the dict. Parameter
    names are global and the same under every layout (``layers.7.attention.wq.weight``), which lets one checkpoint serve
    every layout. Models are built on ``meta``, cut and sharded, and only then given memory and values.
    """

    stem: nn.Module | None
    layers: nn.ModuleDict
    head: Head | None
    tied: Mapping[str, str] = {}  # alias -> canonical name, both global; instances may override
    config: Any = None  # the config of a model that a family builds
    family: str | None = None  # the ``model.kind`` that describes it; None: a custom model without a description
    sequence_shards: int = 1  # set by tensor parallelism: hidden states hold 1/sequence_shards of the sequence

    @property
    def own_count(self) -> bool:
        """``Head.own_count`` of the whole model; a ``forward`` of its own may count as it likes."""
        return getattr(self.head, "own_count", True) or type(self).forward is not Model.forward

    def forward(
        self, hidden: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """Runs the parts that are there.

        Args:
            hidden: the inputs of the model where the stem is present, else the hidden states of the stage before.
            context: tensors that every layer gets.
            targets: with the head present: what to compute the loss against.

        Returns:
            Hidden states; with the head, logits; with the head and ``targets``, the sum of losses and the count,
            and in evaluation mode the number of right predictions as a third.
        """
        context = self.prepare(hidden, context)
        if self.stem is not None:
            hidden = self.stem(hidden, context)
        for layer in self.layers.values():
            hidden = layer(hidden, context)
        if self.head is None:
            return hidden
        if targets is None:
            return self.head(hidden)
        return self.head.loss(hidden, targets) if self.training else self.head.evaluate(hidden, targets)

    def prepare(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Adds to ``context`` what all layers share (rotary tables)."""
        return context

    @abstractmethod
    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Shape of the hidden states between layers for one micro-batch of ``inputs``."""

    @abstractmethod
    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills ``value`` (the full parameter ``name``, never a shard) in place with its initial values."""

    @abstractmethod
    def init_buffers(self, device: torch.device) -> None:
        """Recomputes the buffers that are not in checkpoints, after a build on ``meta``."""

    @abstractmethod
    def flops_per_sample(self, inputs: Tensor) -> float:
        """Floating-point operations of forward and backward for one sample; the formula stands in the docstring.

        Of the whole model, also when called on a pipeline stage. ``inputs`` is a micro-batch of which only the shape is
        read (it may be on ``meta``): a language model's count depends on the sequence length.
        """

    def flop_terms(self, inputs: Tensor) -> FlopTerms | None:
        """What other ways of counting leave out of ``flops_per_sample``, or add; None where nobody has said."""
        return None

    def block_flops(self, inputs: Tensor) -> tuple[float, ...] | None:
        """What ``flops_per_sample`` counts in the stem, in each layer and in the head; None where nobody has said."""
        return None


WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")  # DDP, torch.compile, activation checkpointing


def canonical_name(raw: str) -> str:
    """Returns ``layers.0.norm.weight`` for ``layers.0._checkpoint_wrapped_module.norm.weight``.

    DDP's ``module.`` is taken off the front only: a user's model may have a part of that name.
    """
    name = raw.removeprefix(WRAPPERS[0])
    for wrapper in WRAPPERS[1:]:
        name = name.replace(wrapper, "")
    return name


def named_parameters(parts: Iterable[nn.Module], tied: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter of ``parts``; a tied copy (``tied``: alias -> canonical) has its canonical name."""
    found: dict[str, nn.Parameter] = {}
    for part in parts:
        for raw, parameter in part.named_parameters():
            name = canonical_name(raw)
            found.setdefault(tied.get(name, name), parameter)
    return found


def named_buffers(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Canonical name -> buffer, of the buffers that belong into checkpoints."""
    return {name: buffer for part in parts for name, buffer in _persistent(part)}


def _persistent(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in part.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield canonical_name(f"{prefix}.{name}" if prefix else name), buffer


@contextmanager
def keep_shared(module: nn.Module) -> Iterator[None]:
    """Inside, parameters may be replaced module by module (``to_empty``, ``parallelize_module``).

    Afterwards those that were one parameter before are one again: the first one's replacement.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    yield
    for first, *others in groups.values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, module.get_parameter(first))
