"""Where a user id has no name, as in a container started with ``--user``."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from hpc_train.config.run_path import run_directory
from hpc_train.errors import UserError
from hpc_train.machine.allocation import current_allocation
from hpc_train.report.monitoring.exporter import identity_of
from hpc_train.run.directory import RunDirectory
from hpc_train.schedulers.slurm.site import begin_site
from hpc_train.users import name_of_user, own_name, user_cache


def test_everything_works_without_a_name_and_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*arguments: object) -> None:
        raise KeyError("getpwuid(): uid not found: 5001")

    monkeypatch.setattr(pwd, "getpwuid", raises)
    monkeypatch.setattr("os.getuid", lambda: 5001)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert (own_name(), name_of_user(5001)) == ("5001", "user 5001")
    assert identity_of(RunDirectory(tmp_path), current_allocation({})).labels["user"] == "5001"
    asked: list[str] = []
    begin_site(asked.extend)()
    assert "user=5001" in asked
    assert user_cache().is_dir()
    monkeypatch.setattr("os.access", lambda *arguments: False)
    monkeypatch.setattr("os.geteuid", lambda: -1)
    with pytest.raises(UserError, match=f"belongs to user {tmp_path.stat().st_uid},"):
        run_directory(str(tmp_path.parent), tmp_path.name)
