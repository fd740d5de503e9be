"""Parses the output of ``rocm-smi --showtopo``: several matrices of GPUs, and the NUMA node of each GPU.

The matrix of link types gives the links: ``XGMI`` (Infinity Fabric) or ``PCIE``. A PCIe link is ``SYS`` between NUMA
nodes; within a node rocm-smi does not show which bridges are between the devices. NICs are not in the output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from hpc_train.machine.network.facts import XGMI, Gpu, GpuLink, NodeFacts

_BANNER = re.compile(r"=+\s*(?:ROCm System Management Interface|(?:Weight|Hops|Link Type) between two GPUs)\s*=+")
_TITLE = re.compile(r"=+\s*(\S.*?)\s*=+\s*$")
_NUMA = re.compile(r"GPU ?\[?(\d+)\]?\s*:\s*\(Topology\) Numa Affinity:\s*(-?\d+)")
_NAME = re.compile(r"GPU\d+")
_CELL = re.compile(r"0|XGMI|PCIE|N/A")


def is_rocm_smi(text: str) -> bool:
    """Returns whether ``text`` is an output of rocm-smi, whose matrices resemble those of nvidia-smi."""
    return _BANNER.search(text) is not None


def parse_showtopo(text: str) -> NodeFacts:
    """Returns the GPUs and their links; never raises on malformed text."""
    sections = _sections(text)
    unknown: list[str] = []
    lines = sections.get("Link Type between two GPUs")
    numa = {int(number): int(node) for number, node in _NUMA.findall(text) if int(node) >= 0}
    if lines is None:
        reason = "the output of rocm-smi contains no matrix of link types: give that of rocm-smi --showtopo"
        return NodeFacts(unknown=(reason,))
    names, rows = _matrix(lines, unknown.append)
    gpus = tuple(Gpu(int(name[3:]), model="AMD", numa_nodes=_tuple(numa.get(int(name[3:])))) for name in names)
    unknown += [f"the NUMA node of {gpu.name}" for gpu in gpus if not gpu.numa_nodes]
    unknown.append("the NICs and their distance from the GPUs: rocm-smi does not show them; give a copy of /sys")
    return NodeFacts(gpus=gpus, links=tuple(_links(names, rows, numa, unknown.append)), unknown=tuple(unknown))


def _tuple(node: int | None) -> tuple[int, ...]:
    if node is None:
        return ()
    return (node,)


def _sections(text: str) -> dict[str, list[str]]:
    """Returns the lines below each title, as ``Link Type between two GPUs``; the first of equal titles counts."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if title := _TITLE.search(line):
            lines = []
            sections.setdefault(title[1], lines)
        else:
            lines.append(line)
    return sections


def _matrix(lines: Sequence[str], doubt: Callable[[str], None]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Returns the names of the columns, and the cells of each row by name."""
    words = [fields for line in lines if (fields := line.split()) and _NAME.fullmatch(fields[0])]
    if not words:
        doubt("the matrix of link types is empty")
        return (), {}
    names = tuple(name for name in words[0] if _NAME.fullmatch(name))
    rows = {row[0]: row[1:] for row in words[1:]}
    for name in names:
        cells = rows.get(name, [])
        if len(cells) != len(names) or not all(map(_CELL.fullmatch, cells)):
            doubt(f"the row of {name} in the matrix of link types is {'incomplete' if cells else 'missing'}")
    return names, rows


def _links(
    names: Sequence[str], rows: dict[str, list[str]], numa: dict[int, int], doubt: Callable[[str], None]
) -> Iterator[GpuLink]:
    for i, a in enumerate(names):
        for j, b in enumerate(names[:i]):
            seen = {cells[at] for name, at in ((a, j), (b, i)) if len(cells := rows.get(name, [])) == len(names)}
            nodes = (numa.get(int(a[3:])), numa.get(int(b[3:])))
            if seen == {XGMI}:
                yield GpuLink(b, a, XGMI)
            elif seen == {"PCIE"} and None not in nodes and nodes[0] != nodes[1]:
                yield GpuLink(b, a, "SYS")
            elif seen != {"PCIE"}:
                doubt(f"the link of {b} and {a}: {' or '.join(sorted(seen)) or 'not in the matrix'}")
