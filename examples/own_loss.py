"""A custom loss with several outputs: a variational autoencoder of images that also classifies them.

    python -m hpc_train +strategy=dp model=custom model._target_=examples.own_loss.ClassifyingAutoencoder \
        data=synthetic data.task=images
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Outputs = dict[str, Tensor]


class ClassifyingAutoencoder(nn.Module):
    """Encodes an image as a normal distribution, and decodes and classifies a sample of it.

    Args:
        image_size: the width and height of the images.
        n_latent: the dimensions of the normal distribution.
        class_weight: the weight of the classification in the loss.
    """

    def __init__(
        self, image_size: int = 32, n_classes: int = 10, n_latent: int = 16, width: int = 64, class_weight: float = 10.0
    ) -> None:
        super().__init__()
        pixels = 3 * image_size**2
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(pixels, width), nn.GELU(), nn.Linear(width, 2 * n_latent))
        self.decoder = nn.Sequential(nn.Linear(n_latent, width), nn.GELU(), nn.Linear(width, pixels))
        self.classifier = nn.Linear(n_latent, n_classes)
        self.class_weight = class_weight

    def forward(self, pixels: Tensor) -> Outputs:
        """Returns all that the loss needs; ``loss`` receives it unchanged, whatever its structure."""
        mean, log_variance = self.encoder(pixels).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        latent = mean + (log_variance / 2).exp() * noise
        decoded = self.decoder(latent).view_as(pixels)
        logits = self.classifier(latent)
        return {"pixels": pixels, "decoded": decoded, "mean": mean, "log_variance": log_variance, "logits": logits}

    def loss(self, outputs: Outputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of three losses over the samples, and the number of samples; targets of -100 are padding."""
        kept = targets != -100
        mean, log_variance = outputs["mean"], outputs["log_variance"]
        squares = (outputs["decoded"] - outputs["pixels"]).square().flatten(1).sum(1)
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(1)
        classes = F.cross_entropy(outputs["logits"], targets, ignore_index=-100, reduction="none")
        return (squares + divergence + self.class_weight * classes)[kept].sum(), kept.sum()
