"""Caches in node-local space come and go with the agent; leftovers of killed ones are removed, live ones are not."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from hpc_train.machine.environment import node_local_caches, remove_shared_memory
from hpc_train.machine.temporary import JOB_CACHES
from tests.other_user import OTHER, needs_root


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return {"SLURM_JOB_ID": "7", "TMPDIR": str(tmp_path)}


def become_node(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", name, "", "", "")))


def test_caches_live_as_long_as_the_agent(job: dict[str, str], tmp_path: Path) -> None:
    parent = tmp_path / f"hpc_train-{os.getuid()}" / os.uname().nodename
    with node_local_caches("7.0.0-n1", job) as first:
        named = {variable.name: variable.value for variable in first}
        directory = Path(named["TRITON_CACHE_DIR"]).parent
        assert directory.parent == parent
        assert directory.name.startswith(f"{JOB_CACHES}7.0.0-n1.")
        assert {"CUDA_CACHE_PATH", "WANDB_CACHE_DIR", "HF_HUB_CACHE", "MPLCONFIGDIR"} <= set(named)
        with node_local_caches("7.0.0-n1", job) as second:  # of another cluster's job with the same number
            assert directory.is_dir(), "its agent lives"
            assert Path(second[0].value).parent.is_dir()
        assert not Path(second[0].value).parent.exists()
    assert not directory.exists()


def test_what_a_killed_agent_left_is_removed(job: dict[str, str], tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            with node_local_caches("6.0.0-n1", job):
                os._exit(0)  # leaves the directory behind, as a kill does
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    (left,) = tmp_path.glob("*/*/*6.0.0-n1.*")
    with node_local_caches("7.0.0-n1", job):
        assert not left.exists()


def test_a_node_keeps_the_caches_of_other_nodes(
    job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # each node gets each lock, as on Lustre with localflock
    become_node(monkeypatch, "n1")
    with node_local_caches("7.0.0-n1", job) as first:
        become_node(monkeypatch, "n2")
        with node_local_caches("7.0.0-n2", job) as second:
            directories = [Path(variables[0].value).parent for variables in (first, second)]
            assert all(directory.is_dir() for directory in directories)
            own = tmp_path / f"hpc_train-{os.getuid()}"
            assert [directory.parent for directory in directories] == [own / "n1", own / "n2"]


def test_nothing_is_removed_on_a_file_system_without_locks(
    job: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with node_local_caches("7.0.0-n1", job) as first:
        with node_local_caches("7.0.0-n1", job) as second:
            directories = [Path(variables[0].value).parent for variables in (first, second)]
            assert all(directory.is_dir() for directory in directories)
        assert [directory.is_dir() for directory in directories] == [True, False]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_tmpdir_that_is_no_directory_of_this_node_is_not_used(
    job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with node_local_caches("7.0.0-n1", job | {"TMPDIR": str(tmp_path / name)}) as variables:
        assert Path(variables[0].value).is_relative_to(tmp_path / "tmp")
    with node_local_caches("7.0.0-n1", job | {"SLURM_TMPDIR": str(tmp_path / name)}) as variables:
        assert Path(variables[0].value).is_relative_to(tmp_path / f"hpc_train-{os.getuid()}"), "TMPDIR is there"


def test_miopen_on_amd_nodes(job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, there in ((tmp_path, True), (tmp_path / "none", False)):
        monkeypatch.setattr("hpc_train.machine.environment.NODES", nodes)
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
    for link in (tmp_path / f"hpc_train-{os.getuid()}", tmp_path / f"hpc_train-{os.getuid()}" / os.uname().nodename):
        link.symlink_to(tmp_path / "theirs")
        with node_local_caches("7.0.0-n1", job) as variables:
            assert variables == ()
        assert list((tmp_path / "theirs").iterdir()) == []
        link.unlink()
        link.mkdir()


@needs_root
def test_a_directory_that_belongs_to_another_user_is_not_used(job: dict[str, str], tmp_path: Path) -> None:
    for directory in (own := tmp_path / f"hpc_train-{os.getuid()}", own / os.uname().nodename):
        directory.mkdir()
        os.chown(directory, OTHER, OTHER)
        with node_local_caches("7.0.0-n1", job) as variables:
            assert variables == ()
        assert list(directory.iterdir()) == []
        os.chown(directory, os.getuid(), -1)


def test_shared_memory_of_dead_processes_is_removed(tmp_path: Path) -> None:
    dead, alive = tmp_path / "torch_4194305_1_0", tmp_path / f"torch_{os.getpid()}_1_0"  # above the highest pid
    young, old, other = tmp_path / "nccl-a", tmp_path / "nccl-b", tmp_path / "psm_x"
    for path in (dead, alive, young, old, other):
        path.touch()
    os.utime(old, (0, 0))
    remove_shared_memory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, young.name, other.name}
