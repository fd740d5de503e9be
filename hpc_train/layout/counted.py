"""Reads the counts of models whose family does not define sizes: custom models and most Hugging Face models.

Another process counts such a model once by running it on the meta device (``planner/work.py``), and stores the counts
in the user's cache. ``counted`` replaces the model of a config by its counts, so that the memory estimate and the plan
treat it like a model of a family. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from hpc_train.config import hf_config
from hpc_train.config.extensions import SOURCES, Activations, ModelFamily, family_of
from hpc_train.config.schema import Config, HFModelConfig
from hpc_train.config.schema.data import OwnKeys
from hpc_train.config.values import runs_own_code
from hpc_train.layout.float8 import Products
from hpc_train.layout.recomputation import compute_width, residual_width
from hpc_train.users import user_cache
from hpc_train.version import __version__

_FORMAT = 4
_PACKAGES = ("torch", "transformers")  # their versions may change the counts
_SHAPES = (("channels", "image_size", "image_size"), ("sequence_length",))  # keys with the sizes of a sample


@dataclass(frozen=True)
class Block:
    """Counts the operations of the stem, a layer or the head for one sample, and the elements that it keeps.

    Attributes:
        parameters, trained: the number of parameters, and the number of parameters that train.
        narrow: the number of frozen parameters that are held in the compute type, if it is bf16 or fp16, or in NF4.
        quantized: the number of parameters that are held in NF4.
        products: FLOPs of the forward in matrix products and convolutions with weights.
        attention: FLOPs of the forward in products of activations, not halved for a causal mask.
        backward: FLOPs of the backward.
        results: elements of the results of products and attention.
        kernels: the number of operations of the forward that write a tensor. It does not depend on the batch.
        largest: elements of the largest tensor that is kept for the backward.
        wide_bytes, narrow_bytes: bytes that are kept for the backward with fp32, and with bf16 or fp16.
        wide_input, narrow_input: bytes of the input with fp32, and with bf16 or fp16.
    """

    parameters: int
    trained: int
    narrow: int
    quantized: int
    products: float
    attention: float
    backward: float
    results: float
    kernels: int
    largest: float
    wide_bytes: float
    narrow_bytes: float
    wide_input: float
    narrow_input: float

    @property
    def total(self) -> float:
        """Returns the FLOPs of forward and backward."""
        return self.products + self.attention + self.backward


@dataclass(frozen=True)
class Counts:
    """The counts of a model.

    Attributes:
        blocks: the stem, the layers and the head. A model without repeated blocks has no layers.
        hidden: elements of the hidden states of one sample.
        tokens: positions of a sample; 1 if the inputs are not tokens.
        products: the linear layers that can compute in fp8: those in the layers, or in a model without layers, all.
        has_stages: whether the model can be cut into pipeline stages.
        tied: whether stem and head share a parameter.
        files: path -> hash of each user's file that was imported to build the model.
        versions: package -> version of the packages that may change the counts.
    """

    blocks: tuple[Block, ...]
    hidden: int
    tokens: int
    products: tuple[Products, ...]
    has_stages: bool
    tied: bool
    files: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class CountedModel:
    """The counts of a model, which replace the config of the model.

    Attributes:
        width, normed: bytes per element of an activation, and of the hidden states between layers.
    """

    counts: Counts
    width: int
    normed: int
    n_layers: int
    kind: str = "hpc_train.layout.counted:COUNTED_FAMILY"

    @property
    def tied_embeddings(self) -> bool:
        return self.counts.tied

    @property
    def layers(self) -> tuple[Block, ...]:
        return self.counts.blocks[1:-1]

    def saved(self, block: Block) -> float:
        """Returns the bytes that a block saves for the backward per sample."""
        if self.width < 4:
            return block.narrow_bytes
        return block.wide_bytes * self.width / 4

    def input_bytes(self, block: Block) -> float:
        """Returns the bytes of the input of a block per sample."""
        if self.width < 4:
            return block.narrow_input
        return block.wide_input * self.width / 4


def counted(config: Config) -> Config:
    """Returns ``config`` with the counts of its model in place of the model. Returns ``config`` itself if the family
    defines the sizes or there are no counts."""
    if not needs_counts(config):
        return config
    counts = read_counts(key_of(config))
    if counts is None:
        return config
    width = compute_width(config.precision)
    normed = residual_width(config.precision)
    model: Any = CountedModel(counts, width, normed, len(counts.blocks) - 2)
    return replace(config, model=model)


def needs_counts(config: Config) -> bool:
    """Returns whether the family of the model does not define its sizes."""
    model = config.model
    if runs_own_code(config) or isinstance(model, CountedModel):
        return False
    family = family_of(model)
    facts = (family.parameters, family.activations, family.flops_per_sample)
    return any(fact is None for fact in facts) or (family.parameters is not None and family.parameters(model) is None)


def has_own_samples(data: Any) -> bool:
    """Returns whether the shape of a sample is known only from the data, not from the config."""
    return isinstance(data, OwnKeys) or data.kind not in SOURCES or data.collate is not None or not sample_shape(data)


def sample_shape(data: Any) -> tuple[int, ...]:
    """Returns the shape of a sample's inputs; empty if the config does not show it."""
    for names in _SHAPES:
        sizes = [getattr(data, name, None) for name in names]
        shape = tuple(size for size in sizes if isinstance(size, int))
        if len(shape) == len(names) and (len(shape) == 1 or getattr(data, "task", "images") == "images"):
            return shape
    return ()


def key_of(config: Config) -> str:
    """Returns a hash of all inputs of the counts except the user's files and the versions of packages."""
    model = config.model
    data = config.data
    samples = asdict(data) if has_own_samples(data) else {"shape": sample_shape(data)}
    values = None
    if isinstance(model, HFModelConfig):
        values = hf_config.read(model.name_or_path, model.revision, model.config)
    content = [_FORMAT, __version__, asdict(model), values, samples, config.precision.residual, str(Path.cwd())]
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@cache
def versions() -> Mapping[str, str]:
    """Returns package -> version of those packages that may change the counts and are installed here."""
    installed = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def counts_file(key: str) -> Path:
    """Returns the file with the counts: ``hpc_train/counts`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return user_cache() / "counts" / f"{key}.json"


@lru_cache(maxsize=64)
def read_counts(key: str) -> Counts | None:
    """Returns the counts in the cache; None if there are none, or if a file of the user or a package has changed
    since."""
    try:
        stored = json.loads(counts_file(key).read_text(encoding="utf-8"))
        blocks = tuple(Block(**block) for block in stored["blocks"])
        products = tuple(
            Products(tuple(map(tuple, row["names"])), row["inputs"], tuple(row["outputs"]), row["rows"])
            for row in stored["products"]
        )
        counts = Counts(**{**stored, "blocks": blocks, "products": products})
        same_files = all(file_hash(Path(path)) == digest for path, digest in counts.files.items())
    except (OSError, ValueError, TypeError, KeyError):  # missing, or written by another version
        return None
    same_packages = all(counts.versions.get(name) == version for name, version in versions().items())
    return counts if same_files and same_packages else None


def file_hash(path: Path) -> str:
    """Returns the hash of the content of a file."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _activations(model: CountedModel, _: Any) -> Activations:
    """Returns the activations per sample: the mean over the layers, and the activations that stem and head keep.

    The largest tensor of the head holds the logits; the estimate adds their gradient and copies. All other bytes that
    stem and head keep are converted to logits, too.
    """
    stem, *layers, head = model.counts.blocks
    count = max(1, model.n_layers)
    wide = max(4, model.width)
    of_logits = 3 * wide  # bytes per logit in the backward, as in the estimate
    others = model.saved(stem) + model.saved(head) - head.largest * wide
    return Activations(
        tokens=1,
        norm_inputs=0,
        layer=round(sum(map(model.saved, layers)) / count / model.width),
        products=round(sum(block.results for block in layers) / count),
        layer_input=round(sum(map(model.input_bytes, layers)) / count / model.normed),
        logits=round(head.largest + max(0.0, others) / of_logits),
    )


COUNTED_FAMILY = ModelFamily(
    schema=CountedModel,
    learns_from=None,
    builder="hpc_train.models.counting:count",  # is not called: the config of the model itself names its builder
    parameters=lambda model: sum(block.parameters for block in model.counts.blocks),
    layer_parameters=lambda model: sum(block.parameters for block in model.layers) // max(1, model.n_layers),  # a mean
    stem_parameters=lambda model: model.counts.blocks[0].parameters,
    trained_parameters=lambda model: sum(block.trained for block in model.counts.blocks),
    quantized_parameters=lambda model: sum(block.quantized for block in model.counts.blocks),
    activations=_activations,
    flops_per_sample=lambda model, _: sum(block.total for block in model.counts.blocks),
    tensor_parallel=None,
    why_not_stages=lambda model: (
        "" if model.counts.has_stages else "the model is not a hpc_train.models.model.Model with layers"
    ),
    hugging_face=None,
)
