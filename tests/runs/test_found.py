"""Runs are found again by their names where runs lie by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.run.freeze import text_of
from hpc_train.runs.lookup import find_runs
from tests.launch.jobs import make_job


@pytest.mark.parametrize(("variable", "below"), [("HPC_TRAIN_ROOT", ""), ("SCRATCH", "hpc_train")])
def test_a_name_is_looked_up_where_runs_lie(
    variable: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path / below / "sweep", 3)
    job.run.config.write_text(text_of(job.config))
    monkeypatch.delenv("HPC_TRAIN_ROOT", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    (found,) = find_runs("sweep/3", "status")
    assert (found.run, found.number) == (job.run, 3)
    assert [item.run for item in find_runs("sweep", "status")] == [job.run]
    with pytest.raises(UserError, match="no run or sweep"):
        find_runs("sweep/4", "status")
