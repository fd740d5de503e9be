"""Shows the progress of a run from its run directory: a live line, notices, and a summary; without torch.

Each read covers only what was written since the last one.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hpc_train.opening import DamagedFile
from hpc_train.run.directory import RANK_0, RunDirectory
from hpc_train.run.events import Event
from hpc_train.run.files import PATIENCE_S, BackgroundCall, in_time
from hpc_train.run.ledger import Account, read_ledger
from hpc_train.run.rows import Line, is_profile
from hpc_train.telemetry.sinks.tracking import TRACKING
from hpc_train.units import counted, format_duration, format_hours, format_metric

if TYPE_CHECKING:  # workers import this module and print no live line
    from rich.console import Console
    from rich.live import Live

_KIND_OF_ERROR = re.compile(r"(OSError: )?\[Errno \d+\] ")


@dataclass
class Notices:
    """Follows the events of rank 0. It reports only the first of consecutive failed saves, and counts the saves.

    Attributes:
        kept: the step of the newest checkpoint; 0 before the first.
        failed: number of consecutive failed saves up to now.
        evaluating: the step of the newest evaluation that has begun.
    """

    kept: int = 0
    failed: int = 0
    evaluating: int | None = None

    def message(self, event: Event) -> str | None:
        """Returns the line that the console shows for ``event``; None for most kinds of event."""
        name = event.name
        step = event.step or 0
        at_stake = f"the steps after checkpoint {self.kept}" if self.kept else "all steps"
        if name == "evaluation_started":
            self.evaluating = step
        elif name == "resumed":
            self.evaluating = None
            self.kept = step
            self.failed = 0
            return f"resumed from the checkpoint of step {step}"
        elif name == "rolled_back":
            self.evaluating = None
            self.kept = event.continues_from
            return f"rolled back to step {self.kept}: {event.reason}"
        elif name == "checkpoint_saved":
            failed = self.failed
            self.failed = 0
            self.kept = step
            if failed:
                saves = counted(failed, "save", "saves")
                return f"saving works again: checkpoint of step {step} is saved after {saves} failed"
        elif name == "save_deferred":
            return (
                f"the last save, of step {step}, failed: {reason(event)}\n"
                f"  retrying for up to {event.seconds:.0f} s: free some space in {event.path}; "
                f"otherwise the run fails and loses {at_stake}"
            )
        elif name == "checkpoint_failed":
            self.failed += 1
            if self.failed == 1 and not event.final:
                return (
                    f"saving has failed since step {step}: {reason(event)}; training continues, but a failure would "
                    f"lose {at_stake}"
                )
        elif name == "warning":
            return f"warning: {event.message}"
        elif name == "no_progress":
            return event.message
        elif name == "checkpoint_set_aside" and not event.rolled_back:
            return f"the checkpoint of step {step} is damaged and set aside as {event.path}: {reason(event)}"
        return None


def reason(event: Event) -> str:
    return _KIND_OF_ERROR.sub("", event.message)


def failing(events: Iterable[Event]) -> int:
    """Returns the number of consecutive failed saves at the end of ``events``."""
    notices = Notices()
    for event in events:
        notices.message(event)
    return notices.failed


WIDTH, HEIGHT = 56, 10  # size of the chart in characters
TRAIN, VALIDATION = "•", "o"


def loss_chart(metrics: Sequence[dict[str, Any]], width: int = WIDTH, height: int = HEIGHT) -> str:
    """Draws the training loss (•) and the validation loss (o) over the steps; empty with fewer than two losses.

    Each column shows the mean of the losses in its range of steps.
    """
    train = [(line["step"], line["loss"]) for line in metrics if line.get("loss") is not None]
    validation = [(line["step"], line["val_loss"]) for line in metrics if line.get("val_loss") is not None]
    if len(train) < 2:
        return ""
    steps = [step for step, _ in train + validation]
    values = [value for _, value in train + validation]
    first, last = min(steps), max(steps)
    low, high = min(values), max(values)
    grid = [[" "] * width for _ in range(height)]
    for points, mark in ((train, TRAIN), (validation, VALIDATION)):
        columns: dict[int, list[float]] = {}
        for step, value in points:
            columns.setdefault(round((step - first) / max(1, last - first) * (width - 1)), []).append(value)
        for column, losses in columns.items():
            below = (high - fmean(losses)) / ((high - low) or 1.0)
            grid[round(below * (height - 1))][column] = mark
    labels = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    lines = [f"{labels.get(row, ''):>8} ┤{''.join(cells).rstrip()}" for row, cells in enumerate(grid)]
    begin = f"step {first}"
    axis = f"{'':>8} └{'─' * width}"
    return "\n".join([*lines, axis, f"{'':>10}{begin}{last:>{max(1, width - len(begin))}}"])


LOOK_EVERY_S = 0.5
LOOK_S = 1.0  # the agent waits at most this long for the file system
PLAIN_LINE_EVERY_S = 5.0  # interval of lines if the output is not a terminal
WINDOW = 20  # number of logged steps from which the remaining time is estimated

Look = tuple[list[Line], list[Event]]  # new lines of metrics, new events


class Progress:
    """Shows the attempts of ``run`` that start after the construction of this object. ``resume_command`` is the command
    line that continues this run, for the summary."""

    def __init__(self, run: RunDirectory, console: Console, resume_command: str | None = None) -> None:
        self._run = run
        self._console = console
        self._resume_command = resume_command
        self._first_attempt = run.newest_attempt() + 1
        self._lines = _NewLinesOfAttempts(run, self._first_attempt, run.metrics_file)
        writers = (RANK_0, TRACKING)
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
        if self._is_command:
            return  # the agent prints what the processes print
        if self._console.is_terminal:
            self._update_live()
        elif not self._announced and not self._recent:
            self._announced = True
            self._say(self._line())
        elif self._recent and self._state != self._shown and now - self._printed >= PLAIN_LINE_EVERY_S:
            self._print()

    def finish(self, failed: bool = False) -> None:
        """Prints the last state, and the summary if the run is done and this attempt has not ``failed``."""
        self._take(self._look.result, PATIENCE_S)  # a look may have started before the last line was written
        self._looked = float("-inf")
        self.tick()
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._recent and self._state != self._shown and not self._is_command:
            self._print()
        end = f"run directory: {self._run.path}"
        with suppress(OSError):  # the file system does not respond
            if not failed and in_time(lambda: is_done(self._run)):
                end = in_time(lambda: f"\n{summary(self._run, self._resume_command)}")
        self._say(end)

    def _take(self, look: Callable[[float], Look], seconds: float) -> None:
        """Processes what was written since the last look, if the file system responds within ``seconds``."""
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
        """Reads the new metrics and events. It runs in a thread, since a hanging file system blocks it."""
        record = self._run.record()
        self._total = record.get("total_steps")
        self._is_command = record.get("own_code") == "command"
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
        """Returns the state that the line shows; the line is printed again only if it changes."""
        return self._recent[-1].attempt, self._recent[-1].step, self._evaluating

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        line = progress_line(list(self._recent), self._total, self._restarts, self._notices.failed, self._built)
        if self._evaluating is None:
            return line
        return f"{line} · evaluating after step {self._evaluating}"

    @property
    def _evaluating(self) -> int | None:
        """Returns the step after which an evaluation runs; None if its line of metrics was read."""
        step = self._notices.evaluating
        if step is None or (self._recent and self._recent[-1].step >= step):
            return None
        return step


def progress_line(
    recent: Sequence[Line], total: int | None, restarts: int = 0, failed_saves: int = 0, built: bool = False
) -> str:
    """Formats the newest of the ``recent`` lines of metrics, with the remaining time, restarts and failed saves.

    Without a line it shows what the run is waiting for. ``built`` says whether the model is built and has its weights.
    """
    if not recent and built:
        return "starting: first step"
    if not recent:
        return "starting: importing torch, connecting the ranks and building the model"
    first = recent[0]
    line = recent[-1]
    left_s = None
    if total and line.step < total:
        left_s = (total - line.step) * (line.step_s or 0.0)
        if line.step > first.step:  # with evaluations and saves
            left_s = (total - line.step) * (line.time - first.time) / (line.step - first.step)
    parts = parts_of_line(line, total, left_s, restarts)
    if failed_saves:
        parts.append(f"{counted(failed_saves, 'save', 'saves')} failed")
    return " · ".join(parts)


def parts_of_line(line: dict[str, Any], total: int | None, left_s: float | None, restarts: int) -> list[str]:
    """Returns the words about a line of metrics, or about none: step, loss, speed, remaining time and restarts.

    Args:
        total: the number of steps of the run; None if it is unknown.
    """
    parts = []
    if line.get("step") is not None:
        parts.append(f"step {line['step']}/{total}" if total else f"step {line['step']}")
    if "loss" in line:
        parts.append(f"loss {shown_loss(line['loss'])}")
    parts += speed(line)
    if left_s is not None:
        parts.append(f"{format_duration(left_s)} left")
    if restarts:
        parts.append(counted(restarts, "restart", "restarts"))
    return parts


def shown_loss(loss: float | None) -> str:
    """Returns a loss of a line of metrics, which has null for one that is not finite."""
    return "not finite" if loss is None else format_metric(loss)


def final_result(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the result in ``record``, the contents of ``run.json``, if all steps are done; None otherwise.

    A run that continues with more steps has the result of the shorter one until it is done.
    """
    result: dict[str, Any] | None = record.get("result")
    if result is None or result["steps"] < (record.get("total_steps") or 0):
        return None
    return result


def is_done(run: RunDirectory) -> bool:
    return final_result(run.record()) is not None


def speed(line: dict[str, Any]) -> list[str]:
    """Returns the speed in ``line``, a line of metrics or a result, in samples if each has one target; [] without."""
    rate = line.get("tokens_per_s")
    if rate is None:
        return []
    single = rate == line.get("samples_per_s")
    if "tokens" in line:
        single = line["tokens"] == line.get("samples")
    return [f"{rate:,.0f} samples/s" if single else f"{rate:,.0f} tokens/s"]


def speed_column(lines: Iterable[dict[str, Any]]) -> tuple[str, list[str]]:
    """Returns the head and the cells of a column with the speed in each of ``lines``: the head has the unit, unless the
    units differ."""
    texts = [next(iter(speed(line)), "") for line in lines]
    units = {text.partition(" ")[2] for text in texts if text}
    if len(units) > 1:
        return "speed", texts
    return next(iter(units), "tokens/s"), [text.partition(" ")[0] for text in texts]


NEXT = "for a sweep, change run.name and add +strategy={strategies} optim.lr=1e-3,3e-4 -m; --cfg job prints the config"
STRATEGIES = dict.fromkeys(("custom", "hf"), "dp,zero1,zero3")  # for the kinds of models that have no pipeline stages


def summary(run: RunDirectory, resume_command: str | None = None) -> str:
    """Returns the result of a finished run and suggestions for the next commands. ``resume_command`` is the command
    line that continues the run; None leaves the overrides to the reader."""
    record = run.record()
    result: dict[str, Any] = record.get("result", {})
    metrics = run.read_metrics()
    losses = []
    if metrics and metrics[0].loss is not None and result.get("loss") is not None:
        losses.append(f"training loss {format_metric(metrics[0].loss)} -> {format_metric(result['loss'])}")
    if result.get("val_loss") is not None:
        losses.append(f"validation loss {format_metric(result['val_loss'])}")
    if result.get("val_accuracy") is not None:
        losses.append(f"validation accuracy {format_metric(result['val_accuracy'])}")
    if "evaluated" in result:
        losses.append(f"evaluated {result['evaluated']}")
    code = record.get("own_code")
    is_command = code == "command"
    done = "done" if is_command else f"done: {counted(result.get('steps', 0), 'step', 'steps')}"
    lines = ["; ".join(filter(None, [", ".join([done, *speed(result)]), ", ".join(losses)]))]
    if result.get("ended_early"):
        lines.append(f"ended early:     {result['ended_early']}")
    chart = loss_chart(metrics)
    if chart:
        lines += [f"\n{chart}", f"{'':>10}{TRAIN} training loss  {VALIDATION} validation loss\n"]
    spent = read_ledger(run).total
    if spent.held_s and not is_command:
        lines.append(f"time:            {spent_line(spent)}")
    if "loss_warning" in record:
        lines.append(f"warning:         {record['loss_warning']}")
    if (run.profile / "summary.json").exists():
        lines.append(f"profile:         {_profiled(run)}")
    lines.append(f"run directory:   {run.path}")
    if not is_command:
        command = resume_command or _command(record, f"run.name={run.path.name}")
        lines.append(f"W&B:             {_wandb(run, record)}")
        lines.append(f"train longer:    {train_longer(record, command)}")
    if not code:
        kind = ""
        with suppress(KeyError, TypeError):
            kind = run.plain_config("model")["model"]["kind"]
        lines.append(f"next:            {NEXT.format(strategies=STRATEGIES.get(kind, 'dp,pp,hybrid'))}")
    return "\n".join(lines)


def _profiled(run: RunDirectory) -> str:
    """Returns the time breakdown of the profiled steps, averaged over their ranks."""
    try:
        profile = run.json(run.profile / "summary.json")
    except (OSError, DamagedFile) as error:
        return f"the summary cannot be read: {error}"
    if not is_profile(profile):
        return "the summary is damaged"
    ranks = list(profile["ranks"].values())
    names: dict[str, float] = next(iter(ranks), {})
    breakdown = ", ".join(f"{name} {fmean(rank.get(name, 0.0) for rank in ranks):.0%}" for name in names)
    return f"steps {profile['first']} to {profile['last']}: {breakdown}; traces in {run.profile}"


def _command(record: dict[str, Any], name: str) -> str | None:
    """Returns the command that started the run, by its overrides; None if they are not recorded."""
    overrides = record.get("overrides")
    if overrides is None:
        return None
    others = [override for override in overrides if not override.startswith(("run.name=", "run.fork="))]
    return shlex.join(["python", "-m", "hpc_train", *record.get("options", []), name, *others])


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
    command = re.sub(r" train\.steps=\S+", "", command)
    # the new override goes beside run.name, since Hydra's parser requires overrides to be adjacent
    name = re.search(r" run\.name=\S+", command)
    end = len(command) if name is None else name.end()
    return f"{command[:end]} train.steps={2 * steps}{command[end:]}"


def _wandb(run: RunDirectory, record: dict[str, Any]) -> str:
    outcome = record.get("wandb") or {}
    if outcome.get("mode") == "offline":
        return f"recorded offline; python -m hpc_train sync {run.path}   sends all attempts"
    if outcome.get("url"):
        return str(outcome["url"])
    if outcome.get("problem"):
        return f"not recorded: {outcome['problem']}"
    return f"nothing was sent; python -m hpc_train sync {run.path}   sends the metrics"


def spent_line(account: Account, of_command: bool = False) -> str:
    """Formats the time account of a run in one line, without entries below one second. ``of_command`` states whether
    the run is one of ``run.command``, whose useful time is known only if it reports its steps."""
    is_known = not of_command or account.steps_s > 0
    hours = format_hours((account.gpu_s or account.rank_s) / 3600)
    unit = "GPU-hours" if account.gpu_s else "rank-hours, no GPU"
    parts = (
        ("steps", account.steps_s),
        ("evaluation", account.evaluation_s),
        ("start-up" if is_known else "running", account.start_up_s),
        ("checkpoints", account.checkpoint_s),
        ("verification", account.verification_s),
        ("lost work", account.lost_s),
        (f"{counted(round(account.corrupted_steps), 'step', 'steps')} lost to wrong numbers", account.corrupted_s),
        ("restarts", account.restart_s),
        ("frozen nodes", account.frozen_s),
        ("other", account.other_s),
        ("suspended", account.suspended_s),
        ("queue before", account.queue_s),
    )
    held = f"{format_duration(account.held_s)} ({hours} {unit})"
    line = f"useful time {account.useful_share:.0%} of {held}" if is_known else f"time {held}"
    listed = " · ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts if seconds >= 1)
    return ": ".join(filter(None, [line, listed]))


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
