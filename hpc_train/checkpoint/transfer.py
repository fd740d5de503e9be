"""Implements ``checkpoint export`` and ``checkpoint import``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.export import POSITIONS, PublishedFiles, export_bytes, export_hf, export_pt
from hpc_train.checkpoint.listing import Bar, choose, verified_manifest, was_kept
from hpc_train.checkpoint.manifest import BadCheckpoint, Manifest
from hpc_train.checkpoint.reader import MODEL, StoredTensors
from hpc_train.checkpoint.space import check_space
from hpc_train.checkpoint.store import Checkpoint, CheckpointStore
from hpc_train.checkpoint.writer import SaveFailed, write_tensors
from hpc_train.config.extensions import family_of
from hpc_train.config.hf_config import CONFIG, number
from hpc_train.config.schema import GPTConfig, ModelConfig, TokensDataConfig
from hpc_train.data.tokens import read_meta
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.run.imported import (
    Others,
    import_directory,
    imported_model,
    model_overrides,
    published,
    write_imported,
)

TRIES = 5  # of an export from a run that prunes
LENGTH = 2048  # assumed longest sequence where the run does not define one; Llama's value


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
        format: ``hf`` or ``pt``; None takes ``hf`` if ``transformers`` has the model, and run.entry is not set.
        dtype: torch's name for the dtype of the written tensors; None keeps the stored one.
        weights: the name of a hook whose tensors to write instead of the parameters, such as ema.

    Returns:
        A dict of ``step``, ``path``, ``format`` and ``bytes``, the bytes of the model in the checkpoint.

    Raises:
        UserError: there is no such checkpoint, it is damaged or removed meanwhile, or ``format`` does not support its
            model.
    """
    model, length = _model(run)
    format = _format(run, model, format)
    others = _others(run) if format == "hf" else None
    original = number((others or {}).get(CONFIG), POSITIONS)
    positions = max(original or 0, length or 0) or LENGTH
    store = CheckpointStore(run.checkpoints)
    for _ in range(TRIES):
        checkpoint = choose(run, step)
        try:
            return _export(checkpoint, model, positions, others, to, format, dtype, bar, weights)
        except BadCheckpoint as error:
            if was_kept(store, checkpoint):
                raise UserError(
                    f"the checkpoint is damaged: {error}",
                    where=str(checkpoint.path),
                    fix="select another one with --step; `checkpoint verify RUN` lists the intact ones",
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


def _format(run: RunDirectory, model: ModelConfig, requested: str | None) -> str:
    """Returns ``requested``, or if None the format for the model. Raises UserError for ``hf`` with run.entry."""
    entry = run.plain_config().get("run", {}).get("entry")
    if entry is None:
        return requested or ("pt" if family_of(model).hugging_face is None else "hf")
    if requested == "hf":
        what = f"the checkpoints hold the objects of run.entry={entry}, which have no Hugging Face format"
        raise UserError(what, where="--format", fix="--format pt, which exports any model")
    return "pt"


def _export(
    checkpoint: Checkpoint,
    model: ModelConfig,
    positions: int,
    others: Others | None,
    to: Path,
    format: str,
    dtype: str | None,
    bar: Bar,
    weights: str | None,
) -> dict[str, Any]:
    with bar("verifying", sum(file.stat().st_size for file in checkpoint.path.iterdir())) as advance:
        manifest = verified_manifest(checkpoint, advance)
    stored = StoredTensors(checkpoint.path, manifest, weights)
    kind = None if dtype is None else getattr(torch, dtype)
    with bar("exporting", export_bytes(stored)) as advance:
        if format == "hf":
            export_hf(stored, model, to, positions=positions, dtype=kind, advance=advance, others=others)
        else:
            export_pt(stored, model, to, dtype=kind, advance=advance)
    return {"step": checkpoint.step, "path": str(to), "format": format, "bytes": export_bytes(stored)}


def _model(run: RunDirectory) -> tuple[ModelConfig, int | None]:
    """Returns the model config of a run or import, and the length of the sequences that the run defines."""
    imported = imported_model(run)
    if imported is not None:
        return imported, None
    config = load(run)
    return config.model, getattr(config.data, "sequence_length", None)


def _others(run: RunDirectory) -> Others | None:
    """Returns what the run has from published weights, or else the tokens around its documents."""
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
