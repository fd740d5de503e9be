"""Gives a compiled graph that has a device mesh the same key in every process, so that the next attempt finds it.

TorchInductor finds a compiled graph by a hash of the pickled graph and its inputs. Graphs of tensor-parallel layers
have a ``DeviceMesh`` among their inputs. Torch 2.11 to 2.13 pickle all of it, also its hash, which Python computes from
strings and which differs between processes. From there on the pickler also refers to objects that it has written, so
that the bytes depend on which equal objects are one. Here a mesh is pickled as what distinguishes it from others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


@contextmanager
def stable_keys() -> Iterator[None]:
    """Encloses the compilation of a graph. Imports the compiler."""
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
            if isinstance(mesh, DeviceMesh):
                return str, (_description(mesh),)
            return super()._reduce_fake_script_object(wrapped)

    return MeshPickler


def _description(mesh: DeviceMesh) -> str:
    """Returns the ranks of ``mesh``, this rank's place in it, and the names of its process groups."""
    groups = [group.group_name for group in mesh.get_all_groups()]
    return repr((mesh.device_type, mesh.mesh_dim_names, mesh._layout, mesh._flatten_rank_map, mesh.get_rank(), groups))
