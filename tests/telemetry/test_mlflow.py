"""MLflow: one run over all attempts, each step once, on a stand-in server and, in the long form, on a real one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import pytest

from hpc_train.commands import sync
from hpc_train.config.schema import MlflowConfig
from hpc_train.config.values import server_uri
from hpc_train.errors import UserError
from hpc_train.run.freeze import load
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.sinks.replay import BACKENDS, Replay
from hpc_train.telemetry.sinks.tracker import Session
from tests.telemetry import mlflow_service
from tests.telemetry.test_wandb import logged
from tests.train.runs import frozen


@pytest.mark.long_form(8)  # test_trackers.py has the lines of two attempts, test_wandb.py sends them
def test_two_attempts_and_a_rollback_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mlflow_service.service() as server:
        follow_a_run(tmp_path, server.url, monkeypatch, capsys)
        assert [(one["step"], one["value"]) for one in server.metrics if one["key"] == "loss"] == LOSSES
        assert [name.rpartition("/artifacts/")[2] for name in server.files] == ["samples/step-00000007.txt"]
        assert [params["train.steps"] for params in server.params.values()] == ["7"]
        assert [run["status"] for run in server.runs.values()] == ["FINISHED"]
        assert [run["run_name"] for run in server.runs.values()] == ["run"]


LOSSES = [(1, 1.0), (2, 2.0), (3, 3.1), (4, 4.1), (5, 5.0), (6, 0.5), (7, 0.5)]


def follow_a_run(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first attempt is sent by ``sync``, with a rollback; the second one while it trains; then nothing is new."""
    run = frozen(tmp_path / "run", "+strategy=single", f"telemetry.mlflow.uri={url}", "train.steps=7")
    run.update_record(total_steps=7)
    logged(run, 0, [1, 2, 3, 4, 3, 4, 5])
    assert sync.main([str(run.path), "--to", "mlflow"]) == 0
    assert "run: sent 5 lines, up to step 5" in capsys.readouterr().out
    (run.path / "tracking" / "mlflow.json").unlink()  # as if the process had been killed: the server knows
    attempt = MetricsLog(run, 1)
    for step in (5, 6, 7):
        attempt.write({"step": step, "time": 1e9, "attempt": 1, "loss": 0.5})
    attempt.text(7, "samples", "text")
    follower = Replay(run, BACKENDS["mlflow"](Session(load(run), run, first_attempt=1)))
    follower.send_new()
    follower.finish()
    assert sync.main([str(run.path), "--to", "mlflow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sent"] == 0


def test_the_address_must_be_that_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for uri, word in [
        ("auto", "not set"),
        ("mlruns", "file store"),
        ("file:///m", "file store"),
        ("sqlite:///a", "lock"),
    ]:
        with pytest.raises(UserError, match=word):
            server_uri(MlflowConfig(uri=uri))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example.org")
    assert server_uri(MlflowConfig(uri="auto")) == "https://mlflow.example.org"
    assert server_uri(MlflowConfig(uri="http://other:5000")) == "http://other:5000"


def test_a_server_that_does_not_respond_is_a_message_of_sync(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        uri = f"http://127.0.0.1:{free.getsockname()[1]}"
    run = frozen(tmp_path / "run", "+strategy=single", f"telemetry.mlflow.uri={uri}")
    logged(run, 0, [1])
    assert sync.main([str(run.path), "--to", "mlflow"]) == 1
    assert "does not respond" in capsys.readouterr().err


@contextmanager
def real_server(folder: Path) -> Iterator[str]:
    """A real server with SQLite, which mlflow-skinny does not have."""
    try:
        metadata.version("mlflow")
    except metadata.PackageNotFoundError:
        pytest.skip("needs the extra ci")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    with (
        (folder / "server.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True) as server,
    ):
        try:
            until = time.monotonic() + 240
            while time.monotonic() < until:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.5)
            yield url
        finally:
            os.killpg(server.pid, 15)


@pytest.mark.long_form(40)  # the stand-in above
def test_a_real_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mlflow.tracking import MlflowClient

    with real_server(tmp_path) as url:
        follow_a_run(tmp_path, url, monkeypatch, capsys)
        client = MlflowClient(url)
        experiment = client.get_experiment_by_name("hpc_train")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        assert sorted((one.step, one.value) for one in history) == LOSSES
        assert run.info.status == "FINISHED" and run.data.params["train.steps"] == "7"
