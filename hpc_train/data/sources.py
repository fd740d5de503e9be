"""Describes the built-in data sources: their keys, kind of samples, builder and input check; without torch.

The input checks read only names and sizes of files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpc_train.config.extensions import IMAGES, TOKENS, DataSource, load_source, source_of
from hpc_train.config.import_path import check_call
from hpc_train.config.schema import (
    CIFAR100DataConfig,
    CustomDataConfig,
    DataConfig,
    ImagesDataConfig,
    MixtureDataConfig,
    SFTDataConfig,
    ShardsDataConfig,
    StreamDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.config.schema.data import OwnKeys
from hpc_train.config.schema.key import check_keys
from hpc_train.data import sft_inputs
from hpc_train.data.files import check_classes, class_names, find_text_files
from hpc_train.errors import UserError

CHECKED_FILES = 1000  # enough files to notice a wrong path, and few enough for a network file system


def _check_tokens(data: TokensDataConfig) -> None:
    documents = ("train.documents", "validation.documents") if data.packing else ()
    for name in ("meta.json", "train.bin", "validation.bin", *documents):
        _check_file(_directory(data.path) / name, "a directory that python -m hpc_train prepare wrote")


def _requires(names: tuple[str, ...], fix: str) -> Callable[[Any], None]:
    """Returns an input check for a directory that must contain the files ``names``."""

    def check(data: Any) -> None:
        for name in names:
            _check_file(_directory(data.path) / name, fix)

    return check


def _check_text(data: TextDataConfig) -> None:
    if data.path is None:
        return
    if Path(data.path).exists():
        _readable(Path(data.path))
    find_text_files(data.path, data.pattern, CHECKED_FILES)


def _check_sft(data: SFTDataConfig) -> None:
    paths = {"data.path": data.path, "data.validation_path": data.validation_path}
    forms = {
        sft_inputs.form_of(sft_inputs.first_columns(path, where), f"the first record of {path}")
        for where, path in paths.items()
        if path is not None
    }
    sft_inputs.check_installed()
    tokenizer_size = sft_inputs.vocabulary(data.tokenizer)
    if "messages" in forms:
        sft_inputs.check_template(data.tokenizer, data.chat_template)
    if forms != {"messages"}:
        sft_inputs.check_end(data.tokenizer)
    if data.vocab_size is None or data.vocab_size < tokenizer_size:
        raise UserError(
            f"the tokenizer {data.tokenizer} has {tokenizer_size} token ids, but data.vocab_size is {data.vocab_size}",
            where="data.vocab_size",
            fix=f"data.vocab_size={tokenizer_size} or more",
        )


def _check_images(data: ImagesDataConfig) -> None:
    root = _directory(data.path)
    classes = class_names(root / "train")
    for split in ("train", "validation"):
        check_classes(root, split, classes, data.n_classes)


def _check_custom(data: CustomDataConfig) -> None:
    _check_class(data, ("split",), ("__len__", "__getitem__"), "data=stream reads a class with __iter__")


def _check_stream(data: StreamDataConfig) -> None:
    other = "data=custom reads a class with __len__ and __getitem__"
    _check_class(data, ("split", "shard", "shards"), ("__iter__",), other)


def _check_class(data: OwnKeys, given: Sequence[str], needed: Sequence[str], other: str) -> None:
    """Checks the signature of ``data._target_`` in its source file, and the methods of a class without bases."""
    args = [name for name in data.args if not name.startswith("_")]
    signature = check_call(data._target_, "data._target_", given=given, arguments=args, arguments_key="data.args")
    methods = signature.methods
    missing = [name for name in needed if methods is not None and name not in methods]
    if missing and methods is not None and "__getattr__" not in methods and "__new__" not in methods:
        raise UserError(
            f"the class {data._target_} has no {' and no '.join(missing)}",
            where="data._target_",
            fix=f"define {', '.join(missing)}; {other}",
        )


def mixed_sources(data: MixtureDataConfig) -> dict[str, DataConfig]:
    return {name: load_source(values["kind"]).schema(**values) for name, values in data.sources.items()}


def _check_mixture(data: MixtureDataConfig) -> None:
    sources = mixed_sources(data)
    names = list(sources)
    if not names:
        raise UserError(
            "the mixture has no sources", where="data.sources", fix="+data@data.sources.NAME=SOURCE for each of them"
        )
    if data.weights and set(data.weights) != set(names):
        raise UserError(
            f"data.weights names {', '.join(data.weights)}, but the sources are {', '.join(names)}",
            where="data.weights",
            fix=" ".join(f"+data.weights.{name}=W" for name in names),
        )
    wrong = [name for name, weight in data.weights.items() if not 0 < weight < float("inf")]
    if wrong:
        raise UserError(
            f"the weight of {wrong[0]} is {data.weights[wrong[0]]}, but must be positive",
            where=f"data.weights.{wrong[0]}",
            fix="a positive weight, or remove the source",
        )
    for name, source in sources.items():
        if isinstance(source, MixtureDataConfig | StreamDataConfig) or source.collate is not None:
            problem = f"is a {source.kind}"
            fix = "a source with random access"
            if source.collate is not None:
                problem = "has its own collate"
                fix = "data.collate=..., which gets the items of all sources"
            raise UserError(
                f"the source {name} {problem}, which a mixture does not support", where=f"data.sources.{name}", fix=fix
            )
        if getattr(source, "decoder", None) == "dali":
            raise UserError(
                f"the source {name} decodes with DALI, but Pillow decodes the images of a mixture",
                where=f"data.sources.{name}.decoder",
                fix=f"data.sources.{name}.decoder=pillow",
            )
        try:
            check_keys(source, "data")
            check = source_of(source).check_inputs
            if check is not None:
                check(source)
        except UserError as error:
            prefix = f"data.sources.{name}."
            what, where, fix = (text.replace("data.", prefix) for text in (error.what, error.where, error.fix))
            raise UserError(what, where=where, fix=fix) from error
    for size in ("sequence_length", "image_size", "channels"):
        sizes = {name: getattr(source, size, None) for name, source in sources.items()}
        common = getattr(data, size)
        different = [name for name, value in sizes.items() if value is not None and value != common]
        if different:
            raise UserError(
                f"data.{size} is {common}, but that of the source {different[0]} is {sizes[different[0]]}",
                where=f"data.sources.{different[0]}.{size}",
                fix=f"data.sources.{different[0]}.{size}={common}",
            )


def _mixed_kind(data: Any) -> str | None:
    """Returns the kind of samples that all sources of a mixture give, before its config is typed; None if it is
    unknown. Raises UserError if the sources give different kinds."""
    sources = data.sources.items()
    kinds = {name: load_source(source.kind).sample_kind(source) for name, source in sources}
    known_kinds = {kind for kind in kinds.values() if kind is not None}
    if len(known_kinds) > 1:
        raise UserError(
            "the sources give different kinds of samples: "
            + ", ".join(f"{name} {kind}" for name, kind in kinds.items() if kind is not None),
            where="data.sources",
            fix="sources of one kind",
        )
    return next(iter(known_kinds), None)


def _directory(path: str) -> Path:
    directory = Path(path)
    if not directory.exists():
        raise UserError(f"{directory} does not exist", where="data.path", fix="data.path=DIRECTORY that exists")
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", where="data.path", fix="data.path=DIRECTORY")
    _readable(directory)
    return directory


def _check_file(path: Path, fix: str) -> None:
    if not path.exists():
        raise UserError(f"{path} does not exist", where="data.path", fix=fix)
    if not path.is_file():
        raise UserError(f"{path} is not a file", where="data.path", fix=fix)
    if _size(path) == 0:
        raise UserError(f"{path} is empty", where="data.path", fix=fix)


def _size(path: Path) -> int:
    _readable(path)
    return path.stat().st_size


def _readable(path: Path) -> None:
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise UserError(f"{path} cannot be read", where="data.path", fix="correct its permissions, or change data.path")


TEXT = DataSource(
    schema=TextDataConfig, gives=TOKENS, builder="hpc_train.data.build:build_text", check_inputs=_check_text
)
TOKEN_FILES = DataSource(
    schema=TokensDataConfig, gives=TOKENS, builder="hpc_train.data.build:build_tokens", check_inputs=_check_tokens
)
SFT = DataSource(
    schema=SFTDataConfig,
    gives=TOKENS,
    builder="hpc_train.data.sft:build_sft",
    check_inputs=_check_sft,
    vocabulary=sft_inputs.vocabulary,
)
CIFAR100 = DataSource(
    schema=CIFAR100DataConfig,
    gives=IMAGES,
    builder="hpc_train.data.cifar100:CIFAR100Dataset",
    check_inputs=_requires(("train", "test", "meta"), "the directory cifar-100-python of the official archive"),
)
IMAGE_FOLDERS = DataSource(
    schema=ImagesDataConfig, gives=IMAGES, builder="hpc_train.data.images:ImagesDataset", check_inputs=_check_images
)
SHARDS = DataSource(
    schema=ShardsDataConfig,
    gives=IMAGES,
    builder="hpc_train.data.image_shards:ShardsDataset",
    check_inputs=_requires(
        ("shards.json", "train.index.npy", "validation.index.npy"),
        "a directory that python -m hpc_train prepare --images wrote",
    ),
)
SYNTHETIC = DataSource(
    schema=SyntheticDataConfig,
    gives=lambda data: str(data.task),
    builder="hpc_train.data.build:SyntheticDataset",
    check_inputs=None,
)
CUSTOM = DataSource(
    schema=CustomDataConfig, gives=None, builder="hpc_train.data.custom:build_custom", check_inputs=_check_custom
)
STREAM = DataSource(
    schema=StreamDataConfig, gives=None, builder="hpc_train.data.stream:build_stream", check_inputs=_check_stream
)
MIXTURE = DataSource(
    schema=MixtureDataConfig,
    gives=_mixed_kind,
    builder="hpc_train.data.build:build_mixture",
    check_inputs=_check_mixture,
)
