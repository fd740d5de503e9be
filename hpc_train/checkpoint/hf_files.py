"""A directory of Hugging Face's Llama: its config, and its tensors one at a time under our names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import GPTConfig
from hpc_train.models.build import build_model
from hpc_train.models.hf_names import OUTPUT, gpt_config, hf_name

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_AGAIN = "download it again"


@dataclass(frozen=True)
class LlamaFiles:
    """Published weights: safetensors and ``config.json``; files of the pickle format are not read."""

    folder: Path
    model: GPTConfig
    shapes: dict[str, tuple[int, ...]]  # by our names
    _where: dict[str, str]  # Llama's name -> file

    @classmethod
    def open(cls, folder: Path) -> LlamaFiles:
        """Reads names and shapes, and compares them with the config.

        Raises:
            ConfigError: files are missing, or they hold another model than the config says.
        """
        model = gpt_config(_json(folder / "config.json"), str(folder / "config.json"))
        expected = {name: tuple(value.shape) for name, value in build_model(model, 0).named_parameters()}
        files = cls(folder, model, expected, _located(folder))
        files._check()
        return files

    def read(self, name: str) -> Tensor:
        """The tensor that we call ``name``, as stored."""
        llama = hf_name(name)
        with _opened(self.folder / self._where[llama]) as file:
            return file.get_tensor(llama)

    def _check(self) -> None:
        wanted = {hf_name(name): shape for name, shape in self.shapes.items()}
        problems = [f"missing: {name}" for name in wanted if name not in self._where]
        ignored = (OUTPUT, "rotary_emb.inv_freq") if self.model.tied_embeddings else ("rotary_emb.inv_freq",)
        problems += [
            f"not of a Llama: {name}" for name in self._where if name not in wanted and not name.endswith(ignored)
        ]
        for name, found in self._found_shapes().items():
            shape = wanted.get(name, found)
            problems += [f"{name}: {list(found)}, not {list(shape)}"] if found != shape else []
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise ConfigError(
                "the weights are not those of config.json:\n  " + "\n  ".join(problems[:8]) + more,
                where=str(self.folder),
                mend="the whole directory as it was published",
            )

    def _found_shapes(self) -> dict[str, tuple[int, ...]]:
        """By Llama's names, a file at a time."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in dict.fromkeys(self._where.values()):
            with _opened(self.folder / file) as opened:
                there = {*opened.keys()}
                for name in (name for name, place in self._where.items() if place == file):
                    if name not in there:
                        raise ConfigError(f"{file} has no {name}", where=str(self.folder / file), mend=_AGAIN)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        return shapes


def _located(folder: Path) -> dict[str, str]:
    """In which file each tensor lies."""
    if (folder / _INDEX).exists():
        located: dict[str, str] = _json(folder / _INDEX).get("weight_map", {})
        outside = [file for file in located.values() if Path(file).name != file]
        if outside:
            raise ConfigError(f"{outside[0]} lies outside", where=str(folder / _INDEX), mend="names of files beside it")
        return located
    if (folder / _SINGLE).exists():
        with _opened(folder / _SINGLE) as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    raise ConfigError(
        f"{folder} has no {_SINGLE} and no {_INDEX}",
        where=str(folder),
        mend="the safetensors files of the model; pickled .bin and .pt files can run code and are not read",
    )


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(
            "safetensors is not installed", where="checkpoint import", mend="pip install 'hpc_train[hf]'"
        ) from error
    opener: Callable[..., Any] = safe_open
    try:
        return opener(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where=str(path), mend=_AGAIN) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            where=str(path),
            mend="a directory with the config and weights of a Llama",
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not an object", where=str(path), mend=_AGAIN)
    return content
