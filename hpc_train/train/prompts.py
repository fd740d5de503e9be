"""Converts between prompts and tokens, and defines how the next token is drawn. It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hpc_train.config import hf_config
from hpc_train.config.schema import (
    Config,
    DataConfig,
    HFModelConfig,
    MixtureDataConfig,
    SFTDataConfig,
    TokensDataConfig,
)
from hpc_train.data.documents import BYTES, open_tokenizer, start_of
from hpc_train.data.sft_inputs import tokenizer_file
from hpc_train.data.sources import mixed_sources
from hpc_train.errors import UserError
from hpc_train.run.files import read_json

IDS = "ids"
_FILE = "tokenizer.json"


class Codec(Protocol):
    """Converts between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt."""

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids."""


class ByteCodec:
    """Uses the values of UTF-8 bytes as token ids, as ``data=text`` does."""

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, tokens: list[int]) -> str:
        return bytes(token % 256 for token in tokens).decode("utf-8", "replace")


class IdCodec:
    """Reads and writes token ids as numbers, separated by spaces or commas."""

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.replace(",", " ").split()]
        except ValueError:
            raise UserError(
                f"{text!r} is not a list of token ids", where="--tokenizer ids", fix="a prompt such as '12 7 30'"
            ) from None

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


class FileCodec:
    """Uses a ``tokenizer.json``.

    Args:
        special: whether prompts begin with the start tokens of the tokenizer.

    Raises:
        UserError: the file is missing or not a tokenizer, or the library is not installed.
    """

    def __init__(self, path: str, special: bool = True) -> None:
        self._tokenizer: Any = open_tokenizer(path)
        self._start = start_of(self._tokenizer) if special else ()

    def encode(self, text: str) -> list[int]:
        return [*self._start, *self._tokenizer.encode(text, add_special_tokens=False).ids]

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))


@dataclass(frozen=True)
class TokenizerChoice:
    """Names a tokenizer.

    Attributes:
        name: ``bytes``, ``ids``, or the path of a ``tokenizer.json``.
        special: see ``FileCodec``. The texts of pretrained models have start tokens, the texts of ``prepare`` may have
            them.
        ends: the tokens that end a text.
    """

    name: str
    special: bool = False
    ends: tuple[int, ...] = ()

    def open(self) -> Codec:
        """Opens the tokenizer. Raises UserError if it cannot be loaded."""
        if self.name == BYTES:
            return ByteCodec()
        if self.name == IDS:
            return IdCodec()
        return FileCodec(self.name, self.special)


def choose_tokenizer(config: Config, name: str | None) -> TokenizerChoice:
    """Returns the tokenizer ``name`` or, if it is None, the tokenizer of the data or of the directory of ``model=hf``.

    Raises:
        UserError: ``name`` is None, and neither the data nor the model has a tokenizer.
    """
    choice = _of_data(config.data) or _of_model(config) or _of_chats(config.data)
    if name == BYTES:
        return TokenizerChoice(BYTES)
    if name == IDS:
        return TokenizerChoice(IDS, ends=choice.ends if choice is not None else ())
    if name is not None:
        if Path(name).is_dir():
            name = str(Path(name) / _FILE)
        return TokenizerChoice(name) if choice is None else replace(choice, name=name)
    if choice is None:
        raise UserError(
            f"neither data={config.data.kind} nor the model has a tokenizer",
            where="data",
            fix="--tokenizer tokenizer.json or bytes; or --tokenizer ids, with prompts such as '12 7 30'",
        )
    return choice


def _of_data(data: DataConfig) -> TokenizerChoice | None:
    if isinstance(data, MixtureDataConfig):
        choices = {_of_data(source) for source in mixed_sources(data).values()}
        return choices.pop() if len(choices) == 1 else None
    if data.kind == "text":
        return TokenizerChoice(BYTES)
    if not isinstance(data, TokensDataConfig):
        return None
    from hpc_train.data.tokens import read_meta  # imports torch

    meta = read_meta(Path(data.path))
    name = meta.source.get("settings", {}).get("tokenizer")
    if name is None:
        return None
    ends = (meta.separator,) if meta.separator is not None else ()
    return TokenizerChoice(name, special=bool(meta.source.get("start")), ends=ends)


def _of_model(config: Config) -> TokenizerChoice | None:
    model = config.model
    if not isinstance(model, HFModelConfig):
        return None
    folder = Path(model.name_or_path).expanduser()
    if not (folder / _FILE).is_file():
        return None
    values = hf_config.read(model.name_or_path, model.revision, model.config) or {}
    return TokenizerChoice(str(folder / _FILE), special=True, ends=_ends(folder, values))


def _of_chats(data: DataConfig) -> TokenizerChoice | None:
    """Returns the tokenizer of ``data=sft``, for a model that is not in a directory with a tokenizer."""
    if not isinstance(data, SFTDataConfig):
        return None
    file = tokenizer_file(data.tokenizer)
    return TokenizerChoice(str(file), special=True, ends=_ends(file.parent, {}))


def _ends(folder: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns ``eos_token_id`` from generation_config.json or from the ``values`` of a model, a number or a list."""
    ends = values.get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        ends = read_json(folder / "generation_config.json").get("eos_token_id", ends)
    if isinstance(ends, list):
        return tuple(ends)
    return () if ends is None else (ends,)


@dataclass(frozen=True)
class Sampling:
    """Describes how tokens are drawn from the distribution of the model.

    The logits are divided by ``temperature``, then ``top_k`` and then ``top_p`` exclude tokens.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: only the k most likely tokens can be drawn; None allows all tokens.
        top_p: only tokens in the smallest set of most likely tokens whose probabilities add up to at least p can be
            drawn (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751).
        seed: the seed of the random streams. Each prompt has a separate stream, which depends on the number of the
            prompt.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raises UserError if a value is out of its range or has no effect."""
        if not 0 <= self.temperature < float("inf"):
            raise _out_of_range("--temperature", self.temperature, "at least 0", "--temperature 1")
        if self.top_k is not None and self.top_k < 1:
            raise _out_of_range("--top-k", self.top_k, "at least 1", "--top-k 50")
        if not 0 < self.top_p <= 1:
            raise _out_of_range("--top-p", self.top_p, "above 0 and at most 1", "--top-p 0.9")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError(
                "--top-k and --top-p have no effect at temperature 0, which takes the most likely token",
                where="--top-k, --top-p",
                fix="--temperature 1, or leave them out",
            )


def _out_of_range(option: str, value: float, allowed: str, fix: str) -> UserError:
    return UserError(f"{option} is {value}, but must be {allowed}", where=option, fix=fix)
