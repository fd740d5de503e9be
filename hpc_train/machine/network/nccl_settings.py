"""Reads communication settings of the user and the administrator, and versions, which must be equal on all nodes.

NCCL uses a key of its configuration files only if the environment does not set it, so an exported variable would
silently override the administrator's file. Keys from all sources therefore count as set. Versions are read from files,
without importing packages or starting tools.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.machine.network.facts import NodeFacts, Setting
from hpc_train.machine.sysfs import read_text

# variables that are sent to other nodes: communication, threads and allocator; none of them could be a secret
_OF_COMMUNICATION = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_FR|GLOO|TP|FI|UCX|OMP|GOMP|KMP|MKL)_\w+|CUDA_DEVICE_(ORDER|MAX_CONNECTIONS)|"
    r"PYTORCH_(CUDA_|HIP_)?ALLOC_CONF"
)

SYSTEM_FILE = Path("/etc/nccl.conf")

# outdated names and their replacements (documentation of NCCL and torch)
RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "NCCL_MIN_NCHANNELS": "NCCL_MIN_CTAS",
    "NCCL_MAX_NCHANNELS": "NCCL_MAX_CTAS",
    "NCCL_LAUNCH_MODE": "nothing: NCCL decides since 2.9",
    "NCCL_CHECK_POINTERS": "NCCL_CHECK_MODE",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
}
_LEVELS = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL", "NCCL_P2P_PXN_LEVEL")


# NCCL's defaults since 2.23, and the valid values; with other values of NCCL_IB_TIMEOUT, NCCL waits forever
_IB_TIMEOUT, _IB_TIMEOUTS = 20, range(1, 32)
_IB_RETRIES, _IB_RETRY_COUNTS = 7, range(8)


def settings(
    environment: Mapping[str, str], home: Path | None = None, system_file: Path = SYSTEM_FILE
) -> dict[str, Setting]:
    """Returns all set variables by name. The environment takes precedence over the user's file, and the user's file
    over the system's file.

    The user's file is ``$NCCL_CONF_FILE``, or ``~/.nccl.conf``.
    """
    conf_file = environment.get("NCCL_CONF_FILE")
    if conf_file:
        user_file = Path(conf_file)
    else:
        user_file = (home or Path(environment.get("HOME", "/nonexistent"))) / ".nccl.conf"
    result = {name: Setting(name, value, "the environment") for name, value in environment.items()}
    for path in (user_file, system_file):
        for name, value in read_conf(path).items():
            result.setdefault(name, Setting(name, value, str(path)))
    return result


def settings_of_communication(environment: Mapping[str, str] = os.environ) -> tuple[Setting, ...]:
    variables = settings(environment)
    return tuple(variables[name] for name in sorted(variables) if _OF_COMMUNICATION.fullmatch(name))


def merged(nodes: Mapping[str, Sequence[Setting]]) -> tuple[dict[str, Setting], list[str]]:
    """Returns the settings of a job (set on any of its nodes), and a message for each setting that differs between
    nodes. ``nodes`` are the settings of each node, by its name."""
    job_settings: dict[str, Setting] = {}
    values: dict[str, dict[str, str]] = {}
    for node, node_settings in nodes.items():
        for setting in node_settings:
            job_settings.setdefault(setting.name, setting)
            values.setdefault(setting.name, {})[node] = setting.value
    messages = []
    for name, by_node in values.items():
        if len(by_node) < len(nodes) or len(set(by_node.values())) > 1:
            here = who_has_what({node: by_node.get(node, "not set") for node in nodes})
            messages.append(f"{name} is not the same on all nodes: {here}")
    return job_settings, messages


def read_conf(path: Path) -> dict[str, str]:
    """Parses ``NAME=value`` lines. The value is the text after the first ``=``; a ``#`` in the first column starts a
    comment.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value for name, value in pairs if re.fullmatch(r"\s*\w+\s*", name)}


def ib_retry_s(values: Mapping[str, str]) -> float:
    """Returns the seconds for which NCCL retries a lost InfiniBand packet before a collective fails.

    NCCL's user guide, NCCL_IB_TIMEOUT: 4.096 us x 2^timeout for each of NCCL_IB_RETRY_CNT tries. ``values`` are the set
    variables by name; an invalid value counts as NCCL's default."""
    timeout = _number(values.get("NCCL_IB_TIMEOUT", ""), _IB_TIMEOUTS, _IB_TIMEOUT)
    return 4.096e-6 * 2**timeout * _number(values.get("NCCL_IB_RETRY_CNT", ""), _IB_RETRY_COUNTS, _IB_RETRIES)


def _number(text: str, allowed: range, default: int) -> int:
    if text.strip().isdigit() and int(text) in allowed:
        return int(text)
    return default


def warnings(variables: Mapping[str, Setting]) -> list[str]:
    messages = [
        f"{name} ({variables[name].source}) is an outdated name: use {new}"
        for name, new in RENAMED.items()
        if name in variables
    ]
    for name in _LEVELS:
        if name in variables and variables[name].value.strip().isdigit():
            messages.append(
                f"{name}={variables[name].value} ({variables[name].source}): the level must be one of LOC NVL PIX "
                "PXB PHB SYS"
            )
    for name in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if name in variables and variables[name].value.strip() not in ("", "0"):
            messages.append(
                f"{name}={variables[name].value} ({variables[name].source}) disables a transport: unset it outside "
                "of debugging"
            )
    timeout = variables.get("NCCL_IB_TIMEOUT")
    if timeout and timeout.value.strip().isdigit() and int(timeout.value) not in _IB_TIMEOUTS:
        messages.append(f"NCCL_IB_TIMEOUT={timeout.value} ({timeout.source}) makes NCCL wait forever: use 1-31")
    return messages


SHOWN = 4


def who_has_what(values: Mapping[str, str]) -> str:
    """Formats ``values``, which maps nodes to values, as ``2.12 on n3, 2.13 on n1, n2``, the rarest value first."""
    nodes: dict[str, list[str]] = {}
    for node, value in values.items():
        nodes.setdefault(value, []).append(node)
    rarest = sorted(nodes.items(), key=lambda item: len(item[1]))
    parts = []
    for value, names in rarest[:SHOWN]:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        parts.append(f"{value} on {', '.join(names[:SHOWN])}{more}")
    return ", ".join(parts)


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
    ("nccl", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    ("hpc_train", ("hpc_train",)),
)
_LIBRARIES = (("libfabric", "libfabric.so.1.*"), ("rdma_core", "libibverbs.so.1.*"))
# the oldest driver for each major version of CUDA ("CUDA Compatibility", minor version compatibility)
OLDEST_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
_FOLDERS = ("usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "opt/amazon/efa/lib64")


def read_versions(root: Path = Path("/")) -> tuple[tuple[str, str], ...]:
    """Returns sorted (name, version) pairs. The Python packages are those of this interpreter."""
    versions = dict(recorded_versions(root))
    for name, wheels in _WHEELS:
        for wheel in reversed(wheels):
            with suppress(PackageNotFoundError):
                versions[name] = version(wheel)
    if cuda := cuda_of_torch():
        versions["cuda_of_torch"] = cuda
    return tuple(sorted(versions.items()))


def cuda_of_torch() -> str | None:
    """Returns the version of CUDA that the installed torch is built for, without importing it; None without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b.*?'([\d.]+)'", read_text(Path(spec.origin).with_name("version.py")), re.MULTILINE)
    return None if found is None else found[1]


def recorded_versions(root: Path) -> tuple[tuple[str, str], ...]:
    """Returns the versions found in a copy of a root directory. The version of a library is the end of its file
    name."""
    versions = {}
    for name, path, pattern in _FILES:
        if match := re.search(pattern, read_text(root / path), re.MULTILINE):
            versions[name] = match[1]
    for name, pattern in _LIBRARIES:
        files = [path for folder in _FOLDERS for path in (root / folder).glob(pattern)]
        if files:
            versions[name] = max(path.name.partition(".so.")[2] for path in files)
    return tuple(sorted(versions.items()))


def too_old_driver(driver: str, cuda: str) -> UserError | None:
    """Returns the refusal of a torch that is built for ``cuda`` on a node with ``driver``; None if the two fit or the
    version of CUDA is unknown."""
    oldest = OLDEST_DRIVERS.get(parse_version(cuda)[0])
    if oldest is None or parse_version(driver) >= parse_version(oldest):
        return None
    majors = [major for major, least in OLDEST_DRIVERS.items() if parse_version(driver) >= parse_version(least)]
    fix = f"ask the site for driver {oldest} or newer"
    if majors:
        fix += f", or install a build of torch for CUDA {majors[-1]}: https://pytorch.org/get-started"
    return UserError(
        f"the driver {driver} is too old for torch with CUDA {cuda}, which needs {oldest} or newer",
        where="the NVIDIA driver of the node",
        fix=fix,
    )


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
    """Returns the lowest NCCL version of the nodes; None if the version of a node is unknown."""
    texts = [dict(facts.versions).get("nccl") for facts in nodes]
    if all(texts):
        return min((parse_version(text) for text in texts if text is not None), default=None)
    return None


def parse_version(text: str) -> Version:
    """Parses a version such as ``2.21.5``; a suffix such as ``+cuda12.4`` is ignored. Raises UserError if ``text`` is
    not a version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?!\d)", text.strip())
    if match is None:
        raise UserError(f"{text!r} is not a version", where="--nccl", fix="give a version of NCCL such as 2.21.5")
    return tuple(int(part) for part in match.groups() if part is not None)
