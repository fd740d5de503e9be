"""The runner of ``python -m tests.gpu`` with made-up checks, its table, and the checks' own arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gpu.check import Check, Place, Verdict, read
from tests.gpu.checks import ALONE, TOGETHER, checks_for
from tests.gpu.commands import largest_difference
from tests.gpu.kernels import covered
from tests.gpu.runner import FAILURES, HEAD_BYTES, MOST_BYTES, RESERVE_S, TAIL_BYTES, Runner, keep_output
from tests.gpu.several import hidden_share

MACHINE = {"gpus": 0, "devices": [], "torch": "0"}
Run = Callable[..., dict[str, dict[str, Any]]]


def check(name: str, limit_s: float = 30, **arguments: Any) -> Check:
    return Check(name, f"tests.gpu.made_up:{name}", limit_s, **{"gpus": 0, "least_s": 0.0, **arguments})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns a function that runs checks, and returns the last verdict on each."""

    def run(*checks: Check, budget_s: float = 120, machine: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
        (tmp_path / "scratch").mkdir(exist_ok=True)
        place = Place(tmp_path / "out", tmp_path / "scratch", 0)
        succeeded = Runner(place, machine or MACHINE, budget_s, preload=()).run(checks)
        found = {line["check"]: line for line in read(place.out) if line["kind"] == "verdict"}
        assert succeeded == (not any(Verdict(line["verdict"]).is_failure for line in found.values()))
        return found

    return run


def verdicts(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: line["verdict"] for name, line in found.items()}


def test_a_check_passes_only_if_it_expected_something_and_found_it(run: Run, tmp_path: Path) -> None:
    found = run(check("good"), check("bad"), check("empty"))
    assert verdicts(found) == {"good": "passed", "bad": "failed", "empty": "crashed"}
    assert found["bad"]["reason"] == "1 not as expected"
    kept = (tmp_path / "out" / FAILURES).read_text()
    assert "the log of a check that finds something" in kept
    assert "===== good" not in kept
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| not a number | **NO** |  | nan | <= 1 |" in table


def test_a_crash_ends_one_check_and_keeps_what_it_had_found(run: Run, tmp_path: Path) -> None:
    found = run(check("raises"), check("segfaults"), check("good"))
    assert verdicts(found) == {"raises": "crashed", "segfaults": "crashed", "good": "passed"}
    assert "raised on purpose" in found["raises"]["reason"]
    assert "SIGSEGV" in found["segfaults"]["reason"]
    findings = [line["what"] for line in read(tmp_path / "out") if line["kind"] == "finding"]
    assert {"before the error", "before the fault"} <= set(findings)
    kept = (tmp_path / "out" / FAILURES).read_text()
    assert "Traceback" in kept
    assert "Segmentation fault" in kept


def test_a_check_that_cannot_be_imported_is_a_crash(run: Run) -> None:
    missing = Check("missing", "tests.gpu.nowhere:nothing", 30, gpus=0, least_s=0)
    assert verdicts(run(missing)) == {"missing": "crashed"}


def test_a_check_that_exceeds_its_limit_is_killed_with_what_it_has_started(run: Run, tmp_path: Path) -> None:
    found = run(check("never_ends", limit_s=1.5), check("good"))
    assert verdicts(found) == {"never_ends": "too slow", "good": "passed"}
    assert not psutil.pid_exists(int((tmp_path / "out" / "pid").read_text()))
    assert "made_up.py" in (tmp_path / "out" / FAILURES).read_text()  # its stacks


def test_the_budget_ends_a_check_without_calling_it_a_failure(run: Run) -> None:
    found = run(check("never_ends"), check("good", least_s=5), budget_s=RESERVE_S + 3)
    assert verdicts(found) == {"never_ends": "cut off", "good": "not run"}
    assert "of the budget are left" in found["good"]["reason"]


def test_what_needs_gpus_says_so_without_one(run: Run) -> None:
    found = run(check("good", gpus=1), check("bad", gpus=2))
    assert verdicts(found) == {"good": "not run", "bad": "not run"}
    assert found["good"]["reason"] == "no GPU"


def test_a_second_run_repeats_what_has_not_passed_on_this_machine(run: Run, tmp_path: Path) -> None:
    checks = check("counts"), check("fails_once")
    assert verdicts(run(*checks)) == {"counts": "passed", "fails_once": "failed"}
    assert verdicts(run(*checks)) == {"counts": "passed", "fails_once": "passed"}
    assert (tmp_path / "out" / "count").read_text() == "1"
    run(*checks, machine={**MACHINE, "torch": "1"})
    assert (tmp_path / "out" / "count").read_text() == "2"


def test_what_a_killed_runner_left_does_not_count_in_the_next_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    left = [
        {"kind": "begin", "check": "good"},
        {"kind": "finding", "check": "good", "what": "left", "measured": "", "expected": "", "ok": False},
    ]
    (tmp_path / "out" / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in left))
    assert verdicts(run(check("good"))) == {"good": "passed"}
    assert "| left |" not in (tmp_path / "out" / "table.md").read_text()


def test_a_line_that_was_cut_off_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps({"kind": "machine"}) + '\n{"kind": "find')
    assert read(tmp_path) == [{"kind": "machine"}]


def test_the_output_of_failures_stays_small(tmp_path: Path) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    log.write_bytes(b"first" + b"x" * (HEAD_BYTES + TAIL_BYTES) + b"last")
    keep_output("one", "failed", log, kept)
    text = kept.read_text()
    assert "first" in text
    assert "last" in text
    assert "bytes left out" in text
    for _ in range(80):
        keep_output("another", "failed", log, kept)
    assert kept.stat().st_size < MOST_BYTES + 10_000


def test_every_check_can_be_found_and_has_one_name() -> None:
    checks = (*ALONE, *TOGETHER)
    assert len({each.name for each in checks}) == len(checks)
    for each in checks:
        assert callable(each.function())
    assert checks_for(1)[0] == ALONE[0]
    assert checks_for(4)[0] == TOGETHER[0]


def test_what_cannot_be_compared_differs() -> None:
    assert largest_difference({1: 2.0, 2: 4.4}, {1: 2.0, 2: 4.0}) == pytest.approx(0.1)
    assert largest_difference({1: 2.0}, {1: 2.0, 2: 4.0}) == float("inf")
    assert largest_difference({}, {}) == float("inf")
    assert math.isnan(largest_difference({1: 9.0, 2: math.nan, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.0}))


def test_times_that_overlap_count_once() -> None:
    events = [{"ts": 0.0, "dur": 4.0}, {"ts": 2.0, "dur": 4.0}, {"ts": 10.0, "dur": 1.0}]
    assert covered(events) == 7.0
    assert hidden_share([(0.0, 10.0)], [(-5.0, 1.0), (0.5, 3.0), (8.0, 20.0)]) == pytest.approx(0.5)
    assert hidden_share([], [(0.0, 1.0)]) == 0.0
