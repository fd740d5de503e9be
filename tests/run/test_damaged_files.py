"""A run directory whose small files were changed or damaged is the same run, or refused with one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.run import freeze as freezing
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from tests.config.composing import config_of


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


DAMAGES = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "not JSON": lambda data: b"\xff" + data,
    "another list": lambda data: b"[1]",
    "deep": lambda data: b"[" * 100_000,
    "changed": lambda data: data.replace(b'"run_id": "', b'"run_id": "0'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_restored_from_its_copy(
    run: RunDirectory, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, before = run.path / "run.json", run.record()
    data = path.read_bytes()
    damaged = DAMAGES[damage](data)
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
