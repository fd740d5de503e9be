"""The model: a small convolutional network. Any ``nn.Module`` can take its place."""

from __future__ import annotations

from torch import Tensor, nn


class Net(nn.Module):
    """Classifies pictures of 16 x 16 pixels with one channel.

    Args:
        width: the channels of the first convolution.
        n_classes: the number of classes.
    """

    def __init__(self, width: int = 8, n_classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Linear(2 * width * 4 * 4, n_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Returns the logits ``[batch, n_classes]`` of pictures ``[batch, 1, 16, 16]``."""
        return self.classifier(self.features(pictures).flatten(1))
