"""Shows the progress of a run from its run directory: a live line, notices, and a summary; without torch.

Each look reads only what was written since the last one.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.opening import DamagedFile
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event
from hpc_train.run.files import PATIENCE_S, BackgroundCall, in_time
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.run.rows import Line, is_profile
from hpc_train.telemetry.loss_chart import TRAIN, VALIDATION, loss_chart
from hpc_train.telemetry.notices import Notices, saves
from hpc_train.telemetry.sinks.tracking import TRACKING
from hpc_train.units import format_duration, format_hours

if TYPE_CHECKING:  # workers import this module and print no live line
    from rich.console import Console
    from rich.live import Live

LOOK_EVERY_S = 0.5
LOOK_S = 1.0  # the agent waits at most this long for the file system
PLAIN_LINE_EVERY_S = 5.0  # interval of lines if the output is not a terminal
WINDOW = 20  # number of logged steps from which the remaining time is estimated

NOT_FINITE = "not finite"  # a loss that JSON cannot hold; its line has null

Look = tuple[list[Line], list[Event]]  # new lines of metrics, new events


class Progress:
    """Shows the attempts of ``run`` that start after the construction of this object.

    Args:
        resume_command: the command line that continues this run, for the summary.
    """

    def __init__(self, run: RunDirectory, console: Console, resume_command: str | None = None) -> None:
        self._run = run
        self._console = console
        self._resume_command = resume_command
        self._first_attempt = run.newest_attempt() + 1
        self._lines = _NewLinesOfAttempts(run, self._first_attempt, run.metrics_file)
        writers = ("rank-0000", TRACKING)
        self._events = [_NewLinesOfAttempts(run, self._first_attempt, partial(run.events_file, one)) for one in writers]
        self._look = BackgroundCall(self._read)
        self._total: int | None = None
        self._restarts = 0
        self._notices = Notices()
        self._recent: deque[Line] = deque(maxlen=WINDOW)
        self._live: Live | None = None
        self._looked = self._printed = float("-inf")
        self._shown: tuple[Any, ...] | None = None
        self._built = self._announced = self._is_command = False

    def tick(self) -> None:
        """Updates the display; it is cheap and meant to be called several times per second."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        self._take(self._look.poll, LOOK_S)
        if self._console.is_terminal:
            self._update_live()
        elif not self._announced and not self._recent:
            self._announced = True
            self._say("starting run.command" if self._is_command else self._line())
        elif self._recent and self._state != self._shown and now - self._printed >= PLAIN_LINE_EVERY_S:
            self._print()

    def finish(self, failed: bool = False) -> None:
        """Prints the last state, and the summary if the run is done and this attempt has not ``failed``."""
        self._take(self._look.result, PATIENCE_S)  # it may have begun before the last line was written
        self._looked = float("-inf")
        self.tick()
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._recent and self._state != self._shown:
            self._print()
        self._say(self._end(failed))

    def _end(self, failed: bool) -> str:
        with suppress(OSError):  # the file system does not respond
            if not failed and in_time(lambda: is_done(self._run)):
                return in_time(lambda: f"\n{summary(self._run, self._resume_command)}")
        return f"run directory: {self._run.path}"

    def _take(self, look: Callable[[float], Look], seconds: float) -> None:
        """Takes what was written since the last look, if the file system responds within ``seconds``."""
        try:
            lines, events = look(seconds)
        except OSError:
            return
        for line in lines:
            if self._recent and line.attempt != self._recent[-1].attempt:
                self._recent.clear()
            self._recent.append(line)
        # rank 0 records the number of steps when it has built a new run, and an event when it has resumed one
        self._built |= any(event.rank == 0 for event in events) or (
            self._first_attempt == 0 and self._total is not None
        )
        for event in events:
            if (message := self._notices.message(event)) is not None:
                self._say(message)

    def _read(self) -> Look:
        """Reads the new metrics and events. A file system that hangs blocks it, and so it runs in a thread."""
        record = self._run.record()
        self._total, self._is_command = record.get("total_steps"), record.get("own_code") == "command"
        self._restarts = max(0, self._run.newest_attempt() - self._first_attempt)
        events = [event for file in self._events for event in file.read()]
        return list(deque(self._lines.read(), WINDOW)), events  # no more lines are shown

    def _update_live(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)  # without a thread, since this process forks
            self._live.start()
        self._live.update(Text(self._line(), overflow="ellipsis", no_wrap=True), refresh=True)

    def _print(self) -> None:
        self._printed = time.monotonic()
        self._shown = self._state
        self._say(self._line())

    @property
    def _state(self) -> tuple[Any, ...]:
        """Returns what distinguishes the line that is shown from the one before."""
        return self._recent[-1].attempt, self._recent[-1].step, self._evaluating

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        line = progress_line(list(self._recent), self._total, self._restarts, self._notices.failed, self._built)
        return line if self._evaluating is None else f"{line} · evaluating after step {self._evaluating}"

    @property
    def _evaluating(self) -> int | None:
        """The step after which an evaluation runs; None if its line of metrics was read."""
        step = self._notices.evaluating
        return None if step is None or (self._recent and self._recent[-1].step >= step) else step


def progress_line(
    recent: Sequence[Line], total: int | None, restarts: int = 0, failed_saves: int = 0, built: bool = False
) -> str:
    """Formats the newest of the ``recent`` lines of metrics, with the remaining time, restarts and failed saves.

    Without a line it says what the run is waiting for; ``built``: the model is built and has its weights.
    """
    if not recent:
        return f"starting: {'first step' if built else 'importing torch, connecting the ranks and building the model'}"
    line = recent[-1]
    parts = [f"step {line.step}" + (f"/{total}" if total else "")]
    if "loss" in line:
        parts.append(f"loss {NOT_FINITE if line.loss is None else format(line.loss, '.4f')}")
    parts += speed(line)
    if total and line.step < total:
        parts.append(f"{format_duration((total - line.step) * _seconds_per_step(recent))} left")
    if restarts:
        parts.append(f"{restarts} restart{'s' if restarts > 1 else ''}")
    if failed_saves:
        parts.append(f"{saves(failed_saves)} failed")
    return " · ".join(parts)


def final_result(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the result in ``record``, the contents of ``run.json``, if all steps are done; None otherwise.

    A run that continues with more steps has the result of the shorter one until it is done.
    """
    result: dict[str, Any] | None = record.get("result")
    return None if result is None or result["steps"] < record.get("total_steps", 0) else result


def is_done(run: RunDirectory) -> bool:
    """Returns whether all steps are done and the result is written."""
    return final_result(run.record()) is not None


def speed(line: dict[str, Any]) -> list[str]:
    """Returns the speed in ``line``, a line of metrics or a result, in samples if each has one target; [] without."""
    rate = line.get("tokens_per_s")
    if rate is None:
        return []
    single = line["tokens"] == line.get("samples") if "tokens" in line else rate == line.get("samples_per_s")
    return [f"{rate:,.0f} {'samples' if single else 'tokens'}/s"]


def speed_column(lines: Iterable[dict[str, Any]]) -> tuple[str, list[str]]:
    """Returns the head and the cells of a column with the speed in each of ``lines``: the head has the unit, unless the
    units differ."""
    texts = [next(iter(speed(line)), "") for line in lines]
    units = {text.partition(" ")[2] for text in texts if text}
    if len(units) > 1:
        return "speed", texts
    return next(iter(units), "tokens/s"), [text.partition(" ")[0] for text in texts]


NEXT = "+strategy={strategies} optim.lr=1e-3,3e-4 -m   runs a sweep; --cfg job prints the config"
WHOLE = ("custom", "hf")  # kinds of models that have no pipeline stages


def _next(run: RunDirectory) -> str:
    """Returns a sweep over strategies that the model of the run can have."""
    kind = None
    with suppress(KeyError, TypeError):
        kind = run.plain_config("model")["model"]["kind"]
    return NEXT.format(strategies="dp,zero1,zero3" if kind in WHOLE else "dp,pp,hybrid")


def ended_early(run: RunDirectory) -> str | None:
    """Returns why a hook has ended the run before its last step; None if none has."""
    reason: str | None = run.record().get("result", {}).get("ended_early")
    return reason if is_done(run) else None


def summary(run: RunDirectory, resume_command: str | None = None) -> str:
    """Returns the result of a finished run and suggestions for the next commands.

    Args:
        resume_command: the command line that continues the run; None leaves the overrides to the reader.
    """
    record = run.record()
    result: dict[str, Any] = record.get("result", {})
    metrics = run.read_metrics()
    losses = [f"training loss {metrics[0].loss:.4f} -> {result['loss']:.4f}" if _has(metrics, result) else ""]
    losses += [f"validation loss {result['val_loss']:.4f}" if result.get("val_loss") is not None else ""]
    losses += [f"validation accuracy {result['val_accuracy']:.4f}" if result.get("val_accuracy") is not None else ""]
    losses += [f"evaluated {result['evaluated']}" if "evaluated" in result else ""]
    own = record.get("own_code")
    done = "done" if own == "command" else f"done: {result.get('steps', 0)} steps"
    reason = result.get("ended_early")
    chart = loss_chart(metrics)
    spent = read_ledger(run).total
    name = f"run.name={run.path.name}"
    command = resume_command or _command(record, name)
    lines = [
        "; ".join(filter(None, [", ".join([done, *speed(result)]), ", ".join(filter(None, losses))])),
        *([f"ended early:     {reason}"] if reason else []),
        *([f"\n{chart}", f"{'':>10}{TRAIN} training loss  {VALIDATION} validation loss\n"] if chart else []),
        *([f"time:            {spent_line(spent)}"] if spent.held_s and own != "command" else []),
        *([f"warning:         {record['loss_warning']}"] if "loss_warning" in record else []),
        *([f"profile:         {_profiled(run)}"] if (run.profile / "summary.json").exists() else []),
        f"run directory:   {run.path}",
        *([] if own == "command" else [f"W&B:             {_wandb(run, record)}"]),
        *([] if own == "command" else [f"train longer:    {train_longer(record, command)}"]),
        *([] if own else [f"next:            {_next(run)}"]),
    ]
    return "\n".join(lines)


def _profiled(run: RunDirectory) -> str:
    """Returns the time breakdown of the profiled steps, averaged over their ranks."""
    try:
        found = run.json(run.profile / "summary.json")
    except (OSError, DamagedFile) as error:
        return f"the summary cannot be read: {error}"
    if not is_profile(found):
        return "the summary is damaged"
    ranks = list(found["ranks"].values())
    names = ranks[0] if ranks else {}
    shares = {name: sum(rank.get(name, 0.0) for rank in ranks) / len(ranks) for name in names}
    breakdown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"steps {found['first']} to {found['last']}: {breakdown}; traces in {run.profile}"


def _command(record: dict[str, Any], name: str) -> str | None:
    """Returns the command that started the run, by its overrides; None if they are not recorded."""
    overrides = record.get("overrides")
    if overrides is None:
        return None
    kept = [override for override in overrides if not override.startswith(("run.name=", "run.fork="))]
    return shlex.join(["python", "-m", "hpc_train", name, *kept])


def train_longer(record: dict[str, Any], command: str | None = None) -> str:
    """Returns how a run that is done can train longer: by ``command``, unless a hook or its data has ended it.

    Args:
        record: the contents of ``run.json``.
        command: the command line that started the run; None if it is not known.
    """
    result: dict[str, Any] = record.get("result", {})
    steps: int = result.get("steps", 0)
    if result.get("ended_early"):
        return "change or remove the hook that has ended the run"
    if record.get("stream_ended") == steps and steps:
        return "add items to the stream, which has none left"
    if command is None:
        return f"repeat the command that started the run, with train.steps={2 * steps}"
    return twice_as_long(command, steps)


def twice_as_long(command: str, steps: int) -> str:
    """Returns ``command`` with twice the length, in epochs if it sets ``train.epochs``, else in steps."""
    epochs = re.search(r"(?<= train\.epochs=)[\d.]+", command)
    if epochs:
        return f"{command[: epochs.start()]}{2 * float(epochs[0]):g}{command[epochs.end() :]}"
    command, length = re.sub(r" train\.steps=\S+", "", command), f" train.steps={2 * steps}"
    name = re.search(r" run\.name=\S+", command)  # beside it, as Hydra's parser requires overrides to be adjacent
    return f"{command}{length}" if name is None else f"{command[: name.end()]}{length}{command[name.end() :]}"


def _has(metrics: Sequence[Line], result: dict[str, Any]) -> bool:
    return bool(metrics) and metrics[0].loss is not None and result.get("loss") is not None


def _wandb(run: RunDirectory, record: dict[str, Any]) -> str:
    found = record.get("wandb") or {}
    if found.get("url"):
        return str(found["url"])
    if found.get("problem"):
        return f"not recorded: {found['problem']}"
    if found.get("mode") == "offline":
        return f"recorded offline; python -m hpc_train sync {run.path}   sends all attempts"
    return "disabled; enable it with telemetry.wandb.mode=online and WANDB_API_KEY"


def _seconds_per_step(recent: Sequence[Line]) -> float:
    """Returns the mean time per step, including evaluations and saves if there are two lines of metrics."""
    first, last = recent[0], recent[-1]
    if last.step > first.step:
        return (last.time - first.time) / (last.step - first.step)
    return last.step_s or 0.0


def spent_line(account: Account) -> str:
    """Formats the time account of a run in one line, without entries below one second."""
    hours = format_hours((account.gpu_s or account.rank_s) / 3600)
    held = f"{hours} GPU-hours" if account.gpu_s else f"{hours} rank-hours, no GPU"
    parts = (
        ("steps", account.steps_s),
        ("evaluation", account.evaluation_s),
        ("start-up", account.start_up_s),
        ("checkpoints", account.checkpoint_s),
        ("lost work", account.lost_s),
        ("restarts", account.restart_s),
        ("frozen nodes", account.frozen_s),
        ("other", account.other_s),
        ("suspended", account.suspended_s),
        ("queue before", account.queue_s),
    )
    listed = " · ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts if seconds >= 1)
    return f"useful {account.useful_share:.0%} of {format_duration(account.held_s)} ({held})" + (
        f": {listed}" if listed else ""
    )


class _NewLinesOfAttempts:
    """Reads the lines that were added since the last read, in one file per attempt from ``first_attempt`` on."""

    def __init__(self, run: RunDirectory, first_attempt: int, file: Callable[[int], Path]) -> None:
        self._run = run
        self._file = file
        self._attempt = first_attempt
        self._lines = run.follow(file(first_attempt))

    def read(self) -> Iterator[Any]:
        newest = self._run.newest_attempt()
        while True:
            yield from self._lines.read()
            if self._attempt >= newest:
                return
            self._attempt += 1
            self._lines = self._run.follow(self._file(self._attempt))
