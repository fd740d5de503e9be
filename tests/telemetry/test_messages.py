"""Messages to a webhook: one for each event that matters, and a webhook that does not work delays nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.config.schema import Config, MessagesConfig
from hpc_train.config.secrets import refuse_secret_arguments
from hpc_train.config.services import KINDS, URL, check_messages, message_kinds, webhook
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import EventLog
from hpc_train.telemetry import messages
from hpc_train.telemetry.messages import Message, Messenger, Rate, Relay, post
from tests.telemetry.webhook import Server, serve


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "mine")
    found.create()
    found.update_record(total_steps=20, result={"steps": 20, "loss": 1.25, "val_loss": 1.5})
    return found


def told(run: RunDirectory, messenger: Messenger, *names: str) -> None:
    events = messenger.attach(EventLog.open(run, "agent-n1", 0))
    for name in names:
        events.of(0).write(name, message="rank 1 on n1: out of memory")
    messenger.close()
    events.close()


def metrics(run: RunDirectory, rates: list[float]) -> None:
    lines = [{"step": step, "attempt": 0, "samples_per_s": rate} for step, rate in enumerate(rates, start=1)]
    run.metrics_file(0).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_event_of_the_kinds_that_were_asked_for_is_told_once(run: RunDirectory, server: Server) -> None:
    metrics(run, [10.0] * 7)
    told(run, Messenger(run, frozenset(KINDS), server.url, looks=True), "started", "failed", "requeued", "finished")
    failed, requeued, finished = (body["text"].splitlines() for body in server.got)
    why = f"python -m hpc_train why {run.path}"
    assert failed == ["mine has failed after step 7 of 20", "rank 1 on n1: out of memory", why]
    assert requeued[0] == "mine is requeued after step 7 of 20"
    assert finished == ["mine has finished after step 20", "loss 1.25, val_loss 1.5"]
    assert not run.read_events()[-1:] or "message_not_sent" not in {each["event"] for each in run.read_events()}
    told(run, Messenger(run, frozenset({"finished"}), server.url, looks=True), "failed")
    assert len(server.got) == 3


def test_what_cannot_be_sent_is_an_event_that_a_waiting_command_sends_once(run: RunDirectory, server: Server) -> None:
    config = Config(telemetry=Config().telemetry)
    config.telemetry.messages.webhook_file = str(run.path / "webhook")
    (run.path / "webhook").write_text(server.url + "\n")
    relay = Relay([(run, config)])
    server.code = 403
    told(run, Messenger(run, frozenset(KINDS), server.url, looks=True), "failed")
    event = next(event for event in run.read_events() if event["event"] == "message_not_sent")
    assert event["problem"] == "the webhook answered 403 Forbidden"
    assert "secret" not in json.dumps(run.read_events())
    server.code, server.got = 200, []
    relay.look(now=True)
    relay.look(now=True)
    assert [body["text"] for body in server.got] == [event["text"]]
    Relay([(run, config)]).look(now=True)  # a command that is started later does not repeat it
    assert len(server.got) == 1


def test_a_webhook_that_hangs_holds_up_neither_events_nor_the_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "CLOSE_S", 0.05)
    forever = threading.Event()
    told(run, Messenger(run, frozenset(KINDS), "http://x", True, lambda url, body: str(forever.wait())), "failed")
    assert [event["event"] for event in run.read_events()] == ["failed"]
    forever.set()


def test_a_rate_that_has_halved_is_told_once(run: RunDirectory) -> None:
    metrics(run, [1.0, *[10.0] * 5, 4.0, 4.0, 9.0])
    rate = Rate(0, messages.NewLines(run.metrics_file(0)))
    assert rate.fallen() is None, "the last line is fast"
    metrics(run, [1.0, *[10.0] * 5, 4.0, 4.0, 9.0, 4.0, 3.0, 4.0])
    assert rate.fallen() == "4 samples/s, 10 before"
    assert rate.fallen() is None


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", {"text"}),
        ("https://chat.example.org/hooks/x", {"text"}),
        ("https://example.org/runs", {"kind", "run", "text"}),
    ],
)
def test_chats_get_a_text_and_others_all_fields(url: str, keys: set[str]) -> None:
    assert Message("failed", "/runs/a", "a has failed").body(url).keys() == keys


def test_an_address_without_a_server_is_a_problem_in_words_without_the_url() -> None:
    problem = post("http://127.0.0.1:9/secret", {})
    assert problem is not None
    assert problem.startswith("the webhook cannot be reached: ")
    assert "secret" not in problem


def test_wrong_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    assert webhook(MessagesConfig()) is None
    with pytest.raises(UserError, match="cannot be read"):
        check_messages(MessagesConfig(webhook_file=str(tmp_path / "none")))
    (tmp_path / "url").write_text("hooks.slack.com/x\n")
    with pytest.raises(UserError, match="not an http or https URL") as wrong:
        check_messages(MessagesConfig(webhook_file=str(tmp_path / "url")))
    assert "slack" not in str(wrong.value), "a URL is a secret"
    with pytest.raises(UserError, match="neither all nor a list"):
        message_kinds(MessagesConfig(on=["failed", "done"]))
    monkeypatch.setenv(URL, "https://example.org/hooks/s3cret")
    assert webhook(MessagesConfig(webhook_file="/none")) == "https://example.org/hooks/s3cret"
    with pytest.raises(UserError, match=URL):
        refuse_secret_arguments(["+x=https://example.org/hooks/s3cret"])
