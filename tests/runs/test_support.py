"""The file for a maintainer: what it holds, and what it does not."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from hpc_train.commands import doctor
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from tests.train.runs import frozen

Called = Callable[..., CompletedProcess[str]]
SECRETS = {
    "in_config": "canary-of-cluster-env",
    "in_setup": "canary-of-cluster-setup",
    "in_environment": "canary-of-the-environment",
    "in_log": "canary-of-a-log",
    "in_address": "canary-of-an-address",
    "token": "hf_canaryCanaryCanary",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A failed run whose log repeats each secret."""
    run = frozen(
        tmp_path / "outputs" / "run",
        *("+strategy=single", f"+cluster.env.SITE={SECRETS['in_config']}"),
        f"cluster.setup=['export API_KEY={SECRETS['in_setup']}']",
    )
    (run.attempts / "000.json").write_text("{}")
    EventLog.open(run, "agent-n1", 0).write("failed", message=f"no route with {SECRETS['in_environment']}")
    lines = [*SECRETS.values(), f"MY_TOKEN={SECRETS['in_log']}", f"postgres://me:{SECRETS['in_address']}@db/x"]
    lines.remove(SECRETS["in_log"])  # what stands alone cannot be recognized
    lines.remove(SECRETS["in_address"])
    (run.logs / "n1-000.log").write_text("x" * (1 << 18) + "\n" + "\n".join(lines))
    return run


def test_the_file_holds_what_is_needed_and_no_secret(
    run: RunDirectory, tmp_path: Path, called: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.conftest.environment", lambda: {"MY_PASSWORD": SECRETS["in_environment"]})
    monkeypatch.setattr(doctor, "main", lambda arguments: print("ok       disk") or 0)
    listed = called("support", "run", "--list")
    assert listed.returncode == 0, listed.stderr
    assert not list(tmp_path.glob("*.tar.gz"))
    done = called("support", "run", "-o", "it.tar.gz", "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["files"]) == {line.split()[-1] for line in listed.stdout.splitlines()}
    archive = tmp_path / "it.tar.gz"
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as file:
        content = {entry.name: file.extractfile(entry).read().decode() for entry in file}  # type: ignore[union-attr]
    assert set(content) == {
        f"it/{name}"
        for name in (
            *("versions.json", "doctor.txt", "config.yaml", "run.json", "why.txt"),
            *("events/agent-n1-000.jsonl", "logs/n1-000.log"),
        )
    }
    assert [(name, value) for name, text in content.items() for value in SECRETS.values() if value in text] == []
    assert "SITE: (hidden)" in content["it/config.yaml"] and "disk" in content["it/doctor.txt"]
    assert "MY_TOKEN=(hidden)\n" in content["it/logs/n1-000.log"] and "me:(hidden)@db" in content["it/logs/n1-000.log"]
    assert len(content["it/logs/n1-000.log"]) < 1 << 18
    assert called("support", "run", "-o", "it.tar.gz").returncode == 2, "an existing file is kept"


def test_a_run_of_another_user_is_refused(run: RunDirectory, called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_train.commands.support.is_own", lambda path: False)
    refused = called("support", "run")
    assert refused.returncode == 2
    assert "belongs to another user" in refused.stderr and "ask the owner" in refused.stderr
