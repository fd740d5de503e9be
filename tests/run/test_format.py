"""Directories and checkpoints that another version of hpc_train wrote in another format."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from unittest.mock import ANY

import pytest

from hpc_train.checkpoint.listing import list_checkpoints
from hpc_train.checkpoint.manifest import FORMAT, METADATA, FileEntry, Manifest, decode
from hpc_train.commands import status
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json
from hpc_train.run.freeze import freeze, load
from hpc_train.runs.lookup import find_runs
from tests.launch.jobs import make_job

MANIFEST = Manifest(step=3, files={METADATA: FileEntry(1, "0")})


def test_a_run_directory_records_its_format(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.update_record(run_id="a")
    assert json.loads((tmp_path / "run.json").read_text()) == {"format": 1, "run_id": "a", "digest": ANY}


def test_a_run_directory_without_a_number_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"run_id": "a"}')
    assert RunDirectory(tmp_path).record() == {"run_id": "a"}


@pytest.mark.parametrize(("version", "age"), [(2, "a newer hpc_train"), (0, "an older hpc_train")])
def test_a_run_directory_of_another_format_is_refused(version: int, age: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"format": version}))
    with pytest.raises(UserError, match=f"has format {version}, but hpc_train .* reads format 1") as error:
        RunDirectory(tmp_path).update_record(steps=3)
    assert error.value.fix.startswith(age) and error.value.where == str(tmp_path / "run.json")


def test_a_listing_has_one_line_for_a_directory_of_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, version in enumerate((1, 2)):
        job = make_job(tmp_path, number=number)
        freeze(job.config, job.run)
        write_json(job.run.path / "run.json", {"format": version})
    assert status.main([str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "not submitted" in shown.out and "has format 2" in shown.err
    with pytest.raises(UserError, match="has format 2"):
        find_runs(str(tmp_path), "status")


def test_a_config_with_a_key_of_another_version_names_its_file(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    freeze(job.config, job.run)
    text = job.run.config.read_text().replace("\ntrain:\n", "\ntrain:\n  later: true\n")
    job.run.config.write_text(text)
    job.run.update_record(config_hash=sha256(text.encode()).hexdigest())
    with pytest.raises(UserError, match="was frozen by another version") as error:
        load(job.run)
    assert str(job.run.config) in error.value.what and error.value.what.endswith("train.later is not a config key")


def test_a_list_of_checkpoints_has_one_line_for_another_format(tmp_path: Path) -> None:
    for step, version in ((1, FORMAT), (2, FORMAT + 1)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_bytes(replace(MANIFEST, step=step, format=version).encode())
        (folder / METADATA).write_bytes(b"0")
    problems = [found.problem for found in list_checkpoints(RunDirectory(tmp_path))]
    assert problems[0] is None and f"has format {FORMAT + 1}" in str(problems[1])


@pytest.mark.parametrize(("version", "age"), [(FORMAT + 1, "a newer hpc_train"), (FORMAT - 1, "an older hpc_train")])
def test_a_manifest_of_another_format_is_refused(version: int, age: str) -> None:
    assert decode(MANIFEST.encode()) == MANIFEST
    with pytest.raises(UserError, match=f"has format {version}") as error:
        decode(replace(MANIFEST, format=version).encode(), "step-00000003/manifest.json")
    assert error.value.fix.startswith(age) and error.value.where == "step-00000003/manifest.json"
