"""Model and hardware FLOPs utilisation, with what they count.

MFU = FLOP per sample x samples/s / peak, with the operations of one forward and backward of the model as it is written
down (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B). HFU counts what is computed: also what activation
checkpointing and a loss in chunks run again, a forward, which is a third of both (Narayanan et al. 2021, Megatron-LM,
arXiv:2104.04473, section 5.1). Two other ways of counting stand beside them, as figures of others are given so.

Peak arithmetic rates of GPUs, dense, from NVIDIA's data sheets: the denominator of model FLOPs utilisation.

MFU = flops_per_sample x samples per second / (GPUs x peak rate) (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpc_train.config.schema import TrainConfig
from hpc_train.models.model import Model
from hpc_train.plan.recomputation import parse_recomputation

FORMULA = (
    "MFU = FLOP per sample x samples/s / peak, PaLM appendix B: 6 per parameter and token without the embedding table, "
    "attention not halved for the causal mask; HFU adds the forward that is computed again"
)


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations for one sample; None where the model does not say.

    Attributes:
        model: of forward and backward; matrix products without the embedding table, attention in full.
        recomputed: of the forward that runs again in the backward.
        causal: ``model`` with half of the attention, where a causal mask leaves out that half.
        with_embeddings: ``model`` and 6 for each parameter of the embedding table and token.
    """

    model: float
    recomputed: float | None
    causal: float | None
    with_embeddings: float | None

    @property
    def hardware(self) -> float | None:
        return None if self.recomputed is None else self.model + self.recomputed

    def utilisation(self, samples_per_s: float, peak_flops: float) -> dict[str, float]:
        """``mfu``, and where known ``hfu``, ``mfu_causal``, ``mfu_with_embeddings``."""
        counts = {
            "mfu": self.model,
            "hfu": self.hardware,
            "mfu_causal": self.causal,
            "mfu_with_embeddings": self.with_embeddings,
        }
        return {name: count * samples_per_s / peak_flops for name, count in counts.items() if count is not None}


def count_flops(model: Model, inputs: Tensor, train: TrainConfig) -> FlopCount:
    """Of the whole model. Of ``inputs``, a micro-batch, only the shape is read."""
    total, terms = model.flops_per_sample(inputs), model.flop_terms(inputs)
    return FlopCount(
        model=total,
        recomputed=_recomputed(model.block_flops(inputs), train),
        causal=total - terms.attention / 2 if terms is not None and terms.causal else None,
        with_embeddings=total + terms.embedding if terms is not None else None,
    )


def _recomputed(blocks: tuple[float, ...] | None, train: TrainConfig) -> float | None:
    """A forward is a third of forward and backward. Where products are kept only what PaLM does not count is left."""
    layers_again = parse_recomputation(train.activation_checkpointing)
    in_layers = layers_again.every > 0 and not layers_again.keep_products
    if not in_layers and train.loss_chunks == 1:
        return 0.0
    if blocks is None:
        return None
    _, *layers, head = blocks
    again = [flops for layer, flops in enumerate(layers) if in_layers and layers_again.applies_to(layer)]
    return (sum(again) + (head if train.loss_chunks > 1 else 0.0)) / 3


def described(count: FlopCount, peak_flops: float, source: str) -> dict[str, Any]:
    """What the figures count, for ``run.json`` and reports."""
    return {
        "flops_per_sample": count.model,
        "hardware_flops_per_sample": count.hardware,
        "peak_flops": peak_flops,
        "peak_source": source,
        "formula": FORMULA,
    }


# Part of the device's name -> FLOP/s on tensor cores in bf16 and fp16, FLOP/s outside them in fp32, and in fp64.
# The first name that fits counts, so the longer stand before the shorter.
_RATES: tuple[tuple[str, float, float, float], ...] = (
    ("GB200", 2500e12, 80e12, 40e12),
    ("B200", 2250e12, 80e12, 40e12),
    ("GH200", 989.4e12, 66.9e12, 66.9e12),
    ("H200", 989.4e12, 66.9e12, 66.9e12),
    ("H100 NVL", 835.5e12, 60e12, 60e12),
    ("H100 PCIe", 756e12, 51e12, 51e12),
    ("H100", 989.4e12, 66.9e12, 66.9e12),
    ("H800", 989.4e12, 66.9e12, 1e12),
    ("A100", 312e12, 19.5e12, 19.5e12),
    ("A800", 312e12, 19.5e12, 19.5e12),
    ("A40", 149.7e12, 37.4e12, 0.58e12),
    ("A30", 165e12, 10.3e12, 10.3e12),
    ("A10G", 70e12, 35e12, 0.55e12),
    ("A10", 125e12, 31.2e12, 0.49e12),
    ("L40S", 362e12, 91.6e12, 1.43e12),
    ("L40", 181e12, 90.5e12, 1.41e12),
    ("L4", 121e12, 30.3e12, 0.47e12),
    ("V100", 125e12, 15.7e12, 7.8e12),
    ("T4", 65e12, 8.1e12, 0.25e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device under a precision of the config; None where it is not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it.
    """
    for name, half, single, double in _RATES:
        if name in device_name:
            return {"bf16": half, "fp16": half, "fp32": single, "fp64": double}.get(precision)
    return None
