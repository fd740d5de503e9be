"""``bench batch``: the knee, the noise scale, and trials that run out of memory."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from hpc_train.bench.batch import Trial, expected_memory, knee, noise_scale, table
from tests.doors.command import TINY, hpc_train

HERE = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0", *TINY]


def test_the_knee_is_the_smallest_near_the_best() -> None:
    speeds = [(1, 40.0), (2, 70.0), (4, 96.0), (8, 100.0), (16, 99.0)]
    trials = [Trial(size, speed, 100 * size) for size, speed in speeds] + [Trial(32, None, None, "out_of_memory")]
    found = knee(trials)
    assert found is not None and found.micro_size == 4
    lines = table(trials, "tokens/s").splitlines()
    assert "knee" in lines[3] and "out of memory" in lines[-1] and len(lines) == 7
    assert knee(trials[-1:]) is None
    assert expected_memory(trials[:1], 2) is None and expected_memory(trials, 32) == 3200


def test_the_noise_scale_of_a_known_noise() -> None:
    """Gradients of 50 numbers, 0.2 each, with noise of variance 1 per number and sample: |G|^2 = 2, tr(S) = 50."""
    draw = random.Random(0)

    def squared_norm(samples: int) -> float:
        return sum(draw.gauss(0.2, samples**-0.5) ** 2 for _ in range(50))

    small, big = [squared_norm(4) for _ in range(8000)], [squared_norm(64) for _ in range(2000)]
    found = noise_scale(small, big, 4, 64)
    assert found.gradient == pytest.approx(2, rel=0.05) and found.noise == pytest.approx(50, rel=0.05)
    assert found.samples == pytest.approx(25, rel=0.05)
    assert noise_scale([1.0], [0.0], 4, 64).samples is None and fmean(small) > fmean(big)


@pytest.mark.long_form(30)
def test_sizes_until_the_memory_is_used_up(tmp_path: Path) -> None:
    few = ["--steps", "1", "--pairs", "1", "--noise", "2", "--memory", "0.01", "--plot", "batch.png", "--json"]
    done = hpc_train("bench", "batch", "+strategy=pp", *HERE, "data.samples=4096", *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    *measured, last = result["trials"]
    assert [trial["micro_size"] for trial in measured] == [1, 2] and result["unit"] == "tokens/s"
    assert all(trial["speed"] > 0 and trial["memory"] > 50 * 2**20 for trial in measured)
    assert last["micro_size"] == 4 and "of 10.2 MiB" in last["problem"]
    assert result["overrides"][0] == f"batch.micro_size={result['knee']}" and result["noise"]["noise"] != 0
    assert (tmp_path / "batch.png").stat().st_size > 1000


@pytest.mark.long_form(8)
def test_a_trial_that_runs_out_of_memory_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    custom = ["model=custom", "model._target_=hungry.Hungry", "+strategy=single"]
    few = ["--steps", "1", "--pairs", "1", "--noise", "0"]
    rest = [argument for argument in HERE if not argument.startswith("model")]
    done = hpc_train("bench", "batch", *rest, *custom, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2  out of memory" in done.stdout and "suggested overrides: batch.micro_size=1" in done.stdout


HUNGRY = """
import torch

class Hungry(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)

    def forward(self, inputs):
        if len(inputs) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory: a stand-in for a GPU")
        return self.table(inputs)
"""
