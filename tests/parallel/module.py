"""Defines models as a user does: modules without stem, layers and head, and losses that return their own counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.own_pipeline_model import Layer, ResidualNet
from hpc_train.config.schema import GPTConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.gpt import GPT, GPTHead
from hpc_train.models.own_loss import Gather, alone
from hpc_train.models.transformer import cross_entropy


class Tiny(nn.Module):
    """Maps images ``[micro, 3, 8, 8]`` to class scores.

    Args:
        batch_norm: normalizes by the statistics of the batch.
        unused: adds a parameter that no forward uses.
    """

    def __init__(self, classes: int, batch_norm: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6) if batch_norm else nn.GroupNorm(2, 6)
        self.last = nn.Linear(6, classes)
        if unused:
            self.unused = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.norm(self.first(inputs)).relu().mean((2, 3)))


class StridedTiny(Tiny):
    """Has parameters in other memory formats: channels last and transposed."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.first.to(memory_format=torch.channels_last)
        self.last.weight = nn.Parameter(self.last.weight.detach().t().contiguous().t())


class NormedLayer(Layer):
    """A residual layer that normalizes batches."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor] = {}) -> Tensor:
        return self.norm(super().forward(hidden))


class NormedNet(ResidualNet):
    """A model of three parts with batch statistics."""

    def __init__(self, width: int, image_size: int, n_classes: int) -> None:
        super().__init__(4, width, image_size, n_classes)
        self.layers = nn.ModuleDict({str(index): NormedLayer(width) for index in range(4)})

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        if "norm.weight" in name:
            value.fill_(1)
        else:
            super().init_parameter(name, value, generator)

    def init_buffers(self, device: torch.device) -> None:
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()


class FrozenNet(ResidualNet):
    """A model of three parts whose first half does not train."""

    def __init__(self, width: int, image_size: int, n_classes: int) -> None:
        super().__init__(4, width, image_size, n_classes)
        for part in (self.stem, self.layers["0"], self.layers["1"]):
            part.requires_grad_(False)


class RoundedNet(FrozenNet):
    """Holds its frozen half in bf16, with ``wide`` in fp32."""

    def __init__(self, width: int, image_size: int, n_classes: int, wide: bool = False) -> None:
        super().__init__(width, image_size, n_classes)
        for part in (self.stem, self.layers["0"], self.layers["1"]):
            assert part is not None
            part.to(torch.float32 if wide else torch.bfloat16)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        super().init_parameter(name, value, generator)
        if name.startswith(("stem", "layers.0", "layers.1")):
            value.copy_(value.bfloat16())


class RoundedTiny(Tiny):
    """Has a frozen norm and a frozen product in bf16, with ``wide`` in fp32, between the layers that train."""

    def __init__(self, classes: int, wide: bool = False) -> None:
        super().__init__(classes)
        self.middle = nn.Linear(6, 6)
        for part in (self.norm, self.middle):
            part.requires_grad_(False).bfloat16()
            if wide:
                part.float()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.norm(self.first(inputs)).relu().mean((2, 3))))


class CountingTiny(Tiny):
    """Counts its forward passes in a buffer, which does not change its outputs."""

    passes: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(inputs)


def weighted_cross_entropy(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weighted sum and the sum of the weights. Weights of 2.5, 5 and 7.5 give the shares different sums."""
    weights = torch.where(targets == IGNORED, 0.0, 2.5 * (1 + targets % 3)).flatten()
    losses = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return (losses * weights).sum(), weights.sum()


class WeightedTiny(Tiny):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(outputs, targets)


class ScaledTiny(Tiny):
    """Multiplies the sum and the count of the cross entropy by ``scale``, and by N in the Nth forward if it ``grows``.

    The mean and the gradients are those of ``Tiny``.
    """

    def __init__(self, classes: int, scale: int = 1, grows: bool = False) -> None:
        super().__init__(classes)
        self._scale, self._grows, self._forwards = scale, grows, 0

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self._forwards += 1
        scale = self._scale * (self._forwards if self._grows else 1)
        total, count = cross_entropy(outputs, targets)
        return total * scale, count * scale


class HeadsTiny(Tiny):
    """Predicts the class and, with a second head, a number that depends on it; the sums of both losses have weights."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.number = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        features = self.norm(self.first(inputs)).relu().mean((2, 3))
        return {"scores": self.last(features), "number": self.number(features).squeeze(1)}

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
        total, weights = weighted_cross_entropy(outputs["scores"], targets)
        kept = targets != IGNORED
        errors = (outputs["number"][kept] - targets[kept] % 3).square()
        return total + 0.5 * errors.sum(), weights


class VariationalTiny(nn.Module):
    """A variational autoencoder of images, whose targets are the inputs.

    The noise of a sample is a function of its pixels, so that it is the same in every layout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3 * 64, 8), nn.Linear(4, 3 * 64)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(inputs.flatten(1)).chunk(2, 1)
        noise = torch.cos(40 * inputs.flatten(1)[:, :4])
        image = self.decoder(mean + (log_variance / 2).exp() * noise).view_as(inputs)
        return image, mean, log_variance

    def loss(self, outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        image, mean, log_variance = outputs
        kept = targets != IGNORED
        samples = kept.flatten(1).any(1)
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance).sum(1)
        return (image - targets)[kept].square().sum() + divergence[samples].sum(), int(samples.sum())


class ContrastiveTiny(Tiny):
    """Finds the transposed image of each image among those of the global batch, and the image of each transposed one.

    Targets tell only which samples are padding. The parameter of the temperature is used after the gathering.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.temperature = nn.Parameter(torch.tensor([3.0]))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(inputs), super().forward(inputs.transpose(2, 3))

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Tensor, gather: Gather) -> tuple[Tensor, int]:
        kept = targets != IGNORED
        one, other = (F.normalize(output[kept], dim=1) for output in outputs)
        pairs = self.temperature * (one * other).sum(1)
        among = (self.temperature * left @ gather(right).T for left, right in ((one, other), (other, one)))
        return sum(scores.logsumexp(1).sum() for scores in among) - 2 * pairs.sum(), len(one)


class WeightedHead(GPTHead):
    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_cross_entropy(self(hidden), targets)


class HeadsHead(WeightedHead):
    """Predicts with a second output a number that depends on the token; both losses have weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.number = nn.Linear(config.dim, 1)

    def loss(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, weights = super().loss(hidden, targets)
        errors = (self.number(hidden).squeeze(-1) - targets % 3).square()
        return total + 0.5 * errors[targets != IGNORED].sum(), weights


class WeightedGPT(GPT):
    """Has the three parts of a GPT and a head whose loss differs from the built-in one."""

    head_class: type[WeightedHead] = WeightedHead

    def __init__(self, **sizes: Any) -> None:
        config = GPTConfig(**sizes)
        super().__init__(config)
        output = self.head.output if self.head is not None else None
        self.head = self.head_class(config)
        if output is not None and config.tied_embeddings:
            self.head.output = output


class HeadsGPT(WeightedGPT):
    head_class = HeadsHead


class ContrastiveHead(WeightedHead):
    """Compares the outputs for the first and the last token of all samples."""

    def loss(self, hidden: Tensor, targets: Tensor, gather: Gather = alone) -> tuple[Tensor, int]:  # type: ignore[override]
        kept = (targets != IGNORED).any(1)
        outputs = 10 * self(hidden[kept])
        one, other = outputs[:, 0], outputs[:, -1]
        scores = one @ gather(other).T
        return scores.logsumexp(1).sum() - (one * other).sum(), len(one)


class ContrastiveGPT(WeightedGPT):
    head_class = ContrastiveHead
