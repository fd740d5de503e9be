"""The workers' output: whole lines, prefixed by time and rank, limited."""

from __future__ import annotations

import re
from pathlib import Path

from hpc_train.elastic.workers import RETAINED_ATTEMPTS, TAIL_LINES, WorkerLog, prune_logs
from hpc_train.run.directory import RunDirectory
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


def test_the_stacks_of_old_attempts_are_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    names = [
        "stacks/hang-n-1-{0:03d}.txt",
        "stacks/slow-n-{0:03d}.txt",
        "stacks/collectives-{0:03d}-rank-0001.json",
        "stacks/nccl-{0:03d}-rank-1",
        "nccl/{0:03d}-rank-0001.log",
    ]
    made = [run.logs / name.format(number) for number in range(15) for name in names]
    answers = [run.logs / "stacks" / name for name in ("request", "001-n1.txt", "002-n-001.txt")]
    for path in [*made, *answers]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    prune_logs(run, 14)
    kept = [path for path in made if path.exists()]
    assert kept == made[-5 * RETAINED_ATTEMPTS :]
    assert all(path.exists() for path in answers)
    prune_logs(RunDirectory(tmp_path / "empty"), 14)


def test_much_output_is_complete(frozen: Freeze) -> None:
    run = frozen()
    assert start_agent(run.path, "prints_much").wait(60) == 0
    lines = lines_of(next(run.logs.glob("*.log")))
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert [line.split()[2] for line in own[:-1]] == [str(number) for number in range(20_000)]
        assert own[-1] == f"[{rank}] no newline at the end"
