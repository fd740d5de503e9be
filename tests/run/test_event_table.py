"""Every event that is written is a row of the table of events, with the fields that the row names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hpc_train
from hpc_train.report.monitoring.metrics import METRICS, STATES
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import STRICT, EventLog
from hpc_train.run.events import EVENTS, HEAD, reference
from hpc_train.run.ledger import Account

WRITTEN = re.compile(r'(?:events|_events\(?\)?|log|_log|\))\.write\(\s*"([a-z_]+)"|self\._event\(\s*"([a-z_]+)"')


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EventLog:
    monkeypatch.setenv(STRICT, "1")
    run = RunDirectory(tmp_path)
    run.create()
    return EventLog.open(run, "agent-n0", 0)


def test_the_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "events.md"
    assert page.read_text() == reference(), "python -m hpc_train.run.events > docs/events.md"


def test_the_code_writes_the_events_of_the_table() -> None:
    sources = [path.read_text() for path in Path(hpc_train.__file__).parent.rglob("*.py")]
    written = {first or second for text in sources for first, second in WRITTEN.findall(text)}
    assert written <= EVENTS.keys()
    assert len(written) > 0.7 * len(EVENTS)  # the others have a name that is chosen, or that a constant holds


def test_the_facts_of_an_event_name_what_exists() -> None:
    for name, kind in EVENTS.items():
        assert kind.meaning.endswith("."), name
        assert {*kind.types} <= {*kind.names} and kind.checks.keys() >= {*HEAD, *kind.names}, name
        assert kind.state in ("", *STATES) and kind.counter in ("", *(metric.name for metric in METRICS)), name
        assert not kind.account or hasattr(Account(), kind.account), name


def test_tests_refuse_an_event_that_is_not_as_its_row_says(log: EventLog) -> None:
    with pytest.raises(AssertionError, match="the table of events lacks no_event"):
        log.write("no_event")
    with pytest.raises(AssertionError, match="the row of warning in the table of events lacks pace"):
        log.write("warning", message="slow", pace=1)
    with pytest.raises(AssertionError, match="message of warning are not of the types"):
        log.write("warning", message=7)


def test_a_training_writes_it_all_the_same(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRICT)
    log.write("no_event", pace=1)
    (event,) = RunDirectory(log.path.parents[1]).read_events()
    assert (event.name, event["pace"], event.step) == ("no_event", 1, None)
