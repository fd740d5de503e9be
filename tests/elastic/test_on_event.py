"""``run.on_event``: which events the command gets, and that its failures delay and end nothing."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest

from hpc_train.elastic import agent
from hpc_train.elastic.agent import EventCalls, calling
from hpc_train.launch.script import on_event_lines
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.events import Event

EXAMPLES = Path(__file__).parents[2] / "examples"
MESSAGE = "rank 1 on n1: out of memory"


def record(run: RunDirectory, command: str | None, *names: str, is_first: bool = True) -> list[str]:
    """Writes events while ``command`` is called; returns the warnings in the event log."""
    events = EventLog.open(run, "agent-n1", 0)
    with calling(command, run, events, is_first) as heard:
        for name in names:
            heard.of(0).write(name, message=MESSAGE)
    events.close()
    return [event["message"] for event in run.read_events() if event["event"] == "warning"]


def test_the_command_gets_each_event_of_the_first_agent(run: RunDirectory) -> None:
    heard = run.path / "heard"
    command = f'cat >> {heard}; echo "$HPC_TRAIN_RUN_DIR" >> {heard}'
    assert not record(run, command, "started", "failed")
    first, path, second, _ = heard.read_text().splitlines()
    assert path == str(run.path)
    assert [json.loads(first), json.loads(second)] == run.read_events()
    heard.unlink()
    assert not record(run, command, "started", "stop_requested", "gpu_idle", is_first=False)
    assert json.loads(heard.read_text().splitlines()[0])["event"] == "gpu_idle"
    assert len(heard.read_text().splitlines()) == 2
    assert not record(run, None, "started")


class Webhook(http.server.BaseHTTPRequestHandler):
    messages: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_example_posts_the_events_that_matter_to_a_webhook(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HPC_TRAIN_WEBHOOK_URL", f"http://127.0.0.1:{server.server_address[1]}/hooks/secret")
    assert not record(run, f"bash {EXAMPLES / 'webhook.sh'}", "started", "failed")
    server.shutdown()
    server.server_close()
    assert Webhook.messages == [f"{run.path}: failed\n{MESSAGE}\npython -m hpc_train why {run.path}"]
    assert "secret" not in json.dumps(run.read_events())


def test_a_failure_is_a_warning_that_is_written_once(run: RunDirectory) -> None:
    (warning,) = record(run, "echo first >&2; echo no route >&2; exit 3", "started", "failed", "finished")
    assert warning == "run.on_event failed for the event started: no route"
    (_, warning) = record(run, "no_such_command", "finished")
    assert "no_such_command" in warning


def test_a_command_that_hangs_is_killed_and_delays_no_event(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "CALL_S", 0.2)
    events = EventLog.open(run, "agent-n1", 0)
    calls = EventCalls("sleep 1000", run, events)
    for number in range(100):
        calls.add(Event(event=f"number {number}"))  # would take 20 s
    while not any(event["event"] == "warning" for event in run.read_events()):
        time.sleep(0.01)
    calls.close()
    assert not calls._thread.is_alive() and calls._process is None
    events.close()
    (first, *_) = run.read_events()
    assert first["message"] == "run.on_event failed for the event number 0: it did not end within 0.2 s"


def test_the_batch_script_calls_it_if_no_agent_has_recorded_the_end(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    lines = "\n".join(on_event_lines(f"cat > {heard}; echo $HPC_TRAIN_RUN_DIR >> '{heard}'"))
    before = f"end={tmp_path}/end-7.0 RUN={tmp_path} status=137 cancelled=\n"
    subprocess.run(["bash", "-euo", "pipefail", "-c", before + lines], check=True)
    event, path = heard.read_text().splitlines()
    assert json.loads(event)["message"] == "no agent is left: srun ended with exit code 137"
    assert path == str(tmp_path)
    heard.unlink()
    (tmp_path / "end-7.0.node-0").write_text("1\n")
    subprocess.run(["bash", "-euo", "pipefail", "-c", before + lines], check=True)
    (tmp_path / "end-7.0.node-0").unlink()
    subprocess.run(["bash", "-euo", "pipefail", "-c", before + "cancelled=yes\n" + lines], check=True)
    assert not heard.exists()
    failing = "\n".join(on_event_lines("exit 1"))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", before + failing], check=True, stderr=subprocess.PIPE)
    assert b"run.on_event failed" in done.stderr
    assert not on_event_lines(None)
