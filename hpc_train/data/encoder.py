"""From text to token ids: the bytes themselves, or a ``tokenizer.json`` of the ``tokenizers`` library."""

from __future__ import annotations

import hashlib
import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.errors import ConfigError

BYTES = "bytes"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Encoder(ABC):
    """Attributes: ids are below ``vocab_size``; ``separator`` goes behind each document where there is one."""

    vocab_size: int
    separator: int | None

    @abstractmethod
    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        """The token ids of each text."""


class ByteEncoder(Encoder):
    """Token ids are the values of the bytes in UTF-8. There is no id left for a separator."""

    vocab_size = 256
    separator = None

    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


class FileEncoder(Encoder):
    """A tokenizer from its file. The separator is ``eos``, or the first of the usual end tokens that it knows."""

    def __init__(self, path: str, eos: str | None) -> None:
        self._tokenizer = _load(path)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if eos is not None and eos not in vocabulary:
            raise ConfigError(f"{path} has no token {eos!r}", where="--eos", mend="a token of the tokenizer")
        known = [token for token in ((eos,) if eos is not None else SEPARATORS) if token in vocabulary]
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = vocabulary[known[0]] if known else None

    def encode(self, texts: list[str]) -> list[NDArray[np.uint32]]:
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def open_encoder(tokenizer: str, eos: str | None) -> Encoder:
    """``bytes``, or the path of a ``tokenizer.json``.

    Raises:
        ConfigError: there is no such file, it is no tokenizer, or the library is not installed.
    """
    if tokenizer != BYTES:
        return FileEncoder(tokenizer, eos)
    if eos is not None:
        raise ConfigError("bytes have no end token", where="--eos", mend="leave it out, or --tokenizer tokenizer.json")
    return ByteEncoder()


def fingerprint(tokenizer: str) -> str:
    """Changes when the tokenizer does."""
    if tokenizer == BYTES:
        return BYTES
    return hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()


def _load(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(f"there is no tokenizer file {path}", where="--tokenizer", mend="tokenizer.json, or bytes")
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            "a tokenizer file needs the tokenizers library, which is not installed",
            where="--tokenizer",
            mend="pip install 'hpc_train[tokenizers]', or --tokenizer bytes",
        ) from error
    try:
        return library.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{path} is no tokenizer file: {error}",
            where="--tokenizer",
            mend="tokenizer.json of the tokenizers library",
        ) from error
