"""The class of a failure, from an exception or from what the kernel says of a process that is gone."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from hpc_train.cluster.oom_kills import OomKills
from hpc_train.config.errors import ConfigError
from hpc_train.elastic.process_end import class_of_end
from hpc_train.run.exits import Failure, classify


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConfigError("no data", where="data.path", mend="another"), Failure.REFUSED),
        (MemoryError(), Failure.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), Failure.OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), Failure.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "the checkpoint needs 3 GB, 1 GB free"), Failure.DISK_FULL),
        (OSError(errno.EDQUOT, "quota"), Failure.DISK_FULL),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), Failure.DISK_FULL),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), Failure.KILLED),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), Failure.COMMUNICATION),
        (FloatingPointError("diverged"), Failure.NAN),
        (ArithmeticError("a sum"), Failure.USER_ERROR),
    ],
)
def test_exceptions(error: Exception, failure: Failure) -> None:
    assert classify(error) is failure


@pytest.mark.parametrize(
    ("code", "killed", "failure", "words"),
    [
        (-signal.SIGKILL, OomKills(), Failure.KILLED, "killed by SIGKILL"),
        (-signal.SIGKILL, OomKills(group=1, node=1), Failure.OUT_OF_MEMORY, "out of host memory"),
        (-signal.SIGKILL, OomKills(node=1), Failure.KILLED, "the kernel killed for memory on this node"),
        (-signal.SIGSEGV, OomKills(), Failure.KILLED, "killed by SIGSEGV"),
        (0, OomKills(), Failure.EXITED, "exited early with code 0"),
    ],
)
def test_processes(code: int, killed: OomKills, failure: Failure, words: str) -> None:
    found, message = class_of_end(code, killed)
    assert found is failure
    assert words in message


def test_a_worker_that_ends_with_its_warm_parent() -> None:
    assert class_of_end(255, OomKills(), with_warm_parent=True) == (
        Failure.KILLED,
        "killed by the kernel when the warm parent of the node's workers ended",
    )


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/slurm/job_7/step_0\n", "slurm/job_7/step_0/memory.events"),
        ("9:cpu:/a\n4:memory:/slurm/uid_1/job_7\n0::/\n", "memory/slurm/uid_1/job_7/memory.oom_control"),
    ],
)
def test_both_versions_of_control_groups(tmp_path: Path, membership: str, file: str) -> None:
    counters = tmp_path / "groups" / file
    counters.parent.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 5\noom_kill 9\n")
    assert OomKills.now(tmp_path / "groups", tmp_path / "proc") == OomKills(0, 9)
    counters.write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert OomKills.now(tmp_path / "groups", tmp_path / "proc") - OomKills(1, 9) == OomKills(2, 0)
