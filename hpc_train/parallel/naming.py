"""Canonical names of parameters, without the names of wrappers, and parameters that two modules share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

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
