"""A checkpoint's model in the formats that others read: Hugging Face's Llama as safetensors, or one ``.pt``.

Tensors pass through one after the other. What is written appears under its name when it is whole.

A directory of Hugging Face's Llama: its config, and its tensors one at a time under our names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_train.checkpoint.reader import MODEL, StoredTensors
from hpc_train.checkpoint.state import TensorShape
from hpc_train.config.extensions import family_of
from hpc_train.config.schema import CustomModelConfig, GPTConfig, ModelConfig
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.hf_names import OUTPUT, gpt_config, hf_name
from hpc_train.run.files import write_json

SHARD_BYTES = 4 * 2**30  # of a safetensors file, and so of the memory that an export needs
Advance = Callable[[int], None]  # called with the number of bytes that have passed through


def export_bytes(stored: StoredTensors) -> int:
    """Bytes of the model in the checkpoint: what ``advance`` adds up to."""
    return sum(_bytes(shape) for shape in stored.model().values())


def export_hf(
    stored: StoredTensors,
    model: ModelConfig,
    to: Path,
    *,
    positions: int,
    dtype: torch.dtype | None,
    advance: Advance,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the directory ``to``, which ``transformers.AutoModelForCausalLM.from_pretrained`` reads.

    Args:
        positions: the longest sequence that the model was trained on.
        dtype: of the files; None: as stored.

    Raises:
        UserError: the model is none that ``transformers`` knows, ``to`` is taken, or safetensors is not installed.
    """
    hugging_face = family_of(model).hugging_face
    if hugging_face is None:
        raise UserError(
            f"model kind {model.kind} has no Hugging Face format", where="--format", fix="--format pt, for any model"
        )
    hf_name, hf_config = hugging_face.parameter_name, hugging_face.config
    save_file = _save_file()
    shards = _shards(stored.model(), dtype, shard_bytes)
    with _appearing(to) as folder:
        folder.mkdir()
        index: dict[str, str] = {}
        for number, names in enumerate(shards):
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else _SINGLE
            index |= {hf_name(name): file for name in names}
            save_file(dict(_named(stored, names, hf_name, dtype, advance)), folder / file, metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(_bytes(shape, dtype) for shape in stored.model().values())
            write_json(
                folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
            )
        kind = dtype or next(iter(stored.model().values())).dtype
        write_json(folder / "config.json", hf_config(model, positions, str(kind).removeprefix("torch.")))


def export_pt(
    stored: StoredTensors, model: ModelConfig, to: Path, *, dtype: torch.dtype | None, advance: Advance
) -> None:
    """Writes the file ``to``: a dict of parameter name -> tensor for ``torch.load`` and ``load_state_dict``.

    The tensors are laid out in files first, which the save reads through the page cache: it needs their size once more
    on disk for its time, and no memory.

    Raises:
        UserError: ``to`` is taken.
    """
    with _appearing(to) as file:
        folder = file.with_name(f"{file.name}.tensors")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            state = {name: _mapped(stored, name, folder, dtype, advance) for name in stored.model()}
            torch.save(state | {alias: state[name] for alias, name in _tied(model).items()}, file)
        finally:
            shutil.rmtree(folder)


_SINGLE = "model.safetensors"


def _save_file() -> Callable[..., Any]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UserError(
            "safetensors is not installed", where="--format", fix="pip install 'hpc_train[hf]', or --format pt"
        ) from error
    return save_file


def _shards(shapes: Mapping[str, TensorShape], dtype: torch.dtype | None, most: int) -> list[list[str]]:
    """Names in order, as many to a file as fit; a tensor is never cut."""
    shards: list[list[str]] = []
    filled = 0
    for name, shape in shapes.items():
        size = _bytes(shape, dtype)
        if not shards or filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _named(
    stored: StoredTensors,
    names: list[str],
    hf_name: Callable[[str], str],
    dtype: torch.dtype | None,
    advance: Advance,
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = stored.read(MODEL + name)
        yield hf_name(name), tensor if dtype is None else tensor.to(dtype)
        advance(_bytes(stored.shapes[MODEL + name]))


def _mapped(stored: StoredTensors, name: str, folder: Path, dtype: torch.dtype | None, advance: Advance) -> Tensor:
    """The tensor in a file of its own, mapped into memory."""
    shape = stored.shapes[MODEL + name]
    kind = dtype if dtype is not None and shape.dtype.is_floating_point else shape.dtype
    mapped = torch.from_file(
        str(folder / str(len(list(folder.iterdir())))), shared=True, size=_elements(shape), dtype=kind
    ).view(shape.shape)
    if kind == shape.dtype:
        stored.read(MODEL + name, mapped)
    else:
        mapped.copy_(stored.read(MODEL + name))
    advance(_bytes(shape))
    return mapped


def _tied(model: ModelConfig) -> Mapping[str, str]:
    """The tied parameters of a model of a known family; a custom model's code is not imported here."""
    return {} if isinstance(model, CustomModelConfig) else getattr(build_model(model, 0), "tied", {})


@contextmanager
def _appearing(to: Path) -> Iterator[Path]:
    """A path beside ``to`` that takes its name at the end, and is gone after a failure."""
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UserError(f"{to} is there already", where="--to", fix="a path that is free")
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_name(f".{to.name}.partial")
    _remove(partial)
    try:
        yield partial
        partial.rename(to)
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _elements(shape: TensorShape) -> int:
    return torch.Size(shape.shape).numel()


def _bytes(shape: TensorShape, dtype: torch.dtype | None = None) -> int:
    return _elements(shape) * (dtype or shape.dtype).itemsize


_INDEX, _SINGLE_HF = "model.safetensors.index.json", "model.safetensors"
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
            UserError: files are missing, or they hold another model than the config says.
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
            raise UserError(
                "the weights are not those of config.json:\n  " + "\n  ".join(problems[:8]) + more,
                where=str(self.folder),
                fix="the whole directory as it was published",
            )

    def _found_shapes(self) -> dict[str, tuple[int, ...]]:
        """By Llama's names, a file at a time."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in dict.fromkeys(self._where.values()):
            with _opened(self.folder / file) as opened:
                there = {*opened.keys()}
                for name in (name for name, place in self._where.items() if place == file):
                    if name not in there:
                        raise UserError(f"{file} has no {name}", where=str(self.folder / file), fix=_AGAIN)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        return shapes


def _located(folder: Path) -> dict[str, str]:
    """In which file each tensor lies."""
    if (folder / _INDEX).exists():
        located: dict[str, str] = _json(folder / _INDEX).get("weight_map", {})
        outside = [file for file in located.values() if Path(file).name != file]
        if outside:
            raise UserError(f"{outside[0]} lies outside", where=str(folder / _INDEX), fix="names of files beside it")
        return located
    if (folder / _SINGLE_HF).exists():
        with _opened(folder / _SINGLE_HF) as file:
            return dict.fromkeys(file.keys(), _SINGLE_HF)
    raise UserError(
        f"{folder} has no {_SINGLE} and no {_INDEX}",
        where=str(folder),
        fix="the safetensors files of the model; pickled .bin and .pt files can run code and are not read",
    )


def _opened(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError(
            "safetensors is not installed", where="checkpoint import", fix="pip install 'hpc_train[hf]'"
        ) from error
    opener: Callable[..., Any] = safe_open
    try:
        return opener(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}", where=str(path), fix=_AGAIN) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {error}",
            where=str(path),
            fix="a directory with the config and weights of a Llama",
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not an object", where=str(path), fix=_AGAIN)
    return content
