"""Defines the environment variables of the workers with their reasons, finds variables that torch rejects, and creates
node-local caches.

The user's settings take precedence. On a cluster the home directory has a quota and is slow for the thousands of small
files of compilers, so caches are in node-local space for the lifetime of the agent. The next agent on the node removes
the caches of an agent that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from hpc_train.errors import UserError
from hpc_train.machine.amd_gpus import NODES
from hpc_train.machine.temporary import JOB_CACHES, TemporaryDirectory
from hpc_train.run.owner import make_private
from hpc_train.users import user_cache


@dataclass(frozen=True)
class Variable:
    """One environment variable of the workers and the reason for its value."""

    name: str
    value: str
    reason: str


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPORTED = "HPC_TRAIN_EXPORTED"  # the digest of the variables that a batch script has exported


def job_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of ``cluster.env`` and a variable that marks them as exported; {} if there are none. Raises
    UserError if a name is not valid for a variable."""
    for name in variables:
        if not _VARIABLE.fullmatch(name):
            raise UserError(
                f"{name!r} is not the name of an environment variable",
                where="cluster.env",
                fix="use letters, digits and _, and no digit at the beginning",
            )
    digest = hashlib.sha256(repr(sorted(variables.items())).encode()).hexdigest()[:16]
    if variables:
        return {**variables, _EXPORTED: digest}
    return {}


def export_job_environment(variables: Mapping[str, str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Exports ``cluster.env``, unless a batch script has done so: ``cluster.setup`` may have changed a value since.
    Raises UserError if a name is not valid for a variable, or a value contains a NUL character."""
    variables_to_export = job_environment(variables)
    if variables_to_export and environment.get(_EXPORTED) != variables_to_export[_EXPORTED]:
        try:
            environment.update(variables_to_export)
        except ValueError:
            fix = "remove it; no variable can hold it"
            raise UserError("a value contains a NUL character", where="cluster.env", fix=fix) from None


def node_environment(threads: int) -> tuple[Variable, ...]:
    """Returns the variables of this node's workers that do not depend on other nodes."""
    return (Variable("OMP_NUM_THREADS", str(threads), "the ranks of a node share its cores"),)


def apply(variables: Iterable[Variable], environment: MutableMapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Sets those of ``variables`` that are not set yet; returns the effective values with their reasons, for
    ``run.json``."""
    record = []
    for variable in variables:
        value = environment.get(variable.name)
        if value is None:
            environment[variable.name] = variable.value
            record.append(asdict(variable))
        else:
            reason = variable.reason if value == variable.value else "set by the user"
            record.append({"name": variable.name, "value": value, "reason": reason})
    return record


def threads_per_rank(requested: int | str, local_workers: int, bound_cores: int = 0) -> int:
    """Returns the number of intra-op threads of a rank. ``auto`` means one thread for each core to which the rank is
    bound or, if it is not bound, an equal share of the affinity mask of this process. Raises UserError if ``requested``
    is neither ``auto`` nor a number of at least 1."""
    if requested == "auto":
        return bound_cores or max(1, len(os.sched_getaffinity(0)) // local_workers)
    if not isinstance(requested, int) or requested < 1:
        raise UserError(
            f"train.threads must be auto or a number >= 1, got {requested!r}",
            where="train.threads",
            fix="set train.threads=auto",
        )
    return requested


def refuse_unknown_interface(environment: Mapping[str, str] = os.environ) -> None:
    """Raises UserError if ``GLOO_SOCKET_IFNAME`` names an interface that does not exist on this node."""
    names = environment.get(GLOO_INTERFACE, "")
    present = psutil.net_if_addrs()
    unknown = [name for name in names.split(",") if name and name not in present]
    if unknown:
        raise UserError(
            f"{GLOO_INTERFACE}={names}, but {socket.gethostname()} has no network interface {unknown[0]}",
            where=f"{GLOO_INTERFACE} in the environment, or cluster.env",
            fix=f"unset {GLOO_INTERFACE}, or name one of {', '.join(sorted(present))}",
        )


def refuse_loopback_down() -> None:
    """Raises UserError if the loopback interface, through which the processes of a node connect, is down."""
    loopback = psutil.net_if_stats().get("lo")
    if loopback is not None and not loopback.isup:
        raise UserError(
            f"the loopback interface lo of {socket.gethostname()} is down, so processes on this node cannot connect",
            where="the network of this machine, or of this container",
            fix="ip link set lo up, as root; in a container, start it with a network",
        )


REASON = "node-local, to save the quota of the home directory; removed at the end of the job"
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "MPLCONFIGDIR": "matplotlib",
    "WANDB_CACHE_DIR": "wandb",
    "WANDB_DATA_DIR": "wandb-data",
}
# AMD's MIOpen has databases that need file locks, which Lustre and NFS may not support (LUMI and OLCF set the same)
MIOPEN = {"MIOPEN_USER_DB_PATH": "miopen", "MIOPEN_CUSTOM_CACHE_DIR": "miopen"}
HUGGING_FACE = {"HF_HUB_CACHE": "huggingface/hub", "HF_DATASETS_CACHE": "huggingface/datasets"}
OF_CACHES = frozenset({*CACHES, *MIOPEN, *HUGGING_FACE})  # read on the first use of a cache, not by ``import torch``
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SHARED_MEMORY = Path("/dev/shm")
TORCH = re.compile(r"torch_(\d+)_.*")
NCCL_SETUP_S = 600.0  # NCCL removes its files as soon as all ranks have opened them


@contextmanager
def node_local_caches(name: str, environment: Mapping[str, str] = os.environ) -> Iterator[tuple[Variable, ...]]:
    """Yields the variables that redirect caches to a directory of this job, which is removed at the end of the block.

    Yields no variables outside of a Slurm job, since caches on a workstation are permanent. ``name`` is the name of the
    job and the node. It need not be unique: several test clusters may use the same name on one machine."""
    parent = _parent(environment) if "SLURM_JOB_ID" in environment else None
    if parent is None:
        yield ()
        return
    remove_shared_memory()
    directory = TemporaryDirectory.make(f"{JOB_CACHES}{name}.", parent)
    try:
        chosen = CACHES | (MIOPEN if NODES.is_dir() else {})
        # do not redirect an existing cache: the user has filled it, because compute nodes often cannot download
        if "HF_HOME" not in environment and not (user_cache().parent / "huggingface").exists():
            chosen |= HUGGING_FACE
        yield tuple(Variable(name, str(directory.path / folder), REASON) for name, folder in chosen.items())
    finally:
        directory.remove()
        remove_shared_memory()


def remove_shared_memory(directory: Path = SHARED_MEMORY) -> None:
    """Removes the user's files of torch whose processes no longer exist, and stale files of NCCL."""
    for path in directory.glob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            torch = TORCH.fullmatch(path.name)
            dead = torch is not None and not Path("/proc", torch[1]).exists()
            old = path.name.startswith("nccl-") and time.time() - status.st_mtime > NCCL_SETUP_S
            if status.st_uid == os.getuid() and (dead or old):
                path.unlink()


def _parent(environment: Mapping[str, str]) -> Path | None:
    """Returns the directory of this user and this node in node-local space; None if another user owns it, since other
    users can write to /tmp.

    Its path contains the name of the node, because all nodes may share TMPDIR.
    """
    named = (environment.get(name) for name in ("SLURM_TMPDIR", "TMPDIR"))
    # a job may inherit a variable from the login node that names a directory which does not exist on this node
    base = next((base for base in named if base and Path(base).is_dir()), None) or tempfile.gettempdir()
    user_directory = Path(base) / f"hpc_train-{os.getuid()}"
    parent = user_directory / os.uname().nodename
    with contextlib.suppress(OSError):
        if make_private(user_directory) and make_private(parent):
            return parent
    return None


READ_BY_TORCH = ("TORCH", "PYTORCH", "GLOO_", "TP_", "NCCL_", "CUDA_", "HIP_", "OMP_", "MKL_", "KMP_", "ATEN_")
NAME = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
SHORTEST, LONGEST = 3, 80  # characters: the fewest of a value that identifies its variable, the most in a message


def rejected_variable(error: BaseException, environment: Mapping[str, str]) -> UserError | None:
    """Returns the ``UserError`` for a variable of ``environment`` whose value torch has rejected with ``error``.

    Returns None if neither the message of the error nor the line that raised it names a variable that is set, and the
    message contains no value of such a variable.
    """
    set_ = {name: value for name, value in environment.items() if name.startswith(READ_BY_TORCH)}
    message = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    line = (frames[-1].line or "") if frames else ""
    named = [name for name in (*NAME.findall(message), *NAME.findall(line)) if name in set_]
    quoted = [name for name, value in set_.items() if len(value) >= SHORTEST and _contains(message, value)]
    name = next(iter((*named, *quoted)), None)
    if name is None:
        return None
    reason = " ".join(next((text for text in message.split("\n\n") if text.strip()), message).split())
    what = f"torch cannot use {name}={set_[name][:LONGEST]}: {type(error).__name__}: {reason:.300}"
    return UserError(
        what,
        where=f"{name} in the environment, or cluster.env",
        fix=f"unset {name}, or set it to a value that torch documents",
    )


INTEGERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def refuse_unreadable_sizes(environment: Mapping[str, str]) -> None:
    """Raises UserError for a variable of ``INTEGERS`` that is not an integer, since torch would abort the process
    without stating the reason."""
    for name in INTEGERS:
        value = environment.get(name)
        if value is not None and re.fullmatch(r"\s*[+-]?\d+.*", value, re.DOTALL) is None:  # std::stoi accepts this
            raise UserError(
                f"{name}={value[:LONGEST]} is not an integer, so torch would abort",
                where=f"{name} in the environment, or cluster.env",
                fix=f"unset {name}, or set it to a number of collectives, such as 2000",
            )


def _contains(message: str, value: str) -> bool:
    """Returns whether ``message`` contains ``value`` as a separate word."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", message) is not None
