"""Caches in node-local space come and go with the agent; leftovers of killed ones are removed, live ones are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_train.cluster.environment import LOCK, node_local_caches, remove_shared_memory


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return {"SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path)}


def test_caches_live_as_long_as_the_agent(job: dict[str, str], tmp_path: Path) -> None:
    parent = tmp_path / f"hpc_train-{os.getuid()}"
    with node_local_caches("7.0.0-n1", job) as first:
        named = {variable.name: variable.value for variable in first}
        directory = Path(named["TRITON_CACHE_DIR"]).parent
        assert directory.parent == parent
        assert directory.name.startswith("7.0.0-n1.")
        assert {"CUDA_CACHE_PATH", "WANDB_CACHE_DIR", "HF_HUB_CACHE", "MPLCONFIGDIR"} <= set(named)
        with node_local_caches("7.0.0-n1", job) as second:  # of another cluster's job with the same number
            assert directory.is_dir(), "its agent lives"
            assert Path(second[0].value).parent.is_dir()
        assert not Path(second[0].value).parent.exists()
    assert not directory.exists()


def test_what_a_killed_agent_left_is_removed(job: dict[str, str], tmp_path: Path) -> None:
    left = tmp_path / f"hpc_train-{os.getuid()}" / "6.0.0-n1"
    left.mkdir(parents=True)
    (left / LOCK).touch()
    with node_local_caches("7.0.0-n1", job):
        assert not left.exists()


def test_miopen_on_amd_nodes(job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, there in ((tmp_path, True), (tmp_path / "none", False)):
        monkeypatch.setattr("hpc_train.cluster.environment.NODES", nodes)
        with node_local_caches("7.0.0-n1", job) as variables:
            assert ("MIOPEN_USER_DB_PATH" in {variable.name for variable in variables}) == there


def test_no_job_no_caches(tmp_path: Path) -> None:
    with node_local_caches("name", {"TMPDIR": str(tmp_path)}) as variables:
        assert variables == ()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_of_hugging_face_that_is_there_stays_in_use(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home" / ".cache" / "huggingface").mkdir(parents=True)
    with node_local_caches("7.0.0-n1", job) as variables:
        assert not [variable for variable in variables if variable.name.startswith("HF_")]


def test_the_directory_of_somebody_else_is_not_used(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"hpc_train-{os.getuid()}").symlink_to(tmp_path / "theirs")
    with node_local_caches("7.0.0-n1", job) as variables:
        assert variables == ()
    assert list((tmp_path / "theirs").iterdir()) == []


def test_shared_memory_of_dead_processes_is_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / "torch_4194305_1_0", tmp_path / f"torch_{os.getpid()}_1_0"  # above the highest pid
    young, old, other = tmp_path / "nccl-a", tmp_path / "nccl-b", tmp_path / "psm_x"
    for path in (dead, alive, young, old, other):
        path.touch()
    os.utime(old, (0, 0))
    remove_shared_memory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, young.name, other.name}
