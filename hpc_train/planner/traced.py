"""Counts a custom model, or of Hugging Face, in another process with torch, and keeps the counts.

``layout/counted.py`` reads them. The process builds the model without values where its constructor permits this, and
runs it without values, so it needs seconds and hardly any memory, whatever the size of the model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.counted import counts_file, key_of, needs_counts, read_counts

LIMIT_S = 180.0  # imports of torch from a busy network file system take up to a minute
_FIX = (
    "correct the model, name another model of about the same size, or describe it as a ModelFamily with parameters, "
    "activations and flops_per_sample (docs/extend.md)"
)


def count_model(config: Config) -> None:
    """Counts the model of ``config`` if its family does not tell its sizes and the cache has no counts of it.

    Raises:
        UserError: torch is not installed here, or the model cannot be counted.
    """
    if not needs_counts(config):
        return
    read_counts.cache_clear()  # the user's files may have changed
    key = key_of(config)
    if read_counts(key) is not None:
        return
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the size of this model is known only after it is built with torch, which is not installed here",
            where="model",
            fix="plan where torch is installed; the counts are kept in ~/.cache/hpc_train, where this machine finds "
            "them too if it has the same home directory",
        )
    file = counts_file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            answer = Path(folder, file.name)
            counts = _answer(config, answer)
            answer.write_text(json.dumps(counts), encoding="utf-8")
            answer.replace(file)
    except OSError as error:
        raise UserError(
            f"the counts of the model cannot be written to {file.parent}: {error}",
            where="$XDG_CACHE_HOME",
            fix="set XDG_CACHE_HOME to a directory with free space that you may write",
        ) from error
    read_counts.cache_clear()


def _answer(config: Config, file: Path) -> dict[str, Any]:
    """Returns the counts, which the other process writes to ``file``.

    Raises:
        UserError: the model cannot be counted. The message has the last line that its code printed.
    """
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hpc_train.models.counting", str(file)],
            input=pickle.dumps(config),
            capture_output=True,
            timeout=LIMIT_S,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONSAFEPATH": "1",
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(f"it took longer than {LIMIT_S:g} s") from None
    if not file.exists():
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise _refusal(lines[-1].strip() if lines else f"its process ended with exit code {done.returncode}")
    found = json.loads(file.read_text(encoding="utf-8"))
    if "what" in found:
        raise _refusal(found["what"], found.get("where") or "model", found.get("fix") or _FIX)
    counts: dict[str, Any] = found["counts"]
    return counts


def _refusal(why: str, where: str = "model", fix: str = _FIX) -> UserError:
    return UserError(f"the model cannot be counted: {why}", where=where, fix=fix)
