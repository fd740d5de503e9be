"""Tests of the project: ``python -m pytest``. They take seconds and need neither a GPU nor Slurm."""

from __future__ import annotations

import torch
from torch import nn

from data import CLASSES, SIZE, Shapes
from model import Net


def test_an_index_always_has_the_same_picture() -> None:
    data = Shapes("train")
    picture, label = data[7]
    assert picture.shape == (1, SIZE, SIZE)
    assert label in range(len(CLASSES))
    assert torch.equal(picture, data[7][0])
    assert not torch.equal(picture, Shapes("validation")[7][0])


def test_the_loss_of_a_batch_falls() -> None:
    torch.manual_seed(0)
    data = Shapes("train")
    pictures = torch.stack([data[index][0] for index in range(16)])
    labels = torch.tensor([data[index][1] for index in range(16)])
    model = Net()
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(pictures), labels)
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)  # a step of gradient descent
    assert losses[-1] < losses[0]
