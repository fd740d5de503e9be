"""Implements ``checkpoint export``, in Hugging Face's format or as one ``.pt`` file, and ``checkpoint import``.

Tensors are converted one at a time. An export is renamed to its final path when it is complete.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.extra_state import keys
from hpc_train.checkpoint.listing import Bar, choose, verified_manifest, was_kept
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest
from hpc_train.checkpoint.reader import MODEL, StoredTensors
from hpc_train.checkpoint.space import check_space
from hpc_train.checkpoint.state import TensorShape
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.checkpoint.writer import SaveFailed, write_tensors
from hpc_train.config.extensions import family_of
from hpc_train.config.hf_config import CONFIG, number
from hpc_train.config.import_path import install_extra
from hpc_train.config.schema import (
    CustomModelConfig,
    GPTConfig,
    HFModelConfig,
    LoraConfig,
    ModelConfig,
    TokensDataConfig,
)
from hpc_train.data.tokens import read_meta
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.hf.family import exported_config, other_files
from hpc_train.models.hf.family import hf_name as hf_parameter
from hpc_train.models.hf.lora import MergedWeights, check_base
from hpc_train.models.hf_names import OUTPUT, gpt_config, hf_name
from hpc_train.run.directory import CheckpointDirectory, RunDirectory
from hpc_train.run.files import make_directory, refuse_existing, write_json
from hpc_train.run.freeze import load
from hpc_train.run.imported import (
    Others,
    import_directory,
    imported_model,
    model_overrides,
    published,
    write_imported,
)

SHARD_BYTES = 4 * 2**30  # largest safetensors file, and thereby the memory that an export needs
# keys of config.json
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
POSITIONS = "max_position_embeddings"
GENERATION = "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TRIES = 5  # attempts to export while the run removes old checkpoints
LENGTH = 2048  # assumed longest sequence where the run does not define one; Llama's value
_REDOWNLOAD = "download the model again"
Advance = Callable[[int], None]  # called with the number of bytes done since the last call


def export(
    run: RunDirectory,
    step: int | None,
    to: Path,
    format: str | None,
    dtype: str | None,
    bar: Bar,
    weights: str | None = None,
) -> dict[str, Any]:
    """Verifies every byte of a checkpoint and writes its model to ``to``.

    If a live run removes the checkpoint meanwhile, the newest one is exported instead, unless ``step`` names it.

    Args:
        step: the step of the checkpoint; None selects the newest.
        format: ``hf``, ``merged`` (the base model with merged adapters) or ``pt``; None takes ``hf`` if
            ``transformers`` has the model, and run.entry is not set.
        dtype: torch's name for the dtype of the written tensors; None keeps the stored one.
        weights: the name of a hook whose tensors to write instead of the parameters, such as ema.

    Returns:
        A dict of ``step``, ``path``, ``format`` and ``bytes``, the bytes of the model in the checkpoint.

    Raises:
        UserError: there is no such checkpoint, it is damaged or removed meanwhile, or ``format`` does not support its
            model.
    """
    model, length = _model(run)
    entry = run.plain_config().get("run", {}).get("entry")
    if entry is not None and format == "hf":
        what = f"the checkpoints hold the objects of run.entry={entry}, which have no Hugging Face format"
        raise UserError(what, where="--format", fix="--format pt, which exports any model")
    if format is None:
        format = "hf" if entry is None and family_of(model).hugging_face is not None else "pt"
    others = _others(run) if format == "hf" else None
    positions = max(number((others or {}).get(CONFIG), POSITIONS) or 0, length or 0) or LENGTH
    kind: torch.dtype | None = None
    if dtype is not None:
        kind = getattr(torch, dtype)

    def write(checkpoint: Checkpoint) -> dict[str, Any]:
        with bar("verifying", sum(file.stat().st_size for file in checkpoint.path.iterdir())) as advance:
            manifest = verified_manifest(checkpoint, advance)
        stored = StoredTensors(checkpoint.path, manifest, weights)
        size = sum(map(_bytes, stored.model().values()))
        with bar("exporting", size) as advance:
            if format == "hf":
                export_hf(stored, model, to, positions=positions, dtype=kind, advance=advance, others=others)
            elif format == "merged":
                export_merged(stored, model, to, extra=manifest.extra, dtype=kind, advance=advance)
            else:
                export_pt(stored, model, to, dtype=kind, advance=advance)
        return {"step": checkpoint.step, "path": str(to), "format": format, "bytes": size}

    store = CheckpointStore(run.checkpoints)
    for _ in range(TRIES):
        checkpoint = choose(run, step)
        try:
            return write(checkpoint)
        except BadCheckpoint as error:
            if was_kept(store, checkpoint):
                raise UserError(
                    f"the checkpoint is damaged: {error}",
                    where=str(checkpoint.path),
                    fix="select another one with --checkpoint STEP; `checkpoint verify RUN` lists the intact ones",
                ) from error
        except (UserError, CheckpointException, OSError):
            if was_kept(store, checkpoint):
                raise
        print(f"the run has removed its checkpoint of step {checkpoint.step} meanwhile", file=sys.stderr)
    raise UserError(
        f"the run removes its checkpoints faster than they can be exported ({TRIES} tries)",
        where=str(run.checkpoints),
        fix="raise checkpoint.keep or checkpoint.keep_every, or export when the run has ended",
    )


def _model(run: RunDirectory) -> tuple[ModelConfig, int | None]:
    """Returns the model config of a run or import, and the length of the sequences that the run defines."""
    if isinstance(run, CheckpointDirectory):
        return CustomModelConfig(), None
    model = imported_model(run)
    if model is not None:
        return model, None
    config = load(run)
    return config.model, getattr(config.data, "sequence_length", None)


def _others(run: RunDirectory) -> Others | None:
    """Returns the settings of the published weights that the run forked, or else the tokens around its documents."""
    others = published(run)
    config = load(run) if others is None and run.config.exists() else None
    if config is None or not (isinstance(config.model, GPTConfig) and isinstance(config.data, TokensDataConfig)):
        return others
    try:
        meta = read_meta(Path(config.data.path))
    except UserError as error:
        print(f"the exported config.json has no end token: {error.what}", file=sys.stderr)
        return None
    start = meta.source.get("start") or [None]
    return {CONFIG: {"bos_token_id": start[0], "eos_token_id": meta.separator}}


def export_hf(
    stored: StoredTensors,
    model: ModelConfig,
    to: Path,
    *,
    positions: int,
    dtype: torch.dtype | None,
    advance: Advance,
    others: Others | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the directory ``to``, which ``from_pretrained`` of transformers reads.

    Args:
        positions: the longest sequence that the model was trained on.
        dtype: dtype of the exported tensors; None keeps the stored dtype.
        others: the token ids of config.json, and generation_config.json; None: no token has such a meaning.

    Raises:
        UserError: ``transformers`` has no class for the model, ``to`` exists, or safetensors is not installed.
    """
    hugging_face = family_of(model).hugging_face
    if hugging_face is None:
        raise UserError(
            f"model kind {model.kind} has no Hugging Face format",
            where="--format",
            fix="--format pt, which exports any model",
        )
    extra = keys(stored.shapes)
    if extra:
        raise UserError(
            f"the model has the state {extra[0]}, which is neither a parameter nor a buffer, and Hugging Face's format "
            "has no place for it",
            where="--format",
            fix="--format pt",
        )
    kind = dtype or next(iter(stored.model().values())).dtype
    config = hugging_face.config(model, positions, str(kind).removeprefix("torch."))
    if others is not None:  # ``transformers`` has a default for each missing id
        ids = {name: others[CONFIG][name] for name in TOKEN_IDS if name in others[CONFIG]}
        config = {name: value for name, value in config.items() if name not in TOKEN_IDS} | ids
    hf_name = partial(hugging_face.parameter_name, model)
    save_file = _import_save_file()
    prefix = hugging_face.prefix(model)  # an adapter has one file
    shards = [[*stored.model()]] if prefix else _shards(stored.model(), dtype, shard_bytes)
    with _atomic_output(to) as folder:
        folder.mkdir()
        index: dict[str, str] = {}
        for number, names in enumerate(shards):
            if len(shards) > 1:
                file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
            else:
                file = f"{prefix}{WEIGHTS}"
            index |= {published: file for name in names for published in _published(hf_name(name))}
            save_file(dict(_named(stored, names, hf_name, dtype, advance)), folder / file, metadata={"format": "pt"})
        if len(shards) > 1:
            total = sum(_bytes(shape, dtype) for shape in stored.model().values())
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        write_json(folder / f"{prefix}config.json", config)
        if others is not None and GENERATION in others:
            write_json(folder / GENERATION, others[GENERATION])
        for other in hugging_face.other_files(model) if hugging_face.other_files is not None else ():
            shutil.copyfile(other, folder / other.name)


def export_merged(
    stored: StoredTensors,
    model: ModelConfig,
    to: Path,
    *,
    extra: Mapping[str, Any],
    dtype: torch.dtype | None,
    advance: Advance,
) -> None:
    """Writes the directory ``to`` with the base model of ``stored``, into which its adapters are merged, as files of
    the base model; ``from_pretrained`` of transformers reads it.

    Args:
        extra: what the manifest of the checkpoint has in addition, with the identity of the base model.
        dtype: the dtype of the weights; None keeps the dtype of each tensor in the files of the base model.

    Raises:
        UserError: the model has no adapters, or files of the base model have changed or hold an adapted weight as a
            part of another tensor.
    """
    if not isinstance(model, HFModelConfig) or model.lora.rank is None:
        raise UserError(
            "the model has no adapters that could be merged", where="--format", fix="--format hf, or --format pt"
        )
    check_base(model, extra, "--format merged")
    name_of = {hf_parameter(name): name for name in stored.model()}

    def read(name: str) -> Tensor:
        tensor = stored.read(MODEL + name_of[name])
        advance(_bytes(stored.shapes[MODEL + name_of[name]]))
        return tensor

    save_file = _import_save_file()
    with _atomic_output(to) as folder:
        folder.mkdir()
        index: dict[str, str] = {}
        total = 0
        kind = dtype
        for file, tensors in MergedWeights(model, name_of, read, dtype).files():
            kind = kind or next(value.dtype for value in tensors.values() if value.is_floating_point())
            save_file(tensors, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
            total += sum(value.nbytes for value in tensors.values())
        if len({*index.values()}) > 1:
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        whole = replace(model, lora=LoraConfig())
        write_json(folder / CONFIG, exported_config(whole, 0, str(kind).removeprefix("torch.")))
        for other in other_files(model):
            shutil.copyfile(other, folder / other.name)


def export_pt(
    stored: StoredTensors, model: ModelConfig, to: Path, *, dtype: torch.dtype | None, advance: Advance
) -> None:
    """Writes the file ``to``: a dict of parameter name -> tensor for ``torch.load`` and ``load_state_dict``.

    The dict also has the other entries of the module's state dict, such as those of ``get_extra_state``.

    The tensors are first written to temporary files, which ``torch.save`` then reads through the page cache. This
    needs twice the disk space for a while, but no memory.

    Raises:
        UserError: ``to`` exists.
    """
    with _atomic_output(to) as file:
        folder = file.with_name(f"{file.name}.tensors")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            state = {name: _mapped(stored, name, folder, dtype, advance) for name in stored.model()}
            tied = dict(stored.aliases)
            if not isinstance(model, CustomModelConfig):  # whose code is not imported here
                tied = getattr(build_model(model, 0), "tied", {}) | tied
            aliases = {alias: state[name] for alias, name in tied.items() if name in state}
            torch.save(state | aliases | stored.extra_state(), file)
        finally:
            shutil.rmtree(folder)


def _import_save_file() -> Callable[..., Any]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UserError(
            "safetensors is not installed", where="--format", fix=f"{install_extra('hf')}, or --format pt"
        ) from error
    return save_file


def _shards(shapes: Mapping[str, TensorShape], dtype: torch.dtype | None, most: int) -> list[list[str]]:
    """Splits the names in order into files of at most ``most`` bytes; a tensor is never split."""
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
    hf_name: Callable[[str], str | tuple[str, ...]],
    dtype: torch.dtype | None,
    advance: Advance,
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = stored.read(MODEL + name)
        if dtype is not None:
            tensor = tensor.to(dtype)
        published = hf_name(name)
        if isinstance(published, str):
            yield published, tensor
        else:
            yield from zip(published, map(torch.clone, tensor), strict=True)
        advance(_bytes(stored.shapes[MODEL + name]))


def _published(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _mapped(stored: StoredTensors, name: str, folder: Path, dtype: torch.dtype | None, advance: Advance) -> Tensor:
    """Returns the tensor, mapped into memory from a separate file."""
    shape = stored.shapes[MODEL + name]
    kind = dtype if dtype is not None and shape.dtype.is_floating_point else shape.dtype
    file = folder / str(len(list(folder.iterdir())))
    mapped = torch.from_file(str(file), shared=True, size=math.prod(shape.shape), dtype=kind).view(shape.shape)
    if kind == shape.dtype:
        stored.read(MODEL + name, mapped)
    else:
        mapped.copy_(stored.read(MODEL + name))
    advance(_bytes(shape))
    return mapped


@contextmanager
def _atomic_output(to: Path) -> Iterator[Path]:
    """Yields a temporary path that is renamed to ``to`` at the end and removed after a failure."""
    refuse_existing(to, "--to")
    make_directory(to.parent, "--to")
    partial = to.with_name(f".{to.name}.partial")

    def remove() -> None:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)

    remove()
    try:
        yield partial
        partial.rename(to)
    except BaseException:
        remove()
        raise


def _bytes(shape: TensorShape, dtype: torch.dtype | None = None) -> int:
    return math.prod(shape.shape) * (dtype or shape.dtype).itemsize


@dataclass(frozen=True)
class PublishedFiles:
    """Reads published weights from ``config.json`` and safetensors files; pickled files are not read.

    Attributes:
        shapes: shapes of the tensors under the names of hpc_train's GPT.
        others: the settings that an export writes back; see ``run/imported.py``.
    """

    folder: Path
    model: GPTConfig
    others: Others
    shapes: dict[str, tuple[int, ...]]
    _file_of: dict[str, str]  # published name -> file

    @classmethod
    def open(cls, folder: Path) -> PublishedFiles:
        """Reads names and shapes, and compares them with the config.

        Raises:
            UserError: files are missing, or their tensors do not match the config.
        """
        config = _json(folder / CONFIG)
        model = gpt_config(config, str(folder / CONFIG))
        others = {CONFIG: {name: config[name] for name in (*TOKEN_IDS, POSITIONS) if name in config}}
        if (folder / GENERATION).exists():
            others[GENERATION] = _json(folder / GENERATION)
        expected = {name: tuple(value.shape) for name, value in build_model(model, 0).named_parameters()}
        files = cls(folder, model, others, expected, _locate_tensors(folder))
        files._check()
        return files

    def read(self, name: str) -> Tensor:
        """Returns the tensor with hpc_train's name ``name`` in its stored dtype."""
        published = hf_name(self.model, name)
        if isinstance(published, str):
            return self._read(published)
        return torch.stack([self._read(of_slice) for of_slice in published])

    def _read(self, published: str) -> Tensor:
        with _open_safetensors(self.folder / self._file_of[published]) as file:
            tensor: Tensor = file.get_tensor(published)
        return tensor

    def _check(self) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            published = hf_name(self.model, name)
            if isinstance(published, str):
                expected[published] = shape
            else:
                expected |= dict.fromkeys(published, shape[1:])
        problems = [f"missing: {name}" for name in expected if name not in self._file_of]
        ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
        if self.model.tied_embeddings:
            ignored = (OUTPUT, *ignored)
        problems += [
            f"not part of the model: {name}"
            for name in self._file_of
            if name not in expected and not name.endswith(ignored)
        ]
        for name, stored_shape in self._stored_shapes().items():
            shape = expected.get(name, stored_shape)
            if stored_shape != shape:
                problems += [f"{name}: shape {list(stored_shape)}, expected {list(shape)}"]
        if problems:
            more = f"\n  and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise UserError(
                "the weights do not match config.json:\n  " + "\n  ".join(problems[:8]) + more,
                where=str(self.folder),
                fix="use the complete directory as it was published",
            )

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the stored shapes under the published names; opens one file at a time."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in dict.fromkeys(self._file_of.values()):
            with _open_safetensors(self.folder / file) as opened:
                stored = {*opened.keys()}
                for name in (name for name, holder in self._file_of.items() if holder == file):
                    if name not in stored:
                        raise UserError(f"{file} has no tensor {name}", where=str(self.folder / file), fix=_REDOWNLOAD)
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        return shapes


def _locate_tensors(folder: Path) -> dict[str, str]:
    """Returns tensor name -> file."""
    if (folder / INDEX).exists():
        located: dict[str, str] = _json(folder / INDEX).get("weight_map", {})
        outside = [file for file in located.values() if Path(file).name != file]
        if outside:
            raise UserError(
                f"the index refers to {outside[0]}, which is outside {folder}",
                where=str(folder / INDEX),
                fix="use only names of files in the same directory",
            )
        return located
    if (folder / WEIGHTS).exists():
        with _open_safetensors(folder / WEIGHTS) as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    raise UserError(
        f"{folder} has neither {WEIGHTS} nor {INDEX}",
        where=str(folder),
        fix="download the safetensors files of the model; pickled .bin and .pt files can run code and are not read",
    )


def _open_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError("safetensors is not installed", where="checkpoint import", fix=install_extra("hf")) from error
    opener: Callable[..., Any] = safe_open
    try:
        return opener(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}", where=str(path), fix=_REDOWNLOAD) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {error}",
            where=str(path),
            fix="name a directory with config.json and safetensors files",
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object", where=str(path), fix=_REDOWNLOAD)
    return content


def import_hf(source: Path, name: str, root: Path, dtype: str, bar: Bar) -> dict[str, Any]:
    """Imports the model in ``source`` as ``root``/``name`` with a checkpoint of step 0, which runs can fork from.

    Args:
        dtype: dtype of the stored tensors, the parameter dtype of the runs that will start from them.

    Returns:
        A dict of ``path``, ``parameters`` (number of elements) and ``overrides`` for a run with the model.

    Raises:
        UserError: the files are not a model that hpc_train's GPT can compute, or the name is taken.
    """
    directory = import_directory(root, name)
    files = PublishedFiles.open(source)
    kind: torch.dtype = getattr(torch, dtype)
    state = {
        f"{MODEL}{name_in_model}": torch.empty(shape, dtype=kind, device="meta")
        for name_in_model, shape in files.shapes.items()
    }
    try:
        with bar("importing", sum(value.nbytes for value in state.values())) as advance:
            write_checkpoint(directory, 0, state, _Converted(files, state, advance))
        write_imported(directory, files.model, str(source.absolute()), files.others)
    except BaseException as error:
        disk.remove(directory.path)  # it was empty before
        if isinstance(error, SaveFailed):
            raise UserError(
                str(error), where="checkpoint import", fix="free some space there, or set another run.root"
            ) from error
        raise
    return {
        "path": str(directory.path),
        "parameters": sum(value.numel() for value in state.values()),
        "overrides": [*model_overrides(files.model), f"run.name={name}"],
    }


def write_checkpoint(
    directory: RunDirectory, step: int, state: Mapping[str, Tensor], host: Mapping[str, Tensor] | None = None
) -> Checkpoint:
    """Commits ``state`` from this one process as a checkpoint from which training can start.

    Args:
        host: the values, if ``state`` holds meta tensors.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(directory.checkpoints)
    writing = store.begin(step, attempt=0)

    def check(size: int, count: int) -> None:
        check_space(writing, store, size, max(count, len(state)), keep=1)

    files = write_tensors(state, writing, None, check, host, single_file=host is None)
    extra = {"tokens": 0, "loss_scale": None}
    versions = {"torch": torch.__version__}
    return store.commit(writing, Manifest(step, files, extra=extra, versions=versions, time=time.time()))


class _Converted(Mapping[str, Tensor]):
    """Maps names to tensors that are read from their files and converted on access."""

    def __init__(self, files: PublishedFiles, state: Mapping[str, Tensor], advance: Callable[[int], None]) -> None:
        self._files = files
        self._state = state
        self._advance = advance

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._files.read(name.removeprefix(MODEL)).to(self._state[name].dtype)
        self._advance(tensor.nbytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
