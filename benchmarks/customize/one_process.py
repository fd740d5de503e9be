"""The oracle: each task in one process and plain torch, in fp64, over whole global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score
from transformers import AutoModelForCausalLM

from benchmarks.customize.shared import (
    CLASSES,
    GLOBAL,
    Classifier,
    Critic,
    Generator,
    Sentences,
    Shapes,
    built,
    ring,
    samples,
    tiny_llama,
)
from examples.contrastive import TwoViews
from examples.own_model import WeightedClassifier
from examples.own_optimizer import Lion

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def oracle(task: str) -> dict[str, list[float]]:
    """Returns the loss of every step, and the value of the metric after the last."""
    if task == "gan":
        return {"loss": list(_gan())}
    model, loss = _TASKS[task]
    net = model()
    optimizer = Lion(_groups(net)) if task == "optimizer" else torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    data = samples("train", Sentences if task == "fine_tuning" else Shapes)
    for inputs, targets in DataLoader(data, batch_size=GLOBAL):
        value = loss(net, inputs, targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return {"loss": losses} | ({"f1": [_macro_f1(net)]} if task == "metric" else {})


def _cross_entropy(net: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(pixels), labels)


def _weighted(net: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(pixels), labels, weight=net.weights)


def _contrastive(net: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    one, other = net(pixels)
    similarity = net.log_scale.exp() * one @ other.T
    pairs = torch.arange(len(one))
    return F.cross_entropy(similarity, pairs) + F.cross_entropy(similarity.T, pairs)


def _next_tokens(net: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(net(ids).logits.flatten(0, 1), targets.flatten())


def _gan() -> Iterator[float]:
    generator, critic = built(Generator), built(Critic)
    of_generator, of_critic = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic))
    real = torch.ones(GLOBAL, 1, dtype=torch.float64)
    for noise, points in DataLoader(ring(), batch_size=GLOBAL):
        fake = generator(noise)
        labels = torch.cat([real, 0 * real])
        critic_loss = F.binary_cross_entropy_with_logits(critic(torch.cat([points, fake.detach()])), labels)
        of_critic.zero_grad()
        critic_loss.backward()
        of_critic.step()
        generator_loss = F.binary_cross_entropy_with_logits(critic(fake), real)
        of_generator.zero_grad()
        generator_loss.backward()
        of_generator.step()
        yield float((critic_loss + generator_loss).detach())


def _pretrained() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float64)


def _groups(net: nn.Module) -> Iterator[dict[str, Any]]:
    for name, value in net.named_parameters():
        lr = 1e-4 if name.startswith("convolutions") else 1e-3
        yield {"params": [value], "lr": lr, "weight_decay": 0.1 if value.ndim > 1 else 0.0}


def _macro_f1(net: nn.Module) -> float:
    pixels, labels = samples("validation").tensors
    with torch.no_grad():
        return float(MulticlassF1Score(num_classes=CLASSES, average="macro")(net(pixels), labels))


_TASKS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "own_model": (lambda: built(Classifier), _cross_entropy),
    "own_loss": (lambda: built(WeightedClassifier, n_classes=CLASSES), _weighted),
    "contrastive": (lambda: built(TwoViews, noise=0.0), _contrastive),
    "optimizer": (lambda: built(Classifier), _cross_entropy),
    "metric": (lambda: built(Classifier), _cross_entropy),
    "fine_tuning": (_pretrained, _next_tokens),
}
