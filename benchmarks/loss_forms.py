"""Measures on one CPU thread what each form of the loss takes in a training step: processor time and peak of tensors.

    python -m benchmarks.loss_forms [--vocabulary 32000] [--dim 256] [--length 512] [--samples 4] [--rounds 5]

The forms take turns, so that other load on the machine hits all of them alike; the medians are printed. The peak counts
the bytes of all tensors that a step creates, without parameters.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from hpc_train.config.schema import BatchConfig, Config, GPTConfig, SyntheticDataConfig
from hpc_train.data.dataset import Batch, StepBatch
from hpc_train.layout.loss_chunks import LossForm
from hpc_train.layout.resolve import resolve_layout
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.mesh import join_mesh
from hpc_train.parallel.parallelize import apply_loss_form
from hpc_train.units import format_bytes
from tests.parallel.memory import PeakMemory

FORMS = {
    "whole logits": LossForm(),
    "8 chunks, computed again": LossForm(8),
    "8 chunks with gradients": LossForm(8, fused=True),
    "1 chunk with gradients": LossForm(1, fused=True),
}


def build_step(options: argparse.Namespace) -> Callable[[LossForm], None]:
    """Returns a function that runs a training step with the loss in a form."""
    dim = options.dim
    config = Config(
        model=GPTConfig(vocab_size=options.vocabulary, dim=dim, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=3 * dim),
        data=SyntheticDataConfig(sequence_length=options.length, vocab_size=options.vocabulary),
        batch=BatchConfig(global_size=options.samples, micro_size=options.samples),
    )
    engine = build_engine(config, join_mesh(resolve_layout(config, 1, 1), 0, torch.device("cpu")))
    tokens = torch.randint(options.vocabulary, (options.samples, options.length))
    batch = StepBatch((Batch(tokens, tokens.roll(-1, 1)),), tokens.numel())

    def step(form: LossForm) -> None:
        apply_loss_form(engine.parts[0], form)
        engine.train_step(0, batch)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    defaults = {"vocabulary": 32000, "dim": 256, "length": 512, "samples": 4, "rounds": 5}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    step = build_step(options)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(options.rounds):
        for name, form in FORMS.items():
            begin = time.process_time()
            step(form)
            seconds[name].append(time.process_time() - begin)
    print(f"{'':28}{'s/step':>8} {'of first':>9}   peak")
    for name, form in FORMS.items():
        with PeakMemory() as memory:
            step(form)
        ratio = median(seconds[name]) / median(seconds["whole logits"])
        print(f"{name:28}{median(seconds[name]):8.3f} {ratio:9.3f}   {format_bytes(memory.peak)}")


if __name__ == "__main__":
    main()
