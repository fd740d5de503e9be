"""How a submitted job stands, read from its run directory: the same for every place that runs jobs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.launch.job import Job
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import read_lines

TAIL_BYTES = 8192

STATES = {Exit.DONE: "done", Exit.STOPPED: "stopped", Exit.REFUSED: "refused", Exit.GAVE_UP: "given up"}


@dataclass(frozen=True)
class View:
    """A job at one moment.

    ``exit`` is None until the job has ended; ``metrics`` is its newest logged step (empty before the first); ``steps``
    is how many there will be, where that is known.
    """

    state: str
    metrics: dict[str, Any]
    exit: int | None = None
    message: str = ""
    steps: int | None = None


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted. Attempts before ``first_attempt`` belong to earlier submissions of the same run."""

    job: Job
    job_id: str
    first_attempt: int
    agent_output: Path

    def view(self, present: bool) -> View:
        """How the job stands; ``present`` says whether the place that took it still has it."""
        attempt = self.job.run.newest_attempt()
        if attempt < self.first_attempt:
            return View("waiting", {}) if present else self._lost({})
        metrics = last_line(self.job.run.metrics_file(attempt))
        if present:
            return View("running" if metrics else "starting", metrics, steps=self._steps())
        end = _end(self.job.run, attempt)
        if end is None:
            return self._lost(metrics)
        code = end["exit_code"]
        return View(STATES.get(code, "failed"), metrics, code, _message(self.job.run, end), self._steps())

    def _steps(self) -> int | None:
        return self.job.config.train.steps or self.job.run.record().get("total_steps")

    def _lost(self, metrics: dict[str, Any]) -> View:
        """The agent has ended without saying how: what it printed last is all there is."""
        text = self.agent_output.read_text(errors="replace") if self.agent_output.exists() else ""
        message = "\n".join(text.strip().splitlines()[-30:])
        return View("failed", metrics, Exit.FAILED, message or "the agent ended without a word: was it killed?")


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a metrics file, without reading what comes before."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return {}
    try:
        return json.loads(whole.rpartition(b"\n")[2])
    except ValueError:
        return {}


def resume_command(arguments: Sequence[str], run: RunDirectory, root: str, *, submits: bool = False) -> str:
    """The command that goes on with ``run``: the same command line under the run's name; ``submits``: with ``-m``."""
    name = f"run.name={os.path.relpath(run.path, root)}"
    kept = [part for part in arguments if not part.startswith(("run.name=", "run.fork="))]
    # beside the other overrides: Hydra's parser wants them in one piece, with options before or after
    first = next((place for place, part in enumerate(kept) if "=" in part and not part.startswith("-")), len(kept))
    return shlex.join(["python", "-m", "hpc_train", *(["-m"] if submits else []), *kept[:first], name, *kept[first:]])


def _end(run: RunDirectory, attempt: int) -> dict[str, Any] | None:
    """The event by which an agent ended the attempt; a failure of one node counts for all."""
    found = [
        event
        for path in run.events.glob(f"agent-*-{attempt:03d}.jsonl")
        for event in read_lines(path)
        if "exit_code" in event
    ]
    return min(found, key=lambda event: (event["event"] != "failed", event["time"]), default=None)


def _message(run: RunDirectory, end: dict[str, Any]) -> str:
    """The failing rank's own traceback."""
    if end["event"] != "failed" or "class" not in end:
        return str(end.get("message", ""))
    if end["exit_code"] == Exit.REFUSED:
        return end["message"]
    failed = [
        event
        for event in run.read_events()
        if event["event"] == "worker_failed" and event["attempt"] == end["attempt"] and "traceback" in event
    ]
    head = f"rank {end['rank']} on {end['node']} failed ({end['class']}):"
    return f"{head}\n{failed[0]['traceback'].rstrip()}" if failed else f"{head} {end['message']}"
