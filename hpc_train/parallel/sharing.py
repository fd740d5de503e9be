"""Parameters that two modules share (tied embeddings) and that must still be shared after each was replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
