"""The workers' output: whole lines, prefixed by time and rank, limited."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_train.elastic.logs import TAIL_LINES, WorkerLog
from hpc_train.run.file_writer import FileWriter
from tests.elastic.conftest import Freeze
from tests.elastic.entries import start_agent


def lines_of(path: Path) -> list[str]:
    """Without the times."""
    return [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in path.read_text().splitlines()]


def test_lines_of_ranks_are_whole_and_prefixed(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "node.log", FileWriter("the output"))
    log.write(0, b"a be")
    log.write(1, b"other\n")
    log.write(0, b"ginning\nunfinished")
    assert log.tail(0) == ["a beginning", "unfinished"]
    log.close()
    assert lines_of(log.path) == ["[1] other", "[0] a beginning", "[0] unfinished"]


def test_a_full_log_says_so_and_keeps_the_last_lines(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "node.log", FileWriter("the output"), limit_bytes=1000)
    for number in range(500):
        log.write(number % 2, b"line %d\n" % number)
    log.close()
    lines = lines_of(log.path)
    assert lines[0] == "[0] line 0"
    assert sum("has reached its limit of 1000 bytes" in line for line in lines) == 1
    assert lines[-1] == "[1] line 499"
    assert len(lines) < 1000 // 30 + 2 * TAIL_LINES + 3


def test_a_line_without_end_does_not_grow_in_memory(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "node.log", FileWriter("the output"))
    for _ in range(100):
        log.write(0, b"x" * 10_000)
    assert len(log.tail(0)[-1]) < 80_000
    log.close()


def test_much_output_is_complete(frozen: Freeze) -> None:
    run = frozen()
    assert start_agent(run.path, "prints_much").wait(60) == 0
    lines = lines_of(next(run.logs.glob("*.log")))
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert [line.split()[2] for line in own[:-1]] == [str(number) for number in range(20_000)]
        assert own[-1] == f"[{rank}] no newline at the end"
