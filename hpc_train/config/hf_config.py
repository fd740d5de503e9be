"""Reads the config.json of a Hugging Face model, from a directory or the hub, without importing torch or transformers.

Keys that a config.json lacks have the defaults of ``transformers``, which are not known here, so each reader defines
what a missing key means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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
    """Returns the content of config.json with ``overrides``; None if it cannot be read from this machine. Raises
    UserError if ``name_or_path`` is a directory without a readable config.json.
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
            pass  # the hub has answered, and hf_hub_download handles the answer
        except Exception:
            answers = False
        path = hf_hub_download(name, CONFIG, revision=revision, local_files_only=not answers)
        return Path(path).read_text(encoding="utf-8")
    except Exception:  # not installed, no network, no such name: the worker reports what is wrong
        return None


def number(values: Mapping[str, Any] | None, key: str) -> int | None:
    """Returns an integer of the config; None if it is unknown."""
    value = None if values is None else values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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


CLASSIFIERS = ("sequence_classification", "image_classification")
REGRESSION, SINGLE, MULTI = "regression", "single_label_classification", "multi_label_classification"
PROBLEM_TYPES = (REGRESSION, SINGLE, MULTI)
SMOOTHING = "label_smoothing"
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # the key of the load-balancing loss depends on the family
WHERE = "model.name_or_path, model.config"


@dataclass(frozen=True)
class RefusedKey:
    """Describes a key that changes the loss of causal language models in a way that is not implemented.

    Attributes:
        default: the value of configs that lack the key.
        inactive: the value that disables it.
        effect: what it does to the loss, for messages.
        families: the model types that read it; empty for all.
    """

    key: str
    default: Any
    inactive: Any
    effect: str
    families: tuple[str, ...] = ()


_PROPHETNET = ("prophetnet", "xlm-prophetnet")
REFUSED = (
    RefusedKey("z_loss_coefficient", 0, 0, "adds a z-loss over all positions", ("bamba",)),
    RefusedKey("eps", 0, 0, "smooths the targets", _PROPHETNET),
    RefusedKey("disable_ngram_loss", False, True, "adds the losses of later tokens", _PROPHETNET),
)


def check_loss(values: Mapping[str, Any], task: str) -> None:
    """Raises UserError if a key of a config.json, or of a config object of transformers, requests a loss of ``task``
    that is not implemented.
    """
    problem = values.get("problem_type")
    if task in CLASSIFIERS and problem is not None and problem not in PROBLEM_TYPES:
        raise UserError(
            f"the config of the model has problem_type={problem!r}, which transformers does not know",
            where=WHERE,
            fix="+model.config.problem_type=" + ", ".join(PROBLEM_TYPES[:-1]) + f" or {PROBLEM_TYPES[-1]}",
        )
    kind = values.get("model_type")
    smoothing = values.get(SMOOTHING)
    if smoothing and task == "causal_lm" and kind in DECODERS:
        raise _refused(SMOOTHING, smoothing, f"which is not implemented for models of type {kind}", 0)
    if task != "causal_lm":
        return
    for row in REFUSED:
        value = values.get(row.key, row.default)
        if value != row.inactive and (not row.families or kind in row.families):
            raise _refused(row.key, value, f"which {row.effect} in transformers, and is not implemented", row.inactive)


def label_smoothing(values: Mapping[str, Any]) -> float:
    """Returns the share of each target that a cross-entropy distributes evenly over all classes."""
    return float(values.get(SMOOTHING) or 0.0)


def balances_experts(values: Mapping[str, Any], task: str) -> bool:
    """Returns whether ``values`` request a load-balancing loss.

    A config.json may lack the coefficient; whether its family has a default is only known to transformers.
    """
    parts = [values, values.get("text_config")]
    tables = [part for part in parts if isinstance(part, Mapping)]
    asks = any(part.get("output_router_logits") for part in tables)
    return task == "causal_lm" and asks and any(part.get(name) for part in tables for name in COEFFICIENTS)


def _refused(key: str, value: Any, why: str, inactive: Any) -> UserError:
    return UserError(
        f"the config of the model has {key}={value}, {why}",
        where=WHERE,
        fix=f"+model.config.{key}={str(inactive).lower()}, which trains without it",
    )
