"""Directories and checkpoints that another version of hpc_train wrote in another format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_train.checkpoint.manifest import FORMAT, METADATA, FileEntry, Manifest, decode
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory

MANIFEST = Manifest(step=3, files={METADATA: FileEntry(1, "0")})


def test_a_run_directory_records_its_format(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.update_record(run_id="a")
    assert json.loads((tmp_path / "run.json").read_text()) == {"format": 1, "run_id": "a"}


def test_a_run_directory_without_a_number_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "a"}')
    assert RunDirectory(tmp_path).record() == {"run_id": "a"}


@pytest.mark.parametrize(("version", "age"), [(2, "a newer hpc_train"), (0, "an older hpc_train")])
def test_a_run_directory_of_another_format_is_refused(version: int, age: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": version}))
    with pytest.raises(UserError, match=f"has format {version}, but hpc_train .* reads format 1") as error:
        RunDirectory(tmp_path).update_record(steps=3)
    assert error.value.fix.startswith(age) and error.value.where == str(tmp_path / "run.json")


@pytest.mark.parametrize(("version", "age"), [(FORMAT + 1, "a newer hpc_train"), (FORMAT - 1, "an older hpc_train")])
def test_a_manifest_of_another_format_is_refused(version: int, age: str) -> None:
    assert decode(MANIFEST.encode()) == MANIFEST
    with pytest.raises(UserError, match=f"has format {version}") as error:
        decode(replace(MANIFEST, format=version).encode(), "step-00000003/manifest.json")
    assert error.value.fix.startswith(age) and error.value.where == "step-00000003/manifest.json"
