"""Describes model families and data sources by facts that are known without importing torch.

Built-in families and sources use the same descriptions as families and sources of a user's package, which
``model.kind`` or ``data.kind`` names as ``package.module:NAME``. A description that lacks a fact is refused when the
config is composed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from hpc_train.config.import_path import check_call, module_spec
from hpc_train.errors import UserError

TOKENS, IMAGES = "tokens", "images"
SAMPLE_KEYS: dict[str, tuple[str, ...]] = {  # what the schema of a source must have for each kind of sample
    TOKENS: ("sequence_length", "vocab_size"),
    IMAGES: ("image_size", "channels", "n_classes"),
}
FAMILIES: dict[str, str] = {
    "gpt": "hpc_train.models.families:GPT_FAMILY",
    "vit": "hpc_train.models.families:VIT_FAMILY",
    "custom": "hpc_train.models.families:CUSTOM_FAMILY",
    "hf": "hpc_train.models.hf.family:HF_FAMILY",
}
SOURCES: dict[str, str] = {
    "text": "hpc_train.data.sources:TEXT",
    "tokens": "hpc_train.data.sources:TOKEN_FILES",
    "sft": "hpc_train.data.sources:SFT",
    "cifar100": "hpc_train.data.sources:CIFAR100",
    "images": "hpc_train.data.sources:IMAGE_FOLDERS",
    "shards": "hpc_train.data.sources:SHARDS",
    "synthetic": "hpc_train.data.sources:SYNTHETIC",
    "custom": "hpc_train.data.sources:CUSTOM",
    "stream": "hpc_train.data.sources:STREAM",
    "mixture": "hpc_train.data.sources:MIXTURE",
}


@dataclass(frozen=True)
class Activations:
    """Counts what a model keeps for the backward pass, in elements.

    Attributes:
        tokens: positions per sample, to which the other numbers refer.
        norm_inputs: inputs of norms per token and layer, in the format of ``precision.residual``.
        layer: all other activations per token and layer.
        products: the part of ``layer`` that consists of results of matrix products or attention.
        layer_input: the width of the hidden states, which full activation checkpointing keeps.
        logits: logits per token.
        scores: attention scores per token and layer, if attention keeps them: two copies in fp32, and one more copy in
            half precision if that is used.
        mixed: the result of attention per token and layer, which context-parallel ranks keep before and after its
            exchange.
        passing: results per token and layer that are written and read but not kept; they take time and no memory.
        tables: values in fp32 per position, the same for all samples and layers, that a layer keeps: rotary tables.
        backward: the peak of the gradients per token that the backward pass of a layer holds, minus what it has freed
            by then; None: a quarter of ``layer``.
        fused: the part of ``layer`` that a compiled layer does not keep, but recomputes in its backward pass inside the
            kernels that read it.
        routing: values per token and layer in at least fp32 that a router keeps, without recomputation.
        widened: the elements per token and layer that half precision keeps in addition, as copies in fp32 take the
            place of activations.
    """

    tokens: int
    norm_inputs: int
    layer: int
    products: int
    layer_input: int
    logits: int
    scores: int = 0
    mixed: int = 0
    passing: int = 0
    tables: int = 0
    backward: int | None = None
    fused: int = 0
    routing: int = 0
    widened: int = 0


@dataclass(frozen=True)
class RoutedExperts:
    """Describes the experts from which the router of a layer chooses: gated branches of three matrices.

    Attributes:
        number: how many a layer has.
        chosen: how many compute a token.
        row: the width of their inputs and results.
        width: the width of the branch between them.
        layers: how many layers have them.
        capacity: the most choices of an expert relative to the mean; None: no limit.
    """

    number: int
    chosen: int
    row: int
    width: int
    layers: int
    capacity: float | None

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of an expert."""
        return 3 * self.row * self.width


@dataclass(frozen=True)
class TensorParallel:
    """Describes how the matrices of a family are split over tensor-parallel ranks.

    Attributes:
        plan: ``module:function``. Called with the model (or a pipeline stage of it), the function returns a mapping of
            module names to ``torch.distributed.tensor.parallel`` styles.
        divisible: the keys of the schema whose values the number of ranks must divide.
        shards_sequence: whether each rank holds a shard of the sequence between the layers.
    """

    plan: str
    divisible: tuple[str, ...]
    shards_sequence: bool


@dataclass(frozen=True)
class LinearLayers:
    """Describes linear layers inside a layer of the model that have the same input.

    Attributes:
        names: their names in the model, relative to the layer.
        inputs: their ``in_features``.
        outputs: the ``out_features`` of each.
        layer: the name of the layer in the model, with ``{}`` for its number.
    """

    names: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    layer: str = "layers.{}"


@dataclass(frozen=True)
class HuggingFaceFormat:
    """Describes the format in which a checkpoint is exported for ``transformers``.

    Attributes:
        parameter_name: takes the model's config and the name of a parameter; returns its name in the exported files, or
            the names of its slices along the first dimension.
        config: takes the model's config, the longest sequence and the dtype, and returns the content of config.json.
        other_files: takes the model's config and returns files that are copied, such as a tokenizer.
        prefix: takes the model's config and returns the prefix of the files of weights and config, such as adapter_.
    """

    parameter_name: Callable[[Any, str], str | tuple[str, ...]]
    config: Callable[[Any, int, str], Mapping[str, Any]]
    other_files: Callable[[Any], Sequence[Path]] | None = None
    prefix: Callable[[Any], str] = lambda model: ""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """States the facts about a model family. None states that the family lacks a feature or a value is unknown.

    Attributes:
        schema: the dataclass of its keys, derived from ``ModelKeys``, with ``n_layers``.
        learns_from: the kind of samples, such as ``tokens`` or ``images``; None: any.
        builder: ``module:attribute``; called with the config on the meta device, it returns a ``Model``.
        parameters: the number of parameters of a config, or None if it is unknown; it must also be right for other
            values of ``n_layers``, unless ``layer_parameters`` is given.
        layer_parameters: the number of parameters of one layer.
        experts: describes the experts of which a token chooses some; None, or a function that returns None: all
            parameters compute each token.
        stem_parameters: the number of parameters before the layers; a table that stem and head share counts here. None:
            half of the parameters outside the layers, or all of them if the schema has ``tied_embeddings`` and it is
            true.
        trained_parameters: the number of parameters that train, if checkpoints contain only these; None: all.
        quantized_parameters: the number of parameters of the layers that are held in NF4; None: none.
        activations: takes the configs of model and data.
        flops_per_sample: takes the config and the shape of a sample's inputs; forward and backward pass.
        linear_layers: the linear layers of one layer, grouped by input, in the order of the forward pass. With None, or
            a function that returns None, neither the time of fp8 matrix products nor the gain of ``strategy.async_tp``
            is predicted.
        tensor_parallel: None refuses ``strategy.tp`` above 1.
        context_heads: the keys of the schema with the numbers of query heads and of key and value heads, if all
            attention is ``models.attention.Attention`` and ``prepare`` follows ``Model.token_shares``. None refuses
            ``strategy.cp`` above 1.
        hugging_face: None refuses ``checkpoint export --format hf``.
        chunked_loss: whether the head can compute its loss in chunks of the sequence (``train.loss_chunks``), or a
            function that takes the config and returns it.
        fused_loss: whether the head derives from ``models.linear_head.LinearHead``, so that chunks cost nothing and are
            the default for a large vocabulary; or a function that takes the config and returns it.
        why_not_stages: takes the config and returns why the model cannot be cut into pipeline stages; an empty string
            if it can. None: the workers decide.
        check: takes the configs of model and data; raises ``UserError`` for sizes that do not fit together.
    """

    schema: type
    learns_from: str | None
    builder: str
    parameters: Callable[[Any], int | None] | None
    activations: Callable[[Any, Any], Activations] | None
    flops_per_sample: Callable[[Any, tuple[int, ...]], float | None] | None
    tensor_parallel: TensorParallel | None
    hugging_face: HuggingFaceFormat | None
    chunked_loss: bool | Callable[[Any], bool] = False
    context_heads: tuple[str, str] | None = None
    fused_loss: bool | Callable[[Any], bool] = False
    layer_parameters: Callable[[Any], int | None] | None = None
    experts: Callable[[Any], RoutedExperts | None] | None = None
    linear_layers: Callable[[Any], Sequence[LinearLayers] | None] | None = None
    stem_parameters: Callable[[Any], int | None] | None = None
    trained_parameters: Callable[[Any], int | None] | None = None
    quantized_parameters: Callable[[Any], int | None] | None = None
    why_not_stages: Callable[[Any], str] | None = None
    check: Callable[[Any, Any], None] | None = None

    def chunks_loss(self, model: Any) -> bool:
        """Returns ``chunked_loss`` of the model with this config."""
        return self.chunked_loss(model) if callable(self.chunked_loss) else self.chunked_loss

    def fuses_loss(self, model: Any) -> bool:
        """Returns ``fused_loss`` of the model with this config."""
        return self.fused_loss(model) if callable(self.fused_loss) else self.fused_loss


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """States the facts about a data source.

    Attributes:
        schema: the dataclass of its keys, derived from ``DataKeys``, with those that ``SAMPLE_KEYS`` lists.
        gives: the kind of samples, such as ``tokens`` or ``images``, or a function of the config; None: unknown.
        builder: ``module:attribute``; called with the config, the split and the seed, it returns a dataset.
        check_inputs: takes the config; raises ``UserError`` if input files are missing. None: there are no files.
        vocabulary: takes ``data.tokenizer`` and returns the number of its token ids, which is the value of
            ``data.vocab_size`` if that is null. None: the source has no tokenizer.
    """

    schema: type
    gives: str | Callable[[Any], str | None] | None
    builder: str
    check_inputs: Callable[[Any], None] | None
    vocabulary: Callable[[str], int] | None = None

    def sample_kind(self, config: Any) -> str | None:
        """Returns the kind of samples that ``config``, typed or not yet typed, gives."""
        return self.gives(config) if callable(self.gives) else self.gives


Row = TypeVar("Row")
Schema = TypeVar("Schema")


def from_plain(schema: type[Schema], values: Mapping[str, Any]) -> Schema:
    """Returns a config of class ``schema`` with plain ``values``, in which a group is a mapping. Raises TypeError if a
    key is unknown.
    """
    types = get_type_hints(schema)
    given = dict(values)
    for key, value in given.items():
        if is_dataclass(types.get(key)) and isinstance(value, Mapping):
            given[key] = from_plain(types[key], value)
    return schema(**given)


def family_of(model: Any) -> ModelFamily:
    """Returns the family of a model's config. Raises UserError if the description cannot be loaded or lacks a fact."""
    return load_family(model.kind)


def experts_of(model: Any) -> RoutedExperts | None:
    """Returns the experts of which a token chooses some; None if all parameters compute each token."""
    describe = family_of(model).experts
    if describe is None:
        return None
    return describe(model)


def source_of(data: Any) -> DataSource:
    """Returns the source of a data config; raises like ``family_of``."""
    return load_source(data.kind)


@cache
def load_family(kind: str) -> ModelFamily:
    """Returns the family that ``model.kind`` names: a built-in name or ``package.module:NAME``."""
    family = load_row(FAMILIES.get(kind, kind), "model.kind", ModelFamily)
    if is_import_path(kind):
        where = location(kind)
        _check_schema(family.schema, ("kind", "n_layers"), where, "ModelKeys")
        check_call(family.builder, f"{where}, builder", positional=1)
        _check_functions(family, ("parameters", "activations", "flops_per_sample", "check"), where)
        if family.tensor_parallel is not None:
            _check_schema(family.schema, family.tensor_parallel.divisible, where, "ModelKeys")
            check_call(family.tensor_parallel.plan, f"{where}, tensor_parallel.plan", positional=1)
        if family.context_heads is not None:
            _check_schema(family.schema, family.context_heads, where, "ModelKeys")
        if (family.parameters is None) != (family.activations is None):
            raise UserError(
                "the memory estimate needs both parameters and activations, and one of them is None",
                where=where,
                fix="give both functions, or None for both: the dry run then shows no estimate",
            )
    return family


@cache
def load_source(kind: str) -> DataSource:
    """Returns the source that ``data.kind`` names: a built-in name or ``package.module:NAME``."""
    source = load_row(SOURCES.get(kind, kind), "data.kind", DataSource)
    if is_import_path(kind):
        where = location(kind)
        sizes = SAMPLE_KEYS.get(source.gives, ()) if isinstance(source.gives, str) else ()
        _check_schema(source.schema, ("kind", *sizes), where, "DataKeys")
        _check_functions(source, ("check_inputs",), where)
        check_call(source.builder, f"{where}, builder", positional=3)
    return source


def _check_schema(schema: Any, keys: tuple[str, ...], where: str, base: str) -> None:
    names = getattr(schema, "__dataclass_fields__", ())
    missing = ", ".join(key for key in keys if key not in names)
    if missing:
        what = f"the schema {getattr(schema, '__name__', schema)} has no key {missing}"
        fix = f"a dataclass derived from hpc_train.config.schema.{base} with {missing}"
        raise UserError(what, where=where, fix=fix)


def _check_functions(description: ModelFamily | DataSource, names: tuple[str, ...], where: str) -> None:
    for name in names:
        value = getattr(description, name)
        if value is not None and not callable(value):
            what = f"{name} is {value!r}, which cannot be called"
            raise UserError(what, where=where, fix=f"{name}= a function, or None")


IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_import_path(name: str) -> bool:
    """Returns whether ``name`` is ``module:attribute`` in a user's package, not a built-in name."""
    return ":" in name


def location(path: str) -> str:
    """Returns the file of ``module:attribute`` for messages, or ``path`` itself if there is no such file."""
    spec = module_spec(path.partition(":")[0])
    return spec.origin if spec is not None and spec.origin else path


def load_row(path: str, key: str, kind: type[Row]) -> Row:
    """Returns the description at ``module:attribute`` without importing torch.

    The package's ``__init__.py`` may import torch, so only the named file is executed. Files with torch code, such as
    builders, are parsed and not executed. Raises UserError if the file or the attribute does not exist, the file cannot
    be executed or imports torch, or a fact is missing, unknown or contradictory.

    Args:
        key: the config key that holds ``path``.
        kind: the class of the description.
    """
    name, separator, attribute = path.partition(":")
    spec = module_spec(name) if separator and attribute else None
    if spec is None or spec.loader is None:
        raise UserError(
            f"the module of {path} cannot be found" if separator else f"{path!r} is not an import path",
            where=key,
            fix=f"{key}=package.module:NAME, where package is in the current directory or on PYTHONPATH",
        )
    module = sys.modules.get(name) or _execute(spec, path)
    if not hasattr(module, attribute):
        what = f"{spec.origin} defines no {attribute}"
        raise UserError(what, where=key, fix=f"{key}={name}:NAME, where NAME is defined there")
    row = getattr(module, attribute)
    if not isinstance(row, kind):
        raise UserError(
            f"{path} is of type {type(row).__name__}, but must be a {kind.__name__}",
            where=location(path),
            fix=f"{attribute} = {kind.__name__}(...) from {kind.__module__}",
        )
    return row


def _execute(spec: ModuleSpec, path: str) -> ModuleType:
    """Executes one file as a module. Its parent packages are executed only if the file imports them. Raises UserError
    if it cannot be executed, or imports torch.
    """
    assert spec.loader is not None
    file = str(spec.origin)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their annotations in sys.modules
    refusal = _NoTorch()
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, refusal)
    try:
        if file.endswith(".py"):  # also in a process that has torch
            for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
                if any(name.partition(".")[0] == "torch" for name in _imported_modules(statement)):
                    raise ImportError(name="torch")
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _explained(error, path, file) from error
    finally:
        if refusal in sys.meta_path:
            sys.meta_path.remove(refusal)
    return module


class _NoTorch:
    """Makes imports of torch fail, and also checks whether torch is installed, since packages cache their result."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "torch":
            raise ImportError(name="torch")


def _imported_modules(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.level == 0:
        return [statement.module or ""]
    return []


def _explained(error: Exception, path: str, file: str) -> UserError:
    """Returns the message for an error that the execution of ``file`` raised."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ImportError) and error.name == "torch":
        fix = "move the torch code to another file and name it as module:attribute; submission cannot import torch"
        return UserError(f"{path} imports torch", where=file, fix=fix)
    if isinstance(error, TypeError) and "missing" in str(error):
        missing = re.findall(r"'(\w+)'", str(error))
        if missing:
            fix = ", ".join(f"{name}=..." for name in missing)
            return UserError(f"{path} does not state {', '.join(missing)}", where=file, fix=f"add {fix}")
    if isinstance(error, ValueError):  # contradictory facts
        return UserError(f"{path}: {error}", where=file, fix="correct the values in this file")
    return UserError(f"{path} cannot be loaded: {type(error).__name__}: {error}", where=file, fix="correct the file")
