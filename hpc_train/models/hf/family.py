"""Describes the models of Hugging Face's transformers as a family, without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hpc_train.config import hf_config
from hpc_train.config.extensions import IMAGES, HuggingFaceFormat, ModelFamily
from hpc_train.config.import_path import install_extra
from hpc_train.config.schema import HFModelConfig
from hpc_train.errors import UserError
from hpc_train.models.hf import sizes

OLDEST = (5, 23)  # the oldest version that was tested


def check(model: HFModelConfig, data: Any) -> None:
    """Checks that transformers is installed, that there are weights to read, and that the model fits ``data``. Raises
    UserError if transformers is missing or too old, there are no weights, or the model cannot learn from ``data``."""
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "safetensors")):
        raise UserError(
            "model=hf needs transformers, which is not installed here", where="model", fix=install_extra("hf")
        )
    installed = metadata.version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2] if part.isdigit()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UserError(
            f"model=hf needs transformers {oldest} or newer, and {installed} is installed",
            where="model",
            fix=install_extra("hf"),
        )
    _check_samples(model, data)
    values = sizes.values_of(model) or {}
    if model.pretrained:
        hf_config.check_weights(model.name_or_path)
    hf_config.check_loss(values, model.task)
    if model.lora.rank is not None:
        if importlib.util.find_spec("peft") is None:
            raise UserError(
                "model.lora needs peft, which is not installed here", where="model.lora.rank", fix=install_extra("lora")
            )
        if not model.pretrained:
            raise UserError(
                "model.lora trains adapters of pretrained weights, but model.pretrained is false",
                where="model.lora.rank, model.pretrained",
                fix="model.pretrained=true, or model.lora.rank=null",
            )
        layers = sizes.linear_layers(model)
        unknown = [name for name in model.lora.targets or () if layers and name.rpartition(".")[2] not in layers]
        if unknown:
            raise UserError(
                f"{unknown[0]} is not a linear layer of this model",
                where="model.lora.targets",
                fix=f"names among {', '.join(layers)}",
            )
    if model.wrap is not None and not hf_config.why_not_stages(values, model.task):
        raise UserError(
            f"model.wrap is {model.wrap}, but the blocks of a {values['model_type']} are its layers",
            where="model.wrap",
            fix="remove model.wrap",
        )
    needed = getattr(data, "vocab_size", None)
    vocabulary = hf_config.number(values, "vocab_size")
    if needed is not None and vocabulary is not None and vocabulary < needed:
        raise UserError(
            f"the data has {needed} token ids, but the model has {vocabulary}",
            where="model.name_or_path",
            fix="data with the tokenizer of the model, or model.pretrained=false with "
            f"+model.config.vocab_size={needed}",
        )


def _check_samples(model: HFModelConfig, data: Any) -> None:
    if data.kind == "synthetic":
        images = getattr(data, "task", None) == IMAGES
    else:
        images = hasattr(data, "image_size")
    if data.kind == "custom" or images == (model.task == "image_classification"):
        return
    samples = "images"
    fix = "data=cifar100, images or shards"
    if images:
        samples = "tokens"
        fix = "data=text, tokens or sft"
    raise UserError(
        f"model.task={model.task} learns from {samples}, but data={data.kind} does not provide them",
        where="model.task, data",
        fix=fix,
    )


def why_not_stages(model: HFModelConfig) -> str:
    """Returns the reason why the model cannot be cut into pipeline stages; an empty string if it can."""
    if model.lora.rank is not None:
        return "a model with adapters (model.lora.rank) cannot be cut into pipeline stages"
    return hf_config.why_not_stages(sizes.values_of(model), model.task)


def ends_with_matrix(model: HFModelConfig) -> bool:
    """Returns whether the model is a decoder of known sizes with logits for each token."""
    is_decoder = not hf_config.why_not_stages(sizes.values_of(model), model.task)
    return is_decoder and sizes.sizes(model) is not None


_PARTS = {"stem.embed_tokens.": "model.embed_tokens.", "head.norm.": "model.norm.", "head.lm_head.": "lm_head."}


def hf_name(name: str) -> str:
    """Returns the name of a parameter in transformers. Only decoders that can be cut into stages have different names
    here."""
    for part_name, theirs in _PARTS.items():
        if name.startswith(part_name):
            return theirs + name.removeprefix(part_name)
    match name.split(".", 3):
        case ["layers", index, "block", rest]:
            return f"model.layers.{index}.{rest}"
    return name


def _exported_name(model: HFModelConfig, name: str) -> str:
    if model.lora.rank is None:
        return hf_name(name)
    from hpc_train.models.hf import lora  # imports torch

    return lora.exported_name(hf_name(name))


def exported_config(model: HFModelConfig, positions: int, dtype: str) -> Mapping[str, Any]:
    """Returns the config.json of an exported model, or the adapter_config.json of an adapter. The number of positions
    is the value of the original model; ``positions`` is not used."""
    from hpc_train.models.hf import lora, pretrained  # they import torch

    if model.lora.rank is not None:
        return lora.exported_config(model)

    config = pretrained.hf_config(model).to_dict()
    return {**config, "dtype": dtype, "architectures": [pretrained.architecture(model)]}


def exported_prefix(model: HFModelConfig) -> str:
    if model.lora.rank is None:
        return ""
    return "adapter_"


def other_files(model: HFModelConfig) -> list[Path]:
    """Returns the files of the tokenizer, the image processor and the generation, if the model is a directory."""
    folder = Path(model.name_or_path).expanduser()
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    suffixes = (".json", ".txt", ".model", ".jinja")
    return [
        file
        for file in files
        if file.is_file()
        and file.suffix in suffixes
        and file.name not in ("config.json", "adapter_config.json")
        and "index" not in file.name
    ]


HF_FAMILY = ModelFamily(
    schema=HFModelConfig,
    learns_from=None,
    builder="hpc_train.models.hf.decoder:build",
    parameters=sizes.parameters,
    trained_parameters=sizes.trained_parameters,
    quantized_parameters=sizes.quantized_parameters,
    layer_parameters=sizes.layer_parameters,
    stem_parameters=sizes.stem_parameters,
    linear_layers=sizes.products,
    activations=sizes.activations,
    flops_per_sample=sizes.flops_per_sample,
    tensor_parallel=None,
    why_not_stages=why_not_stages,
    hugging_face=HuggingFaceFormat(_exported_name, exported_config, other_files, exported_prefix),
    chunked_loss=ends_with_matrix,
    fused_loss=ends_with_matrix,
    check=check,
)
