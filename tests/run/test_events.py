"""The event log: nothing is lost on a file system that fails, and each event is as the table of events says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_train
from hpc_train.report.monitoring.metrics import METRICS, STATES
from hpc_train.run import files
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import STRICT, EventLog
from hpc_train.run.events import EVENTS, HEAD, reference
from hpc_train.run.files import NewLines
from hpc_train.run.ledger import Account
from tests.run.outage import detachable

FAILING = "cannot write the event log; it is kept in memory until it can be written: [Errno 2] "
AGAIN = "the event log can be written again; what was kept in memory is written"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create()
    return run


def messages(path: Path) -> list[str]:
    return [line["message"] for line in NewLines(path).read() if line["event"] == "warning"]


def test_what_cannot_be_written_is_written_later_in_order(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    outage = detachable(run.events)
    first = EventLog.open(run, "agent-n0", 0)
    first.write("warning", message="before")
    with outage():
        first.write("warning", message="during")
        second = first.of(1)
        second.write("warning", message="of the next attempt")
        EventLog.open(run, "agent-n1", 0).write("warning", message="of another writer")
        first.write("warning", message="still during")
    second.write("warning", message="after")
    second.close()
    assert messages(first.path) == ["before", "during", "still during"]
    assert second.path.name == "agent-n0-001.jsonl"
    assert messages(second.path) == ["of the next attempt", "after"]
    reported = capfd.readouterr().err.splitlines()
    assert [line[: len(FAILING)] for line in reported if line != AGAIN] == [FAILING, FAILING], "once by each writer"
    assert AGAIN in reported


def test_a_directory_that_was_removed_is_made_again(run: RunDirectory) -> None:
    log = EventLog.open(run, "agent-n0", 0)
    run.events.rmdir()  # as a purge of empty directories does
    log.write("warning", message="before")
    log.write("warning", message="after")
    assert messages(log.path) == ["before", "after"]


def test_the_end_of_a_writer_waits_a_while(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    outage = detachable(run.events)
    log = EventLog.open(run, "agent-n0", 0)
    with outage():
        log.write("finished")
    log.close()
    assert [line["event"] for line in NewLines(log.path).read()] == ["finished", "file_system_failed"]
    with outage():
        log.write("finished")
        assert not log.writer.close(0.3)
    assert capfd.readouterr().err.splitlines()[-1] == "1 writes of the event log are lost"


def test_a_line_that_was_cut_short_does_not_spoil_the_next(run: RunDirectory) -> None:
    """As on a full disk: the limit lets a part of the line through."""
    script = f"""if True:
        import resource
        from pathlib import Path
        from hpc_train.run.directory import RunDirectory
        from hpc_train.run.event_log import EventLog
        log = EventLog.open(RunDirectory(Path({str(run.path)!r})), "agent-n0", 0)
        log.write("warning", message="one")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 20, hard))
        log.write("warning", message="two")
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        log.write("warning", message="three")
    """
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, check=True)
    assert "File too large" in done.stderr
    assert messages(next(run.events.glob("*.jsonl"))) == ["one", "two", "three"]


def test_damaged_lines_among_those_that_are_decoded_together_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", block := 1 << 14)
    whole = [f'{{"step":{number},"x":[1,2]}}\n' for number in range(3 * block // 24)]
    damaged = {3: '{"step":3,"x":', len(whole) // 2: "[4]", len(whole) - 9: '{"step":5},{"step":-5}'}
    for number, text in damaged.items():
        whole[number] = f"{text}\n"
    (tmp_path / "lines").write_text("".join(whole) + '{"step":-1}')
    steps = [line["step"] for line in NewLines(tmp_path / "lines").read()]
    assert steps == [number for number in range(len(whole)) if number not in damaged]


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
