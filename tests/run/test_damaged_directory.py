"""Damaged, hand-edited and foreign files of a run: it is the right run, or one message."""

from __future__ import annotations

import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from hpc_train import cli
from hpc_train.checkpoint.listing import list_checkpoints
from hpc_train.checkpoint.manifest import FORMAT, METADATA, BadCheckpoint, FileEntry, Manifest, decode
from hpc_train.checkpoint.store import furthest_saved
from hpc_train.commands import agent, status
from hpc_train.config.schema import Config
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.errors import UserError
from hpc_train.preflight.bandwidth import read_fabric
from hpc_train.run import freeze as freezing
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json
from hpc_train.run.freeze import freeze, load
from hpc_train.runs.lookup import find_runs
from tests.config.composing import config_of
from tests.doors.recorded import recorded_run
from tests.launch.jobs import make_job

CASES = 1 if "HPC_TRAIN_LONG" not in os.environ else 400  # per file
COMMANDS = (["status"], ["why"], ["checkpoint", "list", "--json"], ["agent"])


def flip(data: bytes, choose: random.Random) -> bytes:
    at = choose.randrange(8 * len(data))
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def truncate(data: bytes, choose: random.Random) -> bytes:
    return data[: choose.randrange(len(data))]


def empty(data: bytes, choose: random.Random) -> bytes:
    return b""


def zeros(data: bytes, choose: random.Random) -> bytes:
    start = choose.randrange(len(data))
    return data[:start] + bytes(len(data) - start)


def remove(data: bytes, choose: random.Random) -> None:
    return None


DAMAGES: tuple[Callable[[bytes, random.Random], bytes | None], ...] = (
    (flip,) * 8 + (truncate,) * 3 + (empty, zeros, remove)
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose checkpoint of step 4 continues with another number of steps."""
    return recorded_run(tmp_path_factory.mktemp("trained") / "one")


def small_files(run: RunDirectory) -> list[Path]:
    found = (path for path in run.path.rglob("*") if path.is_file() and path.stat().st_size)
    left_out = (run.checkpoints, run.logs, run.wandb, run.code, run.compiled)
    return sorted(path for path in found if not any(path.is_relative_to(folder) for folder in left_out))


class Truth:
    """What identifies the run, before any damage."""

    def __init__(self, run: RunDirectory) -> None:
        self.config: Config = load(run)
        record = run.record()
        self.identity = [record.get(key) for key in ("run_id", "forked_from", "created")]
        self.code = frozen_code(run)

    def check(self, run: RunDirectory) -> None:
        """Does what an agent does before it trains; raises UserError where it would refuse the run."""
        assert load(run) == self.config, "another config"
        record = run.record()
        assert [record.get(key) for key in ("run_id", "forked_from", "created")] == self.identity, "another run"
        assert frozen_code(run) == self.code, "other code"
        assert furthest_saved(run) > 0, "would begin at step 0 if its checkpoints disappeared"
        NodeFailures(run, 3600.0)
        read_fabric(run)
        run.newest_attempt()


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunDirectory]]:
    """The runs for which an agent was started."""
    started: list[RunDirectory] = []
    monkeypatch.setattr(agent, "reexec_from_snapshot", lambda run: None)
    monkeypatch.setattr(agent, "run_agent", lambda run, *_, **__: started.append(run) or 0)
    yield started


def test_damage_is_the_right_run_or_one_message(
    trained: RunDirectory, tmp_path: Path, agents: list[RunDirectory], capfd: pytest.CaptureFixture[str]
) -> None:
    truth = Truth(trained)
    names = [path.relative_to(trained.path) for path in small_files(trained)]
    assert {"config.yaml", "run.json"} <= {str(name) for name in names}
    assert {"attempts", "events", "metrics"} <= {name.parts[0] for name in names}
    run = RunDirectory(tmp_path / "one")
    shutil.copytree(trained.path, run.path, symlinks=True)
    wrong: dict[str, str] = {}
    refused = 0
    for number, name in enumerate(names):
        commands = COMMANDS if CASES > 1 else [COMMANDS[number % len(COMMANDS)]]  # each file and each command
        data = (trained.path / name).read_bytes()
        for seed in range(CASES):
            choose = random.Random(f"{name.parts[0]} {seed}")
            damage = choose.choice(DAMAGES)
            damaged = damage(data, choose)
            (run.path / name).unlink()
            if damaged is not None:
                (run.path / name).write_bytes(damaged)
            case = f"{damage.__name__} of {name}, seed {seed}"
            try:
                truth.check(run)
            except UserError as error:
                refused += 1
                if not (error.where and error.fix):
                    wrong[case] = f"a message without advice: {error}"
            except Exception:
                wrong[case] = traceback.format_exc(limit=-3)
            for command in commands:
                try:
                    code = cli.run([*command, str(run.path)])
                except Exception:
                    wrong[f"{' '.join(command)} after {case}"] = traceback.format_exc(limit=-3)
                    continue
                said = capfd.readouterr().err
                if code not in (0, 1, 2) or "Traceback" in said or (code == 2 and not said.strip()):
                    wrong[f"{' '.join(command)} after {case}"] = f"exit code {code}: {said}"
            (run.path / name).write_bytes(data)
    truth.check(run)
    kinds = sorted({text.strip().splitlines()[-1] for text in wrong.values()})
    shown = "\n".join(f"{case}: {text}" for case, text in list(wrong.items())[:8])
    assert not wrong, f"{len(wrong)} of {len(names) * CASES} cases, {kinds}\n{shown}"
    assert refused, "a changed config is among the cases"


def test_the_record_of_a_run_that_has_started_is_rebuilt_from_the_events(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case damages it, and every second one the events as well: it is the right run, or a refusal."""
    truth, run = Truth(trained), RunDirectory(tmp_path / "one")
    shutil.copytree(trained.path, run.path, symlinks=True)
    monkeypatch.setattr(freezing, "SETTLE_S", 0.0)
    assert not (run.path / "run.copy.json").exists(), "the first start has removed it"
    path = run.path / "run.json"
    intact = {path: path.read_bytes() for path in [path, *run.events.glob("*.jsonl")]}
    refused = 0
    for seed in range(12 if CASES == 1 else 200):
        choose = random.Random(seed)
        for file in intact if seed % 2 else [path]:
            damaged = choose.choice(DAMAGES)(intact[file], choose)
            file.unlink(missing_ok=True) if damaged is None else file.write_bytes(damaged)
        try:
            truth.check(run)
        except UserError as error:
            refused += 1
            assert seed % 2 and error.where and error.fix, f"seed {seed}: {error}"
        for file, data in intact.items():
            file.write_bytes(data)
    assert refused, "the damage of an event is among the cases"
    path.unlink()
    run.update_record()
    assert read_record_of(path) == read_record_of(trained.path / "run.json"), "it restores it"


def read_record_of(path: Path) -> dict[str, object]:
    """Returns what stays the same during a start of the workers."""
    record: dict[str, object] = json.loads(path.read_bytes())
    return {key: record[key] for key in ("run_id", "created", "code", "snapshot", "versions", "config_hash")}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freezing, "SETTLE_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "outputs" / "run")
    frozen(run, "train.steps=7")
    return run


def frozen(run: RunDirectory, *arguments: str) -> None:
    freeze(config_of(f"run.root={run.path.parent}", "run.name=run", *arguments), run)


def test_a_changed_config_is_refused_by_all_that_read_it(run: RunDirectory) -> None:
    text = run.config.read_text()
    run.config.write_text(text.replace("lr: 0.003", "lr: 0.9"))
    assert run.config.read_text() != text
    for action in (lambda: load(run), lambda: frozen(run, "train.steps=9")):
        with pytest.raises(UserError, match=r"config\.yaml was changed after the run was frozen") as error:
            action()
        assert "restore the file" in error.value.fix and "run.name" in error.value.fix
    run.config.write_text(text)
    assert load(run).optim.lr == 0.003


def test_every_single_bit_of_the_config_counts(run: RunDirectory) -> None:
    data, right = run.config.read_bytes(), load(run)
    for position in range(0, 8 * len(data), 997):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        run.config.write_bytes(flipped)
        with pytest.raises(UserError, match="was changed after"):
            load(run)
    run.config.write_bytes(data)
    assert load(run) == right


@pytest.mark.parametrize("stops_at", [1, 2, 3])
def test_a_freeze_that_was_interrupted_leaves_a_config_that_loads(
    run: RunDirectory, stops_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException): ...

    writes = []

    write = freezing.write_text

    def counted(path: Path, content: str, mode: int) -> None:
        writes.append(path)
        if len(writes) == stops_at:
            raise Killed
        write(path, content, mode)

    record = RunDirectory.update_record

    def update(self: RunDirectory, **fields: object) -> dict[str, object]:
        writes.append(self.path)
        if len(writes) == stops_at:
            raise Killed
        return record(self, **fields)

    with monkeypatch.context() as patched:
        patched.setattr(freezing, "write_text", counted)
        patched.setattr(RunDirectory, "update_record", update)
        with pytest.raises(Killed):
            frozen(run, "train.steps=9")
    assert load(run).train.steps == (9 if stops_at == 3 else 7)
    frozen(run, "train.steps=9")
    assert load(run).train.steps == 9
    assert run.record()["next_config_hash"] is None


def test_a_missing_config_is_only_replaced_by_the_same(run: RunDirectory) -> None:
    run.metrics_file(0).write_text('{"step": 1}\n')
    text = run.config.read_text()
    run.config.unlink()
    with pytest.raises(UserError, match=r"config\.yaml is missing"):
        frozen(run, "model.dim=64")
    frozen(run, "train.steps=7")
    assert run.config.read_text() == text


RECORD_DAMAGES = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "not JSON": lambda data: b"\xff" + data,
    "another list": lambda data: b"[1]",
    "deep": lambda data: b"[" * 100_000,
    "changed": lambda data: data.replace(b'"run_id": "', b'"run_id": "0'),
}


@pytest.mark.parametrize("damage", RECORD_DAMAGES)
def test_a_damaged_record_is_restored_from_its_copy(
    run: RunDirectory, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = run.path / "run.json", run.record()
    data = path.read_bytes()
    damaged = RECORD_DAMAGES[damage](data)
    assert damaged != data
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    assert run.record() == before
    assert load(run).run.name == "run"
    run.update_record(total_steps=5)
    assert json.loads(path.read_bytes())["total_steps"] == 5
    assert run.record() == before | {"total_steps": 5}
    said = capsys.readouterr().err
    assert said.count("note: ") == 1 and f"{run.path}: run.json is" in said


def test_a_record_without_an_intact_copy_is_refused(run: RunDirectory) -> None:
    (run.path / "run.json").write_bytes(b"{")
    (run.path / "run.copy.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"damaged \(not JSON\), and its copy run\.copy\.json is empty") as error:
        load(run)
    assert "backup" in error.value.fix
    (run.path / "run.json").unlink()
    (run.path / "run.copy.json").unlink()
    with pytest.raises(UserError, match=r"has a config\.yaml but no run\.json"):
        load(run)


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


@pytest.mark.parametrize("metrics", [None, [], "", 0, {"val_loss": "low"}])
def test_a_manifest_whose_metrics_are_not_numbers_is_damaged(metrics: Any) -> None:
    right = replace(MANIFEST, metrics={"val_loss": 1.5})
    assert decode(right.encode()) == right
    with pytest.raises(BadCheckpoint, match="not a manifest"):
        decode(replace(MANIFEST, metrics=metrics).encode())
