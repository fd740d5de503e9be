"""What each saver of memory costs in speed: ``bench step`` of an experiment, with one option changed at a time.

The row of the experiment as it stands is in turn with a bare PyTorch loop on the same device that computes the same
products: as many chunks of the loss, the same recomputation. On one H200 a row takes about a minute, most of it before
the first timed step. The rows share a cache of compiled kernels. A row that fails has its whole output, and the others
go on; those that the budget leaves no time for are named. ``python -m gpu_checks`` measures with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.bench.step import LISTED

ROOT = Path(__file__).parents[1]
AS_IT_STANDS = "as it stands"
ROWS: dict[str, tuple[str, ...]] = {  # in the order of what one wants to know first
    AS_IT_STANDS: (),
    "twice the micro-batch": ("batch.micro_size=32",),
    "CUDA graphs": ("train.cuda_graphs=true",),
    "weights in bf16": ("precision.weights=bf16",),
    "these three": ("batch.micro_size=32", "train.cuda_graphs=true", "precision.weights=bf16"),
    "half the micro-batch": ("batch.micro_size=8",),
    "fp8, one scale per tensor": ("precision.fp8=tensorwise",),
    "fp8, one scale per row": ("precision.fp8=rowwise",),
    "logits whole": ("train.loss_chunks=1",),
    "moments in bf16": ("optim.moments=bf16",),
    "checkpointing: ops": ("train.activation_checkpointing=ops",),
    "checkpointing: full": ("train.activation_checkpointing=full",),
    "activations by a budget": ("train.activation_checkpointing=16GiB",),
    "activations on the host": ("train.activation_offload=1MiB",),
    "one micro-batch per step": ("batch.global_size=16",),  # to compare the next row with
    "and updates inside the backward": ("batch.global_size=16", "optim.in_backward=true", "optim.clip_norm=0"),
    "not compiled": ("train.compile=false",),
    "checkpointing: every third layer": ("train.activation_checkpointing=selective:3",),
    "inputs of layers on the host": ("train.activation_offload=1MiB", "train.activation_checkpointing=full"),
    "optimizer on the host": ("strategy.offload=optimizer",),
}
LEAST_S = 20.0  # with less left no row is started
END_S = 5.0  # from SIGTERM to SIGKILL
SMI_EVERY_S = 2.0
SMI = ("clocks.sm", "power.draw", "temperature.gpu")


@dataclass(frozen=True)
class Row:
    """What was measured with one change.

    Attributes:
        result: that of ``bench step``; None if it failed.
        error: its whole output if it failed.
        gpu: medians of what nvidia-smi showed meanwhile, by name.
        late: whether it was stopped at the end of the budget.
    """

    name: str
    overrides: tuple[str, ...]
    seconds: float
    result: dict[str, Any] | None
    error: str = ""
    gpu: Mapping[str, float] = field(default_factory=dict)
    late: bool = False


def measured(
    rows: Mapping[str, tuple[str, ...]], given: Sequence[str], amount: Sequence[str], budget_s: float
) -> Iterator[Row | str]:
    """Yields the measurement of each of ``rows``, or the line of one that the budget left no time for."""
    until = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory(prefix="hpc_train-savers-") as cache:
        for name, changes in rows.items():
            left = until - time.monotonic()
            if left < LEAST_S:
                yield f"{name:34}not measured: {max(0.0, left):.0f} s of the budget are left"
                continue
            against = ["--against", "raw", "--profile-gap"] if name == AS_IT_STANDS else []
            yield measure(name, changes, [*given, *changes, *amount, *against], left, Path(cache))


def measure(name: str, changes: tuple[str, ...], arguments: Sequence[str], limit_s: float, cache: Path) -> Row:
    """Runs ``bench step`` once; what exceeds ``limit_s`` is stopped and counts as failed."""
    begin = time.monotonic()
    own = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "hpc_train", "bench", "step", *arguments, "--json"],
            stdout=output, stderr=errors, env=own | os.environ, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        with ended(process):
            gpu = watched(process, begin + limit_s)
            late = process.poll() is None
        texts = [_text(file) for file in (output, errors)]
    seconds = round(time.monotonic() - begin, 1)
    if process.returncode == 0 and not late:
        return Row(name, changes, seconds, json.loads(texts[0].strip().splitlines()[-1]), gpu=gpu)
    end = f"stopped after {seconds:.0f} s, at the end of the budget" if late else f"exit code {process.returncode}"
    return Row(name, changes, seconds, None, "".join([*texts, f"\n{end}"]).strip(), gpu, late)


def _text(file: Any) -> str:
    file.seek(0)
    text: str = file.read()
    return text


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends what still runs when the context is left: the agent ends its workers when it is asked to."""
    try:
        yield
    finally:
        if process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)


def watched(process: subprocess.Popen[bytes], until: float) -> dict[str, float]:
    """Waits for the end of ``process``, at most until ``until``, and returns medians of the GPU's clock and power."""
    seen: dict[str, list[float]] = {name: [] for name in SMI}
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(SMI_EVERY_S, max(0.0, until - time.monotonic())))
            break
        for name, value in gpu_state().items():
            seen[name].append(value)
    return {name: sorted(values)[len(values) // 2] for name, values in seen.items() if values}


def gpu_state() -> dict[str, float]:
    """Returns the values of ``SMI`` of the first GPU; {} without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return dict(zip(SMI, map(float, done.stdout.splitlines()[0].split(",")), strict=True))
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return {}


def text_of(row: Row, first: float | None) -> str:
    """Returns the line of the table, with a second one for the bare loop; of a failed row its whole output."""
    if row.result is None:
        return f"{row.name:34}failed\n{row.error}"
    memory, mfu, own = row.result["memory"], row.result["mfu"], speed(row.result)
    peak = max(memory["device_peak_bytes"] or memory["host_peak_bytes"])
    share = f"{100 * mfu['value']:.1f} %" if mfu else "n/a"
    gpu = [f"{row.gpu[name]:.0f}" if name in row.gpu else "" for name in SMI]
    line = f"{row.name:34}{own:10,.0f} {own / (first or own):9.3f} {share:>7} {peak / 2**30:7.2f}"
    line += f" {gpu[0]:>6} {gpu[1]:>5} {gpu[2]:>4}"
    against = row.result["against"]
    if against:
        line += f"\n{'  the bare loop':34}{speed(against):10,.0f} {1 / against['ratio']:9.3f}"
    gap = row.result["gap"]
    lost = (
        [f"\n  {1e3 * each['seconds']:8.1f} ms lost to {each['kind']}" for each in gap["losses"][:LISTED]]
        if gap
        else []
    )
    return "".join([line.rstrip(), *lost])


def speed(rates: dict[str, Any]) -> float:
    return float(rates["tokens_per_s"]["median"])
