"""A custom model that can be cut into pipeline stages: an image classifier of residual layers.

    python -m hpc_train +strategy=pp model=custom model._target_=examples.own_pipeline_model.ResidualNet \
        data=synthetic data.task=images
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.models.model import Head, Model


class Stem(nn.Linear):
    def forward(self, inputs: Tensor, context: Mapping[str, Tensor] = {}) -> Tensor:
        """Maps pixels ``[micro, 3, height, width]`` to hidden states ``[micro, width]``."""
        return super().forward(inputs.flatten(1))


class Layer(nn.Linear):
    def forward(self, hidden: Tensor, context: Mapping[str, Tensor] = {}) -> Tensor:
        """Returns hidden states in the shape of ``hidden``."""
        return hidden + F.gelu(super().forward(hidden))


class Classifier(Head):
    def __init__(self, width: int, n_classes: int) -> None:
        super().__init__()
        self.output = nn.Linear(width, n_classes)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses and the number of targets; targets of -100 are padding."""
        return F.cross_entropy(self(hidden), targets, ignore_index=-100, reduction="sum"), (targets != -100).sum()

    def correct(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns the number of correct predictions, for the accuracy on the validation data."""
        return (self(hidden).argmax(-1) == targets).sum()


class ResidualNet(Model):
    """``n_layers`` residual layers of ``width`` features on pixels ``[micro, 3, image_size, image_size]``."""

    def __init__(self, n_layers: int = 4, width: int = 32, image_size: int = 32, n_classes: int = 10) -> None:
        super().__init__()
        self.width = width
        self.stem = Stem(3 * image_size**2, width)
        self.layers = nn.ModuleDict({str(index): Layer(width, width) for index in range(n_layers)})
        self.head = Classifier(width, n_classes)
        self.n_products = sum(value.numel() for value in self.parameters() if value.ndim == 2)

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        """Returns the shape in which each layer receives and returns the hidden states of ``inputs``."""
        return (len(inputs), self.width)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Draws weights from N(0, 1 / features of the input) and sets biases to 0."""
        if name.endswith("bias"):
            value.zero_()
        else:
            value.normal_(0.0, 1 / math.sqrt(value.shape[1]), generator=generator)

    def init_buffers(self, device: torch.device) -> None:
        """Does nothing: the model has no buffers."""

    def flops_per_sample(self, inputs: Tensor) -> float:
        """Returns 6 per weight: a multiplication and an addition, once in the forward and twice in the backward."""
        return 6.0 * self.n_products
