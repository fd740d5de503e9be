"""A contrastive loss: two views of an image must be more similar to each other than to those of all other images.

    python -m hpc_train +strategy=dp model=custom model._target_=examples.contrastive.TwoViews \
        data=synthetic data.task=images

The loss compares the samples of a batch, which its parameter ``gather`` declares. All samples of the global batch are
compared with each other, so the results are the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoViews(nn.Module):
    """Embeds an image and its noisy mirror image (InfoNCE; van den Oord et al. 2018, arXiv:1807.03748)."""

    def __init__(self, width: int = 16, n_features: int = 32, noise: float = 0.1) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, n_features),
        )
        self.log_scale = nn.Parameter(torch.tensor([2.0]))  # one element, since ZeRO cannot shard a scalar
        self.noise = noise

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Maps pixels ``[micro, 3, height, width]`` to the unit vectors of both views, ``[micro, n_features]``."""
        mirrored = pixels.flip(-1)
        if self.training:
            mirrored = mirrored + self.noise * torch.randn_like(pixels)
        return F.normalize(self.encoder(pixels), dim=1), F.normalize(self.encoder(mirrored), dim=1)

    def loss(
        self, outputs: tuple[Tensor, Tensor], targets: Tensor, gather: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, int]:
        """Returns the sum of the losses of this rank's samples, compared with those of all ranks, and their number.

        The loss of a sample is -log(exp(pair) / sum of exp(all)) = logsumexp(all) - pair, for each of its views.
        """
        one, other = (output[targets != -100] for output in outputs)  # without padding
        scale = self.log_scale.exp()
        pairs = scale * (one * other).sum(1)
        left, right = scale * one @ gather(other).T, scale * other @ gather(one).T
        return (left.logsumexp(1) + right.logsumexp(1) - 2 * pairs).sum(), len(one)
