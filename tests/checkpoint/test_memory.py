"""Export and import of a model that is larger than the memory they may have."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from hpc_train.checkpoint import transfer as exporting
from hpc_train.checkpoint.transfer import export, import_hf, write_checkpoint
from hpc_train.config.schema import GPTConfig
from hpc_train.models.build import build_model
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.made import quiet_bar
from tests.ranks import run_ranks
from tests.train.runs import frozen

SIZES = {"vocab_size": 256, "n_layers": 10, "dim": 256, "ffn_dim": 1024, "n_heads": 4, "n_kv_heads": 4}
_MMAP_THRESHOLD = -3  # of malloc.h
SHARD = 3 << 20
LIMIT = 14 << 20  # of memory beside what the process holds already; the model has 42 MB


def commit_model(path: Path, config: GPTConfig) -> RunDirectory:
    overrides = [f"model.{key}={getattr(config, key)}" for key in SIZES]
    run = frozen(path, "+strategy=single", f"data.vocab_size={config.vocab_size}", *overrides)
    model = build_model(config, 0)
    write_checkpoint(run, 7, {f"model.{name}": torch.rand(value.shape) for name, value in model.named_parameters()})
    return run


def transfer(run: RunDirectory, to: Path) -> None:
    export(run, None, to / "llama", "hf", None, quiet_bar)
    export(run, None, to / "llama.pt", "pt", None, quiet_bar)
    import_hf(to / "llama", "back", to, "float32", quiet_bar)


def transfer_in_little_memory(rank: int, world_size: int, folder: str, small: RunDirectory, large: RunDirectory) -> int:
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 17)  # freed tensors go back to the system, as large ones do
    exporting.SHARD_BYTES = exporting.export_hf.__kwdefaults__["shard_bytes"] = SHARD
    transfer(small, Path(folder, "first"))  # everything is imported, and every thread there
    data = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line).split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (data * 1024 + LIMIT, -1))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(3 * LIMIT, dtype=torch.uint8)
    transfer(large, Path(folder, "second"))
    checkpoint = next(RunDirectory(Path(folder, "second/back")).checkpoints.iterdir())
    return sum(file.stat().st_size for file in checkpoint.iterdir())


@pytest.mark.long_form(8)
def test_a_model_passes_through_in_pieces(tmp_path: Path) -> None:
    small = commit_model(tmp_path / "small", GPTConfig(**{**SIZES, "n_layers": 1}))  # type: ignore[arg-type]
    large = commit_model(tmp_path / "large", GPTConfig(**SIZES))  # type: ignore[arg-type]
    (size,) = run_ranks(1, transfer_in_little_memory, str(tmp_path), small, large)
    assert size > 2.8 * LIMIT
