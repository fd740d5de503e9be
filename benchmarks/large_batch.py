"""Trains a small ViT on 100 classes of synthetic images in batches of 128 and of 4,096, for the same number of epochs.

    python -m benchmarks.large_batch [--epochs 10]

Each row has the keys of a run, with warm-up over the same number of samples. Prints the loss of the last batch and the
validation loss.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.data.build import build_dataset
from hpc_train.models.build import build_model
from hpc_train.parallel.parallelize import materialize
from hpc_train.train.optimizers.learning_rate import learning_rates
from hpc_train.train.optimizers.optimizer import Optimizer
from tests.config.composing import compose

DATA = [
    "data=synthetic", "data.task=images", "data.image_size=8", "data.n_classes=100", "data.samples=20480",
    "data.validation_samples=2000",
]  # fmt: skip
MODEL = [
    "model=vit_tiny",
    "model.n_layers=1",
    "model.dim=24",
    "model.n_heads=2",
    "model.mlp_dim=48",
    "model.patch_size=4",
]
LARGE = ["batch.global_size=4096", "optim.base_batch=128", "optim.warmup_steps=5"]
SMALL = ["batch.global_size=128", "optim.warmup_steps=160"]
ROWS = (
    [*SMALL, "optim.lr=3e-3"],
    [*LARGE, "optim.lr=3e-3"],
    [*LARGE, "optim.lr=3e-3", "optim.lr_scaling=sqrt"],
    [*LARGE, "optim.lr=3e-3", "optim.lr_scaling=linear"],
    [*LARGE, "optim=lamb", "optim.lr=1e-2", "optim.lr_scaling=sqrt"],
    [*LARGE, "optim=lamb", "optim.lr=1e-2", "optim.lr_scaling=linear"],
    [*SMALL, "optim=sgd", "optim.lr=0.1"],
    [*LARGE, "optim=sgd", "optim.lr=0.1", "optim.lr_scaling=linear"],
    [*LARGE, "optim=lars", "optim.lr=10"],
    [*LARGE, "optim=lars", "optim.lr=30"],
)


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)
    config = typed(compose(["+strategy=single", *DATA, *MODEL]))
    train, validation = (images(config, split) for split in ("train", "validation"))
    for row in ROWS:
        losses = trained(typed(compose(["+strategy=single", *DATA, *MODEL, *row])), epochs, train, validation)
        print(f"{losses[0]:.3f} {losses[1]:.3f} {' '.join(row)}", flush=True)


def images(config: Config, split: str) -> tuple[Tensor, Tensor]:
    dataset = build_dataset(config.data, split, 0, "fp32")
    samples = [dataset.sample(index, 0) for index in range(len(dataset))]
    inputs = np.stack([sample.inputs for sample in samples])
    return torch.tensor(inputs), torch.tensor(np.stack([sample.targets for sample in samples]))


def trained(
    config: Config, epochs: int, train: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """Returns the loss of the last batch, and the validation loss after ``epochs``."""
    inputs, targets = train
    size = config.batch.global_size
    model = build_model(config.model, 0)
    materialize(model, torch.device("cpu"), 0, torch.float32)
    optimizer = Optimizer(config.optim, dict(model.named_parameters()))
    rate = learning_rates(config.optim, size, epochs * len(inputs) // size)
    order = torch.Generator().manual_seed(0)
    batches = [batch for _ in range(epochs) for batch in torch.randperm(len(inputs), generator=order).split(size)]
    for step, batch in enumerate(batches):
        model.zero_grad()
        total, count = model(inputs[batch], {}, targets[batch])
        (total / count).backward()
        if config.optim.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step(rate(step), torch.tensor(True))
    last = total.item() / int(count)
    with torch.no_grad():
        total, count = model(validation[0], {}, validation[1])
    return last, total.item() / int(count)


if __name__ == "__main__":
    main()
