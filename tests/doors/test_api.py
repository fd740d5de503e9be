"""The Python API: a run is submitted from this process and read back."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import hpc_train
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import write_json
from tests.data.chats import write_chat_model
from tests.doors.command import TINY, environment
from tests.warm_parents import HUGGING_FACE, with_server


@pytest.fixture(autouse=True)
def fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs go below a directory of the test; the environment is that of a fresh shell."""
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def test_importing_the_package_is_cheap_and_the_api_needs_no_torch() -> None:
    script = (
        "import sys, hpc_train\n"
        "assert not {'torch', 'hydra', 'submitit'} & set(sys.modules)\n"
        "assert hpc_train.submit and hpc_train.Run and hpc_train.UserError\n"
        "assert not {'torch', 'wandb'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_submitted_run_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # in a notebook rich shows what it does not write
    run = hpc_train.submit(["+strategy=dp", *TINY, "cluster=local", "cluster.cpu_workers=2", "run.name=one"])
    assert capsys.readouterr().out == ""
    assert isinstance(run, hpc_train.Run)
    assert run.path == tmp_path / "outputs" / "one"
    status = run.wait(timeout=200)
    assert (status.state, status.exit_code, status.step, status.message) == ("done", 0, 6, "")
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    columns = run.columns("step", "loss")
    assert list(columns) == ["step", "loss"]
    assert columns["loss"] == [line["loss"] for line in run.metrics()]
    assert {event["event"] for event in run.events("finished")} == {"finished"}
    assert len(run.events()) > len(run.events("finished"))
    assert [(found.step, found.problem) for found in run.checkpoints()] == [(6, None)]
    assert run.result is not None
    assert run.result["steps"] == 6
    record = RunDirectory(run.path).record()
    write_json(run.path / "run.json", record | {"total_steps": 9})  # what an attempt with more steps does at its start
    assert run.result is None, "that of the shorter run"
    write_json(run.path / "run.json", record)
    assert run.config.train.steps == 6
    assert run.cancel() is False
    assert hpc_train.Run("one").path == run.path


@pytest.mark.parametrize(
    ("name", "steps", "export"),
    [("fine_tuning", "train.epochs=0.03", "sums-model"), ("lora", "train.steps=2", "adapter")],
)
@pytest.mark.long_form(45)  # the commands of docs/howto/huggingface.md do the same
def test_the_examples_of_hugging_face_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: str, export: str
) -> None:
    for variable, value in with_server(os.environ, HUGGING_FACE).items():
        monkeypatch.setenv(variable, value)
    write_chat_model(tmp_path / "model")
    small = ["cluster=local", "cluster.cpu_workers=2", "batch.global_size=8", "telemetry.wandb.mode=disabled"]
    small += ["data.sequence_length=64", *(["data.pattern=json/*.py"] if name == "lora" else [])]
    importlib.import_module(f"examples.{name}").main(str(tmp_path / "model"), *small, steps)
    assert any((tmp_path / export).glob("*.safetensors"))


def test_a_run_can_be_cancelled(tmp_path: Path) -> None:
    steps = [part for part in TINY if not part.startswith("train.steps")]
    run = hpc_train.submit(["+strategy=single", *steps, "cluster=local", "train.steps=1000000", "run.name=long"])
    assert isinstance(run, hpc_train.Run)
    with pytest.raises(TimeoutError, match="outputs/long is "):
        run.wait(timeout=0.1)
    try:
        deadline = time.monotonic() + 200
        while not run.metrics():
            assert time.monotonic() < deadline, run.status()
            time.sleep(0.2)
    finally:  # a run that is left would hold its cores for ever
        cancelled = run.cancel()
    assert cancelled is True
    assert run.wait(timeout=200).exit_code == 75


@pytest.mark.long_form(9)  # the commands of sweeps are tested as such
def test_a_sweep_gives_a_list_of_runs() -> None:
    few = ["cluster=local", "cluster.cpu_workers=1", "train.steps=2", "run.name=sweep"]
    runs = hpc_train.submit(["+strategy=single", *TINY, *few, "optim.lr=1e-3,3e-4"], detach=False)
    assert isinstance(runs, list)
    assert [run.config.optim.lr for run in runs] == [1e-3, 3e-4]
    assert [run.status().exit_code for run in runs] == [0, 0]
    assert [run.path for run in hpc_train.find_runs("sweep")] == [run.path for run in runs]
    with pytest.raises(hpc_train.UserError, match="has 2 runs"):
        hpc_train.Run("sweep")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [(["batch.global_size=0"], "global_size"), (["-m"], "-m is an option"), (["launch.dry_run=true"], "no dry run")],
)
def test_a_mistake_is_a_user_error_and_writes_nothing(tmp_path: Path, overrides: list[str], what: str) -> None:
    with pytest.raises(hpc_train.UserError, match=what):
        hpc_train.submit([*overrides, "cluster=local"])
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_exist_is_a_user_error() -> None:
    with pytest.raises(hpc_train.UserError, match="no run or sweep found in nothing"):
        hpc_train.Run("nothing")


@pytest.mark.parametrize("overrides", ["optim.lr=1", [5], 5, None, {"optim.lr": 1}, (text for text in ("optim.lr=1",))])
def test_overrides_that_are_no_list_of_texts_are_refused(overrides: object) -> None:
    with pytest.raises(hpc_train.UserError, match="not a list of strings"):
        hpc_train.submit(overrides)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"entry": 3}, "the entry is 3, which workers cannot import"),
        ({"entry": functools.partial(print)}, "which workers cannot import by a name"),
        ({"args": [1]}, r"args is \[1\], not a dict"),
        ({"args": {"a b": 1}}, "args has the name 'a b'"),
        ({"config_dir": 5}, "config_dir is 5, not a path"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(hpc_train.UserError, match=what):
        hpc_train.submit([], **arguments)
