"""Compiles the layers and the loss of a model, once per node, and keeps the results for the next attempt of the run.

The compiler (TorchInductor) has a cache on disk (``TORCHINDUCTOR_CACHE_DIR``), which is node-local on Slurm and removed
with the job. The ranks of a node share it, and take turns where they would compile the same graph, so that the first
one compiles it and the others load it. A graph contains the index of its device, so ranks with different indices
compile at the same time: they could only share Triton's kernels.

The artifacts of the cache are also kept in the run directory (``torch.compiler.save_cache_artifacts``), one file for
each environment, device index, model, strategy and part of the ranks (``_part``). One rank writes each file, after the
first step and with later checkpoints, and all ranks load theirs before the first step. The compiler takes an artifact
only if its own key of the graph, the versions and the device agrees. Artifacts are pickled code, like the run's own
code directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.compiler._cache import CacheArtifactManager, CacheInfo
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_train.config.schema import Config
from hpc_train.layout.techniques import CompilerMode
from hpc_train.models.model import Model
from hpc_train.models.moe import MixtureOfExperts
from hpc_train.models.packed_attention import kernel_for
from hpc_train.models.wrapped import layers_of
from hpc_train.parallel.collectives import gather_plain
from hpc_train.parallel.mesh import Mesh

FUSES_FP64 = not torch.__version__.startswith(("2.11.", "2.12."))  # compiled attention on CPUs
# The settings of TorchInductor for the number of parts of a concatenation that one kernel writes; torch 2.13 has both.
CONCATENATION = ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs")
MOST_SHAPES = 32  # graphs of a layer: 8 widths of a batch (``data/sampler.py``) and others, with and without gradients


def compile_model(model: nn.Module, mode: CompilerMode = CompilerMode.PLAIN) -> None:
    """Compiles each layer or block of ``model`` in place, or the whole model if it has none.

    Call it after activation checkpointing and the form of the loss are applied and before the model is sharded. Equal
    layers are compiled once. A mixture of experts that exchanges rows is left out. A stem or head that has
    ``compile_with`` chooses what of it is compiled.

    Under DDP torch would cut each layer where a bucket of gradients ends, so that the backward pass can reduce a bucket
    before the graph ends. Gradients are final after each layer anyway, so a layer stays one graph.

    Args:
        mode: ``CUDA_GRAPHS`` requires that each pass of a micro-batch begins with
            ``torch.compiler.cudagraph_mark_step_begin``, ``ASYNC_TP`` that ``share_memory`` was called.
    """
    backend = BACKENDS[mode]
    layers = layers_of(model)
    if not layers and not isinstance(model, Model):
        model.compile(backend=backend)
        return
    import torch._dynamo  # takes 0.3 s; a worker prints its first lines before

    torch._dynamo.config.optimize_ddp = False
    torch.compiler.assume_constant_result(kernel_for)
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    # torch 2.13 cannot trace the gradients of DTensors of unknown sizes, and a CUDA graph has fixed ones
    dynamic = False if mode == CompilerMode.CUDA_GRAPHS or _is_tensor_parallel(model) else None
    for module in model.modules():
        # the number of rows that arrive changes in every step
        if isinstance(module, MixtureOfExperts) and module.exchange is not None:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    for layer in layers:
        _compiled_part(layer).compile(backend=backend, dynamic=dynamic)
    for part in (model.stem, model.head) if isinstance(model, Model) else ():
        compile_with = getattr(part, "compile_with", None)
        if compile_with is not None:
            compile_with(partial(torch.compile, backend=backend, dynamic=dynamic))


def _is_tensor_parallel(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _compiled_part(layer: nn.Module) -> nn.Module:
    """Returns the part of ``layer`` that is compiled: all of it, with its activation checkpointing, if torch supports
    this.

    The graph of a tensor-parallel layer that recomputes everything would keep the mesh for its backward pass, which
    torch 2.13 takes for a tensor. There the layer is compiled inside of its checkpoint, which runs it again as a whole.
    """
    keeps_nothing = isinstance(layer, CheckpointWrapper) and "context_fn" not in layer.checkpoint_fn.keywords
    if keeps_nothing and _is_tensor_parallel(layer):
        inner = layer._checkpoint_wrapped_module
        assert isinstance(inner, nn.Module)
        return inner
    return layer


def share_memory(group: dist.ProcessGroup) -> None:
    """Lets the compiled code of the ranks of ``group`` use symmetric memory. Collective when the compiled code first
    runs.

    torch 2.11 and 2.13 call this unnecessary, but their compiler looks up whether it was done.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def compile_in_turns(
    graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compiles with torch's backend. All layers use one function, since a new function would compile them again.

    Args:
        options: options of the backend, which the backward pass is compiled with as well.
    """
    from torch._inductor import config as inductor_config  # takes half a second, so only import it to compile
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(graph: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        has_mesh = any(isinstance(getattr(value, "real_obj", None), DeviceMesh) for value in inputs)
        apart = _written_apart() if kwargs.get("is_backward") else {}
        # a mesh has the rank, so no other rank has the graph; the compilation does not wait for other ranks
        with stable_keys(), inductor_config.patch(apart), nullcontext() if has_mesh else _turn(_device(inputs)):
            return compile_fx_inner(graph, inputs, *args, **kwargs)

    with _attention(inputs):
        compiled: Any = compile_fx(graph, list(inputs), inner_compile=compile_inner, config_patches=options)
    return compiled


def _written_apart() -> dict[str, int]:
    """Returns the settings with which the parts of a concatenation are written by one kernel each; torch >= 2.13.

    By default code for GPUs selects among all parts for each element. In a backward pass the parts are gradients, such
    as those of queries, keys and values that were computed together (``models/linear_layers.py``): on an H200 they took
    13.8 ms of a step, but the rotation of queries and keys in the forward pass 4 ms (torch 2.11). With these settings
    the generated kernels are like those of the forward pass. That they are as fast is not measured yet.
    """
    from torch._inductor import config as inductor_config

    if all(hasattr(inductor_config, name) for name in CONCATENATION):
        return dict.fromkeys(CONCATENATION, 0)
    return {}


def _attention(inputs: Sequence[Any]) -> AbstractContextManager[None]:
    """Encloses the compilation of a graph, in which attention in fp64 on CPUs takes the kernel that works.

    Before 2.13 the compiler expects fp32 where the fused kernel keeps fp64, and the backward pass of its code fails.
    """
    in_fp64 = any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in inputs)
    if in_fp64 and _device(inputs).type == "cpu" and not FUSES_FP64:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


BACKENDS: dict[CompilerMode, Callable[..., Any]] = {
    CompilerMode.PLAIN: compile_in_turns,
    # records a CUDA graph when it first runs, and replays it
    CompilerMode.CUDA_GRAPHS: partial(compile_in_turns, options={"triton.cudagraphs": True}),
    # joins products with the collectives of their operands and results; torch 2.11 and 2.13 find the two gathers and
    # the two scatters of each pass of a GPT's layer
    CompilerMode.ASYNC_TP: partial(compile_in_turns, options={"_micro_pipeline_tp": True}),
}


def _device(inputs: Sequence[Any]) -> torch.device:
    devices = [value.device for value in inputs if isinstance(value, Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


@contextmanager
def _turn(device: torch.device) -> Iterator[None]:
    """Waits for the other ranks of the node that compile for a device of the same index."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with Path(cache_dir(), f"hpc_train-{device.type}-{device.index or 0}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked processes may still have the file open


def compiled_graphs() -> tuple[int, int]:
    """Returns how many graphs this process has compiled, and how many it has loaded from a cache."""
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    return counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"], counts["fxgraph_cache_hit"]


class KeptArtifacts:
    """Keeps the artifacts of the compiler in ``path``. A failure only writes one line to the log.

    Args:
        writes: whether this rank writes the file.

    Attributes:
        loaded: whether ``load`` found artifacts.
    """

    def __init__(self, path: Path, writes: bool) -> None:
        self.loaded = False
        self._path = path
        self._writes = writes
        self._graphs = 0  # compiled or taken from the cache up to the last save
        self._kept: set[tuple[str, str]] = set()  # kinds and keys of the artifacts in the file

    def load(self) -> None:
        """Loads the artifacts into the cache on disk."""
        try:
            content = self._path.read_bytes()
            with _without_traceback():
                info = torch.compiler.load_cache_artifacts(content)
            if info is not None:
                self._kept = _keys(info)
                self.loaded = True
                return
            problem = "the file is damaged"
        except FileNotFoundError:
            return
        except Exception as error:  # unpickling a damaged file may raise anything
            problem = repr(error)
        print(f"the compiler's artifacts cannot be loaded from {self._path}, so it compiles again: {problem}")

    def save(self) -> None:
        """Replaces the file atomically if this rank writes it and has used artifacts that are not in it.

        Another rank of the node may have compiled them.
        """
        graphs = sum(compiled_graphs())
        if not self._writes or graphs == self._graphs:
            return
        self._graphs = graphs
        try:
            with _without_traceback():
                artifacts = _used_artifacts()
            if artifacts is not None and not _keys(artifacts[1]) <= self._kept:
                self._replace(artifacts[0])
                self._kept = _keys(artifacts[1])
        except Exception as error:
            print(f"the compiler's artifacts cannot be saved to {self._path}: {error!r}")

    def _replace(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)


def _used_artifacts() -> tuple[bytes, CacheInfo] | None:
    """Returns all artifacts that this process has compiled or loaded, as bytes, and their keys; None if there are none.

    A second call of torch's function appends a list of what is new, and of several lists torch 2.11 to 2.13 loads only
    the last one. Here each call makes one list of all.
    """
    manager = CacheArtifactManager
    manager._serializer.clear()
    manager._cache_info.clear()
    manager._new_cache_artifacts.clear()
    for artifact in manager._seen_artifacts:
        manager._new_cache_artifacts[artifact.type()].append(artifact)
    return torch.compiler.save_cache_artifacts()


def _keys(info: CacheInfo) -> set[tuple[str, str]]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}


@contextmanager
def _without_traceback() -> Iterator[None]:
    """Keeps torch from writing the traceback of a damaged file to the log."""
    log = logging.getLogger("torch.compiler._cache")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def kept_artifacts(config: Config, mesh: Mesh, folder: Path) -> KeptArtifacts | None:
    """Returns the artifacts of this rank in ``folder``, or None if the run compiles nothing. Collective."""
    on_gpu = mesh.device.type == "cuda"
    if not config.train.compile and not (on_gpu and config.optim.moments != "fp32"):
        return None
    name = artifacts_name(config, mesh.device, _part(mesh))
    names = gather_plain(name, mesh.control)
    return KeptArtifacts(folder / name, writes=names.index(name) == mesh.rank)


def _part(mesh: Mesh) -> str:
    """Names the ranks that compile the same graphs as this one.

    A graph of a tensor-parallel rank contains the mesh with its rank, and one with collectives the name of their group.
    """
    if mesh.layout.tp > 1:
        return f"rank {mesh.rank}"
    if mesh.layout.cp > 1:
        return f"ranks from {mesh.rank - mesh.cp_rank}"
    return f"stage {mesh.pp_rank}"


def artifacts_name(config: Config, device: torch.device, part: str) -> str:
    """Returns the name of the file for this environment, device index, model, strategy and part.

    Args:
        part: names the ranks that compile the same graphs.
    """
    facts = {
        "torch": torch.__version__,
        "triton": _triton_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "model": asdict(config.model),
        "strategy": asdict(config.strategy),
        "precision": asdict(config.precision),
        "part": part,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{device.type}-{device.index or 0}-{digest[:16]}.bin"


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def stable_keys() -> Iterator[None]:
    """Gives a compiled graph that has a device mesh the same key in every process, so that the next attempt finds it.

    Encloses the compilation of the graph and imports the compiler. TorchInductor finds a compiled graph by a hash of
    the pickled graph and its inputs. Graphs of tensor-parallel layers have a ``DeviceMesh`` among their inputs. Torch
    2.11 to 2.13 pickle all of it, including its hash, which Python computes from strings and which differs between
    processes. The pickler also refers back to objects that it has written, so the bytes depend on which equal objects
    are identical. Here, a mesh is pickled as the values that distinguish it from others.
    """
    from torch._inductor import codecache

    plain = codecache.FxGraphCachePickler
    codecache.FxGraphCachePickler = _with_described_meshes(plain)  # type: ignore[misc]
    try:
        yield
    finally:
        codecache.FxGraphCachePickler = plain  # type: ignore[misc]


@cache
def _with_described_meshes(plain: Any) -> Any:
    class MeshPickler(plain):  # type: ignore[misc]
        def _reduce_fake_script_object(self, wrapped: Any) -> Any:
            mesh = wrapped.real_obj
            if not isinstance(mesh, DeviceMesh):
                return super()._reduce_fake_script_object(wrapped)
            groups = [group.group_name for group in mesh.get_all_groups()]
            kind = (mesh.device_type, mesh.mesh_dim_names, mesh._layout, mesh._flatten_rank_map)
            return str, (repr((*kind, mesh.get_rank(), groups)),)

    return MeshPickler
