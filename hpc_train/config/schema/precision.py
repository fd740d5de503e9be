"""The keys of the group ``precision``: the number formats of a run."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.schema.condition import unless, when
from hpc_train.config.schema.key import key


@dataclass
class PrecisionConfig:
    """Number formats. Parameters and optimizer state are in fp32, or in fp64 under fp64; see weights."""

    name: str = key("fp32", "The format of matrix products.", choices=("fp64", "fp32", "bf16", "fp16"))
    residual: str = key(
        "compute",
        "bf16, fp16: the format of the hidden states between layers and between pipeline stages, under every strategy: "
        "compute is that of matrix products; fp32 needs more memory, traffic and time.",
        choices=("compute", "fp32"),
        when=when("precision.name", "bf16", "fp16"),
    )
    tf32: bool = key(
        False,
        "Whether matrix products and convolutions of fp32 tensors use TF32 on GPUs, with 10 bits of precision instead "
        "of 23. It is several times faster; without it, fp32 gives the same results as on a CPU up to rounding.",
        when=when("gpus"),
    )
    weights: str = key(
        "fp32",
        "bf16: the format of the weights and of their gradients. If it is bf16, the optimizer updates fp32 masters of "
        "the weights, which are sharded like its state. Checkpoints contain the masters.",
        choices=("fp32", "bf16"),
        when=when("precision.name", "bf16"),
    )
    fp8: str | None = key(
        None,
        "bf16: the scales with which the matrix products of the layers are computed in fp8, by torchao: one per tensor "
        "(tensorwise), per row (rowwise) or per block of 32 values (mxfp8). CPUs emulate it. Requires hpc_train[fp8].",
        choices=("tensorwise", "rowwise", "mxfp8"),
    )
    fp8_skip: list[str] = key(
        [],
        "Regular expressions, such as attention: linear layers whose names match one of them stay in bf16. Linear "
        "layers outside the model's layers, frozen ones, and those whose sizes are not multiples of 16 (mxfp8: 32) "
        "stay in bf16 in any case.",
        when=unless("precision.fp8", None),
    )
