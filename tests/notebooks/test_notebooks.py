"""Every notebook runs from beginning to end, in its short form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHORT = "batch.global_size=8 data.sequence_length=32 cluster.gpus_per_node=0"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook(notebook: Path, tmp_path: Path) -> None:
    short = {"QUICKSTART_STEPS": "4", "QUICKSTART_ROOT": str(tmp_path), "QUICKSTART_OVERRIDES": SHORT}
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20):
        (text / f"{number}.py").write_text(f"print({number})\n" * 40)
    short["QUICKSTART_OVERRIDES"] += f" data.path={text}"
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=500", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(notebook)],
        env={**os.environ, **short, "MPLBACKEND": "agg"},
        cwd=NOTEBOOKS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    if notebook.stem == "quickstart":
        assert (tmp_path / "dp" / "metrics").is_dir() and (tmp_path / "hybrid" / "checkpoints").is_dir()
