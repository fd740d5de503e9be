"""Checks the tokenizer of ``data=sft`` and finds its vocabulary and chat template, without importing transformers."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_READ = (".json", ".jinja", ".txt", ".model")


def tokenizer_file(path: str) -> Path:
    """Returns the ``tokenizer.json`` that ``path`` (this file or its directory) names.

    Raises:
        UserError: there is none.
    """
    given = Path(path).expanduser()
    file = given / TOKENIZER if given.is_dir() else given
    if file.is_file():
        return file
    raise UserError(
        f"{file} does not exist",
        where="data.tokenizer",
        fix=f"data.tokenizer=a directory with {TOKENIZER}, which save_pretrained of a fast tokenizer writes",
    )


def vocabulary(path: str) -> int:
    """Returns the number of token ids: the largest id plus one.

    Raises:
        UserError: the file is missing or is not a tokenizer.
    """
    file = tokenizer_file(path)
    return _vocabulary(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _vocabulary(file: Path, mtime_ns: int) -> int:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = values["model"]["vocab"]
        ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
        return max(*ids, *(token["id"] for token in values.get("added_tokens", [])), 0) + 1
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a tokenizer: {error!r}", where="data.tokenizer", fix="data.tokenizer=a tokenizer.json"
        ) from error


def check_installed() -> None:
    """Raises UserError if transformers is missing."""
    if importlib.util.find_spec("transformers") is None:
        raise UserError(
            "data=sft needs transformers, which is not installed here", where="data", fix="pip install 'hpc_train[hf]'"
        )


def template_text(path: str) -> str:
    """Returns the content of ``data.chat_template``; raises UserError if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", where="data.chat_template", fix="a Jinja file, or null"
        ) from error


def check_template(tokenizer: str, template: str | None) -> None:
    """Raises UserError if there is neither the file ``template`` nor a chat template of the tokenizer."""
    if template is not None:
        template_text(template)
        return
    folder = tokenizer_file(tokenizer).parent
    if any((folder / name).is_file() for name in _TEMPLATES) or _settings(folder).get("chat_template"):
        return
    raise UserError(
        f"the tokenizer of {folder} has no chat template, which the column messages needs",
        where="data.chat_template",
        fix="data.chat_template=FILE.jinja, or the tokenizer of a model for chats",
    )


def check_end(tokenizer: str) -> None:
    """Raises UserError if no file can name the token that ends a text."""
    if not (tokenizer_file(tokenizer).parent / SETTINGS).is_file():
        raise no_end(tokenizer)


def no_end(tokenizer: str) -> UserError:
    """Returns the error about a tokenizer without a token that ends a text, which no model would learn to write."""
    return UserError(
        f"{tokenizer} names no token that ends a text (eos_token), which the columns text, prompt and completion need",
        where="data.tokenizer",
        fix=f"data.tokenizer=a directory with {SETTINGS} and eos_token in it, as save_pretrained writes",
    )


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / SETTINGS
    try:
        if file.is_file():
            return dict(json.loads(file.read_text(encoding="utf-8")))
        return {}
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}", where="data.tokenizer", fix="copy the file again") from error


def fingerprint(tokenizer: str, template: str | None) -> str:
    """Returns a hash of everything besides the text that the token ids depend on."""
    file = tokenizer_file(tokenizer)
    files = sorted(file.parent.iterdir()) if (file.parent / SETTINGS).is_file() else [file]
    digest = hashlib.blake2b((template or "").encode(), digest_size=16)
    for path in files:
        if path.suffix in _READ and path.is_file() and not path.name.endswith(".index.json"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
