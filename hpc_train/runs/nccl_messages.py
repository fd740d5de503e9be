"""Explains NCCL's messages: what each means and what to do.

The messages are those of NCCL 2.9 to 2.30 (its source, June 2026, and the reports in its issue tracker) and of torch,
which quotes NCCL's last warning in the exception. Status numbers are those of ``enum ibv_wc_status`` of libibverbs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.opening import DamagedFile, read_tail
from hpc_train.run.directory import RunDirectory

TAIL_BYTES = 256 << 10
MOST_WARNINGS = 5
_STATUS = r"[Gg]ot completion from peer .*?(?:with (?:error|status=)\s*{0}\b|status=\w*\({0}\))"


@dataclass(frozen=True)
class NcclProblem:
    """The meaning of a message of NCCL, and what to do."""

    pattern: str
    meaning: str
    fix: str


# The causes come first, then the errors that name no cause, then those that follow another rank's failure.
PROBLEMS = (
    NcclProblem(
        _STATUS.format(12),
        "InfiniBand error 12 (retry counter exceeded): the other port did not acknowledge the data",
        "if another rank failed first, fix that. Otherwise a link or switch drops data, or no route leads to the port: "
        "`doctor --submit` shows links with errors; exclude the node with cluster.exclude. With RoCE, check the GID "
        "and the VLAN (show_gids). On fabrics with short interruptions set NCCL_IB_TIMEOUT=22 (cluster.env)",
    ),
    NcclProblem(
        _STATUS.format(13),
        "InfiniBand error 13 (receiver not ready): the other rank accepted no data for too long",
        "the process of the other rank is stopped, swapping or overloaded: look at its log, and at the memory and load "
        "of its node",
    ),
    NcclProblem(
        _STATUS.format("(?:4|10)"),
        "InfiniBand error 4 or 10 (protection or access): the NIC may not use the memory",
        "usually GPUDirect: check that nvidia_peermem matches the driver, or set NCCL_NET_GDR_LEVEL=LOC (cluster.env) "
        "to test without it; in virtual machines PCIe ACS must be off for it",
    ),
    NcclProblem(
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        "set cluster.gpus_per_node to the GPUs that the job has, and remove --gpus-per-task, --gpu-bind and "
        "CUDA_VISIBLE_DEVICES from the environment",
    ),
    NcclProblem(
        r"shared memory segment|failed to extend \S*shm|failed to create shared memory file|posix_fallocate failed",
        "NCCL cannot create its buffers in /dev/shm",
        "free some space there: df -h /dev/shm on the node, and remove nccl-* files of ended jobs. In a container use "
        "a larger one (--shm-size=8g) or bind the host's /dev/shm",
    ),
    NcclProblem(
        r"[Ff]ailed to initialize any NET plugin|network .+ not found|no (?:net )?plugin found"
        r"|[Cc]ould not find: ?\S*libnccl-net",
        "NCCL did not find the network plugin that NCCL_NET or NCCL_NET_PLUGIN names",
        "load the module of the plugin (aws-ofi-nccl) in cluster.setup, so that libnccl-net.so is in LD_LIBRARY_PATH; "
        "in a container bind it. Only NCCL_NET=Socket or IB need no plugin",
    ),
    NcclProblem(
        r"ibv_(?:reg_mr\w*|create_cq|create_qp|reg_dmabuf_mr).*(?:Cannot allocate memory|errno 12\b)",
        "the NIC cannot lock memory",
        "the limit of locked memory is too small: `ulimit -l` must be unlimited in the job "
        "(PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, LimitMEMLOCK of slurmd)",
    ),
    NcclProblem(
        r"ibv_modify_qp.*(?:failed|timed out)",
        "an InfiniBand connection cannot be set up",
        "the ports cannot reach each other: different subnets or rails, or with RoCE a wrong GID index. Choose the "
        "ports with NCCL_IB_HCA, on rail-isolated fabrics set NCCL_CROSS_NIC=0, and with RoCE unset NCCL_IB_GID_INDEX",
    ),
    NcclProblem(
        r"no socket interface found|No usable listening interface|no device found (?:matching|after excluding)",
        "NCCL found no network interface with the requested name",
        "correct or unset NCCL_SOCKET_IFNAME and NCCL_OOB_NET_IFNAME; `ip -brief address` on the node lists the names",
    ),
    NcclProblem(
        r"[Cc]onnect.*(?:Connection refused|No route to host|Network is unreachable)|exceeded error retry count",
        "a rank cannot connect to another one",
        "the other process has ended, or NCCL uses an interface that the other node cannot reach (docker0, a "
        "management network): set NCCL_SOCKET_IFNAME in cluster.env, and ask the site whether a firewall closes ports",
    ),
    NcclProblem(
        r"[Cc]onnect.*(?:timed out|Connection timed out)|Call to recv .*timed out",
        "a connection to another rank timed out",
        "NCCL uses an interface that the other node cannot reach, or a firewall drops packets: `doctor --submit` "
        "compares the nodes; set NCCL_SOCKET_IFNAME in cluster.env",
    ),
    NcclProblem(
        r"Mismatched NCCL version",
        "the ranks use different versions of NCCL",
        "use one environment for all nodes (cluster.python), and remove other copies of libnccl.so.2 from "
        "LD_LIBRARY_PATH and LD_PRELOAD",
    ),
    NcclProblem(
        r"mixed local (?:Net|CollNet) device counts|NET_MISMATCH",
        "the ranks see different numbers of network devices",
        "a NIC or port of one node is down, or the nodes have different hardware: `doctor --submit` compares them; "
        "exclude that node with cluster.exclude",
    ),
    NcclProblem(
        r"Too many open files",
        "the limit of open files is too small for the connections",
        "raise `ulimit -n` in cluster.setup, or ask the site to raise the hard limit",
    ),
    NcclProblem(
        r"Cuda failure.*out of memory|Failed to CUDA calloc",
        "no GPU memory is left for NCCL's buffers",
        "use a smaller batch.micro_size or strategy=zero3, and check with nvidia-smi that no other process uses it",
    ),
    NcclProblem(
        r"driver version is insufficient|forward compatibility was attempted",
        "the GPU driver is too old for this NCCL",
        "use a torch build for the CUDA version that nvidia-smi shows, or exclude the node (cluster.exclude)",
    ),
    NcclProblem(
        r"Cuda failure|unhandled cuda error",
        "a CUDA call inside NCCL failed",
        "an earlier error of a kernel usually causes this: see the traceback of the rank that failed first, or set "
        "CUDA_LAUNCH_BLOCKING=1. If nothing failed before, look for Xid messages (dmesg) on the node",
    ),
    NcclProblem(
        r"Connection closed by (?:remote )?peer|remote process exited or there was a network error"
        r"|Connection reset by peer|Broken pipe|ncclRemoteError",
        "the other process ended, or the connection to it was lost",
        "usually another rank failed first: `logs RUN --rank all` shows its error. If none did, check the network",
    ),
    NcclProblem(
        r"invalid usage|ncclInvalidUsage|invalid argument \(run with",
        "NCCL was called with arguments that do not match between the ranks",
        "train.debug=true names the collective that differs; ranks may also share a GPU (cluster.gpus_per_node)",
    ),
    NcclProblem(
        r"unhandled system error|ncclSystemError",
        "a system call of NCCL failed",
        "the warning before it names the call; the usual causes are a full /dev/shm, the limit of locked memory "
        "(ulimit -l) and an interface that is down",
    ),
    NcclProblem(
        r"ncclInternalError|NCCL.*internal error|Internal check failed",
        "NCCL found an inconsistent state",
        "the warning before it has the cause; another rank's failure or different versions of NCCL lead here. Set "
        "NCCL_DEBUG=INFO (cluster.env) for details",
    ),
)  # fmt: skip


def explain_nccl(text: str) -> NcclProblem | None:
    """Returns the problem that ``text`` describes best; None without a known message of NCCL."""
    if "NCCL" not in text:
        return None
    return next((problem for problem in PROBLEMS if re.search(problem.pattern, text)), None)


def nccl_warnings(run: RunDirectory, node: str, rank: int, attempt: int) -> tuple[str, ...]:
    """Returns the last warnings that NCCL printed on one rank of one attempt, oldest first.

    They are in NCCL's own file if the attempt ran a preflight and failed, and otherwise in the log of the node.
    """
    own = _tail(run, f"nccl/{attempt:03d}-rank-{rank:04d}.log")
    prefix = f"[{rank}] "
    shared = [line.partition(prefix)[2] for line in _tail(run, f"{node}-{attempt:03d}.log") if prefix in line]
    found = (line.strip() for line in (*own, *shared) if "NCCL WARN" in line)
    return tuple(dict.fromkeys(found))[-MOST_WARNINGS:]


def _tail(run: RunDirectory, name: str) -> list[str]:
    try:
        return read_tail(run.logs / name, run.path, TAIL_BYTES).splitlines()
    except (OSError, DamagedFile):
        return []
