"""The writer of small files on file systems that fail, are full, or hang."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.elastic.workers import WorkerLog
from hpc_train.run import file_writer
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.file_writer import ENTRY_BYTES, FileWriter
from hpc_train.run.files import NewLines
from tests.run.outage import detachable, fill, small_disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", kilobytes=64) as made:
        yield made


def numbers(path: Path) -> list[int]:
    return [line["number"] for line in NewLines(path).read()]


def test_lines_on_a_full_disk_are_written_when_there_is_room(disk: Path) -> None:
    path = disk / "log"
    writer = FileWriter("the log")
    for number in range(10):
        writer.append(path, {"number": number, "text": "x" * 1000})
    ballast = fill(disk)
    for number in range(10, 30):
        writer.append(path, {"number": number, "text": "x" * 1000})
    assert writer.pending > 0
    ballast.unlink()
    assert writer.close(60)
    assert numbers(path) == list(range(30))


def test_output_on_a_full_disk_is_complete_when_there_is_room(disk: Path) -> None:
    writer, ballast = FileWriter("the output"), disk / "ballast"
    log = WorkerLog(disk / "node.log", writer)
    ballast.write_bytes(b"x" * 40_000)
    for number in range(1000):
        log.write(0, b"line %d\n" % number)
    log.close()
    assert writer.pending > 0
    ballast.unlink()
    assert writer.close(60)
    assert [line.split(" ", 2)[2] for line in log.path.read_text().splitlines()] == [f"line {n}" for n in range(1000)]


def test_an_outage_is_an_event_when_it_is_over(disk: Path) -> None:
    run = RunDirectory(disk)
    run.create()
    events = EventLog.open(run, "agent-n0", 3)
    ballast = fill(disk)
    for _ in range(30):
        events.write("warning", message="x" * 1000)
    assert events.writer.pending > 0
    ballast.unlink()
    assert events.writer.close(60)
    (outage,) = [event for event in run.read_events() if event["event"] == "file_system_failed"]
    assert (outage["class"], outage["attempt"]) == ("disk_full", 3)
    assert outage["began"] <= outage["time"] and "No space left on device" in outage["message"]


def test_a_hang_of_the_file_system_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_writer, "HANGS_S", 0.2)
    monkeypatch.setattr(file_writer, "FIRST_TRY_S", 0.01)
    run = RunDirectory(tmp_path)
    run.create()
    metrics = FileWriter("the metrics")
    metrics.on_outage = EventLog.open(run, "rank-0000", 0, 0).write_outage
    metrics.put(tmp_path / "hangs", lambda again: time.sleep(0.5))
    assert metrics.close(60)
    until(lambda: [event["event"] for event in run.read_events()] == ["file_system_failed"])
    (outage,) = run.read_events()
    assert outage["class"] == "file_system" and outage["seconds"] >= 0.4
    assert "the file system did not respond for" in outage["message"]


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EROFS])
def test_an_error_of_the_file_server_is_retried(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path, right, failing = tmp_path / "log", os.open, True

    def opened(name: str, *arguments: Any, **named: Any) -> int:
        if failing and name == path.name:
            raise OSError(code, os.strerror(code), str(path))
        return right(name, *arguments, **named)

    monkeypatch.setattr(os, "open", opened)
    writer = FileWriter("the log")
    for number in range(3):
        writer.append(path, {"number": number})
    assert writer.pending == 3
    failing = False
    assert writer.close(60)
    assert numbers(path) == [0, 1, 2]


def test_a_file_that_fails_does_not_hold_up_the_others(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    outage = detachable(tmp_path / "away")
    writer = FileWriter("the log")
    with outage():
        for number in range(3):
            writer.append(tmp_path / "away" / "log", {"number": number})
            writer.append(tmp_path / "log", {"number": number})
        until(lambda: writer.pending == 3)
        assert numbers(tmp_path / "log") == [0, 1, 2]
    assert writer.close(60)
    assert numbers(tmp_path / "away" / "log") == [0, 1, 2]


def test_a_write_that_hangs_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process that opens a pipe without a reader sleeps in the kernel, as on a hung file system."""
    monkeypatch.setattr(file_writer, "HANGS_S", 0.0)
    pipe = tmp_path / "log"
    os.mkfifo(pipe)

    def waiting(path: Path, text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    monkeypatch.setattr(file_writer, "append_text", waiting)
    monkeypatch.setattr(file_writer, "append_line", lambda path, value: waiting(path, file_writer.json_line(value)))
    writer = FileWriter("the log")
    began = time.monotonic()
    for number in range(1000):
        writer.append(pipe, {"number": number})
    assert time.monotonic() - began < 60  # each of them would wait for ever
    assert writer.pending == 1000
    assert not writer.close(0.1)
    assert "cannot write the log; it is kept in memory until it can be written: the file system has" in printed(capfd)
    with os.fdopen(os.open(pipe, os.O_RDWR), encoding="utf-8") as both_ends:
        assert writer.close(60)
        assert [json.loads(both_ends.readline())["number"] for _ in range(1000)] == list(range(1000))
    assert "the log can be written again; what was kept in memory is written" in printed(capfd)


def test_memory_is_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "away").mkdir()
    outage = detachable(tmp_path / "away")
    size = len('{"number":0}\n') + ENTRY_BYTES
    writer = FileWriter("the log", limit_bytes=3 * size)
    with outage():
        for number in range(5):
            writer.append(tmp_path / "away" / "log", {"number": number})
            time.sleep(0.01)
        until(lambda: writer.pending == 3)
    assert writer.close(60)
    assert numbers(tmp_path / "away" / "log") == [2, 3, 4]
    assert printed(capfd).endswith("is written except for the oldest 2 writes, which are lost\n")


def test_a_mistake_in_a_write_does_not_end_the_writer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = FileWriter("the log")

    def wrong(again: bool) -> None:
        raise ValueError("wrong")

    writer.put(tmp_path / "log", wrong)
    writer.append(tmp_path / "log", {"number": 1})
    assert numbers(tmp_path / "log") == [1]
    assert f"cannot write {tmp_path / 'log'}: ValueError('wrong')" in printed(capfd)


def test_a_removed_run_directory_is_not_made_again(tmp_path: Path) -> None:
    writer = FileWriter("the log")
    writer.append(tmp_path / "run" / "events" / "log", {"number": 1})
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    assert writer.close(60)
    assert numbers(tmp_path / "run" / "events" / "log") == [1]


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


def until(found: Callable[[], object], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit
        time.sleep(0.01)
