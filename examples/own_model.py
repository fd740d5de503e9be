"""A custom model with a loss of its own: a small image classifier whose classes have weights.

    python -m hpc_train +strategy=dp model=custom model._target_=examples.own_model.WeightedClassifier \
        data=synthetic data.task=images
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightedClassifier(nn.Module):
    """Two convolutions and a linear layer. Rare classes can be given a larger weight in the loss."""

    weights: Tensor

    def __init__(self, n_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.classifier = nn.Linear(2 * width, n_classes)
        self.register_buffer("weights", torch.linspace(1.0, 2.0, n_classes))

    def forward(self, pixels: Tensor) -> Tensor:
        """Maps pixels ``[micro, 3, height, width]`` to logits ``[micro, n_classes]``."""
        return self.classifier(self.convolutions(pixels).mean(dim=(-2, -1)))

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of losses and the sum of the weights; targets of -100 are padding."""
        kept = targets != -100
        losses = F.cross_entropy(outputs[kept], targets[kept], reduction="none")
        weights = self.weights[targets[kept]]
        return (weights * losses).sum(), weights.sum()
