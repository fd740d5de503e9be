"""Reports a run on rank 0: metrics, lines in the log, events, and the result at the end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpc_train.config.schema import Config
from hpc_train.data.feed import LocalBatch
from hpc_train.data.mixture import SourceSeen
from hpc_train.data.sampler import Skipped
from hpc_train.models.attention import attention_backend
from hpc_train.parallel.compile import KeptArtifacts, compiled_graphs
from hpc_train.parallel.engine import Engine, step_numbers
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.precision.dtypes import compute_dtype, parameter_dtype
from hpc_train.parallel.precision.masters import saved_value
from hpc_train.run.directory import RANK_0, RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.events import Event
from hpc_train.run.ledger import read_ledger
from hpc_train.telemetry.metrics import MetricsLog, finite_or_none
from hpc_train.telemetry.progress import speed, spent_line
from hpc_train.train.step import Replay, SkippedSteps
from hpc_train.train.verify import Suspicion
from hpc_train.train.watch.memory import MemoryReport
from hpc_train.train.watch.replica_balance import Move
from hpc_train.train.watch.suggestions import AdviceWatch
from hpc_train.units import format_duration, format_metric

RESULT = ("loss", "samples", "tokens", "mfu", "mfu_of_precision", "hfu")
EVALUATED = "val_"  # the prefix of the metrics of evaluations


@dataclass
class Report:
    """Writes the metrics, log lines and events of a run; does nothing if ``metrics`` is None."""

    run: RunDirectory
    events: EventLog
    device: torch.device
    world_size: int
    total_steps: int
    metrics: MetricsLog | None = None
    advice: AdviceWatch | None = None
    evaluated: str | None = None  # the extent of an evaluation, if it does not read all samples
    _began: float = field(default_factory=time.monotonic)
    _last: dict[str, Any] = field(default_factory=dict)

    def line(self, line: dict[str, Any], skipped: SkippedSteps) -> None:
        """Writes one line of metrics and reports the steps that were skipped since the previous line."""
        if self.metrics is None:
            return
        head = {"time": self.events.now(), "attempt": self.events.attempt, "world_size": self.world_size}
        self._last = head | line
        self.metrics.write(self._last)
        parts = [f"step {line['step']}/{self.total_steps}", f"loss {format_metric(line['loss'])}"]
        if "val_loss" in line:
            parts.append(f"val_loss {format_metric(line['val_loss'])}")
            if self.evaluated is not None:
                parts[-1] += f" (evaluated {self.evaluated})"
        parts += [f"lr {line['lr']:.3g}", f"grad_norm {line['grad_norm']:.3g}"]
        if "expert_load_max" in line:
            parts.append(f"largest expert {line['expert_load_max']:.2f}x")
        if line.get("dropped_share"):
            parts.append(f"dropped {100 * line['dropped_share']:.1f} %")
        print("  ".join([*parts, *speed(self._last)]))
        if skipped.since_last and line.get("loss_scale") is None:
            steps = "1 step" if skipped.since_last == 1 else f"{skipped.since_last} steps"
            print(f"skipped {steps} with non-finite gradients")
            counts = {"steps": skipped.since_last, "in_a_row": skipped.in_a_row}
            self.events.write("step_skipped", step=line["step"], **counts)
        advice = self.advice.look(self._last) if self.advice is not None else None
        if advice is not None:
            print(advice.message)
            self.events.write("advice", step=line["step"], **advice.details())

    def uneven_replicas(self, step: int, cost: float) -> None:
        """Advises ``batch.balance`` once if uneven replicas cost a large share of the time."""
        advice = self.advice.on_replicas(cost) if self.advice is not None else None
        if advice is not None and self.metrics is not None:
            print(advice.message)
            self.events.write("advice", step=step, **advice.details())

    def moved(self, step: int, move: Move) -> None:
        """Reports that micro-batches move between replicas."""
        if self.metrics is not None:
            details = move.details()
            print(details["message"])
            self.events.write("micro_batches_moved", step=step, **details)

    def rolled_back(self, bad: range, to_step: int, skipped: Skipped, reason: str) -> None:
        """Reports a rollback to ``to_step`` after the steps ``bad``.

        Args:
            skipped: all data that is skipped from now on, including the data of ``bad``.
        """
        if self.metrics is None:
            return
        end = f"; skipping the samples of steps {bad.start + 1} to {bad.stop}" if bad else ""
        print(f"{reason}\nrolled back to step {to_step}{end}")
        details = {"to_step": to_step, "bad_steps": [bad.start, bad.stop], "skipped_windows": skipped.windows}
        self.events.write("rolled_back", step=bad.stop, reason=reason, **details)

    def first_step(self, step: int, seconds: float, artifacts: KeptArtifacts | None) -> None:
        """Reports the duration of the first step of an attempt, and the number of graphs that it compiled."""
        if self.metrics is None:
            return
        text = f"the first step took {seconds:.2f} s"
        details = {"seconds": round(seconds, 3), "compiled": 0, "reused": 0, "cache_loaded": False}
        if artifacts is not None:
            compiled, reused = compiled_graphs()
            details |= {"compiled": compiled, "reused": reused, "cache_loaded": artifacts.loaded}
            text += f"; {compiled} graphs compiled, {reused} taken from the cache"
            if artifacts.loaded:
                text += " of earlier attempts"
        print(text)
        self.events.write("first_step", step=step, **details)

    def evaluation_started(self, step: int) -> None:
        """Writes an event, since an evaluation may take longer than many steps."""
        if self.metrics is not None:
            self.events.write("evaluation_started", step=step)

    def warning(self, step: int, message: str) -> None:
        if self.metrics is not None:
            print(message)
            self.events.write("warning", step=step, message=message)

    def corruption(self, suspicion: Suspicion) -> int:
        """Reports wrong numbers, and returns how many findings the run has of the node, with these."""
        if self.metrics is None:
            return 0
        earlier = [event for event in self.run.events_of(RANK_0) if event.name == "corruption"]
        details = {
            "node": suspicion.node,
            "rank": next(iter(suspicion.ranks), None),
            "reason": suspicion.check,
            "ranks": [*suspicion.ranks],
            "gpus": [*suspicion.devices],
            "parts": [*suspicion.parts],
            "first": suspicion.since,
            "steps": suspicion.findings,
            "final": not suspicion.corrected,
        }
        print(suspicion.words)
        self.events.write("corruption", step=suspicion.step, message=suspicion.words, **details)
        return suspicion.findings + sum(event.steps for event in earlier if event.node == suspicion.node)

    def replayed(self, step: int, message: str, replay: Replay) -> None:
        """Reports whether a step without a finite gradient, or steps with high losses, repeat."""
        if self.metrics is not None:
            print(message)
            rank, node = next(iter(replay.nodes.items()), (None, None))
            details = {"rank": rank, "node": node, "reason": replay.verdict, "ranks": [*replay.nodes]}
            self.events.write("replayed", step=step, message=message, **details)

    def save_deferred(self, step: int, message: str, seconds: float) -> None:
        """Reports that the last save failed and is retried for at most ``seconds``."""
        if self.metrics is None:
            return
        print(f"the last save, of step {step}, failed: {message}; retrying for up to {format_duration(seconds)}")
        path = str(self.run.checkpoints)
        self.events.write("save_deferred", step=step, path=path, seconds=round(seconds, 1), message=message)

    def text(self, step: int, name: str, text: str) -> None:
        """Prints the text of a hook and writes it for the trackers."""
        if self.metrics is not None:
            print(f"{name} after step {step}:\n{text}")
            self.metrics.text(step, name, text)

    def stream_ended(self, step: int) -> None:
        """Reports that ``step`` is the last step, because the stream has no more items."""
        if self.metrics is not None:
            print(f"the stream has ended: step {step} is the last one")
            self.total_steps = step
            self.events.record(self.run, total_steps=step, stream_ended=step)
            self.events.write("stream_ended", step=step)

    def data_seen(self, step: int, seen: Mapping[str, SourceSeen]) -> None:
        """Reports how much of each source of a mixture was used since step 0. Does nothing for other data."""
        if self.metrics is None or not seen:
            return
        parts = [f"{name} {100 * source.share:.1f} % ({source.epochs:.2f} epochs)" for name, source in seen.items()]
        print(f"samples seen: {', '.join(parts)}")
        sources = {name: asdict(source) for name, source in seen.items()}
        self.events.record(self.run, data_seen={"step": step, "sources": sources})

    def nothing_to_do(self, step: int, weights_sha256: str | None, ended_early: str | None) -> None:
        """Reports that the run is complete. Writes its result if the run was killed after the last save and before it
        wrote the result.

        Args:
            ended_early: the reason why a hook ended the run before its last step; None if no hook did.
        """
        if self.metrics is None:
            return
        if ended_early is not None:
            print(f"the run has ended at step {step} of {self.total_steps}: {ended_early}; change the hook to continue")
            self.events.record(self.run, total_steps=step)
        elif self.run.record().get("stream_ended") == step:
            self.events.record(self.run, total_steps=step)  # the run is complete
            print(f"already at step {step} of {step}; the stream has no more items: add items to continue")
        else:
            print(f"already at step {step} of {self.total_steps}; increase train.steps to continue")
        if self.run.record().get("result", {}).get("steps") != step:
            last: dict[str, Any] = {}
            for line in self.run.read_metrics():
                if line.step <= step:
                    last = line
            self.events.record(self.run, result=self._result(step, last, weights_sha256))
        self.events.write("training_finished", step=step)

    def stopped(self, step: int, rates: dict[str, float]) -> None:
        """Reports a stop on request after a checkpoint.

        Args:
            rates: the values of the meter since the last line of metrics.
        """
        if self.metrics is not None:
            print(f"stopped on request after step {step} of {self.total_steps}; the checkpoint is saved")
            self.end("training_stopped", step, {}, rates)

    def finished(
        self,
        step: int,
        tokens_per_s: float,
        rates: dict[str, float],
        weights_sha256: str | None,
        memory: MemoryReport,
        ended_early: str | None,
    ) -> None:
        """Writes the result to the log and to ``run.json``.

        Args:
            tokens_per_s: the mean of this attempt.
            rates: the values of the meter since the last line of metrics.
            ended_early: the reason why a hook ended the run before its last step; None if no hook did.
        """
        if self.metrics is None:
            return
        if ended_early is not None:
            print(f"ended at step {step} of {self.total_steps}: {ended_early}")
            self.events.write("ended_early", step=step, reason=ended_early)
            self.events.record(self.run, total_steps=step)  # the run is complete
        result = self._result(step, self._last, weights_sha256)
        result["seconds"] = round(time.monotonic() - self._began, 3)  # since the first batch of this attempt
        result["tokens_per_s"] = tokens_per_s
        if ended_early is not None:
            result["ended_early"] = ended_early
        self.events.record(self.run, result=result, memory=memory.as_json())
        print(memory)
        shown = {key: value for key, value in result.items() if key != "attempt"}
        for key, value in shown.items():
            if isinstance(value, float):
                shown[key] = f"{value:,.4f}".rstrip("0").rstrip(".")
        print("finished: " + ", ".join(f"{key} {value}" for key, value in shown.items()))
        self.end("training_finished", step, result, rates)

    def _result(self, step: int, last: dict[str, Any], weights_sha256: str | None) -> dict[str, Any]:
        """Returns the result of the run; ``last`` is the last line of metrics."""
        result: dict[str, Any] = {"steps": step, "attempt": self.events.attempt}
        for key, value in last.items():
            if value is not None and (key in RESULT or key.startswith(EVALUATED)):
                result[key] = finite_or_none(value)
        if self.evaluated is not None:
            result["evaluated"] = self.evaluated
        if weights_sha256 is not None:
            result["weights_sha256"] = weights_sha256
        return result

    def end(self, event: str, step: int, details: dict[str, Any], rates: Mapping[str, float]) -> None:
        """Writes the last event of rank 0 with the time ledger of the run.

        Args:
            rates: ``step_s`` and ``save_s`` since the last line of metrics, among others.
        """
        last = {key: rates[key] for key in ("step_s", "save_s", "verify_s") if key in rates}
        head = {"event": event, "time": self.events.now(), "attempt": self.events.attempt, "step": step}
        total = read_ledger(self.run, closing=Event(head | last)).total
        print(spent_line(total))
        self.events.write(event, step=step, **details | last, ledger=total.as_json())

    def close(self) -> None:
        """Closes the metrics in bounded time."""
        if self.metrics is not None:
            self.metrics.close()


def open_report(run: RunDirectory, mesh: Mesh, events: EventLog, total: int) -> Report:
    """Opens the report of this rank; only rank 0 writes metrics."""
    metrics = MetricsLog(run, events.attempt, events) if mesh.rank == 0 else None
    return Report(run, events, mesh.device, mesh.layout.world_size, total, metrics)


def weights_sha256(engine: Engine) -> str:
    """Returns the SHA-256 of the names and bytes of all parameters and buffers, on a rank that holds them unsharded.

    For parameters in bf16, the masters are hashed.
    """
    digest = hashlib.sha256()
    for name, value in sorted([*engine.named_parameters().items(), *engine.named_buffers().items()]):
        plain = saved_value(value).cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def name_attention(config: Config, mesh: Mesh, engine: Engine, batch: LocalBatch) -> None:
    """Prints on rank 0 which implementation computes the attention."""
    if mesh.rank != 0:
        return
    precision = config.precision.name
    dtype = compute_dtype(precision) or parameter_dtype(precision)
    choice = attention_backend(engine.parts, batch.micro_batches[0], dtype, mesh.device)
    if choice is not None:
        print(f"attention: {choice}")


SUMS = ("loss_sum", "target_count", "correct_sum", "reports")
SKIPPED = ("in_a_row", "since_last")
ROUTING = ("expert_load_max", "expert_entropy", "dropped_share")


class Readback:
    """Holds numbers while they are copied from ``device`` to page-locked memory. Later changes of the tensors do not
    affect them.

    Args:
        values: tensors on ``device``, most of them scalars; fp64 represents all of them exactly.
    """

    def __init__(self, values: Mapping[str, Tensor], device: torch.device) -> None:
        self._shapes = {name: value.shape for name, value in values.items()}
        together = torch.cat([value.detach().to(torch.float64).flatten() for value in values.values()])
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._values = torch.empty(len(together), dtype=torch.float64, pin_memory=True)
            self._values.copy_(together, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._values = together

    @property
    def ready(self) -> bool:
        """Returns whether ``read`` returns without waiting."""
        return self._copied is None or self._copied.query()

    def read(self) -> dict[str, Any]:
        """Returns name -> number or nested list of numbers; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        pieces = self._values.split([shape.numel() for shape in self._shapes.values()])
        return {name: piece.view(self._shapes[name]).tolist() for name, piece in zip(self._shapes, pieces, strict=True)}


@dataclass(frozen=True)
class Line:
    """Holds a line of metrics whose numbers are still being computed.

    On a GPU, the host reads them after it has launched the next step, so that the device never waits for the host. A
    save, an evaluation, a stop and the end of the run read them first: every checkpoint includes the changes that
    follow from its line, and after a failure no line before the checkpoint is missing. A divergence is therefore found
    one step later. The step that was taken in the meantime counts as not taken, so the skipped data and the numbers are
    the same as on a CPU.

    Attributes:
        totals: the samples and tokens of the run.
        scalars: the arguments of ``step_numbers``, ``grad_norm``, the scalars of ``SkippedSteps``, and perhaps
            ``loss_scale`` and the metrics of experts.
    """

    step: int
    epoch: int
    learning_rate: float
    totals: dict[str, int]
    scalars: Readback

    def content(self) -> tuple[dict[str, Any], SkippedSteps]:
        """Returns the metrics that the step itself has computed, and the skipped steps; waits for the device."""
        values = self.scalars.read()
        metrics = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": step_numbers(*(values[name] for name in SUMS)).loss,
            "lr": self.learning_rate,
            "grad_norm": values["grad_norm"],
            **self.totals,
        }
        metrics |= {name: values[name] for name in ("loss_scale", *ROUTING) if name in values}
        if "expert_load" in values:
            metrics["expert_load"] = [[round(load, 3) for load in layer] for layer in values["expert_load"]]
        return metrics, SkippedSteps(*(int(values[name]) for name in SKIPPED))
