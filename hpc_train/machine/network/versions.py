"""Reads versions that must be equal on all nodes from files, without importing packages or starting tools."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.nccl_settings import who_has_what

Version = tuple[int, ...]

_FILES = (
    ("driver", "proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s"),
    ("amdgpu", "sys/module/amdgpu/version", r"^([\w.-]+)"),
    ("rocm", "opt/rocm/.info/version", r"^([\w.-]+)"),
    ("cuda", "usr/local/cuda/version.json", r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"'),
    ("ofed", "sys/module/mlx5_core/version", r"^([\w.-]+)"),
    ("efa_installer", "opt/amazon/efa_installed_packages", r"EFA installer version:\s*([\d.]+)"),
    ("efa_driver", "sys/module/efa/version", r"^([\w.-]+)"),
    ("kernel", "proc/sys/kernel/osrelease", r"^(\S+)"),
)
_WHEELS = (
    ("torch", ("torch",)),
    ("nccl", ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")),
    ("hpc_train", ("hpc_train",)),
)
_LIBRARIES = (("libfabric", "libfabric.so.1.*"), ("rdma_core", "libibverbs.so.1.*"))
_FOLDERS = ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "opt/amazon/efa/lib64")


def read_versions(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Returns sorted (name, version) pairs; those of Python packages belong to this interpreter."""
    return tuple(sorted([*recorded_versions(root), *_of_wheels()]))


def recorded_versions(root: Path) -> tuple[tuple[str, str], ...]:
    """Returns the versions found in a copy of a root directory."""
    return tuple(sorted([*_of_files(root), *_of_libraries(root)]))


def _of_files(root: Path) -> Iterator[tuple[str, str]]:
    for name, path, pattern in _FILES:
        try:
            match = re.search(pattern, (root / path).read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if match:
            yield name, match[1]


def _of_libraries(root: Path) -> Iterator[tuple[str, str]]:
    """Yields versions of libraries, taken from the end of their file names."""
    for name, pattern in _LIBRARIES:
        files = [path for folder in _FOLDERS for path in (root / folder).glob(pattern)]
        if files:
            yield name, max(path.name.partition(".so.")[2] for path in files)


def _of_wheels() -> Iterator[tuple[str, str]]:
    for name, wheels in _WHEELS:
        for wheel in wheels:
            try:
                yield name, version(wheel)
                break
            except PackageNotFoundError:
                continue


def different_versions(nodes: Sequence[NodeFacts]) -> list[str]:
    """Returns a line with the nodes for each version that is not equal on all nodes."""
    versions = {facts.node or "?": dict(facts.versions) for facts in nodes}
    names = sorted({name for node_versions in versions.values() for name in node_versions})
    versions_by_node = (
        (name, {node: node_versions.get(name, "none") for node, node_versions in versions.items()}) for name in names
    )
    return [
        f"{name} is not the same on all nodes: {who_has_what(by)}"
        for name, by in versions_by_node
        if len(set(by.values())) > 1
    ]


def lowest_nccl(nodes: Sequence[NodeFacts]) -> Version | None:
    """Returns the lowest NCCL version of the nodes; None if one is unknown."""
    texts = [dict(facts.versions).get("nccl") for facts in nodes]
    if all(texts):
        return min((parse_version(text) for text in texts if text is not None), default=None)
    return None


def parse_version(text: str) -> Version:
    """Parses ``2.21.5``, also with a suffix such as ``+cuda12.4``.

    Raises:
        UserError: ``text`` is not a version.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!\d)", text.strip())
    if match is None:
        raise UserError(f"{text!r} is not a version", where="--nccl", fix="give a version of NCCL such as 2.21.5")
    return tuple(int(part) for part in match.groups() if part is not None)
