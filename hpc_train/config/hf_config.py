"""Reads the config.json of a Hugging Face model, from a directory or the hub, without importing torch or transformers.

Keys that a config.json lacks have the defaults of ``transformers``, which are not known here, so each reader says what
a missing key means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError

TASKS = ("causal_lm", "masked_lm", "sequence_classification", "image_classification")
CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # one file, or several and their index
# Types of decoders whose causal language model hpc_train can cut into pipeline stages.
DECODERS = ("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3")
TIED_BY_DEFAULT = ("gemma", "gemma2")  # in transformers 5, unless config.json says otherwise


def read(name_or_path: str, revision: str | None, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the content of config.json with ``overrides``; None if it cannot be read from this machine.

    Raises:
        UserError: ``name_or_path`` is a directory without a readable config.json.
    """
    content = _read(name_or_path, revision)
    return None if content is None else {**json.loads(content), **overrides}


def _read(name_or_path: str, revision: str | None) -> str | None:
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        if folder.is_absolute():
            raise UserError(
                f"{folder} is not a directory",
                where="model.name_or_path",
                fix="a directory with config.json and safetensors files, or a name on the hub such as Qwen/Qwen3-0.6B",
            )
        return _from_hub(name_or_path, revision)
    try:
        content = (folder / CONFIG).read_text(encoding="utf-8")
        if isinstance(json.loads(content), dict):
            return content
        problem = "it is not a JSON object"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise UserError(
        f"{folder / CONFIG} cannot be read: {problem}",
        where="model.name_or_path",
        fix="a directory that save_pretrained of transformers wrote",
    )


@lru_cache(maxsize=64)
def _from_hub(name: str, revision: str | None) -> str | None:
    """Returns the file of the hub, or of the cache if the hub cannot be reached.

    Without a network ``hf_hub_download`` alone would repeat its requests for 23 s if the file is not in the cache.
    """
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError

        answers = True
        try:
            get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except HfHubHTTPError:
            pass  # an answer, which hf_hub_download treats as it should
        except Exception:
            answers = False
        path = hf_hub_download(name, CONFIG, revision=revision, local_files_only=not answers)
        return Path(path).read_text(encoding="utf-8")
    except Exception:  # not installed, no network, no such name: the worker reports what is wrong
        return None


def number(values: Mapping[str, Any] | None, key: str) -> int | None:
    """Returns an integer of the config; None if it is unknown."""
    found = None if values is None else values.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def ties(values: Mapping[str, Any] | None) -> bool:
    """Returns whether the output projection shares the embedding table."""
    known = values or {}
    return bool(known.get("tie_word_embeddings", known.get("model_type") in TIED_BY_DEFAULT))


def why_not_stages(values: Mapping[str, Any] | None, task: str) -> str:
    """Returns why a model cannot be cut into pipeline stages; an empty string if it can."""
    if task != "causal_lm":
        return f"models of task {task} cannot be cut into pipeline stages"
    if values is None:
        return "its config.json cannot be read from here, so it is not known whether it can be cut into stages"
    kind = values.get("model_type")
    return "" if kind in DECODERS else f"models of type {kind} cannot be cut into pipeline stages"


def check_weights(name_or_path: str) -> None:
    """Raises UserError if ``name_or_path`` is a directory without safetensors files."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir() and not any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        raise no_weights(folder)


def no_weights(folder: Path) -> UserError:
    return UserError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}",
        where="model.name_or_path",
        fix="the safetensors files of the model, since pickled .bin files can run code and are not read; or "
        "model.pretrained=false, which initializes a model of this config",
    )
