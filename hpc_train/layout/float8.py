"""Determines which linear layers ``precision.fp8`` computes in fp8, and which GPUs support it. It does not import
torch.

The workers know the architecture of their GPU. Before the submission, it is derived from the name that Slurm or the
driver reports.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from hpc_train.config.extensions import family_of
from hpc_train.config.schema import Config, PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout

WHERE = "precision.fp8"
OFF = "precision.fp8=null"
MULTIPLES = {"tensorwise": 16, "rowwise": 16, "mxfp8": 32}  # both sizes of a matrix must be multiples of this


@dataclass(frozen=True)
class Products:
    """Trained linear layers with the same input, together with the corresponding linear layers in other layers of the
    model.

    Attributes:
        names: for each linear layer, its full names in the layers of the model.
        inputs: their ``in_features``.
        outputs: the ``out_features`` of each linear layer.
        rows: the number of rows of the input for one sample.
    """

    names: tuple[tuple[str, ...], ...]
    inputs: int
    outputs: tuple[int, ...]
    rows: float

    def chosen(self, precision: PrecisionConfig) -> list[int]:
        """Returns, for each linear layer, the number of layers of the model in which it computes in fp8."""
        return [
            sum(not why_not_float8(name, self.inputs, outputs, precision) for name in names)
            for names, outputs in zip(self.names, self.outputs, strict=True)
        ]


def why_not_float8(name: str, inputs: int, outputs: int, precision: PrecisionConfig) -> str:
    """Returns why the linear layer ``name`` computes in bf16; an empty string if it computes in fp8."""
    if any(re.search(pattern, name) for pattern in precision.fp8_skip):
        return "precision.fp8_skip"
    multiple = MULTIPLES[str(precision.fp8)]
    if inputs % multiple or outputs % multiple:
        return f"sizes that are not multiples of {multiple}"
    return ""


def check_skip(precision: PrecisionConfig) -> None:
    """Raises UserError if an item of ``precision.fp8_skip`` is not a regular expression."""
    for pattern in precision.fp8_skip:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(
                f"precision.fp8_skip has {pattern!r}, which is not a regular expression: {error}",
                where="precision.fp8_skip",
                fix="precision.fp8_skip=[attention] leaves all matrices in bf16 whose names contain attention",
            ) from None


def check_float8(config: Config, layout: Layout) -> None:
    """Raises UserError if tensor-parallel ranks would have shards of a size that ``precision.fp8`` does not support."""
    recipe = config.precision.fp8
    model = config.model
    tp = layout.tp
    plan = family_of(model).tensor_parallel
    # the workers know the names of the matrices to skip
    if recipe is None or tp == 1 or plan is None or config.precision.fp8_skip:
        return
    for key in plan.divisible:
        width = getattr(model, key)
        if key.endswith("heads"):
            width *= getattr(model, "head_dim", None) or getattr(model, "dim", 0) // getattr(model, "n_heads", 1)
        if width % MULTIPLES[recipe] == 0 and width % (tp * MULTIPLES[recipe]):
            raise refused_shard(recipe, f"a matrix of model.{key}", width, tp)


def refused_shard(recipe: str, what: str, width: int, tp: int) -> UserError:
    """Returns the error for a matrix of this ``width`` whose shards on ``tp`` ranks cannot be in fp8."""
    why = "a block would cross shards" if recipe == "mxfp8" else "GPUs multiply no other sizes in fp8"
    return UserError(
        f"precision.fp8={recipe} needs shards of a multiple of {MULTIPLES[recipe]}, but {what} has a width of {width}, "
        f"which {tp} ranks share: {why}",
        where=f"{WHERE}, strategy.tp",
        fix=f"a smaller strategy.tp, a width of a multiple of {tp * MULTIPLES[recipe]}, precision.fp8_skip, or {OFF}",
    )


# the lowest compute capability of NVIDIA GPUs for which the hardware and torch's kernels support this scaling
CAPABILITIES = {"tensorwise": (8, 9), "rowwise": (9, 0), "mxfp8": (10, 0)}
AMD = ("gfx94", "gfx95")  # MI300 and MI350, which have fp8 with one scale per tensor or row
# from developer.nvidia.com/cuda/gpus and rocm.docs.amd.com (2026); a name matches an entry if it contains all its words
_ARCHITECTURES = {
    "7.0": ("V100", "V100S", "GV100"),
    "7.5": ("T4", "QUADRO RTX"),
    "8.0": ("A100", "A100X", "A800", "A30"),
    "8.6": (
        "A2", "A10", "A10G", "A16", "A40", "A400", "A1000", "A2000", "A4000", "A4500", "A5000", "A5500", "A6000",
        "3090",
    ),
    "8.9": ("L4", "L40", "L40S", "ADA", "4090"),
    "9.0": ("H20", "H100", "H200", "H800", "GH200"),
    "10.0": ("B200", "GB200"),
    "10.3": ("B300", "GB300"),
    "12.0": ("RTX BLACKWELL", "5090"),
    "gfx908": ("MI100",),
    "gfx90a": ("MI210", "MI250", "MI250X"),
    "gfx942": ("MI300A", "MI300X", "MI325X"),
    "gfx950": ("MI350X", "MI355X"),
}  # fmt: skip


def architecture_of(gpu: str) -> str | None:
    """Returns the compute capability of a GPU such as ``h100`` or ``nvidia_a100-sxm4-80gb``, or the AMD architecture
    such as ``gfx942``; None if unknown."""
    words = set(re.split(r"[^A-Z0-9]+", gpu.upper()))
    for architecture, names in _ARCHITECTURES.items():
        if any(words.issuperset(name.split()) for name in names):
            return architecture
    return None


def check_architecture(recipe: str, device: str, architecture: str, instead: Collection[str] = ()) -> None:
    """Checks that a GPU supports the scaling ``recipe`` in hardware.

    Args:
        architecture: a compute capability such as ``9.0``, or an AMD architecture such as ``gfx942``.
        instead: other settings that the fix suggests.

    Raises:
        UserError: ``device``, which has this architecture, does not support this scaling.
    """
    needs = _why_not(recipe, architecture)
    if needs:
        others = [name for name in CAPABILITIES if CAPABILITIES[name] < CAPABILITIES[recipe]]
        kind = "architecture" if architecture.startswith("gfx") else "compute capability"
        raise UserError(
            f"precision.fp8 is {recipe}, but the GPU ({device}) has {kind} {architecture}; {needs}",
            where=WHERE,
            fix=" or ".join([*instead, *(f"precision.fp8={name}" for name in others), OFF]),
        )


def _why_not(recipe: str, architecture: str) -> str:
    """Returns the requirement of ``recipe`` that ``architecture`` does not meet; an empty string if it meets all."""
    if architecture.startswith("gfx"):
        if recipe == "mxfp8" or not architecture.startswith(AMD):
            return "fp8 needs an MI300 or later, and mxfp8 an NVIDIA B200"
        return ""
    major, minor = CAPABILITIES[recipe]
    if tuple(map(int, architecture.split("."))) < (major, minor):
        return f"{recipe} needs {major}.{minor} or later"
    return ""


def check_gpus(config: Config, gpus: Collection[str]) -> None:
    """Checks that all GPUs that a job may get support ``precision.fp8``.

    Args:
        gpus: the names of the GPUs that a job may get. Unknown names are not checked.

    Raises:
        UserError: a GPU does not support ``precision.fp8``.
    """
    recipe = config.precision.fp8
    if recipe is None:
        return
    architectures = {gpu: name for gpu in sorted(gpus) if (name := architecture_of(gpu)) is not None}
    instead = [f"cluster.gpu_type={gpu}" for gpu, name in architectures.items() if not _why_not(recipe, name)]
    for gpu, architecture in architectures.items():
        check_architecture(recipe, gpu, architecture, instead)
