"""What all contenders share and nobody's line count contains: models, samples, and what makes numbers comparable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset

from hpc_train.data.sampler import Order

CLASSES, SIZE = 4, 8
GLOBAL, STEPS, VALIDATION = 16, 20, 51  # 51 samples do not divide by two ranks
WORLD = 2
SEED = 0
SAME = (  # for hpc_train: as precise as the others, and every step in the metrics
    "precision=fp64", f"train.seed={SEED}", "telemetry.log_every=1", "cluster=local", f"cluster.cpu_workers={WORLD}",
    "cluster.gpus_per_node=0",
)  # fmt: skip
TRAINER: dict[str, Any] = {  # for Lightning: the same, and quiet
    "precision": "64-true", "log_every_n_steps": 1, "accelerator": "cpu", "enable_progress_bar": False,
    "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip


class Shapes:
    """Noisy 8 x 8 images of ``CLASSES`` classes, which differ in the brightness of one quarter; class 3 is rare."""

    def __init__(self, split: str) -> None:
        self.first, self.samples = (0, GLOBAL * STEPS) if split == "train" else (GLOBAL * STEPS, VALIDATION)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        random = np.random.default_rng(self.first + index)
        label = int(random.choice(CLASSES, p=[0.4, 0.3, 0.2, 0.1]))
        pixels = random.normal(size=(3, SIZE, SIZE))  # fp64
        half = SIZE // 2
        pixels[label % 3, half * (label // 2) :, half * (label % 2) :] += 1.5
        return pixels, np.int64(label)


class Sentences:
    """Token ids of which most follow from the one before, and the next token of each."""

    LENGTH, VOCABULARY = 16, 32

    def __init__(self, split: str) -> None:
        self.first, self.samples = (0, GLOBAL * STEPS) if split == "train" else (GLOBAL * STEPS, VALIDATION)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        random = np.random.default_rng(self.first + index)
        ids = random.integers(self.VOCABULARY, size=self.LENGTH + 1)
        for place in np.flatnonzero(random.random(self.LENGTH) < 0.8):
            ids[place + 1] = (3 * ids[place] + 1) % self.VOCABULARY
        return ids[:-1], ids[1:]


class Classifier(nn.Module):
    """Two convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU()
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.convolutions(pixels).mean(dim=(-2, -1)))


class Generator(nn.Sequential):
    """Maps noise ``[count, 4]`` to points ``[count, 2]``."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


class Critic(nn.Sequential):
    """Maps points ``[count, 2]`` to logits ``[count, 1]``: whether a point is real."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))


def ring() -> TensorDataset:
    """Returns noise and real points, which lie on a circle, in fp64."""
    random = np.random.default_rng(SEED)
    angle = 2 * np.pi * random.random(GLOBAL * STEPS)
    noise = random.normal(size=(GLOBAL * STEPS, 4))
    return TensorDataset(torch.tensor(noise), torch.tensor(np.stack([np.cos(angle), np.sin(angle)], axis=1)))


def save_tiny_llama(folder: Path) -> None:
    """Saves a Llama of two layers in ``folder``, which ``tiny_llama`` then names in all processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=Sentences.VOCABULARY, **sizes)).save_pretrained(folder)
    os.environ["TINY_LLAMA"] = str(folder)


def tiny_llama() -> str:
    return os.environ["TINY_LLAMA"]


def built(model: type[nn.Module], **arguments: Any) -> Any:
    """Returns the model in fp64, with the initial weights that hpc_train draws."""
    torch.manual_seed(SEED)
    return model(**arguments).double()


def samples(split: str, source: type[Shapes | Sentences] = Shapes) -> TensorDataset:
    """Returns the samples of a split in the order in which hpc_train reads them; pixels are in fp64."""
    data = source(split)
    indices = range(len(data))
    if split == "train":
        order = Order(len(data), GLOBAL, drop_last=True, seed=SEED)
        indices = np.concatenate([order.slots(step, 0, GLOBAL) for step in range(STEPS)]).tolist()
    inputs, targets = zip(*(data[index] for index in indices), strict=True)
    return TensorDataset(torch.tensor(np.stack(inputs)), torch.tensor(np.stack(targets)))


def in_order(split: str) -> DistributedSampler[object]:
    """Returns a sampler for Lightning, which otherwise shuffles the training samples of several ranks."""
    return DistributedSampler(samples(split), num_replicas=WORLD, rank=int(os.environ["RANK"]), shuffle=False)
