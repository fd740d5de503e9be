"""The keys of the group ``data``: one dataclass per data source."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from hpc_train.config.schema.key import key, required, when


@dataclass
class DataKeys:
    """Holds the keys that every data config has. A custom source derives its dataclass from this one."""

    kind: str = required("The data source: a built-in name, custom, or package.module:NAME of a custom source.")
    _: KW_ONLY
    collate: str | None = key(
        None,
        "The function that builds a micro-batch from a list of items: package.module.name. null stacks the samples.",
    )


@dataclass
class WindowKeys(DataKeys):
    """Holds the keys of sources that cut a text into samples."""

    packing: bool = key(
        False,
        "Whether whole documents share a sequence without attending to each other. false cuts windows from the whole "
        "text.",
    )


@dataclass
class TextDataConfig(WindowKeys):
    """The bytes of text files, split into training and validation by file."""

    kind: str = key("text", "The data source.")
    path: str | None = key(None, "A file, a directory or a glob. null uses the source of Python's standard library.")
    pattern: str = key("**/*.py", "The glob for files if path is a directory or null.", when=when("directory"))
    sequence_length: int = key(256, "Tokens per sample.", at_least=1, unit="tokens")
    validation_share: float = key(0.01, "The share of the files that is used for validation.", above=0, below=1)
    vocab_size: int = key(256, "The number of token ids.", at_least=1)


@dataclass
class TokensDataConfig(WindowKeys):
    """Memory-mapped ``.bin`` files of token ids, as ``python -m hpc_train prepare`` writes them."""

    kind: str = key("tokens", "The data source.")
    path: str = required("The directory with train.bin, validation.bin and meta.json.")
    sequence_length: int = key(1024, "Tokens per sample.", at_least=1, unit="tokens")
    vocab_size: int = required("The number of token ids.", at_least=1)


@dataclass
class SFTDataConfig(DataKeys):
    """Texts, prompts with completions, or conversations for fine-tuning; the loss is on the answers only."""

    kind: str = key("sft", "The data source.")
    path: str = required("A JSONL file, a directory of them, or a directory that Dataset.save_to_disk wrote.")
    tokenizer: str = required("The directory of a model with tokenizer.json, or this file.")
    chat_template: str | None = key(
        None, "A Jinja file that renders the column messages. null uses the chat template of the tokenizer."
    )
    validation_path: str | None = key(None, "The validation records, in a format of path. null uses a share of path.")
    validation_share: float = key(
        0.01,
        "The share of the records for validation if validation_path is null.",
        above=0,
        below=1,
        when=when("data.validation_path", None),
    )
    sequence_length: int = key(
        1024, "The largest number of inputs of a sample; longer records are truncated.", at_least=1, unit="tokens"
    )
    vocab_size: int | None = key(None, "The number of token ids. null uses the size of the tokenizer.")
    packing: bool = key(
        False, "Whether whole records share a sequence without attending to each other. false pads each record."
    )
    cache: str | None = key(
        None,
        "The directory for the tokens, which are computed once. null uses hpc_train/sft in the user's cache directory.",
    )


@dataclass
class ImageKeys(DataKeys):
    """Holds the keys that every source of image files has."""

    path: str = required(
        "The directory with the images: cifar-100-python, one with train/ and validation/ (images), or one with "
        "shards.json and the tar files (shards)."
    )
    image_size: int = key(224, "The width and height to which images are resized.", at_least=1, unit="pixels")
    channels: int = key(3, "The number of color channels.", at_least=1)
    n_classes: int = required("The number of classes, which is 100 for cifar100.", at_least=1)
    augment: bool = key(True, "Whether training images are cropped and flipped at random.")


@dataclass
class CIFAR100DataConfig(ImageKeys):
    """Reads the official CIFAR-100 directory for Python."""

    kind: str = key("cifar100", "The data source.")
    image_size: int = key(32, "The width and height of an image.", at_least=1, unit="pixels")
    n_classes: int = 100  # no other value is right


@dataclass
class EncodedImageKeys(ImageKeys):
    """Holds the keys that every source of encoded images has."""

    decoder: str = key(
        "pillow",
        "What decodes, crops and resizes images: pillow in the loader processes, or dali (NVIDIA DALI) in the rank, on "
        "its GPU if it has one. auto is dali on an NVIDIA GPU if it is installed, else pillow.",
        choices=("auto", "pillow", "dali"),
    )


@dataclass
class ImagesDataConfig(EncodedImageKeys):
    """Image files in one directory per class under ``train/`` and ``validation/``."""

    kind: str = key("images", "The data source.")


@dataclass
class ShardsDataConfig(EncodedImageKeys):
    """Images in indexed tar shards, as ``python -m hpc_train prepare --images`` writes them."""

    kind: str = key("shards", "The data source.")


@dataclass
class SyntheticDataConfig(DataKeys):
    """Samples that are computed from their index."""

    kind: str = key("synthetic", "The data source.")
    task: str = key("tokens", "What a sample is.", choices=("tokens", "images"))
    samples: int = key(4096, "The number of training samples.", at_least=1)
    validation_samples: int = key(256, "The number of validation samples.", at_least=1)
    sequence_length: int = key(256, "Tokens per sample.", at_least=1, unit="tokens", when=when("data.task", "tokens"))
    vocab_size: int = key(256, "The number of token ids.", at_least=1, when=when("data.task", "tokens"))
    image_size: int = key(
        32, "The width and height of an image.", at_least=1, unit="pixels", when=when("data.task", "images")
    )
    channels: int = key(3, "The number of color channels.", at_least=1, when=when("data.task", "images"))
    n_classes: int = key(10, "The number of classes.", at_least=1, when=when("data.task", "images"))


@dataclass
class OwnKeys(DataKeys):
    """Holds the keys that every source with items of a user's class has."""

    _target_: str = required("The class or function that returns the dataset: package.module.Name.")
    args: dict[str, Any] = key({}, "The keyword arguments of _target_.")
    inputs: str = key("inputs", "The name of the inputs in items and batches that are dicts.")
    targets: str = key("targets", "The name of the targets in items and batches that are dicts.")


@dataclass
class CustomDataConfig(OwnKeys):
    """A custom dataset, built by calling ``_target_`` with ``args`` and ``split="train"`` or ``"validation"``."""

    kind: str = key("custom", "The data source.")


@dataclass
class StreamDataConfig(OwnKeys):
    """Reads a custom stream: iterables without a length, one per shard, that continue exactly after a restart."""

    kind: str = key("stream", "The data source.")
    shards: int = required(
        "The number of shards: _target_ is called once per shard with shard= and shards=. It stays the same for a run; "
        "with a multiple of the data-parallel ranks each item is read once.",
        at_least=1,
    )
    repeat: bool = key(True, "Whether a shard starts again at its end. false ends the run when all shards have ended.")
    validation_samples: int = key(
        256, "The number of validation samples, which are read once and kept in memory.", at_least=1
    )


@dataclass
class MixtureDataConfig(DataKeys):
    """Several sources, mixed by weights. The sizes to which a model refers, as in data.vocab_size, are the sources'."""

    kind: str = key("mixture", "The data source.")
    sources: dict[str, Any] = key({}, "The sources by name, each with kind and keys: +data@data.sources.NAME=SOURCE.")
    weights: dict[str, float] = key(
        {}, "The weight of each source in the samples, by name. By default, sources are weighted by their sizes."
    )
    # taken from the sources when the config is composed
    sequence_length: int | None = None
    vocab_size: int | None = None
    image_size: int | None = None
    channels: int | None = None
    n_classes: int | None = None
