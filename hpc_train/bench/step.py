"""``python -m hpc_train bench step`` times training steps, optionally alternating with a bare PyTorch loop."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from hpc_train.bench.measuring import add_blocks, bench_parser, check_here, config_of, refuse_below_one, run_benchmark
from hpc_train.bench.request import StepRequest
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.units import format_bytes

ENTRY = "hpc_train.bench.step_worker:measure"
WARMUP = 5  # steps of each loop before the first block
LISTED = 5  # losses
MEASURED = {  # advised key -> what was measured with each value
    "strategy.bucket_cap_mb": "forward, backward and reduction of a step",
    "strategy.compression": "the sum of the gradients of a step",
}

LABELS = {  # figure of the utilization -> its name in the report
    "hfu": "HFU",
    "mfu_of_precision": "MFU of the peak in this precision",
    "mfu_causal": "MFU with half the attention",
    "mfu_with_embeddings": "MFU with embeddings",
}


def main(arguments: list[str]) -> int:
    options, rest = _parser().parse_known_args(arguments)
    refuse_below_one(options, "steps", "pairs")
    config = config_of(rest, several_nodes=True)
    layout = check_here(config)
    raw = bare_loop(config, layout) if options.against else None
    request = StepRequest(options.steps, options.pairs, WARMUP, raw, options.profile_gap)
    code, result = run_benchmark(config, request, ENTRY)
    if result is not None:
        print(json.dumps(result) if options.json else report(result))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser(
        "step",
        "[overrides] [--against raw] [--steps N] [--pairs N] [--profile-gap]",
        "Times training steps on this node, without saves, evaluation and logging.",
        [
            "python -m hpc_train bench step +strategy=dp",
            "python -m hpc_train bench step +strategy=zero2 model=gpt_124m precision=bf16 --against raw --pairs 20",
        ],
    )
    parser.add_argument(
        "--against", choices=["raw"], help="alternate with a bare PyTorch loop of the same model in the same processes"
    )
    add_blocks(parser, 10, 20)
    parser.add_argument(
        "--profile-gap", action="store_true", help="list what the step loses against the peak matrix rate"
    )
    return parser


BARE_REPLICAS = {"ddp": "dp", "zero2": "zero2", "zero3": "zero3"}  # kind -> its loop in ``bare_loop.py``
BARE_PIPELINES = {"1f1b": "pp", "interleaved_1f1b": "pp"}  # and for each pipeline schedule


def bare_loop(config: Config, layout: Layout) -> str:
    """Returns the kind of bare loop (see ``bare_loop.py``) that is equivalent to ``config`` in ``layout``. Raises
    UserError if there is no equivalent bare loop."""
    if config.precision.name == "fp16":
        raise UserError(
            "precision=fp16 needs loss scaling, which the bare loops do not have",
            where="precision, --against",
            fix="precision=bf16 or precision=fp32, or drop --against",
        )
    if layout.pp > 1 and getattr(config.data, "packing", False):
        raise UserError(
            "the bare pipeline loop does not support data.packing=true",
            where="data.packing, --against",
            fix="data.packing=false, or drop --against",
        )
    if layout.pp > 1 and config.train.loss_chunks not in (1, "auto"):
        raise UserError(
            "the bare pipeline loop computes the loss in one piece",
            where="train.loss_chunks, --against",
            fix="train.loss_chunks=1, or drop --against",
        )
    if layout.world_size == 1:
        return "single"
    if layout.dp == layout.world_size and layout.shard in (1, layout.dp) and layout.data_parallel in BARE_REPLICAS:
        return BARE_REPLICAS[layout.data_parallel]
    if layout.pp == layout.world_size and layout.schedule in BARE_PIPELINES:
        return BARE_PIPELINES[layout.schedule]
    raise UserError(
        f"there is no bare loop for {layout}",
        where="strategy, --against",
        fix="+strategy=single, dp, zero2, zero3, or pp with schedule 1f1b or interleaved_1f1b; or drop --against",
    )


def report(result: dict[str, Any]) -> str:
    unit = "tokens/s" if result["tokens_per_s"] else "samples/s"
    blocks = result["blocks"]
    memory = result["memory"]
    peaks = f"peak {_byte_counts(memory['host_peak_bytes'])} resident (VmHWM), by rank"
    if memory["device_peak_bytes"] is not None:
        peaks = f"peak {_byte_counts(memory['device_peak_bytes'])} allocated on the GPU, {peaks}"
    active = ""
    if result.get("active_parameters") not in (None, result["parameters"]):
        active = f" ({result['active_parameters']:,} compute a token)"
    lines = [
        f"{result['strategy']}: {result['layout']}",
        f"{result['parameters']:,} parameters{active}, {result['precision']}{', compiled' * result['compile']}, "
        f"{result['world_size']} x {result['device']}, {result['threads']} threads each, torch {result['torch']}",
        f"blocks         {blocks} of {result['steps_per_block']} steps, {result['global_batch']} samples each",
        f"speed          {_speed(result)} {unit} (median; 5 % to 95 % of the blocks)",
        f"step           {1e3 * result['step_s']['median']:.1f} ms",
        f"memory         {peaks}",
    ]
    if result["bubble_share"] is not None:
        shares = _shares(result["bubble_share"])
        ideal = f"{100 * result['ideal_bubble_share']:.1f} %"
        lines.append(f"bubble         {shares} of forward and backward; {ideal} with equal stages")
    if result["communication_share"] is not None:
        shares = _shares(result["communication_share"])
        lines.append(f"communication  {shares}, not overlapped with computation (profiler)")
    mfu = result["mfu"]
    if mfu is None:
        lines.append("MFU            n/a: the model does not define flops_per_sample")
    else:
        others = ", ".join(f"{label} {100 * mfu[name]:.1f} %" for name, label in LABELS.items() if name in mfu)
        lines += [
            f"MFU            {100 * mfu['value']:.1f} % = {mfu['flops_per_sample']:.4g} FLOP per sample x samples/s / "
            f"{mfu['peak_flops']:.4g} FLOP/s ({mfu['peak_source']})",
            f"               {others}",
            f"               {mfu['formula']}",
        ]
    if result["gap"]:
        lost = result["gap"]["step_s"] - result["gap"]["ideal_s"]
        lines.append(
            f"gap            {1e3 * lost:.1f} ms of the step are not the model's FLOPs at the peak rate; the largest "
            "losses (mean of the ranks, profiler):"
        )
        for loss in result["gap"]["losses"][:LISTED]:
            part = f"{1e3 * loss['seconds']:9.1f} ms {100 * loss['seconds'] / max(lost, 1e-9):5.1f} %"
            lines.append(f"{'':15}{part}  {loss['kind']}: {loss['advice']}")
    lines += [describe_advice(key, measured) for key, measured in result["advice"].items()]
    cost = result["measurement"]
    lines.append(
        f"measuring      {100 * cost['share']:.3f} % of a step: {1e6 * cost['seconds_per_step']:.0f} µs per step to "
        f"collect metrics, with {cost['timed_intervals_per_step']:.0f} timed intervals and a share of the log steps"
    )
    if result["against"]:
        against = result["against"]
        lines.append(f"bare loop      {against['loop']}: {_speed(against)} {unit}")
        lines.append(
            f"ratio          {against['ratio']:.4f} of the bare loop's speed (95 % interval "
            f"{against['ci95_low']:.4f} to {against['ci95_high']:.4f}, {blocks} pairs)"
        )
    return "\n".join(lines)


def describe_advice(key: str, measured: dict[str, Any]) -> str:
    times = ", ".join(f"{value} {1e3 * seconds:.3g} ms" for value, seconds in measured["seconds"].items())
    return f"advice         {key}={measured['best']} ({MEASURED[key]}: {times})"


def _speed(rates: dict[str, Any]) -> str:
    speed = rates["tokens_per_s"] or rates["samples_per_s"]
    return f"{speed['median']:,.0f} ({speed['p05']:,.0f} to {speed['p95']:,.0f})"


def _byte_counts(counts: Sequence[int]) -> str:
    return ", ".join(map(format_bytes, counts))


def _shares(shares: Sequence[float]) -> str:
    by_rank = ", ".join(f"{100 * share:.1f}" for share in shares)
    return f"{100 * sum(shares) / len(shares):.1f} % (by rank: {by_rank})"
