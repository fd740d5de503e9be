"""The runner of ``python -m gpu_checks`` with made-up checks, its table, and the checks' own arithmetic."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import gpu_checks
from gpu_checks import levers, node, speed
from gpu_checks.check import Check, Place, Probe, Verdict, read, table
from gpu_checks.checks import (
    ALL,
    ALONE,
    FIRST,
    FIRST_MINUTES,
    FIRST_MINUTES_S,
    LEVERS,
    ONE_GPU,
    ONE_GPU_S,
    PACKAGES,
    PLANS,
    STRATEGIES,
    TOGETHER,
    VISIT_S,
    checks_for,
)
from gpu_checks.commands import SMALL, SYNTHETIC, largest_difference
from gpu_checks.faults import _waiting
from gpu_checks.kernels import covered
from gpu_checks.models import killed
from gpu_checks.runner import FAILURES, HEAD_BYTES, MOST_BYTES, RESERVE_S, TAIL_BYTES, Runner, keep_output
from gpu_checks.several import _check_contexts, count_transports, hidden_share
from gpu_checks.speed import EXPERIMENT
from gpu_checks.steps import World
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.validate import validate
from hpc_train.parallel.precision import dtypes

MACHINE = {"gpus": 0, "devices": [], "torch": "0"}
Run = Callable[..., dict[str, dict[str, Any]]]


def check(name: str, limit_s: float = 30, **arguments: Any) -> Check:
    return Check(name, f"gpu_checks.made_up:{name}", limit_s, **{"gpus": 0, "least_s": 0.0, **arguments})


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


def test_a_check_knows_how_much_of_the_budget_is_left(run: Run) -> None:
    found = run(check("plans", limit_s=500), budget_s=60)
    assert verdicts(found) == {"plans": "passed"}


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
    missing = Check("missing", "gpu_checks.nowhere:nothing", 30, gpus=0, least_s=0)
    assert verdicts(run(missing)) == {"missing": "crashed"}


def test_a_check_that_exceeds_its_limit_is_killed_with_what_it_has_started(run: Run, tmp_path: Path) -> None:
    found = run(check("never_ends", limit_s=0.8), check("good"))
    assert verdicts(found) == {"never_ends": "too slow", "good": "passed"}
    assert not psutil.pid_exists(int((tmp_path / "out" / "pid").read_text()))
    assert "made_up.py" in (tmp_path / "out" / FAILURES).read_text()  # its stacks


def test_the_budget_ends_a_check_without_calling_it_a_failure(run: Run) -> None:
    found = run(check("never_ends"), check("good", least_s=5), budget_s=RESERVE_S + 1)
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
    checks = ALL
    assert len({each.name for each in checks}) == len(checks)
    for each in checks:
        assert callable(each.function())
    assert checks_for(1)[0] == ALONE[0]
    assert checks_for(4)[0] == TOGETHER[0]
    planned = {each for plan in PLANS.values() for each in plan}
    assert planned | set(checks_for(1)) == set(ALL)


def test_every_function_that_takes_a_probe_is_a_check() -> None:
    """One that is in no list, or in a list that another assignment replaces, would never run."""
    modules = [path.stem for path in Path(gpu_checks.__file__).parent.glob("*.py") if path.stem != "made_up"]
    written = {
        f"{module.__name__}:{name}"
        for module in (importlib.import_module(f"gpu_checks.{stem}") for stem in modules if stem != "__main__")
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
        if [*inspect.signature(function, eval_str=False).parameters] == ["probe"]
    }
    assert written == {each.entry for each in ALL}


def test_the_checks_of_one_gpu_fit_into_a_visit() -> None:
    assert sum(each.expected_s for each in ALONE) <= VISIT_S
    without_package = [each for each in ONE_GPU if each.name not in {f"lever_{name}" for name in PACKAGES}]
    assert sum(each.expected_s for each in without_package) <= ONE_GPU_S
    assert sum(each.expected_s for each in FIRST_MINUTES) <= FIRST_MINUTES_S
    assert set(PLANS["node"]) > set(TOGETHER)
    for each in ALL:
        assert each.least_s <= each.limit_s
        assert each.expected_s < each.limit_s


def test_transports_are_counted_in_the_log_of_nccl() -> None:
    first = """\
n1:7:19 [0] NCCL INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 24)
n1:7:19 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:7:19 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:7:19 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
"""
    second = """\
n1:8:21 [1] NCCL INFO NVLS multicast support is not available on dev 1 (NVLS_NCHANNELS 0)
n1:8:21 [1] NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct
n1:8:21 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA
"""
    assert count_transports([first, second]) == {
        "NET/IB/0/GDRDMA": 1,
        "NVLS": 1,
        "P2P/CUMEM": 1,
        "P2P/CUMEM/read": 1,
        "SHM/direct/direct": 1,
    }
    assert count_transports([first]) != count_transports([second])
    assert count_transports([]) == {}


def test_a_dump_names_the_collectives_that_wait() -> None:
    """The form of NCCL's recorder: a kernel that never ends is in front of the third collective."""
    entry = {
        "process_group": ["0", "default_pg"], "collective_seq_id": 1, "record_id": 1, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "input_sizes": [[1]], "time_created_ns": 10, "duration_ms": 0.1,
        "time_discovered_started_ns": 11, "time_discovered_completed_ns": 12, "state": "completed", "retired": True,
    }  # fmt: skip
    waiting = {
        "record_id": 3, "profiling_name": "nccl:all_gather", "state": "scheduled", "retired": False,
        "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
    }  # fmt: skip
    dump = json.dumps({"nccl": {"entries": [entry, entry | {"record_id": 2}, entry | waiting]}}).encode()
    assert _waiting(dump, on_host=False) == ["all_gather"]
    assert _waiting(dump, on_host=True) == []


def context_probe(folder: Path) -> Probe:
    (folder / "out").mkdir(exist_ok=True)
    return Probe(check("good"), Place(folder / "out", folder, gpus=2))


@pytest.mark.parametrize(
    ("seen", "failed"),
    [
        ({("GPU-a", "7"), ("GPU-b", "8")}, 0),
        ({("GPU-a", "7"), ("GPU-b", "8"), ("GPU-a", "8")}, 1),  # a second context on another rank's GPU
        ({("GPU-a", "7"), ("GPU-a", "8")}, 3),  # both ranks on one GPU
        ({("GPU-a", "7")}, 2),
        ({("GPU-a", "70"), ("GPU-b", "80")}, 0),  # the pids of the host
        ({("GPU-a", "70"), ("GPU-b", "80"), ("GPU-a", "80")}, 1),
    ],
)
def test_each_rank_has_a_context_on_its_own_gpu_only(tmp_path: Path, seen: set[tuple[str, str]], failed: int) -> None:
    facts = [{"gpu": "GPU-a", "pid": 7}, {"gpu": "GPU-b", "pid": 8}]
    _check_contexts(context_probe(tmp_path), seen, facts)
    assert [line["ok"] for line in read(tmp_path / "out")].count(False) == failed


def test_rows_of_the_last_run_of_each_check_are_tables_of_measurements(tmp_path: Path) -> None:
    probe = Probe(check("good"), Place(tmp_path, tmp_path, gpus=0))
    probe.row({"": "before", "Tokens/s": "1"})
    lines = [*read(tmp_path), {"kind": "begin", "check": "good"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    probe.row({"": "dp", "Tokens/s": "1,000"})
    probe.row({"": "zero3", "Tokens/s": 0.5})
    Probe(check("bad"), probe.place).row({"": "first save", "s": 1.0})
    assert probe.rows("good") == [{"": "dp", "Tokens/s": "1,000"}, {"": "zero3", "Tokens/s": "0.5"}]
    shown = table(read(tmp_path), ["good", "bad"])
    assert (
        "|  | Tokens/s |\n|---|---:|\n| dp | 1,000 |\n| zero3 | 0.5 |\n\n|  | s |\n|---|---:|\n| first save | 1 |"
        in shown
    )
    assert "before" not in shown


def test_levers_are_valid_for_one_gpu(tmp_path: Path) -> None:
    assert set(levers.SMALLER) < {lever.title for lever in LEVERS.values()}
    world = World(Probe(check("good"), Place(tmp_path, tmp_path, gpus=1)))
    for lever in FIRST.values():
        assert validate(world.config(*EXPERIMENT, *lever.overrides), 1, 1).world_size == 1
    assert validate(world.config(*levers.SEVEN_BILLION), 1, 1).micro_batches == 4


def test_trainings_of_a_node_are_valid_for_eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "is_large", lambda: True)
    given = [*SYNTHETIC, *SMALL, *node._model(Probe(check("good"), Place(tmp_path, tmp_path, gpus=8)))]
    given += ["cluster.gpus_per_node=8", *killed(tmp_path / "once", at=30, rank=7)]
    for strategy in STRATEGIES:
        layout = validate(typed(compose(with_right_plus([*given, f"+strategy={strategy}"]))), 1, 8)
        assert (layout.world_size, layout.micro_batches) == (8, 2)
    for overrides, _ in node.COMMUNICATION.values():
        validate(typed(compose(with_right_plus([*given, "+strategy=zero3", *overrides]))), 1, 8)


def test_llama_2_7b_fits_on_an_h200() -> None:
    config = typed(compose([*levers.SEVEN_BILLION, "cluster.gpus_per_node=1", "cluster.machine=h200"]))
    needed = estimate(config, resolve_layout(config, 1, 1))
    assert needed is not None
    assert needed.total < 0.93 * 141e9


def test_a_contender_does_not_join_queries_keys_and_values() -> None:
    projections = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    joined: list[bool] = []
    training = SimpleNamespace(step=lambda: joined.append(dtypes.can_join(projections)))
    world: Any = SimpleNamespace(of=lambda config: training)
    levers._apart(Config(), world)()
    training.step()
    assert joined == [False, True]


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
