"""Defines the table of events: their meanings, their fields, and what the readers of a run derive from them.

``docs/events.md`` is generated from it. The table also defines which events are failures, end a job, or start a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from hpc_train.run.rows import (
    Check,
    Field,
    Row,
    count,
    dict_of,
    flag,
    group,
    list_of,
    number,
    or_none,
    record_of,
    seconds,
    text,
    typed,
)


def _chunk(value: Any) -> bool:
    """Returns whether ``value`` is the kind, stage, beginning and end of a part of a pipeline step."""
    return (
        type(value) is list
        and len(value) == 4
        and value[0] in ("forward", "backward", "weight")
        and type(value[1]) is int
        and 0 <= value[1] < 1 << 16
        and seconds(value[2])
        and seconds(value[3])
    )


_RATES = record_of(nodes=dict_of(or_none(number)), rails=list_of(or_none(number)), world=or_none(number))
TYPES: dict[str, Check] = {  # the name of the type in the documentation -> its check
    "text": text,
    "text or null": or_none(text),
    "number": number,
    "seconds": seconds,
    "seconds > 0": lambda value: seconds(value) and value > 0,
    "count": count,
    "count or null": or_none(count),
    "true or false": flag,
    "list": lambda value: type(value) is list,
    "list of texts": list_of(text),
    "object": group,
    "object or null": or_none(group),
    "GB/s of nodes, rails and world": _RATES,
    "chunks by rank": list_of(record_of(rank=count, chunks=list_of(_chunk))),
}
_NAMES = {  # the fields of each type
    "text": "class message reason traceback launch layout path schedule kind text problem name gpu executor phase how "
    "drain limit mode",
    "text or null": "node job_id stacks",
    "number": "share late_s value rate usual imbalance bubble_share requested",
    "seconds": "time seconds until began save_s step_s eval_s verify_s",
    "count": "attempt exit_code world_size to_step steps micro_batches bytes before requeues in_a_row compiled "
    "reused slow_rank first command_exit_code",
    "count or null": "rank step",
    "true or false": "final free with_optimizer rolled_back cache_loaded",
    "list": "ranks bad_steps skipped_windows overrides layers blocks stage_s findings changes left_out copy_gb_per_s "
    "gemm_tflops counts micro_batch_s",
    "list of texts": "nodes parts gpus partners instead_of without exclude devices networks",
    "object": "ledger predicted expected_gb_per_s pairs_gb_per_s clock_offset_s versions burn_in",
    "object or null": "record even",
    "GB/s of nodes, rails and world": "bus_gb_per_s",
}
HEAD = ("time", "event", "rank", "node", "attempt", "step")  # the fields of every event
FIELDS = {"event": "text"} | {name: of for of, names in _NAMES.items() for name in names.split()}


class Level(IntEnum):
    """Defines where an event is shown; a level includes the places of the levels below it."""

    DETAIL = 0  # only in the live view
    MARK = 1  # on the report page
    REACTION = 2  # by the command why
    FAILURE = 3  # as the cause of an end


@dataclass(frozen=True)
class EventKind:
    """Holds a row of the table.

    Attributes:
        meaning: the sentence in the documentation.
        fields: the names of its fields besides those of every event, separated by spaces. A line that lacks a field
            marked with ``!`` is damaged. ``*`` allows any other fields.
        types: the fields whose type differs from ``FIELDS``.
        ends: what it ends: the training, reported by rank 0, or the job, reported by an agent with its exit code.
        state: the state that the run is in from then on, for monitoring.
        counter: the counter of monitoring that it increases. ``hang_detected`` has none, because the
            ``worker_failed`` that follows it has the class of the failure.
        account: the account of the time ledger that gets its ``seconds``.
        continues_from: the field with the step from which training continues.
        is_progress: whether it shows that the run makes progress.
        is_late: whether its time is not a sign of life, since the run may have ended or its job may have been requeued
            before: a suspended agent writes it when it resumes, or an agent of another job writes it.
        is_of_attempt_before: whether it reports the failure of the previous attempt, which left no agent.
        node_failed, node_slow: the words of the report page about its node.
        in_top: whether the live view lists it.
    """

    meaning: str
    fields: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    level: Level = Level.DETAIL
    ends: Literal["", "training", "job"] = ""
    state: str = ""
    counter: str = ""
    account: str = ""
    continues_from: str = ""
    is_progress: bool = False
    is_late: bool = False
    is_of_attempt_before: bool = False
    node_failed: str = ""
    node_slow: str = ""
    in_top: bool = True

    @property
    def is_failure(self) -> bool:
        return self.level is Level.FAILURE

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of its fields besides ``HEAD``."""
        return tuple(name.rstrip("!") for name in self.fields.split() if name != "*")

    @property
    def is_open(self) -> bool:
        """Returns whether it may have fields that the row does not name."""
        return "*" in self.fields.split()

    @cached_property
    def required(self) -> tuple[str, ...]:
        return ("time", "attempt", "event", *(name[:-1] for name in self.fields.split() if name.endswith("!")))

    @cached_property
    def checks(self) -> dict[str, Check]:
        """Returns the checks of the fields of a line. The checks of other events also apply, unless any other field is
        allowed."""
        names = (*HEAD, *self.names) if self.is_open else FIELDS
        return {name: TYPES[self.types.get(name, FIELDS[name])] for name in names}


_CLOSING = "step! steps step_s save_s eval_s verify_s ledger *"
_CAUSE = "class message exit_code command_exit_code"
EVENTS = {
    # a job and its attempts
    "submitted": EventKind(
        "Only in versions before 0.9: the job was passed to its executor. Now `run.json` has `submissions`.",
        "job_id executor layout",
    ),
    "started": EventKind(
        "The agents start the workers of an attempt. `record` is a copy of `run.json`.",
        "layout world_size gpus began job_id launch nodes record", {"gpus": "count"},
        level=Level.MARK, state="starting", is_progress=True, in_top=False,
    ),
    "preflight": EventKind(
        "The preflight has measured the nodes.",
        "launch mode seconds nodes findings left_out bus_gb_per_s expected_gb_per_s pairs_gb_per_s copy_gb_per_s "
        "gemm_tflops burn_in devices clock_offset_s versions networks",
    ),
    "unfit_node": EventKind(
        "The preflight has dropped a node.", "message reason! node!", level=Level.REACTION, node_failed="unfit"
    ),
    "slow_node": EventKind(
        "The preflight found the network of a node slow.", "message rate usual partners! drain node!",
        level=Level.REACTION, counter="slow_nodes", node_slow="slow",
    ),
    "slow_gpu": EventKind(
        "The preflight found a GPU slow.", "gpu! slow_rank message rate usual drain node!",
        level=Level.REACTION, counter="slow_nodes", node_slow="slow GPU",
    ),
    "stop_requested": EventKind(
        "A person, Slurm or a limit asked the run to stop.", "reason", level=Level.REACTION, is_late=True
    ),
    "requeued": EventKind(
        "The job asks Slurm to queue it again.", "requeues reason exclude",
        level=Level.REACTION, state="requeued", counter="requeues",
    ),
    "requeued_by_slurm": EventKind(
        "Slurm or a person has queued the job again, perhaps because a node was lost.", "reason class message",
        level=Level.REACTION, counter="requeues", is_of_attempt_before=True,
    ),
    "restarted": EventKind(
        "The workers start again within the job, after a failure.", "reason seconds world_size",
        level=Level.REACTION, counter="restarts", is_progress=True,
    ),
    "shrunk": EventKind(
        "The job continues with fewer nodes.", "nodes before without", {"nodes": "count"}, level=Level.REACTION
    ),
    "resize_requested": EventKind(
        "The run is to continue on `nodes` nodes; `reason`: who asked.", "nodes before reason message",
        {"nodes": "count"}, level=Level.REACTION,
    ),
    "resize_refused": EventKind(
        "The run cannot continue on `nodes` nodes.", "nodes reason message!", {"nodes": "count"}, level=Level.REACTION
    ),
    "resized": EventKind(
        "The job continues on `nodes` nodes as requested; `steps`: how many are repeated.",
        "nodes before without steps reason message", {"nodes": "count"}, level=Level.REACTION, is_progress=True,
    ),
    "joined": EventKind(
        "A node of a joiner belongs to the run; `seconds`: how long its job held it before, with `gpus` GPUs.",
        "seconds! gpus!", {"gpus": "count"},
    ),
    "left": EventKind(
        "A node of a joiner leaves before it has joined; `seconds`: how long its job held it, with `gpus` GPUs.",
        "seconds! gpus!", {"gpus": "count"}, is_late=True,
    ),
    "spare_used": EventKind("A spare node replaces another.", "nodes instead_of", level=Level.REACTION),
    "suspended": EventKind(
        "Slurm had suspended the job for some seconds.", "seconds! until! reason",
        level=Level.REACTION, account="suspended_s", is_late=True,
    ),
    "paused": EventKind(
        "The batch host did not execute for some seconds, although the job was not suspended.",
        "seconds! until! reason", level=Level.REACTION, account="frozen_s", is_late=True,
    ),
    "finished": EventKind("The job has ended, and the run is done.", f"{_CAUSE} reason", ends="job", state="finished"),
    "stopped": EventKind(
        "The job has ended after a stop or to be requeued.", f"{_CAUSE} reason", ends="job", state="stopped"
    ),
    "failed": EventKind(
        "The job has ended because of a failure.", f"{_CAUSE} gpus", level=Level.FAILURE, ends="job", state="failed"
    ),
    "stopped_retrying": EventKind(
        "The job has ended and is not requeued: failures without progress, or a budget that is spent.", _CAUSE,
        level=Level.FAILURE, ends="job", state="failed",
    ),
    # failures
    "worker_failed": EventKind(
        "A worker has failed.", "class message traceback gpus",
        level=Level.FAILURE, state="restarting", counter="failures", node_failed="failed",
    ),
    "node_lost": EventKind(
        "The agent of a node has ended or does not answer.", "class message traceback gpus",
        level=Level.FAILURE, state="restarting", counter="failures", node_failed="lost",
    ),
    "replica_lost": EventKind(
        "Replicas of `strategy.local_steps` are lost with `nodes`; the others go on without a restart.",
        "class! message! nodes!", level=Level.REACTION, node_failed="lost",
    ),
    "hang_detected": EventKind(
        "The ranks do not progress; their stacks were saved, and they are killed.",
        "phase seconds message stacks ranks gpus", level=Level.FAILURE, state="restarting", node_failed="hung",
    ),
    "collective_timed_out": EventKind(
        "A collective timed out on a rank that then failed; the stacks of the others were saved.",
        "message stacks ranks", node_failed="timed out",
    ),
    "agents_killed": EventKind(
        "All agents of a step of the job were killed by a signal; the next step writes the event.", "class message",
        level=Level.REACTION, is_of_attempt_before=True,
    ),
    "file_system_failed": EventKind(
        "Files of the run directory could not be written for some seconds; now they can be written again.",
        "class message began seconds", level=Level.REACTION,
    ),
    "gpu_memory_awaited": EventKind(
        "After a failure due to a lack of GPU memory, the agent waited until memory was free.", "seconds free message",
        level=Level.REACTION,
    ),
    "gpu_idle": EventKind(
        "GPUs were idle for `telemetry.gpu_idle_minutes`.", "gpus message", level=Level.REACTION
    ),
    # observations
    "no_progress": EventKind("The run has made no progress for a minute or more; nothing is killed.", "phase message"),
    "slow_step": EventKind("A step was so slow that its stacks were saved.", "phase seconds message stacks"),
    "held": EventKind(
        "A person looks into the process of a rank with `debug`, at the Unix socket `path`; all ranks wait.",
        "path! message! requested!", level=Level.MARK,
    ),
    "released": EventKind(
        "The ranks continue after a hold; `reason`: why it has ended.", "seconds! reason! requested!", level=Level.MARK
    ),
    "straggler": EventKind(
        "The other ranks often wait for one rank.", "share late_s message",
        level=Level.MARK, counter="stragglers", node_slow="slow",
    ),
    "micro_batches_moved": EventKind(
        "`batch.balance` has changed how many micro-batches of a step each replica computes; `micro_batch_s`: the "
        "seconds that each takes for one.", "message! counts! micro_batch_s!", level=Level.REACTION,
    ),
    "corruption": EventKind(
        "`train.verify` found wrong numbers; `ranks` on `node` are the suspects, `parts`: what differs, `reason`: the "
        "check, `first`: the steps before the first one whose numbers may be wrong, `steps`: the number of "
        "independent findings, `final`: a repetition did not give the right numbers.",
        "message! reason ranks gpus parts first! steps! final", level=Level.REACTION, counter="corruptions",
        node_failed="wrong numbers",
    ),
    "warning": EventKind("Something that the user should know.", "message!", level=Level.MARK),
    "advice": EventKind(
        "What limits the speed or leaves experts unused, and settings that may help.",
        "limit value message! overrides",
        in_top=False,
    ),
    # checkpoints
    "resumed": EventKind(
        "The workers have loaded a checkpoint.", "step! path with_optimizer changes",
        level=Level.REACTION, continues_from="step", is_progress=True,
    ),
    "checkpoint_saved": EventKind(
        "A checkpoint is complete.", "step! path bytes seconds",
        counter="checkpoint_saves", is_progress=True, in_top=False,
    ),
    "checkpoint_failed": EventKind(
        "A save has failed; `final`: the last save of the run.", "message! final",
        level=Level.REACTION, counter="checkpoint_failures",
    ),
    "save_deferred": EventKind(
        "The last save waits for free disk space.", "path! seconds! message!", level=Level.REACTION
    ),
    "checkpoint_set_aside": EventKind(
        "A checkpoint was set aside, because it is damaged or a rollback undoes its steps.",
        "path! message! rolled_back", level=Level.REACTION,
    ),
    # training
    "first_step": EventKind(
        "The first step of the attempt is done; `cache_loaded`: it used graphs compiled earlier.",
        "seconds compiled reused cache_loaded", is_progress=True,
    ),
    "evaluation_started": EventKind("An evaluation begins.", state="evaluating", is_progress=True),
    "step_skipped": EventKind(
        "Steps were skipped on all ranks because the gradient was not finite.", "steps in_a_row", level=Level.MARK
    ),
    "replayed": EventKind(
        "A step without a finite gradient, or steps with high losses, were computed again. `reason`: `hardware` (the "
        "result differs, on `ranks` if it is known where), `data or optimization` (it repeats), or `unknown` (the "
        "weights have changed since).", "message! reason! ranks", level=Level.REACTION, node_failed="wrong numbers",
    ),
    "rolled_back": EventKind(
        "Training has diverged and continues from an earlier checkpoint, without some samples.",
        "to_step! bad_steps skipped_windows reason",
        level=Level.REACTION, counter="rollbacks", continues_from="to_step", is_progress=True,
    ),
    "stream_ended": EventKind("The data has ended before `train.steps`.", level=Level.MARK),
    "ended_early": EventKind("A hook has ended training before the last step.", "reason", level=Level.MARK),
    "training_finished": EventKind(
        "Rank 0 has completed the last step. The event has the result and the time ledger.", _CLOSING,
        level=Level.MARK, ends="training",
    ),
    "training_stopped": EventKind(
        "Rank 0 has stopped after a checkpoint. The event has the time ledger.", _CLOSING,
        level=Level.MARK, ends="training",
    ),
    "pipeline_split": EventKind(
        "The layers of each pipeline stage and their predicted costs.", "how layers blocks predicted even"
    ),
    "pipeline_balance": EventKind(
        "The measured balance of the stages in the first steps.", "stage_s imbalance bubble_share predicted"
    ),
    "pipeline_step": EventKind(
        "When each stage computed in one of the first steps.", "ranks! seconds! schedule! micro_batches!",
        {"ranks": "chunks by rank", "seconds": "seconds > 0"}, in_top=False,
    ),
    "profiled": EventKind("The chosen steps were profiled.", "first ranks", {"ranks": "object"}),
    "loop": EventKind("An event of a custom training loop (`run.entry`), with any fields.", "name *"),
}  # fmt: skip
_UNKNOWN = EventKind("An event of another version of hpc_train.", "*")


class Event(dict[str, Any]):
    """Holds a line of the event log: a dictionary of its fields, most of which are also attributes.

    Attributes:
        failure: its field ``class``, one of ``run.exits.Failure``.
    """

    name = Field("event", "")
    time = Field("time", 0.0)
    attempt = Field("attempt", 0)
    rank = Field[int | None]("rank", None)
    node = Field[str | None]("node", None)
    step = Field[int | None]("step", None)
    message = Field("message", "")
    reason = Field("reason", "")
    failure = Field[str | None]("class", None)
    traceback = Field("traceback", "")
    stacks = Field[str | None]("stacks", None)
    path = Field("path", "")
    step_s = Field[float | None]("step_s", None)
    eval_s = Field[float | None]("eval_s", None)
    save_s = Field[float | None]("save_s", None)
    verify_s = Field[float | None]("verify_s", None)
    exit_code = Field[int | None]("exit_code", None)
    until = Field("until", 0.0)
    seconds = Field("seconds", 0.0)
    began = Field[float | None]("began", None)
    nodes = Field[Sequence[str]]("nodes", ())
    gpus = Field[Any]("gpus", None)  # their number in ``started``, otherwise texts
    world_size = Field("world_size", 0)
    layout = Field("layout", "")
    launch = Field("launch", "")
    job_id = Field[str | None]("job_id", None)
    bytes = Field[int | None]("bytes", None)
    steps = Field("steps", 1)
    bus_gb_per_s = Field[Mapping[str, Any]]("bus_gb_per_s", MappingProxyType({}))
    schedule = Field("schedule", "")
    micro_batches = Field("micro_batches", 0)
    ranks = Field[Any]("ranks", ())
    record = Field[dict[str, Any] | None]("record", None)
    partners = Field[Sequence[str]]("partners", ())
    final = Field("final", False)
    rolled_back = Field("rolled_back", False)

    @property
    def kind(self) -> EventKind:
        return EVENTS.get(self.name, _UNKNOWN)

    @property
    def continues_from(self) -> int:
        """Returns the step from which training continues after it."""
        step: int = self[self.kind.continues_from]
        return step


def event_row(row: Row) -> Event | None:
    """Returns an event, which has ``time``, ``attempt``, ``event``, ``rank``, ``node`` and ``step``, of which the last
    three may be None; None for another line.
    """
    name = row.get("event")
    if type(name) is not str:
        return None
    kind = EVENTS.get(name, _UNKNOWN)
    right = typed(row, kind.checks, kind.required)
    return None if right is None else Event({"rank": None, "node": None, "step": None} | right)


def misfit(line: Row) -> str | None:
    """Returns what is wrong with a line to be written, for tests; None if it matches the table."""
    kind = EVENTS.get(line["event"])
    if kind is None:
        return f"the table of events lacks {line['event']}"
    unknown = line.keys() - {*HEAD, *kind.names}
    if unknown and not kind.is_open:
        return f"the row of {line['event']} in the table of events lacks {', '.join(sorted(unknown))}"
    wrong = [name for name, check in kind.checks.items() if name in line and not check(line[name])]
    return f"{', '.join(wrong)} of {line['event']} are not of the types in the table of events" if wrong else None


_INTRODUCTION = """# Events

`python -m hpc_train.run.events > docs/events.md` generates this page from the table in `hpc_train/run/events.py`.

The files `events/<writer>-NNN.jsonl` of a run directory have one JSON object per line: what the submitter, the agents
and the ranks have done and noticed in attempt NNN. Every event has `time` (seconds since 1970), `event` (its name),
`attempt`, and `rank`, `node` and `step`, which may be null. `class` is one of the
[classes of failures](troubleshooting.md). `Run.events()` of the [Python API](api.md) returns them in order.
"""


def reference() -> str:
    """Returns ``docs/events.md``."""
    lines = [_INTRODUCTION, "| Event | Meaning | Fields |", "|---|---|---|"]
    for name, kind in EVENTS.items():
        fields = ", ".join(f"`{field}`" for field in kind.names if field not in HEAD)
        if kind.is_open:
            fields = f"{fields} and others" if fields else "any"
        lines.append(f"| `{name}` | {kind.meaning} | {fields} |")
    lines += ["\n## Fields\n", "| Field | Type |", "|---|---|"]
    for name in sorted(FIELDS):
        others = [f"{kind.types[name]} in `{event}`" for event, kind in EVENTS.items() if name in kind.types]
        lines.append(f"| `{name}` | {'; '.join([FIELDS[name], *others])} |")
    groups = {
        "Failures": [name for name, kind in EVENTS.items() if kind.is_failure],
        "The end of a job, with its `exit_code`": [name for name, kind in EVENTS.items() if kind.ends == "job"],
        "Shown by `why` besides failures": [n for n, kind in EVENTS.items() if kind.level is Level.REACTION],
        "Shown on the report page besides those": [n for n, kind in EVENTS.items() if kind.level is Level.MARK],
    }
    lines += [
        "\n## Groups\n",
        *(f"- {title}: {', '.join(f'`{n}`' for n in names)}." for title, names in groups.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
