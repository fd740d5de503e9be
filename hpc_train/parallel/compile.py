"""torch.compile per layer: equal layers are compiled once, and names stay as they are.

The ranks of a node compile the same graphs. They share the compiler's cache on disk (``TORCHINDUCTOR_CACHE_DIR``, which
on Slurm is node-local) and take turns: the first compiles a graph, and the others find it there. Graphs of GPUs name
their device, so there only the kernels of Triton are found, not the whole graph.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import fx, nn

from hpc_train.models.model import Model


def compile_layers(model: nn.Module) -> None:
    """Compiles each layer of ``model`` in place, or the whole model where it has no ``layers``.

    After activation checkpointing is applied and before the model is sharded.
    """
    for module in model.layers.values() if isinstance(model, Model) else (model,):
        module.compile(backend=_in_turn)


def _in_turn(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """torch's own backend; one function for all layers, since another one would compile them again."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # half a second, for those who compile

    def alone(*args: Any, **kwargs: Any) -> Any:
        with _turn():  # nothing in here waits for another rank
            return compile_fx_inner(*args, **kwargs)

    compiled: Any = compile_fx(graph, list(inputs), inner_compile=alone)
    return compiled


@contextmanager
def _turn() -> Iterator[None]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with Path(cache_dir(), "hpc_train.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # processes that were forked meanwhile have the file open still
