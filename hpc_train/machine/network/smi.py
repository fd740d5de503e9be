"""Parses the output of ``nvidia-smi`` (topology matrix, NVLink domain) and of ``rocm-smi --showtopo``.

The matrix of ``nvidia-smi topo -m`` may have tabs or spaces, color codes, blank cells (a cgroup hides the CPUs),
duplicate columns, NICs by name or as NICn with a legend, and it may be truncated. rocm-smi shows link types (``XGMI``
for Infinity Fabric, or ``PCIE``) and the NUMA node of each GPU, but neither bridges nor NICs. Ambiguous parts are
dropped and listed in ``unknown``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hpc_train.machine.network.facts import XGMI, Gpu, GpuLink, Nic, NodeFacts, parse_cpu_list
from hpc_train.machine.network.rdma import kind_of

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LABEL = re.compile(r"^\s*(?:#\s+|\d+:\s)")  # a comment sign, or the label of srun --label
_GPU_NAME = re.compile(r"GPU(\d+)")
_NIC = re.compile(r"NIC\d+|[a-z][A-Za-z]*\d*_\w+|(?!mlx\d$)[a-z]\w*\d\w*")  # any name with a number is a NIC
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
_PEER_STATUS = {"OK", "CNS", "GNS", "TNS", "NS", "DR"}
_LEGEND = re.compile(r"^\s*(NIC\d+):\s*(\S+)\s*$")
_SIDE_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_NEAR = 4  # characters by which a cell may be offset from its heading


@dataclass(frozen=True)
class _Header:
    devices: tuple[str, ...]
    cpu_column: int  # column of the heading "CPU Affinity", -1 without it
    side: tuple[str, ...]  # the _SIDE_COLUMNS that are present
    cut: str  # the truncated name at the end, if any


@dataclass(frozen=True)
class _Row:
    device: str
    path_types: tuple[str, ...]
    side: tuple[str, ...]  # the cells under the headings of _SIDE_COLUMNS, possibly blank


def parse_matrix(text: str) -> NodeFacts:
    """Returns the GPUs, NICs and links that ``nvidia-smi topo -m`` shows; never raises on malformed text."""
    lines = [_LABEL.sub("", _COLOR.sub("", line.rstrip("\r"))) for line in text.splitlines()]
    if _is_wrapped(lines):
        return NodeFacts(unknown=("the matrix: its lines are wrapped; write it to a file, or use a wider window",))
    unknown: list[str] = []
    headers = [(number, header) for number, line in enumerate(lines) if (header := _header(line)) is not None]
    if not headers:
        return NodeFacts(unknown=("the output of nvidia-smi topo -m contains no matrix of GPUs",))
    if len(headers) > 1:
        unknown.append(f"{len(headers)} matrices in the output; the first is used")
    start, header = headers[0]
    end = headers[1][0] if len(headers) > 1 else len(lines)
    rows = _rows(lines[start + 1 : end], header, not text.endswith("\n"), unknown.append)
    names = _legend(lines[start:end], header, unknown.append)
    gpus = tuple(_gpu(device, header, rows, unknown.append) for device in header.devices if _GPU_NAME.fullmatch(device))
    nics = tuple(Nic(names[device], kind_of(names[device])) for device in header.devices if device in names)
    return NodeFacts(gpus=gpus, nics=nics, links=_links(header, rows, names, unknown.append), unknown=tuple(unknown))


def _is_wrapped(lines: Sequence[str]) -> bool:
    """Returns whether a terminal has wrapped the lines of a matrix, so that no row follows its heading."""
    for line, following in itertools.pairwise(lines):
        words = line.split()
        if len(words) > 1 and _GPU_NAME.fullmatch(words[0]) and not _begins_row(line) and "\t" not in line:
            return bool(following.strip()) and not _begins_row(following)
    return False


def _begins_row(line: str) -> bool:
    words = line.split()
    return len(words) > 1 and _is_device(words[0]) and bool(words[1] in _PEER_STATUS or _LINK.fullmatch(words[1]))


def _header(line: str) -> _Header | None:
    """Parses the heading of a matrix, which has only device names before "CPU Affinity"; None for other lines."""
    column = line.find("CPU Affinity")
    words = (line if column < 0 else line[:column]).split()
    names = tuple(itertools.takewhile(_is_device, words))
    if not names or not _GPU_NAME.fullmatch(names[0]) or len(set(names)) < len(names):
        return None
    cut = words[len(names) :]
    if len(cut) > 1 or (cut and len(names) == 1):  # a row or prose
        return None
    return _Header(names, column, tuple(heading for heading in _SIDE_COLUMNS if heading in line), " ".join(cut))


def _rows(lines: Sequence[str], header: _Header, cut: bool, doubt: Callable[[str], None]) -> dict[str, _Row]:
    """Parses the rows. ``cut`` means that the text ends in the middle of its last line."""
    rows: dict[str, _Row] = {}
    if header.cut:
        doubt(f"the heading is truncated at {header.cut!r}")
    for heading in _SIDE_COLUMNS[:2]:
        if heading not in header.side:
            doubt(f"the column {heading!r} is missing")
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not _begins_row(line) or words[0] in rows:
            continue
        path_types = tuple(words[1 : 1 + len(header.devices)])
        side = _side_cells(line, words, header) if len(path_types) == len(header.devices) else ()
        if cut and number == len(lines) and len(side) < len(header.side):
            side = side[:-1]
        row = _Row(words[0], path_types, side)
        if row.device not in header.devices:
            doubt(f"the row of {row.device} has no matching column")
            continue
        rows[row.device] = row
        if len(row.path_types) < len(header.devices):
            doubt(f"the row of {row.device} is truncated after {len(row.path_types)} of {len(header.devices)} devices")
    for device in header.devices:
        if device not in rows:
            doubt(f"the row of {device} is missing")
    return rows


def _side_cells(line: str, words: list[str], header: _Header) -> tuple[str, ...]:
    """Returns the cells to the right of the links. If the line has spaces instead of tabs, the positions of the cells
    show which are blank.
    """
    count = len(header.devices)
    if "\t" in line:
        cells = [cell.strip() for cell in line.split("\t")][1 + count :]
        return (*cells[:2], *[cell for cell in cells[2:] if cell][-1:])
    present = words[1 + count :]
    if not present or len(present) == len(header.side):
        return tuple(present)
    starts = [match.start() for match in re.finditer(r"\S+", line)]
    first_is_cpus = abs(starts[1 + count] - header.cpu_column) <= _NEAR
    if first_is_cpus:
        return tuple(present)
    return ("", *present)


def _legend(lines: Iterable[str], header: _Header, doubt: Callable[[str], None]) -> dict[str, str]:
    """Returns the NIC name of each column that is not a GPU."""
    legend = {match[1]: match[2] for line in lines if (match := _LEGEND.match(line))}
    names: dict[str, str] = {}
    for device in header.devices:
        if _GPU_NAME.fullmatch(device):
            continue
        names[device] = legend.get(device, device)
        if re.fullmatch(r"NIC\d+", names[device]):
            doubt(f"the NIC behind {device}: it is missing from the legend")
    if len(set(names.values())) < len(names):
        doubt("the NICs: the legend gives one name twice")
        return {device: device for device in names}
    return names


def _gpu(device: str, header: _Header, rows: dict[str, _Row], doubt: Callable[[str], None]) -> Gpu:
    cells = rows[device].side if device in rows else ()
    side = dict(zip(header.side, cells, strict=False))
    lists = []
    for heading in _SIDE_COLUMNS[:2]:
        try:
            lists.append(parse_cpu_list(side.get(heading, "")))
        except ValueError:
            lists.append(())
        if heading in header.side and device in rows and not lists[-1]:
            doubt(f"{heading} of {device}: {side.get(heading) or 'blank'} in the matrix")
    return Gpu(int(device.removeprefix("GPU")), cpus=lists[0], numa_nodes=lists[1])


def _is_device(word: str) -> bool:
    return bool(_GPU_NAME.fullmatch(word) or _NIC.fullmatch(word))


def _links(
    header: _Header, rows: dict[str, _Row], names: dict[str, str], doubt: Callable[[str], None]
) -> tuple[GpuLink, ...]:
    if any(path_type in _PEER_STATUS for row in rows.values() for path_type in row.path_types):
        doubt("the links: this is the peer access status (topo -p2p), not the matrix of topo -m")
        return ()
    links = []
    for i, a in enumerate(header.devices):
        for j, b in enumerate(header.devices[:i]):
            seen = {_way(rows, a, j), _way(rows, b, i)} - {None}
            first = names.get(b, b)
            second = names.get(a, a)
            if len(seen) == 1 and (path_type := seen.pop()) and path_type != "X":
                links.append(GpuLink(first, second, path_type))
            elif rows:
                doubt(f"the link of {first} and {second}: {' or '.join(sorted(map(str, seen))) or 'not in the matrix'}")
    return tuple(links)


def _way(rows: dict[str, _Row], device: str, column: int) -> str | None:
    path_types = rows[device].path_types if device in rows else ()
    if column >= len(path_types) or not _LINK.fullmatch(path_types[column]):
        return None
    return "SYS" if path_types[column] == "SOC" else path_types[column]  # drivers before 2018


NVLINK_QUERY = ("nvidia-smi", "--query-gpu=fabric.clusterUuid,fabric.cliqueId", "--format=csv,noheader")
_DOMAIN = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}),\s*(\d+)")


def parse_nvlink_domain(text: str) -> str | None:
    """Returns ``UUID.CLIQUE`` of the GPUs of a node from the output of ``NVLINK_QUERY``; None if they are in no domain
    or in different ones, or the driver does not know the fields."""
    domains = {f"{match[1]}.{match[2]}" for line in text.splitlines() if (match := _DOMAIN.fullmatch(line.strip()))}
    domain = domains.pop() if len(domains) == 1 else None
    if domain is None or set(domain.partition(".")[0]) <= {"0", "-"}:
        return None
    return domain


_BANNER = re.compile(r"=+\s*(?:ROCm System Management Interface|(?:Weight|Hops|Link Type) between two GPUs)\s*=+")
_TITLE = re.compile(r"=+\s*(\S.*?)\s*=+\s*$")
_NUMA = re.compile(r"GPU ?\[?(\d+)\]?\s*:\s*\(Topology\) Numa Affinity:\s*(-?\d+)")
_NAME = re.compile(r"GPU\d+")
_CELL = re.compile(r"0|XGMI|PCIE|N/A")


def is_rocm_smi(text: str) -> bool:
    """Returns whether ``text`` is output of rocm-smi, whose matrices resemble the matrices of nvidia-smi."""
    return _BANNER.search(text) is not None


def parse_showtopo(text: str) -> NodeFacts:
    """Returns the GPUs and their links; never raises on malformed text."""
    sections = _sections(text)
    unknown: list[str] = []
    lines = sections.get("Link Type between two GPUs")
    numa = {int(number): int(node) for number, node in _NUMA.findall(text) if int(node) >= 0}
    if lines is None:
        reason = "the output of rocm-smi contains no matrix of link types: use the output of rocm-smi --showtopo"
        return NodeFacts(unknown=(reason,))
    names, rows = _matrix(lines, unknown.append)
    numbers = [int(name[3:]) for name in names]
    gpus = tuple(Gpu(n, model="AMD", numa_nodes=(numa[n],) if n in numa else ()) for n in numbers)
    unknown += [f"the NUMA node of {gpu.name}" for gpu in gpus if not gpu.numa_nodes]
    unknown.append("the NICs and their distance from the GPUs: rocm-smi does not show them; give a copy of /sys")
    return NodeFacts(gpus=gpus, links=tuple(_rocm_links(names, rows, numa, unknown.append)), unknown=tuple(unknown))


def _sections(text: str) -> dict[str, list[str]]:
    """Returns the lines below each title, such as ``Link Type between two GPUs``. If a title is repeated, the first
    counts."""
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


def _rocm_links(
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
