"""``pp_split=measured`` against ``even`` on a lopsided model: a large vocabulary, and layers of unequal width.

    python -m benchmarks.pipeline_split [--stages 2] [--pairs 20]

Both pipelines live in the same processes and take turns, so what slows the machine slows both. Printed: the slowest
stage's time and the whole pass, measured split over even split, beside what the profile of the blocks predicts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.bench.request import Spread, paired_ratio
from hpc_train.config.schema import (
    BatchConfig,
    Config,
    CustomModelConfig,
    GPTConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
)
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import StepBatch
from hpc_train.data.feed import example_micro_batch
from hpc_train.layout.validate import validate
from hpc_train.models.gpt import GPT, GatedFeedForward
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import Mesh, join_mesh
from hpc_train.parallel.pipeline.balance import plan_split
from hpc_train.parallel.pipeline.split import split_layers
from hpc_train.train.watch.pipeline_watch import timed_stages
from tests.ranks import run_ranks

SIZES = {"vocab_size": 8192, "n_layers": 8, "dim": 256, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 512}
MICRO_BATCHES = 8


def lopsided() -> GPT:
    """Half of the work is the head's, and the last two layers are four times as wide as the others."""
    model = GPT(GPTConfig(**SIZES))
    for index in (6, 7):
        model.layers[str(index)].ffn = GatedFeedForward(SIZES["dim"], 4 * SIZES["ffn_dim"])  # type: ignore[union-attr]
    return model


def config(stages: int) -> Config:
    return Config(
        strategy=StrategyConfig(pp=stages, schedule="1f1b", pp_split="measured"),
        model=CustomModelConfig(_target_="benchmarks.pipeline_split.lopsided"),
        data=SyntheticDataConfig(sequence_length=128, vocab_size=SIZES["vocab_size"]),
        batch=BatchConfig(global_size=MICRO_BATCHES, micro_batches=MICRO_BATCHES),
        train=TrainConfig(steps=1),
    )


def compare(rank: int, stages: int, pairs: int) -> dict[str, Any]:
    """On every rank: the plan, and the measured stage times and passes of both splits."""
    settings = config(stages)
    mesh = join_mesh(validate(settings, 1, stages), rank, torch.device("cpu"))
    data = build_dataset(settings.data, "train", 0)
    plan = plan_split(settings, mesh, data)
    assert plan is not None and plan.even is not None
    batch = example_micro_batch(data, mesh.layout, mesh.device)
    step = StepBatch((batch,) * MICRO_BATCHES, MICRO_BATCHES * batch.targets.numel())
    engines = [build_engine(settings, mesh, layers) for layers in (split_layers(8, stages), plan.layers)]
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(-2, 2 * pairs):  # the first turn of each is a warm-up
        found = timed(engines[turn % 2], step, mesh)
        if turn >= 0:
            times[turn % 2].append(found)
    words = plan.describe()
    predicted = [max(plan.even.stage_s), max(plan.predicted.stage_s)], [plan.even.step_s, plan.predicted.step_s]
    return {"words": words, "predicted": predicted, "times": times}


def timed(engine: Any, step: StepBatch, mesh: Mesh) -> tuple[float, float]:
    """CPU seconds of the slowest stage per micro-batch, and seconds of the whole pass."""
    dist.barrier()
    with timed_stages(mesh.device, time.process_time) as work:
        begin = time.perf_counter()
        engine.train_step(0, step)
        dist.barrier()
        elapsed = time.perf_counter() - begin
    slowest = torch.tensor(sum(chunk.seconds() for chunk in work) / MICRO_BATCHES, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item(), elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    found = run_ranks(options.stages, compare, options.pairs, timeout=1800)[0]
    print(found["words"])
    for what, of, (even, balanced) in zip(("slowest stage", "whole pass"), (0, 1), found["predicted"], strict=True):
        first, second = ([entry[of] for entry in times] for times in found["times"])
        ratio = paired_ratio(first, second)
        print(
            f"{what:14} even {1e3 * Spread.of(first).median:.1f} ms, measured {1e3 * Spread.of(second).median:.1f} ms: "
            f"{ratio.median:.2f} times as fast (95 % interval {ratio.low:.2f} to {ratio.high:.2f}; "
            f"best of all passes {min(first) / min(second):.2f}), {even / balanced:.2f} predicted"
        )


if __name__ == "__main__":
    main()
