"""A user's package with a model family and a data source, written to a directory outside the repository."""

from __future__ import annotations

from pathlib import Path

FAMILY = '''
from dataclasses import dataclass

from hpc_train.config.extensions import Activations, HuggingFaceFormat, ModelFamily, TensorParallel
from hpc_train.config.schema import ModelKeys
from hpc_train.config.schema.key import key, required


@dataclass
class MixerConfig(ModelKeys):
    """Feed-forward layers over single tokens."""

    vocab_size: int = "${data.vocab_size}"
    n_layers: int = required("The number of layers.", at_least=1)
    dim: int = key(16, "The width.", at_least=1)
    ffn_dim: int = key(32, "The width of the feed-forward branch.", at_least=1)


def parameters(model):
    return model.n_layers * (model.dim + 2 * model.dim * model.ffn_dim) + model.dim + 2 * model.vocab_size * model.dim


def activations(model, data):
    return Activations(
        tokens=data.sequence_length, norm_inputs=model.dim, layer=model.dim + 2 * model.ffn_dim,
        products=model.ffn_dim + model.dim, layer_input=model.dim, logits=model.vocab_size,
    )


def flops_per_sample(model, shape):
    return 6.0 * shape[-1] * (parameters(model) - model.vocab_size * model.dim)


FAMILY = ModelFamily(
    schema=MixerConfig,
    learns_from="tokens",
    builder="PACKAGE.mixer:Mixer",
    parameters=parameters,
    activations=activations,
    flops_per_sample=flops_per_sample,
    tensor_parallel=TensorParallel(plan="PACKAGE.mixer:plan", divisible=("ffn_dim",), shards_sequence=False),
    hugging_face=HuggingFaceFormat(
        lambda model, name: "mixer." + name,
        lambda model, positions, dtype: {"model_type": "mixer", "torch_dtype": dtype},
    ),
)
'''
MIXER = """
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from hpc_train.models.transformer import CrossEntropyHead
from hpc_train.models.model import Model
from hpc_train.models.vit import ReplicatedStyle

from .mixer_family import flops_per_sample


class Stem(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)

    def forward(self, inputs, context):
        return self.embedding(inputs)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, hidden):
        return self.w2(torch.relu(self.w1(hidden)))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.ffn = nn.RMSNorm(config.dim), FeedForward(config)

    def forward(self, hidden, context):
        return hidden + self.ffn(self.norm(hidden))


class Head(CrossEntropyHead):
    def __init__(self, config):
        super().__init__()
        self.norm, self.output = nn.RMSNorm(config.dim), nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, hidden):
        return self.output(self.norm(hidden))


class Mixer(Model):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.stem, self.head = Stem(config), Head(config)
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in range(config.n_layers)})

    def hidden_shape(self, inputs):
        return (*inputs.shape, self.config.dim)

    def init_parameter(self, name, value, generator):
        with torch.no_grad():
            value.fill_(1.0) if "norm" in name else value.normal_(0.0, 0.1, generator=generator)

    def init_buffers(self, device):
        pass

    def flops_per_sample(self, inputs):
        return flops_per_sample(self.config, inputs.shape[1:])


def plan(model):
    whole = Replicate()
    layer = {
        "norm": ReplicatedStyle(),
        "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "ffn.w1": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(),
    }
    styles = {f"layers.{key}.{name}": style for key in model.layers for name, style in layer.items()}
    ends = {name: ReplicatedStyle() for name in ("stem", "head") if getattr(model, name) is not None}
    return styles | ends
"""
SOURCE = '''
from dataclasses import dataclass

from hpc_train.config.extensions import DataSource
from hpc_train.config.schema import DataKeys
from hpc_train.config.schema.key import key
from hpc_train.errors import UserError


@dataclass
class CountingConfig(DataKeys):
    """Counting upward."""

    start: int = key(0, "The first number.", at_least=0)
    sequence_length: int = key(8, "Tokens per sample.", at_least=1)
    vocab_size: int = key(16, "The number of token ids.", at_least=1)


def check_inputs(data):
    if data.start >= data.vocab_size:
        raise UserError(f"data.start is {data.start}", where="data.start", fix="data.start=0")


SOURCE = DataSource(
    schema=CountingConfig,
    gives="tokens",
    builder="PACKAGE.counting:Counting",
    check_inputs=check_inputs,
)
'''
COUNTING = """
import numpy as np


class Counting:
    def __init__(self, config, split, seed):
        self.config = config

    def __len__(self):
        return 64

    def __getitem__(self, index):
        numbers = (self.config.start + index + np.arange(self.config.sequence_length + 1)) % self.config.vocab_size
        return numbers[:-1], numbers[1:]
"""
FILES = {
    "__init__": "import torch\n",  # the process that submits must not execute it
    "mixer_family": FAMILY,
    "mixer": MIXER,
    "counting_source": SOURCE,
    "counting": COUNTING,
}


def write_package(folder: Path, name: str, *changes: tuple[str, str, str]) -> Path:
    """Writes the package ``name`` into ``folder``.

    Args:
        changes: (file, text, replacement), for a package with a mistake.
    """
    package = folder / name
    package.mkdir(parents=True)
    files = dict(FILES)
    for file, text, replacement in changes:
        assert text in files[file]
        files[file] = files[file].replace(text, replacement)
    for file, content in files.items():
        (package / f"{file}.py").write_text(content.replace("PACKAGE", name))
    return package


def overrides(name: str) -> list[str]:
    """Overrides that choose both extensions of the package ``name``."""
    return [
        "model=extension", f"model.kind={name}.mixer_family:FAMILY", "+model.n_layers=2",
        "data=extension", f"data.kind={name}.counting_source:SOURCE",
    ]  # fmt: skip
