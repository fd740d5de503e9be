"""W&B: it records offline, and one that fails, hangs or is absent costs the training nothing."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.commands import sync
from hpc_train.config.schema import Config, TelemetryConfig, WandbConfig
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.sinks import follow, wandb
from hpc_train.telemetry.sinks.replay import BACKENDS, Replay
from hpc_train.telemetry.sinks.tracker import Session
from hpc_train.telemetry.sinks.tracking import wanted
from hpc_train.telemetry.sinks.wandb import Wandb, not_sent_notice, resolve_mode
from tests.doors.schema import check_output
from tests.telemetry import wandb_service
from tests.train.runs import frozen


def backend(path: Path, checkpoint: Any = None) -> Wandb:
    config = Config(telemetry=TelemetryConfig(wandb=WandbConfig(mode="offline", project="p")))
    return Wandb(Session(config, RunDirectory(path), first_attempt=1, checkpoint=checkpoint))


class FakeRun:
    """What the fake module's ``init`` returns."""

    def __init__(self, url: str | None = "https://example.org/abc123") -> None:
        self.url = url
        self.lines: list[dict[str, Any]] = []
        self.defined: list[tuple[str, dict[str, Any]]] = []
        self.artifacts: list[Any] = []
        self.finished = False

    def define_metric(self, name: str, **more: Any) -> None:
        self.defined.append((name, more))

    def log(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def log_artifact(self, artifact: Any) -> None:
        self.artifacts.append(artifact)

    def finish(self) -> None:
        self.finished = True


class FakeArtifact:
    def __init__(self, name: str, type: str) -> None:
        self.name, self.type, self.folders = name, type, []  # type: ignore[var-annotated]

    def add_dir(self, folder: str) -> None:
        self.folders.append(folder)


def install(monkeypatch: pytest.MonkeyPatch, init: Any) -> None:
    own = {"init": init, "teardown": lambda: None}
    module = SimpleNamespace(**own, Settings=lambda **settings: settings, Artifact=FakeArtifact)
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_offline_records_the_lines_of_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, asked = FakeRun(), {}

    def init(**settings: Any) -> FakeRun:
        asked.update(settings)
        return fake

    install(monkeypatch, init)
    run, client = RunDirectory(tmp_path), backend(tmp_path, lambda: tmp_path)
    replay = Replay(run, client)
    replay.send_new()
    assert not asked, "W&B starts when there is a line"
    logged(run, 0, [1, 2])  # by an earlier job
    logged(run, 1, [1, 2, 3])
    replay.send_new()
    logged(run, 2, [2, 3])
    replay.send_new()
    replay.finish()
    assert [line["step"] for line in fake.lines] == [1, 2, 3, 2, 3]
    assert ("*", {"step_metric": "step"}) in fake.defined
    assert (asked["id"], asked["resume"], asked["mode"], asked["project"]) == (tmp_path.name, "allow", "offline", "p")
    assert asked["settings"]["x_stats_pid"] == os.getppid(), "system metrics are those of the agent and its workers"
    assert fake.artifacts[0].folders == [str(tmp_path)]
    assert fake.finished
    assert client.outcome() == {"mode": "offline", "url": fake.url}


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_sweep_of_the_shell_gives_no_id_to_the_run_unless_its_agent_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_agent: bool
) -> None:
    seen: list[str | None] = []

    def init(**settings: Any) -> FakeRun:
        seen.append(os.environ.get("WANDB_SWEEP_ID"))
        return FakeRun()

    install(monkeypatch, init)
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    monkeypatch.setenv("WANDB_RUN_ID", "left1")
    parameters = tmp_path / "config-left1.yaml"
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(parameters))
    if by_agent:
        parameters.touch()
    backend(tmp_path).open()
    assert seen == ["abc" if by_agent else None]
    word = "the agent of the sweep abc gives the run the id left1" if by_agent else "WANDB_SWEEP_ID is not used"
    assert word in capsys.readouterr().out


@pytest.mark.usefixtures("no_account")
def test_the_service_gets_each_step_of_two_attempts_and_a_rollback_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first attempt is sent by ``sync``, with a rollback; the second one while it trains."""
    run = frozen(tmp_path / "run", "+strategy=single")
    logged(run, 0, [1, 2, 3, 4, 3, 4, 5], lr=0.1)  # step 3 and 4 are done again
    with wandb_service.service() as receiver:
        for name in ("CONFIG", "CACHE", "DATA"):
            monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
        assert sync.main([str(run.path)]) == 1  # without a key
        assert "there is no API key" in capsys.readouterr().err
        monkeypatch.setenv("WANDB_BASE_URL", receiver.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        assert sync.main([str(run.path)]) == 0
        assert receiver.steps() == [1, 2, 3, 4, 5]
        assert "sent 5 lines, up to step 5" in capsys.readouterr().out
        assert [line["loss"] for _, line in sorted(receiver.history.items())] == [1.0, 2.0, 3.1, 4.1, 5.0]
        (run.path / "tracking" / "wandb.json").unlink()  # as if the attempt had been killed: the service knows
        replay = Replay(run, BACKENDS["wandb"](Session(with_online(load(run)), run, first_attempt=1)))
        logged(run, 1, [5, 6, 7])
        replay.send_new()
        replay.finish()
        assert receiver.steps() == [1, 2, 3, 4, 5, 6, 7]
        assert sync.main([str(run.path), "--json"]) == 0
        printed = capsys.readouterr().out.splitlines()[-1]
        check_output(["sync"], printed)
        assert json.loads(printed)["sent"] == 0
        assert receiver.steps() == [1, 2, 3, 4, 5, 6, 7]
        assert not (run.path / "wandb").exists(), "only offline runs have files that are sent later"


def logged(run: RunDirectory, attempt: int, steps: list[int], **values: float) -> None:
    """Writes metrics as an attempt without trackers does; the loss tells how often a step was done before."""
    log, done = MetricsLog(run, attempt), dict.fromkeys(steps, 0)
    for step in steps:
        log.write({"step": step, "time": 1e9 + step, "attempt": attempt, "loss": step + 0.1 * done[step], **values})
        done[step] += 1
    log.close()


def with_online(config: Config) -> Config:
    return replace(config, telemetry=replace(config.telemetry, wandb=WandbConfig(mode="online")))


def fail(**settings: Any) -> None:
    raise RuntimeError("no such project")


def leave(**settings: Any) -> None:
    sys.exit(3)


def hang(**settings: Any) -> None:
    time.sleep(1)


def followed(path: Path, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60) -> tuple[str, list[Any]]:
    """Returns the one message about a run of three steps that cannot be sent, and the outcomes that were recorded."""
    monkeypatch.setattr(follow, "FIRST_EVERY_S", 0.01)
    told: list[str] = []
    recorded: list[Any] = []
    run = RunDirectory(path)
    logged(run, 1, [1, 2, 3])
    follower = follow.Follower(Replay(run, backend(path)), told.append, lambda *outcome: recorded.append(outcome))
    follower.start()
    follower.end.set()
    follower.join(time.monotonic() + limit_s, limit_s)
    (message,) = told
    return message, recorded


@pytest.mark.parametrize(
    ("init", "word"),
    [(fail, "no such project"), (leave, "SystemExit"), (hang, "it did not finish in 0.3 s"), (None, "wandb")],
)
def test_a_failure_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: Any, word: str) -> None:
    install(monkeypatch, init)
    if init is None:  # the package is missing
        monkeypatch.setitem(sys.modules, "wandb", None)
    message, recorded = followed(tmp_path, monkeypatch, limit_s=0.3 if init is hang else 60)
    assert word in message and f"python -m hpc_train sync {tmp_path} --to wandb" in message
    assert [(name, word in outcome["problem"]) for name, outcome in recorded] == [("wandb", True)]


def test_a_file_of_the_user_with_the_name_of_the_client_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own" / "wandb.py"
    own.parent.mkdir()
    own.write_text("")
    monkeypatch.syspath_prepend(str(own.parent))
    monkeypatch.setitem(sys.modules, "wandb", None)
    del sys.modules["wandb"]  # what is imported instead is removed after the test
    message, _ = followed(tmp_path, monkeypatch)
    assert f"{own} shadows the package wandb" in message and f"rename {own}" in message
    assert "\n" not in message


@pytest.fixture
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def service() -> Iterator[str]:
    """Answers every question with 404."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.usefixtures("no_account")
def test_auto_is_online_only_if_the_environment_says_so(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", service)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert [resolve_mode(mode, None) for mode in ("auto", "disabled", "online")] == ["disabled", "disabled", "online"]
    monkeypatch.setenv("WANDB_MODE", "online")
    assert resolve_mode("auto", None) == "online"
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    assert resolve_mode("auto", None) == "offline"
    monkeypatch.delenv("WANDB_API_KEY")
    told: list[str] = []
    assert resolve_mode("online", None, told.append) == "offline"
    assert f"there is no API key for {service}; wandb login stores one; recording offline" in told[0]


@pytest.mark.usefixtures("no_account")
def test_a_run_that_was_online_stays_online(monkeypatch: pytest.MonkeyPatch, service: str, tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single", "telemetry.wandb.mode=auto")
    config = load(run)
    assert wanted(config.telemetry, run) == []
    run.update_record(wandb={"mode": "offline", "url": None})  # as versions before 0.9 recorded a run without a key
    assert wanted(config.telemetry, run) == []
    run.update_record(wandb={"mode": "online", "url": "https://example.org/abc123"})
    assert wanted(config.telemetry, run) == ["wandb"]
    install(monkeypatch, lambda **settings: FakeRun(url=None))
    client = BACKENDS["wandb"](Session(config, run, lambda message: None, first_attempt=1))  # a job without a key
    client.open()
    assert client.outcome() == {"mode": "offline", "url": "https://example.org/abc123"}
    run.update_record(wandb=client.outcome())
    monkeypatch.setenv("WANDB_BASE_URL", service)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_mode("auto", run.record()["wandb"]) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wanted(config.telemetry, run) == []


@pytest.mark.usefixtures("no_account")
def test_a_user_with_a_key_reads_that_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    auto = WandbConfig()
    assert not_sent_notice(auto) is None, "without a key there is nothing to tell"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    line = not_sent_notice(auto)
    assert line is not None and "\n" not in line
    assert "nothing is sent, although there is a key for https://api.wandb.ai; telemetry.wandb.mode=online" in line
    assert "metrics, config, versions, paths" in line
    assert not_sent_notice(auto, {"mode": "online"}) is None
    assert not_sent_notice(WandbConfig(mode="disabled")) is None
    for mode, told in (("online", False), ("disabled", False), ("sometimes", True)):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert ("WANDB_MODE is 'sometimes'" in (not_sent_notice(auto) or "")) == told


@pytest.mark.usefixtures("no_account")
def test_wandb_does_not_see_an_unknown_mode_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=_refuses_the_mode, Settings=dict))
    recorded = backend(tmp_path)
    assert recorded.open()
    assert recorded.mode == "offline"


def _refuses_the_mode(**_: object) -> FakeRun:
    assert "WANDB_MODE" not in os.environ  # wandb validates it, even beside the argument ``mode``
    return FakeRun()


@pytest.mark.usefixtures("no_account")
def test_online_is_offline_when_the_service_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "ANSWER_S", 0.3)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert resolve_mode("online", None, told.append) == "offline"
    assert "did not respond" in told[0]
