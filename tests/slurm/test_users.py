"""Two users of one cluster: their sweeps run side by side, and neither touches what is the other's."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.doors.command import REPOSITORY
from tests.slurm.cluster import Cluster
from tests.slurm.runs import SLOW, every_step, job_id, status, wait_for_step

PACKAGES = "import hydra, importlib.util; assert importlib.util.find_spec('torch')"
USER = "nobody"  # an ordinary user that every machine has
SWEEP = [
    *SLOW,
    "cluster.nodes=1",
    "cluster.cpu_workers=1",
    "train.steps=15",
    "optim.lr=1e-3,3e-4",
    "run.name=sweep",
    "-m",
]


@dataclass(frozen=True)
class Other:
    """The second user, at work in a directory of their own."""

    home: Path
    python: str
    environment: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        account = pwd.getpwnam(USER)
        return subprocess.Popen(
            [self.python, "-m", "hpc_train", *arguments], cwd=self.home, env=self.environment, umask=0o077,
            user=account.pw_uid, group=account.pw_gid, extra_groups=[],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def hpc_train(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=240)
        return process.returncode, output


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Other]:
    if os.geteuid() != 0:
        pytest.skip("a second user takes root")
    home = Path(tempfile.mkdtemp(prefix="hpc_train-user-"))
    shutil.chown(home, USER, pwd.getpwnam(USER).pw_gid)
    packages = os.pathsep.join([str(REPOSITORY), *(path for path in sys.path if path.endswith("-packages"))])
    own = {"HOME": str(home), "USER": USER, "LOGNAME": USER, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**cluster.environment, **own}
    # root's own Python may lie where nobody else may go; the system's of the same version serves as well
    same = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    for python in filter(None, (sys.executable, same)):
        user = Other(home, python, environment)
        try:
            works = subprocess.run([python, "-c", PACKAGES], env=environment, user=USER, group="nogroup", check=False)
        except OSError:
            continue
        if works.returncode == 0:
            break
    else:
        shutil.rmtree(home)
        pytest.skip(f"{USER} may use no Python with our packages here")
    yield user
    shutil.rmtree(home)


@pytest.mark.long_form(60)
def test_two_sweeps_side_by_side(cluster: Cluster, other: Other, tmp_path: Path) -> None:
    code, output = other.hpc_train(*SWEEP)
    assert code == 2, output
    assert "you have no account on this cluster" in output
    assert not (other.home / "outputs").exists()
    cluster.call("sacctmgr", "-iQ", "add", "user", USER, "account=research", "DefaultAccount=research")
    mine, theirs = cluster.start(*SWEEP, cwd=tmp_path), other.start(*SWEEP)
    runs = [place / "outputs" / "sweep" / number for place in (tmp_path, other.home) for number in ("0", "1")]
    for run in runs:
        wait_for_step(run, 1)
    owners = cluster.call("squeue", "--noheader", "--states=all", "--format=%u %k").stdout
    assert f"root hpc_train:{runs[0].parent}" in owners
    assert f"{USER} hpc_train:{runs[2].parent}" in owners
    code, listed = other.hpc_train("status", "--json")
    assert code == 0, listed
    assert str(other.home) in listed
    assert str(tmp_path) not in listed
    assert {row["run"] for row in status(cluster, tmp_path)} >= {str(runs[0]), str(runs[1])}
    with tempfile.TemporaryDirectory() as group:
        Path(group).chmod(0o755)
        (Path(group) / "sweep").mkdir()
        code, refused = other.hpc_train(*SWEEP, f"run.root={group}")
    assert code == 2, refused
    assert f"{group}/sweep belongs to root, and you have no permission to write to it\n  set in: run.name" in refused
    code, refused = other.hpc_train("cancel", str(runs[0].parent))
    assert code == 2, refused
    assert "Traceback" not in refused
    for process in (mine, theirs):
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    for run, user in zip(runs, ("root", "root", USER, USER), strict=True):
        assert every_step(run) == list(range(1, 16))
        assert {path.owner() for path in run.rglob("*")} == {user}
    open_to_others = [path for path in runs[2].rglob("*") if path.stat().st_mode & 0o077 and not path.is_symlink()]
    assert not open_to_others, "their umask is kept"
    assert job_id(runs[0]).partition("_")[0] != job_id(runs[2]).partition("_")[0]
