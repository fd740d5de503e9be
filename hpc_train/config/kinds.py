"""Which model learns from which data: told before interpolations such as ``${data.vocab_size}`` are resolved."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import DATA_SCHEMAS, MODEL_SCHEMAS
from hpc_train.config.wording import nearest

TEXT, IMAGES = "tokens", "images"
OF_MODEL = {"gpt": TEXT, "vit": IMAGES}
OF_DATA = {"text": TEXT, "tokens": TEXT, "cifar100": IMAGES, "images": IMAGES, "shards": IMAGES}
MODELS = {TEXT: "model=gpt_tiny", IMAGES: "model=vit_tiny"}
DATA = {TEXT: "data=text", IMAGES: "data=cifar100"}


def check_kinds(node: DictConfig) -> None:
    """Raises ConfigError for an unknown kind, and for a language model on images or the other way round."""
    model = _kind(node, "model", tuple(MODEL_SCHEMAS))
    data = _kind(node, "data", tuple(DATA_SCHEMAS))
    task = OmegaConf.select(node, "data.task") if data == "synthetic" else None
    gives, takes = task or OF_DATA.get(data), OF_MODEL.get(model)
    if gives in MODELS and takes is not None and gives != takes:
        mend = f"data.task={takes}, or {MODELS[gives]}" if task else f"{DATA[takes]}, or {MODELS[gives]}"
        raise ConfigError(
            f"a {model} model learns from {takes}, data={data} gives {gives}", where="model, data", mend=mend
        )
    vocabulary = node.model._get_node("vocab_size") if model == "gpt" else None
    if data == "custom" and vocabulary is not None and vocabulary._value() == "${data.vocab_size}":
        raise ConfigError(
            "the vocabulary of custom data is not known here", where="model.vocab_size", mend="model.vocab_size=N"
        )


def _kind(node: DictConfig, group: str, known: tuple[str, ...]) -> str:
    kind = OmegaConf.select(node, f"{group}.kind") if OmegaConf.is_dict(node.get(group)) else None
    if kind is None:
        raise ConfigError(
            f"{group} is not one of the config group {group}",
            where=group,
            mend=f"{group}=NAME of a file in conf/{group}, with kind: {' | '.join(known)}",
        )
    if kind not in known:
        raise ConfigError(f"{group}.kind is {kind!r}", where=f"{group}.kind", mend=nearest(kind, known))
    return str(kind)
