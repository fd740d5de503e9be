"""Reads what transformers has of a model: its config, its class, and the directory of its weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from hpc_train.config.hf_config import SMOOTHING
from hpc_train.config.schema import HFModelConfig
from hpc_train.errors import UserError

_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


def hf_config(config: HFModelConfig) -> Any:
    """Returns the config object of transformers.

    Raises:
        UserError: config.json cannot be read or has unknown values, or a key of ``model.config`` is unknown.
    """
    from transformers import AutoConfig

    try:
        hf, unknown = AutoConfig.from_pretrained(
            config.name_or_path,
            revision=config.revision,
            dtype=torch.float32,
            return_unused_kwargs=True,
            **config.config,
        )
    except Exception as error:
        raise UserError(
            f"the config of {config.name_or_path} cannot be read: {type(error).__name__}: {error}",
            where="model.name_or_path, model.config",
            fix="a directory with config.json, or a name on the hub; on nodes without internet download the model "
            "first with: hf download NAME",
        ) from error
    if SMOOTHING in unknown:  # of no config class, but ``models/hf/loss.py`` reads it
        setattr(hf, SMOOTHING, unknown.pop(SMOOTHING))
    if unknown:
        raise UserError(
            f"model.config has the key {next(iter(unknown))}, which a {type(hf).__name__} does not have",
            where=f"model.config.{next(iter(unknown))}",
            fix=f"a key of {type(hf).__name__} in the documentation of transformers",
        )
    return hf


def _bare(config: HFModelConfig, full_config: Any) -> Any:
    import transformers

    try:
        module = getattr(transformers, _CLASSES[config.task]).from_config(full_config)
    except Exception as error:
        raise UserError(
            f"transformers cannot build {config.name_or_path} for {config.task}: {type(error).__name__}: {error}",
            where="model.task, model.config",
            fix="a task that this kind of model supports",
        ) from error
    return module


def architecture(config: HFModelConfig) -> str:
    """Returns the name of transformers' class. It is read from a table if it is there, as building a model is slow."""
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, f"MODEL_FOR_{config.task.upper()}_MAPPING_NAMES")
    name = names.get(hf_config(config).model_type)
    if isinstance(name, str):
        return name
    return type(skeleton(config)).__name__


def skeleton(config: HFModelConfig) -> Any:
    """Returns the model of transformers on ``meta``, without adapters."""
    with torch.device("meta"):
        return _bare(config, hf_config(config))


def weights_folder(config: HFModelConfig) -> Path:
    """Returns the directory with the weights, which are downloaded if they are on the hub."""
    folder = Path(config.name_or_path).expanduser()
    if folder.is_dir():
        return folder
    return _downloaded(config.name_or_path, config.revision)


@cache
def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise UserError(
            f"{name} is not a directory, and it cannot be downloaded: {type(error).__name__}: {error}",
            where="model.name_or_path",
            fix=f"on a machine with internet and the same HF_HOME: hf download {name}",
        ) from error
