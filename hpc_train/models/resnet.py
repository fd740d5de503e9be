"""Implements ResNet-18 for small images, as an example of ``model=custom``.

It is the network of He et al. 2015 (arXiv:1512.03385) with a 3 x 3 stem without pooling, as usual for 32 x 32 pixels.

    python -m hpc_train +strategy=dp model=custom model._target_=hpc_train.models.resnet.resnet18
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Applies two 3 x 3 convolutions with a shortcut; the first may halve height and width."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            projection = nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width_out))

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(pixels)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(pixels))


class ResNet(nn.Module):
    """Computes logits ``[micro, classes]`` from pixels ``[micro, channels, height, width]``."""

    def __init__(self, blocks: tuple[int, ...], widths: tuple[int, ...], n_classes: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        self.blocks = nn.Sequential()
        width_in = widths[0]
        for group, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            for index in range(count):
                self.blocks.append(Block(width_in, width, stride=2 if group > 0 and index == 0 else 1))
                width_in = width
        self.output = nn.Linear(width_in, n_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.blocks(F.relu(self.norm(self.conv(pixels))))
        return self.output(hidden.mean(dim=(2, 3)))


def resnet18(n_classes: int = 100, channels: int = 3, width: int = 64) -> ResNet:
    """Returns a ResNet-18; with width 64 and 100 classes it has 11,220,132 parameters."""
    return ResNet((2, 2, 2, 2), (width, 2 * width, 4 * width, 8 * width), n_classes, channels)
