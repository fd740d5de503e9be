"""Seeded damage of every small file of a run directory: it is the right run, or one clear message and exit code 2.

Each case flips a bit of one file, truncates it, empties it, fills it with zeros or removes it, and then calls the
commands that read the directory and what an agent does before it trains.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_train import cli
from hpc_train.checkpoint.store import furthest_saved
from hpc_train.commands import agent
from hpc_train.config.schema import Config
from hpc_train.elastic.nodes import NodeFailures
from hpc_train.errors import UserError
from hpc_train.preflight.bandwidth import read_fabric
from hpc_train.run import freeze as freezing
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from tests.doors.recorded import recorded_run

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
    monkeypatch.setattr(freezing, "SETTLE_S", 0.0)
    monkeypatch.setattr(agent, "reexec_from_snapshot", lambda run: None)
    monkeypatch.setattr(agent, "run_agent", lambda run, begun: started.append(run) or 0)
    yield started


def test_damage_is_the_right_run_or_one_message(
    trained: RunDirectory, tmp_path: Path, agents: list[RunDirectory], capfd: pytest.CaptureFixture[str]
) -> None:
    truth = Truth(trained)
    names = [path.relative_to(trained.path) for path in small_files(trained)]
    assert {"config.yaml", "run.json", "run.copy.json", "fabric.json"} <= {str(name) for name in names}
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


def test_a_record_lost_with_its_copy_is_rebuilt_from_the_events(
    trained: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case damages both files, and every second one the events as well: it is the right run, or a refusal."""
    truth, run = Truth(trained), RunDirectory(tmp_path / "one")
    shutil.copytree(trained.path, run.path, symlinks=True)
    monkeypatch.setattr(freezing, "SETTLE_S", 0.0)
    files = [run.path / "run.json", run.path / "run.copy.json"]
    intact = {path: path.read_bytes() for path in [*files, *run.events.glob("*.jsonl")]}
    refused = 0
    for seed in range(12 if CASES == 1 else 200):
        choose = random.Random(seed)
        for path in intact if seed % 2 else files:
            damaged = choose.choice(DAMAGES)(intact[path], choose)
            path.unlink(missing_ok=True) if damaged is None else path.write_bytes(damaged)
        try:
            truth.check(run)
        except UserError as error:
            refused += 1
            assert seed % 2 and error.where and error.fix, f"seed {seed}: {error}"
        for path, data in intact.items():
            path.write_bytes(data)
    assert refused, "the damage of an event is among the cases"
    for path in files:
        path.unlink()
    run.update_record()
    assert [read_record_of(path) for path in files] == [read_record_of(trained.path / "run.json")] * 2, (
        "it restores both"
    )


def read_record_of(path: Path) -> dict[str, object]:
    """Returns what stays the same during a start of the workers."""
    record: dict[str, object] = json.loads(path.read_bytes())
    return {key: record[key] for key in ("run_id", "created", "code", "snapshot", "versions", "config_hash")}
