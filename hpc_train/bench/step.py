"""``python -m hpc_train bench step`` times training steps, optionally alternating with a bare PyTorch loop."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import check_here, config_of, run_benchmark
from hpc_train.bench.request import StepRequest, bare_loop
from hpc_train.errors import UserError
from hpc_train.machine.allocation import current_allocation
from hpc_train.units import format_bytes

ENTRY = "hpc_train.bench.step_worker:measure"
WARMUP = 5  # steps of each loop before the first block
LISTED = 5  # losses
MEASURED = {  # advised key -> what was measured with each value
    "strategy.bucket_cap_mb": "forward, backward and reduction of a step",
    "strategy.compression": "the sum of the gradients of a step",
}

_EPILOG = """\
examples:
  python -m hpc_train bench step +strategy=dp
  python -m hpc_train bench step +strategy=zero2 model=gpt_124m precision=bf16 --against raw --pairs 20
"""


def main(arguments: list[str]) -> int:
    """Measures on this node or the nodes of the Slurm step, prints the result and returns the exit code."""
    options, rest = _parser().parse_known_args(arguments)
    if min(options.steps, options.pairs) < 1:
        raise UserError(
            "--steps and --pairs must be at least 1",
            where="--steps, --pairs",
            fix="a positive number, or omit the option",
        )
    config = config_of(rest, several_nodes=True)
    nodes = current_allocation().nodes
    layout = check_here(config)
    raw = bare_loop(config, layout) if options.against else None
    request = StepRequest(options.steps, options.pairs, WARMUP, raw, options.profile_gap)
    code, result = run_benchmark(config, request, ENTRY, Path(config.run.root) if nodes > 1 else None)
    if result is not None:
        print(json.dumps(result) if options.json else report(result))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train bench step",
        usage="python -m hpc_train bench step [overrides] [--against raw] [--steps N] [--pairs N]"
        " [--profile-gap] [--json]",
        description="Times training steps on this node, without saves, evaluation and logging. It takes the same"
        " overrides as a training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--against", choices=["raw"], help="alternate with a bare PyTorch loop of the same model in the same processes"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps per block (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="blocks per loop (default: %(default)s)")
    parser.add_argument(
        "--profile-gap", action="store_true", help="name what the step loses against the peak matrix rate"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def report(result: dict[str, Any]) -> str:
    """Formats the result of the benchmark."""
    unit = "tokens/s" if result["tokens_per_s"] else "samples/s"
    threads = result["threads"]
    blocks = result["blocks"]
    samples = result["global_batch"]
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
        shares = _shares(result["bubble_share"])
        ideal = f"{100 * result['ideal_bubble_share']:.1f} %"
        lines.append(f"bubble         {shares} of forward and backward; {ideal} with equal stages")
    if result["communication_share"] is not None:
        shares = _shares(result["communication_share"])
        lines.append(f"communication  {shares}, not overlapped with computation (profiler)")
    lines.append(f"MFU            {_utilization(result['mfu'])}")
    if result["gap"]:
        lines.append(f"gap            {_gap(result['gap'])}")
    lines += [describe_advice(key, measured) for key, measured in result["advice"].items()]
    lines.append(f"measuring      {_measurement(result['measurement'])}")
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
    host = ", ".join(map(format_bytes, memory["host_peak_bytes"]))
    text = f"peak {host} resident (VmHWM), by rank"
    if memory["device_peak_bytes"] is None:
        return text
    device = ", ".join(map(format_bytes, memory["device_peak_bytes"]))
    return f"peak {device} allocated on the GPU, {text}"


def _gap(gap: dict[str, Any]) -> str:
    lost = gap["step_s"] - gap["ideal_s"]
    lines = [
        f"{1e3 * lost:.1f} ms of the step are not the model's FLOPs at the peak rate; the largest losses "
        "(mean of the ranks, profiler):"
    ]
    for loss in gap["losses"][:LISTED]:
        part = f"{1e3 * loss['seconds']:9.1f} ms {100 * loss['seconds'] / max(lost, 1e-9):5.1f} %"
        lines.append(f"{'':15}{part}  {loss['kind']}: {loss['advice']}")
    return "\n".join(lines)


def describe_advice(key: str, measured: dict[str, Any]) -> str:
    """Returns the line about one advised key."""
    times = ", ".join(f"{value} {1e3 * seconds:.3g} ms" for value, seconds in measured["seconds"].items())
    return f"advice         {key}={measured['best']} ({MEASURED[key]}: {times})"


def _shares(shares: list[float]) -> str:
    by_rank = ", ".join(f"{100 * share:.1f}" for share in shares)
    return f"{100 * sum(shares) / len(shares):.1f} % (by rank: {by_rank})"


def _other_counts(mfu: dict[str, Any]) -> str:
    names = {"hfu": "HFU", "mfu_causal": "MFU with half the attention", "mfu_with_embeddings": "MFU with embeddings"}
    return ", ".join(f"{label} {100 * mfu[name]:.1f} %" for name, label in names.items() if name in mfu)


def _measurement(cost: dict[str, float]) -> str:
    return (
        f"{100 * cost['share']:.3f} % of a step: {1e6 * cost['seconds_per_step']:.0f} µs per step to collect metrics, "
        f"with {cost['timed_intervals_per_step']:.0f} timed intervals and a share of the log steps"
    )


def _utilization(mfu: dict[str, Any] | None) -> str:
    if mfu is None:
        return "n/a: the model does not define flops_per_sample"
    return (
        f"{100 * mfu['value']:.1f} % = {mfu['flops_per_sample']:.4g} FLOP per sample x samples/s / "
        f"{mfu['peak_flops']:.4g} FLOP/s ({mfu['peak_source']})\n"
        f"               {_other_counts(mfu)}\n"
        f"               {mfu['formula']}"
    )
