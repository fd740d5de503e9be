"""Defines the run directory, the one interface between submitter, agents, workers, commands and notebooks.

config.yaml                  the current frozen config; earlier ones are config-NNN.yaml
job.sbatch                   the batch script of the last submission; for an array it is slurm/JOB.sbatch of the sweep
job.sh                       commands that a batch script written by hand sources
gpus.sh                      passes the GPUs of a job on to its steps, for scripts that start the agents themselves
run.json                     run id, config hash, code version, W&B id, every submission (see record.py)
run.copy.json                a copy that replaces a damaged run.json until the first start; then events/ has it
metrics/attempt-NNN.jsonl    one object per logged step
texts/attempt-NNN.jsonl      one object per text of a hook, for trackers
events/<writer>-NNN.jsonl    the event log, one file per writing process and attempt
checkpoints/step-00000100/   committed by rename
logs/<node>-NNN.log          the workers' output
logs/nccl/NNN-rank-RRRR.log  NCCL's log of a rank that a preflight has read, if the attempt fails
logs/stacks/                 stacks of slow steps and hangs, and answers to `stacks`; of the last ten attempts
pp_split.json                cost of each block and the layers of each stage (strategy.pp_split=flops|measured)
attempts/NNN.json            address, port and layout of an attempt; creating the file claims the number. Of an attempt
                             on one node, the hardware and the resulting environment as well
attempts/first-NNN           the job of cluster.first that has started first, by submission; first-NNN.jobs lists all
attempts/00000001            the run's lease while an agent has it (see lease.py and file_lock.py)
plan.json                    the layout that strategy=auto has chosen, the table behind it, and what it depends on
fabric.json                  hardware of several nodes, those of the newest attempt, and the resulting environment
compiled/                    artifacts of torch.compile, which the next attempt loads (see parallel/compile.py)
profile/                     traces of chosen steps and ranks, and the time breakdown of a step (telemetry.profile)
.locks/                      locks that are held at this moment, such as the one on run.json (see file_lock.py)
code/HASH/                   the frozen copy of the user's code with run.snapshot=copy or run.group; the runs of a sweep
                             share one in its directory. Otherwise the runs of a root share it in .code/UID/HASH
report.html                  the report page, written at the end of each job; a sweep's directory has one as well
roles/NAME/                  the run of a role, with all of these files (run.roles)
wandb/                       files of the W&B client, if W&B is enabled
tracking/wandb.json          the step up to which a tracker has the metrics (see telemetry/sinks/tracker.py)
tracking/output.log          what the tracking process and its clients print
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpc_train.errors import UserError
from hpc_train.opening import CONFIG, SMALL, DamagedFile, read_file, read_tail, resolved_below, tell_once
from hpc_train.run.events import Event, event_row
from hpc_train.run.file_lock import LockOwner, exclusive, superseded
from hpc_train.run.files import NewLines, last_line, read_json
from hpc_train.run.record import FORMAT, read_record, write_record
from hpc_train.run.rows import ATTEMPT, Line, config_sections, failure_row, metrics_row, text_row, typed

OUTPUT_BYTES = 1 << 20  # the number of bytes that are read from the end of the output of a job
PIPELINE_SPLIT = "pp_split.json"
ROLES = "roles"
SECTION = re.compile(r"^(?=\w)", re.MULTILINE)  # begins at a line that is not indented
_ATTEMPT_FILE = re.compile(r"([0-9]{3,9})\.json")
RUN_DIRECTORY = "HPC_TRAIN_RUN_DIR"  # the variable with the run directory for commands of the user
PAGE = "report.html"  # the report page of a run or a sweep
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, where PyYAML has it, is eight times as fast


class _Path:
    """Returns, as a descriptor, the path of a file or folder by its name in the run directory."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Gives access to the paths and the small files of one run."""

    path: Path

    config = _Path("config.yaml")
    job_script = _Path("job.sh")
    gpus_script = _Path("gpus.sh")
    metrics = _Path("metrics")
    texts = _Path("texts")
    events = _Path("events")
    checkpoints = _Path("checkpoints")
    logs = _Path("logs")
    profile = _Path("profile")
    compiled = _Path("compiled")
    attempts = _Path("attempts")
    code = _Path("code")
    wandb = _Path("wandb")
    fabric = _Path("fabric.json")
    plan = _Path("plan.json")

    @property
    def title(self) -> str:
        """Returns the name of the run; ``SWEEP/NUMBER`` for a job of a sweep."""
        if self.path.name.isdigit():
            return f"{self.path.parent.name}/{self.path.name}"
        return self.path.name

    @property
    def roles(self) -> list[RunDirectory]:
        """Returns the runs of the roles of this run (``run.roles``), sorted by name."""
        return [RunDirectory(config.parent) for config in sorted(self.path.glob(f"{ROLES}/*/config.yaml"))]

    def of_role(self, name: str) -> RunDirectory:
        """Returns the run of a role of this run."""
        return RunDirectory(self.path / ROLES / name)

    def create(self) -> None:
        """Creates the directory and its folders; idempotent."""
        for folder in (self.metrics, self.events, self.checkpoints, self.logs, self.attempts):
            folder.mkdir(parents=True, exist_ok=True)

    def read(self, path: Path, largest: int = SMALL) -> bytes:
        """Returns the content of a small file of the run.

        Raises:
            DamagedFile: ``hpc_train.opening`` refuses to open it.
            OSError: it does not exist, or cannot be read.
        """
        return read_file(path, self.path, largest)

    def config_bytes(self) -> bytes:
        """Returns the content of ``config.yaml``; raises as ``read`` does."""
        return self.read(self.config, CONFIG)

    def json(self, path: Path) -> Any:
        """Returns the value in a JSON file of the run; raises as ``read``, and DamagedFile if it is not JSON."""
        return read_json(path, self.path)

    def follow(self, path: Path) -> NewLines:
        """Returns a reader of the lines of a file, whose types are checked by ``run.rows``."""
        return NewLines(path, self.path, _CHECKS.get(path.parent.name, failure_row))

    def end_of_output(self, path: Path) -> str:
        """Returns the end of ``path``, the output of the agents; empty if it is missing or not a file of the run.

        ``run.json`` names it, and another user's record might name a private file of the reader.
        """
        resolved = resolved_below(path, [self.path])
        if resolved is None:  # the jobs of a sweep write to its folder slurm, which may not be a link of another user
            of_sweep = resolved_below(path, [self.path.absolute().parent])
            if of_sweep is not None and of_sweep[0].relative_to(of_sweep[1]).parts[0] == "slurm":
                resolved = of_sweep
        try:
            if resolved is not None:
                return read_tail(*resolved, OUTPUT_BYTES)
            if path.is_file():
                tell_once(f"note: {self.path}: its output {path} is not in the directory of the run; it is not read")
        except FileNotFoundError:
            pass
        except DamagedFile as error:
            tell_once(f"note: {self.path}: its output {error.what}; it is not read")
        return ""

    def record(self) -> dict[str, Any]:
        """Returns the content of ``run.json``, or of its copy if it is missing or damaged; empty without both.

        Raises:
            UserError: it is damaged and has no intact copy, or another version of hpc_train wrote it in another format.
        """
        return read_record(self.path)

    def plain_config(self, *sections: str) -> dict[str, Any]:
        """Returns the frozen config as plain values, in a tenth of the time of ``freeze.load``, for listing many runs.

        It is neither checked against the record nor converted to the types of the schema; {} if it is not readable.

        Args:
            sections: the top-level keys to parse, which takes even less time; all by default.
        """
        try:
            text = self.config_bytes().decode()
            if sections:
                text = "".join(part for part in SECTION.split(text) if part.partition(":")[0] in sections)
            config = parsed_config(text)
        except DamagedFile as error:
            tell_once(f"note: {error.what}; it is not read")
            return {}
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return config_sections(config) if isinstance(config, dict) else {}

    def update_record(self, **fields: Any) -> dict[str, Any]:
        """Merges ``fields`` into ``run.json``. Submitter, agent and rank 0 may call it concurrently."""
        with exclusive(self.path / ".locks" / "record"):
            record = self.record() | {"format": FORMAT} | fields
            write_record(self.path, record)
            return record

    def newest_attempt(self) -> int:
        """Returns the highest claimed attempt number, -1 before the first."""
        matches = (_ATTEMPT_FILE.fullmatch(path.name) for path in self.attempts.glob("[0-9]*.json"))
        return max((int(match[1]) for match in matches if match is not None), default=-1)

    def claim_attempt(self, owner: LockOwner | None = None) -> int:
        """Claims the next attempt number for a new start of the workers. Only the agent of node 0 calls it.

        Args:
            owner: this process by default.

        Raises:
            UserError: another process holds the run's lease, or has taken it over.
        """
        other = superseded(lease_folder(self.path), owner or LockOwner.of_this_process())
        if other is not None:
            raise UserError(
                f"{other.owner()} has taken over the run; this process may not start an attempt",
                where=str(self.path),
                fix="let the other process continue the run",
            )
        self.attempts.mkdir(exist_ok=True)
        number = self.newest_attempt() + 1
        while True:
            try:
                os.close(os.open(self.attempts / f"{number:03d}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                return number
            except FileExistsError:
                number += 1

    def metrics_file(self, attempt: int) -> Path:
        return self.metrics / f"attempt-{attempt:03d}.jsonl"

    def events_file(self, writer: str, attempt: int) -> Path:
        return self.events / f"{writer}-{attempt:03d}.jsonl"

    def newest_metrics(self, attempt: int) -> Line:
        """Returns the last line of metrics of an attempt; an empty one if there is none."""
        return metrics_row(last_line(self.metrics_file(attempt), self.path)) or Line()

    def last_logged_step(self) -> Line:
        """Returns the last line of metrics of the newest attempt that has logged a step; an empty one before it."""
        newest_first = sorted(self.metrics.glob("attempt-*.jsonl"), key=_attempt_of, reverse=True)
        lines = (metrics_row(last_line(path, self.path)) for path in newest_first)
        return next(filter(None, lines), Line())

    def attempt_record(self, attempt: int) -> dict[str, Any]:
        """Returns the content of ``attempts/NNN.json``; {} until the attempt has started, or if the file is damaged."""
        try:
            record = self.json(self.attempts / f"{attempt:03d}.json")
        except (FileNotFoundError, DamagedFile):  # it is empty until then
            return {}
        if not isinstance(record, dict):
            return {}
        return typed(record, ATTEMPT) or {}

    def fabric_record(self) -> Any:
        """Returns what is recorded of the nodes of the newest attempt (see ``elastic.fabric``); raises as ``json``.

        An attempt on one node has it in its own record.
        """
        of_one_node = self.attempt_record(self.newest_attempt()).get("fabric")
        return self.json(self.fabric) if of_one_node is None else of_one_node

    def read_metrics(self) -> list[Line]:
        """Returns the logged steps in order; if attempts overlap, the highest attempt's line of a step counts."""
        steps = {line.step: line for line in self.read_all_metrics()}
        return [steps[step] for step in sorted(steps)]

    def read_all_metrics(self) -> Iterator[Line]:
        """Yields the lines of all attempts, including steps that a later attempt repeated."""
        for path in sorted(self.metrics.glob("attempt-*.jsonl"), key=_attempt_of):
            yield from self.follow(path).read()

    def read_events(self) -> list[Event]:
        """Returns all events of all writers by attempt, and within an attempt by time.

        The jobs of a run may have different clocks.
        """
        return sorted(self.events_of("*"), key=lambda event: (event.attempt, event.time))

    def events_of(self, writer: str, attempt: int | None = None) -> Iterator[Event]:
        """Yields the events of ``writer`` in one or all attempts, in no particular order."""
        number = "*" if attempt is None else f"{attempt:03d}"
        for path in self.events.glob(f"{writer}-{number}.jsonl"):
            yield from self.follow(path).read()


class CheckpointDirectory(RunDirectory):
    """Gives access to a directory of checkpoints without a run, as ``hpc_train.checkpoint.save`` writes it."""

    checkpoints = _Path("")


def rank_writer(rank: int) -> str:
    """Returns the name under which a rank writes its events and logs."""
    return f"rank-{rank:04d}"


# Rank 0 writes the events about saves and the preflight; all writers of a large job have thousands of files.
RANK_0 = rank_writer(0)


def parsed_config(text: str) -> Any:
    """Returns the value of the YAML of a config.

    Raises:
        ValueError: it has aliases. hpc_train writes none, and a few lines of aliases can expand to a huge value.
        RecursionError, yaml.YAMLError: it is not YAML.
    """
    if "&" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _LOADER)):
        raise ValueError("it has YAML aliases")
    return yaml.load(text, _LOADER)


_CHECKS = {"metrics": metrics_row, "events": event_row, "texts": text_row}  # folder -> check of its rows


def refuse_empty_name(target: str) -> None:
    """Raises UserError if the name of a run is empty. As a path it would be the run root, with all its runs."""
    if not target.strip():
        raise UserError(
            "the name of the run or sweep is empty",
            where="the command line",
            fix="name a run, or a directory; a shell variable such as $RUN may be unset",
        )


def sweep_given(target: str, runs: Sequence[Path], command: str) -> UserError:
    """Returns the error for several ``runs`` in a directory that is given to a command for one run."""
    return UserError(
        f"{target} has {len(runs)} runs",
        where="the command line",
        fix=f"name one run: python -m hpc_train {command} {target.rstrip('/')}/{runs[0].name}",
    )


def lease_folder(path: Path) -> Path:
    """Returns the folder with the lock files of a run's lease (see ``run.lease``), which also has its attempts."""
    before = path / ".locks" / "lease"  # the folder of versions before 0.9, one of which may be at work
    return before if before.is_dir() else path / "attempts"


def _attempt_of(path: Path) -> int:
    match = re.search(r"(\d+)\.jsonl$", path.name)
    return int(match[1]) if match else -1
