"""``python -m hpc_train bench step|checkpoint``: how fast steps and saves are, on workers as a run has them.

Both go against the plain thing in alternation: a bare PyTorch loop, stock ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpc_train.cluster.allocation import current_allocation, workers_per_node
from hpc_train.commands.train import register_launcher
from hpc_train.config.arguments import CommandLine, expand, with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.errors import ConfigError
from hpc_train.config.freeze import freeze
from hpc_train.config.schema import Config
from hpc_train.config.validate import validate
from hpc_train.elastic.agent import run_agent
from hpc_train.measure.checkpoint_report import checkpoint_report
from hpc_train.measure.request import CheckpointRequest, StepRequest, bare_loop, read_progress, read_result
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit

ENTRY = "hpc_train.train.benchmark:measure"
CHECKPOINT_ENTRY = "hpc_train.train.checkpoint_benchmark:measure"
WARMUP = 5  # steps of each loop before the first block

_EPILOG = """\
examples:
  python -m hpc_train bench step +strategy=dp
  python -m hpc_train bench step +strategy=zero2 model=gpt_124m precision=bf16 --against raw --pairs 20
  python -m hpc_train bench checkpoint +strategy=zero3 model=gpt_124m run.root=/scratch/me
"""


def main(arguments: list[str]) -> int:
    """Measures on this node and prints; returns an exit code."""
    options, rest = _parser().parse_known_args(arguments)
    if min(options.steps, options.pairs) < 1:
        raise ConfigError("nothing to measure", where="--steps, --pairs", mend="1 or more")
    if options.what == "checkpoint" and options.against:
        raise ConfigError("checkpoints always go against plain DCP", where="--against", mend="no --against")
    config = _config(rest)
    layout = validate(config, 1, workers_per_node(config.cluster)[1])
    if options.what == "checkpoint":
        return _run(config, CheckpointRequest(options.pairs), options.json)
    raw = bare_loop(config, layout) if options.against else None
    return _run(config, StepRequest(options.steps, options.pairs, WARMUP, raw), options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench",
        usage="python -m hpc_train bench step|checkpoint [overrides] [--against raw] [--steps N] [--pairs N] [--json]",
        description="Times training steps on this node, without saving, evaluation and logging; or saves and loads of"
        " the state, in run.root. The overrides are those of a training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=["step", "checkpoint"], help="what to measure")
    parser.add_argument(
        "--against", choices=["raw"], help="a bare PyTorch loop of the same model, in turn, in the same processes"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="step: of a block (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=20, metavar="N", help="blocks, or saves, of each (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _config(arguments: list[str]) -> Config:
    """The config of ``arguments``, which are those of a training."""
    if current_allocation().nodes > 1:
        raise ConfigError(
            "bench measures the workers of one node",
            where="the Slurm step of several nodes",
            mend="srun --nodes=1 python -m hpc_train bench …",
        )
    register_launcher()
    line = CommandLine.parse(with_right_plus(arguments))
    if line.multirun or len(expand(line.overrides)) > 1:
        raise ConfigError("bench measures one job", where="the command line", mend="one value for each key, and no -m")
    with line.composer() as compose:
        return typed(compose(line.overrides))


def _run(config: Config, request: StepRequest | CheckpointRequest, as_json: bool) -> int:
    steps = isinstance(request, StepRequest)
    if not steps:
        Path(config.run.root).mkdir(parents=True, exist_ok=True)
    run = RunDirectory(Path(tempfile.mkdtemp(prefix="hpc_train-bench-", dir=None if steps else config.run.root)))
    done = False
    try:
        freeze(config, run)
        request.write(run)
        code = run_agent(
            run, (lambda: _show(run)) if sys.stderr.isatty() else None, entry=ENTRY if steps else CHECKPOINT_ENTRY
        )
        done = code == Exit.DONE
        if done:
            result = read_result(run)
            print(json.dumps(result) if as_json else report(result) if steps else checkpoint_report(result))
        return code
    finally:
        if done or not any(run.logs.glob("*")):  # the log of a failure stays, where its message says
            shutil.rmtree(run.path)


def _show(run: RunDirectory) -> None:
    progress = read_progress(run)
    text = "starting" if progress is None else f"{progress[0] + 1} of {progress[1]}"
    print(f"\r{text:<30}\r", end="", file=sys.stderr, flush=True)


def report(result: dict[str, Any]) -> str:
    """The result in words and figures, one line each."""
    unit = "tokens/s" if result["tokens_per_s"] else "samples/s"
    threads, blocks, samples = result["threads"], result["blocks"], result["global_batch"]
    lines = [
        f"{result['strategy']}: {result['layout']}",
        f"{result['parameters']:,} parameters, {result['precision']}{', compiled' * result['compile']}, "
        f"{result['world_size']} x {result['device']}, {threads} threads each, torch {result['torch']}",
        f"blocks         {blocks} of {result['steps_per_block']} steps, {samples} samples each",
        f"speed          {_speed(result)} {unit} (median; 5 % to 95 % of the blocks)",
        f"step           {1e3 * result['step_s']['median']:.1f} ms",
        f"memory         {_memory(result['memory'])}",
    ]
    if result["bubble_share"] is not None:
        lines.append(f"bubble         {_shares(result['bubble_share'])}: of forward and backward no stage computing")
    if result["communication_share"] is not None:
        shares = _shares(result["communication_share"])
        lines.append(f"communication  {shares}: a collective under way and nothing computed (profiler)")
    lines.append(f"MFU            {_utilisation(result['mfu'])}")
    if result["against"]:
        against = result["against"]
        lines.append(f"bare loop      {against['loop']}: {_speed(against)} {unit}")
        lines.append(
            f"ratio          {against['ratio']:.4f} of the bare loop's speed "
            f"(95 % interval {against['ci95_low']:.4f} to {against['ci95_high']:.4f}, {blocks} pairs)"
        )
    return "\n".join(lines)


def _speed(rates: dict[str, Any]) -> str:
    speed = rates["tokens_per_s"] or rates["samples_per_s"]
    return f"{speed['median']:,.0f} ({speed['p05']:,.0f} to {speed['p95']:,.0f})"


def _memory(memory: dict[str, Any]) -> str:
    host = ", ".join(f"{value / 2**20:,.0f}" for value in memory["host_peak_bytes"])
    text = f"{host} MiB resident at most (VmHWM), by rank"
    if memory["device_peak_bytes"] is None:
        return text
    device = ", ".join(f"{value / 2**20:,.0f}" for value in memory["device_peak_bytes"])
    return f"{device} MiB allocated on the GPU at most, {text}"


def _shares(shares: list[float]) -> str:
    by_rank = ", ".join(f"{100 * share:.1f}" for share in shares)
    return f"{100 * sum(shares) / len(shares):.1f} % (by rank: {by_rank})"


def _utilisation(mfu: dict[str, Any] | None) -> str:
    if mfu is None:
        return "n/a: the model does not say how many operations a sample takes (flops_per_sample)"
    return (
        f"{100 * mfu['value']:.1f} % = {mfu['flops_per_sample']:.4g} FLOP per sample x samples/s / "
        f"{mfu['peak_flops']:.4g} FLOP/s ({mfu['peak_source']})"
    )
