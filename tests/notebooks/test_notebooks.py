"""Every notebook runs from beginning to end, in a short form, and its outputs are stored."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.notebooks.execute import code_cells
from tests.warm_parents import HUGGING_FACE, with_server

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
# without snapshots the runs use this code, which the warm parents have imported
OVERRIDES = ["batch.global_size=8", "cluster.gpus_per_node=0", "cluster.cpu_workers=2", "run.snapshot=false"]
TEXT = ["data.sequence_length=32", "data.pattern=json/*.py"]
SHORT: dict[str, dict[str, object]] = {
    "hf_finetuning": {"STEPS": 4, "OVERRIDES": OVERRIDES},
    "own_model": {"STEPS": 4, "OVERRIDES": OVERRIDES},
    "pipeline": {},
    "planning": {"GPUS": "8,16", "SIMULATED": "8,64"},
    "quickstart": {"STEPS": 4, "OVERRIDES": [*OVERRIDES, *TEXT]},
    "scaling": {"STEPS": 4, "OVERRIDES": OVERRIDES, "CASES": ["zero3:2"]},
}


def run(executed: list[Path], tmp_path: Path) -> None:
    with_root = {
        stem: values | ({"ROOT": str(tmp_path)} if "STEPS" in values else {}) for stem, values in SHORT.items()
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.notebooks.execute", *map(str, executed)],
        env={
            **with_server(os.environ, HUGGING_FACE),
            "NOTEBOOK_PARAMETERS": json.dumps(with_root),
            "MPLBACKEND": "agg",
        },
        cwd=NOTEBOOKS[0].parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.long_form(90)  # the commands of docs/howto/huggingface.md do the same
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_the_notebook_of_hugging_face_runs(tmp_path: Path) -> None:
    run([path for path in NOTEBOOKS if path.stem == "hf_finetuning"], tmp_path)
    assert (tmp_path / "tuned/checkpoints").is_dir()


@pytest.mark.long_form(90)
@pytest.mark.timeout(600)
def test_the_notebooks_run(tmp_path: Path) -> None:
    run([path for path in NOTEBOOKS if path.stem != "hf_finetuning"], tmp_path)
    for folder in ("dp/metrics", "hybrid/checkpoints", "own_model/checkpoints", "zero3-2/metrics"):
        assert (tmp_path / folder).is_dir()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_short_form_replaces_values_that_the_notebook_sets(notebook: Path) -> None:
    cells = ["".join(cell["source"]) for cell in code_cells(notebook) if cell["metadata"].get("tags") == ["parameters"]]
    names = {name for cell in cells for name in re.findall(r"^([A-Z]+) = ", cell, flags=re.MULTILINE)}
    assert names >= {*SHORT[notebook.stem]}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_are_stored_and_from_one_run(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {"stream", "display_data"} <= {output["output_type"] for output in outputs}
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
