"""Diagnoses the last failure of a run from its events, metrics and checkpoints, and from Slurm."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.config.run_path import relative
from hpc_train.config.values import runs_command
from hpc_train.elastic.nodes import TOO_OFTEN, NodeFailures
from hpc_train.elastic.requeue import more_memory
from hpc_train.opening import DamagedFile, read_tail
from hpc_train.run.directory import RunDirectory, rank_writer
from hpc_train.run.events import Event, Level
from hpc_train.run.exits import FIX, HOST_MEMORY, RESPONSES, Exit, Failure, advice_for
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.run.rows import Line
from hpc_train.runs.job_status import NOT_LAUNCHED, JobStatuses, View, time_left
from hpc_train.runs.lookup import RunHandle, statuses_of
from hpc_train.schedulers.scheduler import JobStatus
from hpc_train.schedulers.slurm.client import node_states, query
from hpc_train.schedulers.slurm.reasons import JobFacts, read_facts, sooner, with_gpus
from hpc_train.schedulers.slurm.records import FREE, Free
from hpc_train.telemetry.progress import final_result
from hpc_train.telemetry.tracebacks import own_place

WITH_STACKS = ("hang_detected", "collective_timed_out")
AFTER_OUTAGE_S = 30.0  # time within which a standstill of nodes or ranks is noticed
LAST_STEPS = 15
TAIL_LINES = 25
# failures that recur with the same code and settings
SAME_AGAIN = (Failure.USER_ERROR, Failure.KERNEL, Failure.REFUSED, Failure.NAN)

# Slurm's state of a job -> the advice for an end that the agents could not report
BY_STATE = {
    "OUT_OF_MEMORY": "Slurm killed it for exceeding its memory: increase cluster.mem, or reduce batch.loader_workers",
    "TIMEOUT": "it did not stop before its time limit: increase cluster.time or elastic.stop_grace_s",
    "NODE_FAIL": RESPONSES[Failure.NODE_LOST].advice,
    "BOOT_FAIL": "its nodes failed to boot or to power up: submit it again, and report the nodes to the site",
    "DEADLINE": "its deadline passed: submit it again",
    "PREEMPTED": "a job with a higher priority preempted it: resume the run",
    "CANCELLED": "it was cancelled: resume the run",
}
NOT_LAUNCHED_ADVICE = (
    "check that the nodes can create files in {folder}, where the job's output goes; otherwise a node is faulty: "
    "cluster.exclude=NODE excludes it"
)


NOT_POWERED_UP_FIX = "ask the site: the cloud may lack such machines; or another cluster.partition or cluster.gpu_type"


@dataclass(frozen=True)
class FailureCause:
    """Describes the failure that caused the others. ``rank`` is None if no rank is responsible; ``stacks`` is a path.

    ``nccl`` has the last warnings that NCCL printed on that rank, ``gpus`` the errors that the GPUs of its node
    reported.
    """

    kind: str
    message: str
    attempt: int
    time: float
    rank: int | None = None
    node: str | None = None
    traceback: str = ""
    stacks: str | None = None
    nccl: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    @property
    def nccl_problem(self) -> NcclProblem | None:
        """Returns the explanation of NCCL's messages; None without a known one."""
        return explain_nccl("\n".join((*self.nccl, self.message, self.traceback)))

    @property
    def who(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank} on {self.node}"


@dataclass(frozen=True)
class LastCheckpoint:
    """Describes the newest checkpoint; ``step`` is 0 and ``path`` None without one. ``lost_*`` is the work after it."""

    step: int
    path: str | None
    lost_steps: int
    lost_s: float | None


@dataclass(frozen=True)
class Waiting:
    """Describes why a job is pending, when it is expected to start, and which changes would start it sooner."""

    reason: str
    words: str
    fix: str
    starts: str
    sooner: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Holds the result of ``diagnose``. ``cause`` is None if nothing failed; ``advice`` has the best step first.

    ``ended_early`` is the reason for which a hook has ended the run before its last step. ``withdrawn`` holds the other
    jobs of ``cluster.first``.
    """

    run: str
    job_id: str | None
    state: str
    exit_code: int | None
    message: str
    cause: FailureCause | None
    waiting: Waiting | None
    slurm: JobFacts | None
    peak_memory_bytes: int | None
    checkpoint: LastCheckpoint
    done: tuple[Event, ...]
    excluded_nodes: tuple[ExcludedNode, ...]
    advice: tuple[str, ...]
    ledger: Account
    ended_early: str | None = None
    withdrawn: tuple[str, ...] = ()


def diagnose(
    found: RunHandle,
    statuses: dict[str, JobStatus] | None = None,
    *,
    asks_slurm: bool = True,
    spent: Account | None = None,
) -> Diagnosis:
    """Diagnoses a run.

    Args:
        statuses: the states of Slurm jobs; None queries Slurm.
        asks_slurm: whether to query Slurm for the facts of the job, if the run was submitted to Slurm.
        spent: the time account of the run; None reads it.
    """
    if statuses is None:
        statuses = statuses_of([found], JobStatuses())
    status = statuses.get(found.job_key)
    view = found.view(statuses)
    events = found.run.read_events()
    cause = find_cause(events)
    if cause is not None and cause.rank is not None and cause.node is not None:
        cause = replace(cause, nccl=nccl_warnings(found.run, cause.node, cause.rank, cause.attempt))
    facts = waiting = None
    if asks_slurm and found.job_id:
        is_slurm = "scheduler" not in found.submission
        if is_slurm:
            facts = read_facts(found.job_id)
        if status is not None and (
            status.is_pending or status.is_starting or (not is_slurm and status.is_running and status.reason)
        ):
            waiting = _waiting(found, status, view, is_slurm)
    hours = found.plain_config.get("elastic", {}).get("exclude_hours", 0.0)
    metrics = [line for line in found.run.read_all_metrics() if cause is None or line.attempt == cause.attempt]
    return Diagnosis(
        run=str(found.run.path),
        job_id=found.job_id,
        state=view.state,
        exit_code=view.exit,
        message=view.message,
        cause=cause,
        waiting=waiting,
        slurm=facts,
        peak_memory_bytes=max((line.peak_memory_bytes or 0 for line in metrics), default=0) or None,
        checkpoint=_checkpoint(found.run, cause, events, metrics),
        done=tuple(event for event in events if event.kind.level >= Level.REACTION)[-LAST_STEPS:],
        excluded_nodes=tuple(excluded_nodes(found.run, hours)),
        advice=tuple(_advice(view, cause, facts, found)),
        ledger=spent or read_ledger(found.run, time.time() if view.exit is None else None).total,
        ended_early=(final_result(found.run.record()) or {}).get("ended_early"),
        withdrawn=tuple(found.withdrawn),
    )


@dataclass(frozen=True)
class SweepFailure:
    """Describes a cause of failed runs of a sweep, with the message of the first one; ``runs`` are indices.

    ``place`` is the line of the user's code, such as ``net.py:14 in forward``; empty if it is unknown.
    """

    kind: str
    message: str
    place: str
    advice: str
    runs: tuple[int, ...]


def sweep_failures(found: Sequence[RunHandle], views: Sequence[View]) -> list[SweepFailure]:
    """Returns why runs of a sweep did not finish; runs whose messages differ only in numbers form one group.

    Unlike ``diagnose``, this does not query Slurm.
    """
    groups: dict[tuple[str, str], SweepFailure] = {}
    for index, (item, view) in enumerate(zip(found, views, strict=True)):
        if view.exit in (None, Exit.DONE):
            continue
        kind, message, place, text = _why_ended(item.run, view)
        key = kind, re.sub(r"\d+", "0", message)
        group = groups.get(key)
        if group is None:
            group = SweepFailure(kind, message, place, "", ())
            if kind in list(Failure):
                group = replace(group, advice=advice_for(Failure(kind), text))
        groups[key] = replace(group, runs=(*group.runs, index))
    return sorted(groups.values(), key=lambda group: -len(group.runs))


def _why_ended(run: RunDirectory, view: View) -> tuple[str, str, str, str]:
    """Returns facts about a run that did not finish: the class of its failure or its state, the most informative line
    of its message, the line of the user's code, and the whole message.
    """
    cause = None if view.exit == Exit.STOPPED else find_cause(run.read_events())
    if cause is None:
        lines = view.message.strip().splitlines()
        last = next(reversed(lines), "")  # the end of a traceback
        return view.state, last, "", view.message
    first = next(iter(cause.message.strip().splitlines()), "")
    # the line of the traceback also names the exception: KeyError: 'x'
    lines = cause.traceback.strip().splitlines()
    message = next((line for line in reversed(lines) if line.endswith(first)), first)
    return cause.kind, message, own_place(cause.traceback) or "", cause.message


def find_cause(events: Sequence[Event]) -> FailureCause | None:
    """Returns the first failure of the newest failed attempt, leaving out the secondary failures that it caused.

    An outage of the file system is the cause of a hang or of a lost node during the outage; otherwise it counts only if
    nothing else failed.
    """
    failed = [event for event in events if event.kind.is_failure]
    late = [event for event in events if event.kind.is_of_attempt_before and event.failure is not None]
    failed += [Event(event | {"attempt": event.attempt - 1}) for event in late]
    outages = [event for event in events if event.name == "file_system_failed"]
    failed = failed or outages[-1:]
    if not failed:
        return None
    newest = max(event.attempt for event in failed)
    first = min((event for event in failed if event.attempt == newest), key=_weight)
    if _kind(first) in (Failure.HANG, Failure.NODE_LOST, Failure.COMMUNICATION):  # ranks or nodes stood still
        for outage in outages:
            began = outage.time if outage.began is None else outage.began
            if began <= first.time <= outage.time + AFTER_OUTAGE_S:
                first = outage
                break
    of_hang = (event for event in events if event.name in WITH_STACKS and event.attempt == newest)
    stacks = next((event.stacks for event in of_hang if event.stacks), None)
    return FailureCause(
        kind=_kind(first),
        message=first.message or first.reason,
        attempt=newest,
        time=first.time,
        rank=first.rank,
        node=first.node,
        traceback=first.traceback,
        stacks=stacks,
        gpus=tuple(first.gpus or ()),
    )


def _kind(event: Event) -> str:
    of_event = {"hang_detected": Failure.HANG, "node_lost": Failure.NODE_LOST}
    return event.failure or str(of_event.get(event.name, event.name))


def _weight(event: Event) -> tuple[bool, bool, bool, float]:
    """Sorts the cause first: no secondary failure, with a rank or node, with a traceback; then the earliest."""
    secondary = event.failure == Failure.COMMUNICATION
    anonymous = event.name == "stopped_retrying" or (event.name == "hang_detected" and event.rank is None)
    return secondary, anonymous, "traceback" not in event, event.time


def _checkpoint(
    run: RunDirectory, cause: FailureCause | None, events: Sequence[Event], metrics: Sequence[Line]
) -> LastCheckpoint:
    checkpoint = LastCheckpoint(0, None, 0, None)
    newest = CheckpointStore(run.checkpoints).newest()
    if newest is not None:
        checkpoint = LastCheckpoint(newest.step, str(newest.path), 0, None)
    if cause is None or run.record().get("own_code") == "command":  # only the script knows where it saves
        return checkpoint
    saved = [event for event in events if event.name == "checkpoint_saved" and event.time < cause.time]
    last = max(saved, key=lambda event: (event.step or 0, event.time), default=Event())
    begins = [event.time for event in events if event.name == "started" and event.attempt == cause.attempt]
    if saved:
        begins.append(last.time)
    furthest = max((line.step for line in metrics), default=0)
    checkpoint = replace(checkpoint, lost_steps=max(0, furthest - (last.step or 0)))
    if not begins:
        return checkpoint
    return replace(checkpoint, lost_s=max(0.0, cause.time - max(begins)))


def _advice(view: View, cause: FailureCause | None, facts: JobFacts | None, item: RunHandle) -> list[str]:
    """Returns what to do after the failure; empty if the run is done or is running again."""
    if view.exit in (None, Exit.DONE):
        return []
    saved = CheckpointStore(item.run.checkpoints).newest() is not None
    lines: list[str] = []  # the best step first
    if cause is not None and cause.nccl_problem is not None:
        lines.append(f"{cause.nccl_problem.meaning}: {cause.nccl_problem.fix}")
    if cause is None:  # an agent, or a job before its agents, may have refused the run
        lines += FIX.findall(view.message)
    elif cause.kind not in list(Failure):
        lines += FIX.findall(cause.message)
    elif facts is not None and HOST_MEMORY in cause.message:  # cluster.mem sets the memory of the job
        lines.append(more_memory(item.config.cluster.mem))
    else:
        lines.append(advice_for(Failure(cause.kind), cause.message, None if runs_command(item.config) else saved))
    if facts is not None:
        lines.append(BY_STATE.get(facts.state, ""))
        if facts.exit_code.endswith(":9") and view.state == "stopped":
            killed = "its batch script was killed by SIGKILL"
            lines.append(f"{killed} (scancel --batch, or a lack of memory on the batch host)")
    if NOT_LAUNCHED in view.message:
        lines.append(NOT_LAUNCHED_ADVICE.format(folder=Path(item.submission.get("output", item.run.logs)).parent))
    where = relative(item.run.path)
    refused = cause is None and FIX.search(view.message) is not None
    if not refused and (cause is None or cause.kind not in SAME_AGAIN):
        begins = "resumes from the last checkpoint" if saved else "starts again: there is no checkpoint"
        if item.run.record().get("own_code") == "command":
            begins = "runs the command again in the same run directory"
        lines.append(f"python -m hpc_train resume {where}   {begins}")
    return [*dict.fromkeys(filter(None, lines)), f"python -m hpc_train logs {where}   prints all output"]


def _waiting(item: RunHandle, status: JobStatus, view: View, is_slurm: bool) -> Waiting:
    reason = item.jobs.explain(status)
    if is_slurm and status.is_pending:
        partition = item.config.cluster.partition
        states = node_states([f"--partition={partition}"] if partition else [])
        failed = [node.words for node in states if node.was_not_powered_up]
        if failed:
            words = f"{reason.words}; Slurm could not power up {', '.join(failed)}"
            reason = replace(reason, words=words, fix=reason.fix or NOT_POWERED_UP_FIX)
    if view.exit == Exit.DONE:
        words = f"the run is done, and {item.jobs.name} has requeued its job: {reason.words}"
        return Waiting(status.reason, words, f"python -m hpc_train cancel {relative(item.run.path)}", status.starts, ())
    changes: list[str] = []
    if reason.by_size:
        gpus = item.config.cluster.gpus_per_node
        free = Free.read_all(query(FREE) or "")
        if not isinstance(gpus, int):
            gpus = with_gpus(item.config.cluster, free)
        changes = sooner(item.config.cluster, gpus, free, time_left(view))
    return Waiting(
        reason=status.reason,
        words=reason.words,
        fix=reason.fix.replace("{job}", item.job_id or ""),
        starts=status.starts,
        sooner=tuple(changes),
    )


@dataclass(frozen=True)
class ExcludedNode:
    """Describes a node that the run excludes, with its recent failures; ``until`` is the Unix time of its return."""

    node: str
    failures: tuple[str, ...]
    until: float

    @property
    def words(self) -> str:
        """Returns a line with the failures and the command that drains the node."""
        classes = ", ".join(self.failures)
        times = f"{len(self.failures)} times"
        reason = f"{len(self.failures)} failures"
        if len(self.failures) == 1:
            times = "once"
            reason = "failure"
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.until))
        drain = f"scontrol update nodename={self.node} state=drain reason='{reason}: {classes}'"
        failed = f"{self.node} failed {times} ({classes}) and is excluded until {until}"
        return f"{failed}; administrators drain it with: {drain}"


def excluded_nodes(run: RunDirectory, exclude_hours: float) -> list[ExcludedNode]:
    """Returns the nodes that ``run`` excludes now, sorted by name. ``exclude_hours`` comes from the run's config."""
    failures = NodeFailures(run, exclude_hours * 3600)
    recent = failures.recent()
    excluded = []
    for node in sorted(failures.failing_nodes()):
        lines = [line for line in recent if line["node"] == node]
        times = sorted(line["time"] for line in lines for _ in range(line.get("times", 1)))
        classes = tuple(line["class"] for line in lines)
        excluded.append(ExcludedNode(node, classes, times[-TOO_OFTEN] + exclude_hours * 3600))
    return excluded


LOG_BYTES = 256 << 10
MOST_WARNINGS = 5
_STATUS = r"[Gg]ot completion from peer .*?(?:with (?:error|status=)\s*{0}\b|status=\w*\({0}\))"


@dataclass(frozen=True)
class NcclProblem:
    """Explains a message of NCCL and how to fix the problem."""

    pattern: str
    meaning: str
    fix: str


# The messages come from NCCL 2.9 to 2.30 (its source, June 2026, and the reports in its issue tracker) and from torch,
# which quotes NCCL's last warning in the exception. Status numbers are values of ``enum ibv_wc_status`` of libibverbs.
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
        "the warning before it has the cause, such as another rank's failure or different versions of NCCL. Set "
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
    lines = []
    prefix = f"[{rank}] "
    with suppress(OSError, DamagedFile):
        lines += read_tail(run.logs / f"nccl/{attempt:03d}-{rank_writer(rank)}.log", run.path, LOG_BYTES).splitlines()
    with suppress(OSError, DamagedFile):
        log = read_tail(run.logs / f"{node}-{attempt:03d}.log", run.path, LOG_BYTES)
        lines += [line.partition(prefix)[2] for line in log.splitlines() if prefix in line]
    return tuple(dict.fromkeys(line.strip() for line in lines if "NCCL WARN" in line))[-MOST_WARNINGS:]
