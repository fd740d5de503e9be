"""``checkpoint list|verify|export|import`` as a person calls them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train import cli
from hpc_train.checkpoint import transfer
from hpc_train.checkpoint.manifest import METADATA
from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.made import commit, quiet_bar
from tests.checkpoint.test_hostile import seal
from tests.doors.command import TINY, hpc_train
from tests.ranks import run_ranks

HERE = ["cluster=local", "cluster.cpu_workers=2", "cluster.gpus_per_node=0", *TINY, "data.vocab_size=64"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Three checkpoints, of steps 1, 2 and 3."""
    run = RunDirectory(tmp_path / "outputs/mine")
    for step in (1, 2, 3):
        commit(run, step, {"model.weight": torch.full((40, 10), float(step))})
    return run


def flip_a_bit(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def everything(path: Path) -> list[tuple[str, int, int, bytes]]:
    """What lies below ``path``, with times of change: access times aside, the whole state."""
    found = sorted(path.rglob("*"))
    return [
        (str(file), file.stat().st_mtime_ns, file.stat().st_ctime_ns, file.read_bytes() if file.is_file() else b"")
        for file in found
    ]


def test_list_and_verify_tell_and_write_nothing(tmp_path: Path, run: RunDirectory, called: Callable[..., Any]) -> None:
    flip_a_bit(run.checkpoints / "step-00000002")
    (run.checkpoints / "step-00000003/manifest.json").unlink()
    shutil.copytree(run.checkpoints / "step-00000002", run.checkpoints / "bad.step-00000001.attempt-000")
    before = everything(tmp_path)
    listed = hpc_train("checkpoint", "list", "mine", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    _, *lines = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "1"]
    assert ["intact (sizes checked)" in line for line in lines] == [True, True, False, False]
    assert "set aside as bad.step-00000001.attempt-000" in lines[3]
    assert "manifest.json: No such file" in lines[2] and "KiB" in lines[0]
    verified = called("checkpoint", "verify", str(run.path), "--json")
    assert verified.returncode == 1, verified.stderr
    first, second, third = json.loads(verified.stdout)
    assert first["problem"] is None and first["compared"] == "all bytes" and first["bytes"] > 1600
    assert "the content does not match its checksum" in second["problem"]
    assert "manifest.json" in third["problem"] and third["bytes"] is None
    one = called("checkpoint", "verify", "mine", "--step", "1")
    assert one.returncode == 0 and "intact (all bytes checked)" in one.stdout
    assert everything(tmp_path) == before


def look_as_somebody_else(rank: int, world_size: int, path: str) -> list[int]:
    """Exit codes of list and verify: as the owner, and as a user who may only read."""
    codes = []
    for _ in range(2):
        codes += [cli.run(["checkpoint", action, path, "--json"]) for action in ("list", "verify")]
        if os.geteuid() == 0:
            os.setuid(65534)
    return codes


def test_metadata_with_code_is_damage(
    run: RunDirectory, called: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all checksums are right, which anybody can compute. Nothing of it is executed."""
    checkpoint = run.checkpoints / "step-00000001"
    (checkpoint / METADATA).write_bytes(b"cos\ngetpid\n.")
    seal(checkpoint)
    verified = called("checkpoint", "verify", str(run.path), "--json")
    problems = [found["problem"] for found in json.loads(verified.stdout)]
    assert verified.returncode == 1
    assert problems[1:] == [None, None]
    assert problems[0].endswith("it refers to os.getpid, which is not on the allow-list")
    monkeypatch.setattr(transfer, "_model", lambda run: (GPTConfig(), 8))
    with pytest.raises(UserError, match=r"os.getpid, which is not on the allow-list"):
        transfer.export(run, 1, run.path / "x.pt", "pt", None, quiet_bar)


def test_list_and_verify_need_no_right_to_write(run: RunDirectory) -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs = Path(folder) / "theirs"
        shutil.copytree(run.path, theirs)
        for path in (Path(folder), theirs, *theirs.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = everything(theirs)
        assert run_ranks(1, look_as_somebody_else, str(theirs)) == [[0] * 4]
        assert everything(theirs) == before
        for path in (Path(folder), theirs, *theirs.rglob("*")):
            path.chmod(0o755)


@pytest.mark.long_form(15)  # the commands have tests of their own in test_hf
def test_the_imported_weights_start_a_run(tmp_path: Path, called: Callable[..., Any]) -> None:
    """A run, its export, the import of that and a run that starts there, each by its command."""
    trained = hpc_train("+strategy=pp", *HERE, "run.name=mine", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    exported = called("checkpoint", "export", "mine", "--to", "llama")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith("step 6, ") and "from_pretrained('llama')" in exported.stdout
    assert sorted(os.listdir(tmp_path / "llama")) == ["config.json", "model.safetensors"]  # noqa: PTH208
    done = called("checkpoint", "import", "llama", "--to", "pretrained", "--json")
    assert done.returncode == 0, done.stderr
    assert "model.sliding_window=null" in json.loads(done.stdout)["overrides"]
    listed = called("checkpoint", "list", "pretrained")
    assert "imported" in listed.stdout
    first = ["+strategy=dp", *HERE, "run.name=pretrained"]
    refused = called(*first)
    assert refused.returncode == 2 and "run.name=pretrained run.fork=NEW" in refused.stderr
    refused = called(*first, "run.fork=tuned", "model.rope_theta=5e5")
    assert refused.returncode == 2 and "model.rope_theta: 10000.0 in the import" in refused.stderr
    refused = called(*first, "run.fork=tuned", "model=gpt_124m")
    assert refused.returncode == 2 and "model.vocab_size: 64 in the import" in refused.stderr
    without = [override for override in first if not override.startswith("model.")]  # the import knows its model
    tuned = hpc_train(*without, "run.fork=tuned", "optim=sgd", cwd=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    events = RunDirectory(tmp_path / "outputs/tuned").read_events()
    assert [event["step"] for event in events if event["event"] == "resumed"] == [0]
    last = RunDirectory(tmp_path / "outputs/mine").read_metrics()[-1]["loss"]
    begun = RunDirectory(tmp_path / "outputs/tuned").read_metrics()[0]["loss"]
    assert abs(begun - last) < 0.5  # goes on where the first ended


def test_wrong_calls_are_refused(tmp_path: Path, run: RunDirectory, called: Callable[..., Any]) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        (["list", "nothing"], "no run with checkpoints in nothing"),
        (["verify", "mine", "--step", "9"], "no checkpoint of step 9"),
        (["export", "mine"], "--to"),
        (["export", "mine", "--to", "x", "--checkpoint", "best", "--step", "1"], "not allowed with argument"),
        (["import", "empty", "--to", "new"], "config.json"),
        (["import", "empty", "--to", "../new"], "is not a valid run name"),
        (["sell", "mine"], "checkpoint does not accept 'sell'"),
    ):
        done = called("checkpoint", *arguments)
        assert done.returncode == 2, done
        assert words in done.stderr and "Traceback" not in done.stderr
