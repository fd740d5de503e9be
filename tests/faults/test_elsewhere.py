"""Faults of what a run depends on: a service that is away, the clock of a node, an agent of before that wakes up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from hpc_train.run.processes import process_state
from hpc_train.run.requests import hold_requested
from hpc_train.runs.job_status import hold_of
from tests.checkpoint.progress import IN_LONG_FORM, LONG
from tests.checkpoint.tensors import assert_same_bits
from tests.checkpoint.test_commands import everything
from tests.doors.command import hpc_train
from tests.faults.agent import PATIENCE, SHIFT
from tests.faults.entry import BURN_IN_ERRS, ERRS
from tests.faults.plan import RECOVERY, Fault, happened
from tests.faults.surroundings import Surroundings
from tests.faults.test_faults import until
from tests.faults.trial import (
    EVERY,
    Trial,
    assert_nothing_left,
    finish,
    freeze,
    processes,
    start,
    undisturbed,
)
from tests.warm_parents import with_server

STEPS = 12
LAST = f"step-{STEPS:08d}"
# As on another machine. The first process of a namespace cannot be put to sleep: that is not to be the agent.
OTHER_PIDS = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("runs") / "whole", STEPS, EVERY).checkpoints / LAST


@IN_LONG_FORM  # no time of one node is compared with another's
def test_nothing_depends_on_equal_clocks(tmp_path: Path, whole: Path) -> None:
    """The clock of the second of two nodes is an hour ahead."""
    recovery = [Fault("kill", 0, RECOVERY)] if LONG else []
    plan = [Fault("kill", 1, 5), *recovery, Fault("stop", 1, 7)]
    run = freeze(tmp_path / "run", STEPS, EVERY, "cluster.cpu_workers=1")
    ends = on_two_nodes(run, plan, **{SHIFT: "3600"})
    reported = [("hang", 1), *(("killed", fault.rank) for fault in recovery), ("killed", 1)]
    assert sorted(ends[0].reported) == reported, ends[0].error
    assert_same_bits(run.checkpoints / LAST, whole)
    asked = [sys.executable, "-m", "hpc_train", "why", str(run.path), "--json"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True)
    cause = json.loads(shown.stdout)["cause"]
    assert (cause["kind"], cause["rank"], cause["node"]) == ("hang", 1, "127.0.0.2")
    stacks = {path.name: path.read_text() for path in (run.logs / "stacks").glob("hang-*")}
    assert any("trainer.py" in text for name, text in stacks.items() if "127.0.0.1" in name), "the node that waits"
    assert_nothing_left(run)


@pytest.mark.timeout(600)
@pytest.mark.long_form(90)  # tests/train/test_debug.py
def test_a_person_looks_into_a_rank_of_another_node_and_no_number_changes(tmp_path: Path) -> None:
    """A step takes 0.1 s or more. The hold is longer than the bound of a hang and the timeout of collectives."""
    bound_s = 20
    timeouts = (f"elastic.hang_timeout_s={bound_s}", f"elastic.collective_timeout_s={bound_s}")
    run = freeze(tmp_path / "run", 100_000, "cluster.cpu_workers=1", "telemetry.log_every=1", *timeouts)
    agents = start_on_nodes(run, [Fault("slow", 0, 0)], {}, {})
    try:
        until(run.read_metrics)
        command = [sys.executable, "-m", "hpc_train", "debug", str(run.path), "--rank=1", "--json"]
        person = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert person.stdin is not None and person.stdout is not None
        until(lambda: (request := hold_requested(run)) is not None and hold_of(run, run.newest_attempt(), request))
        held_at = time.monotonic()
        second = hpc_train("debug", str(run.path), "--rank=0", cwd=tmp_path)
        assert second.returncode == 2
        assert "rank 1 is held already" in second.stderr
        [held] = [event for event in run.read_events() if event["event"] == "held"]
        assert f"rank 1 on 127.0.0.2 is held after step {held.step} for at most" in held.message
        until(lambda: time.monotonic() > held_at + 1.5 * bound_s)
        person.stdin.write("p 'step', self.step\np next(self.engine.parts[0].parameters()).shape\nnext\n")
        person.stdin.close()
        shown = json.loads(person.stdout.read())
        assert (shown["rank"], shown["node"], shown["step"]) == (1, "127.0.0.2", held.step)
        assert f"('step', {held.step})" in shown["output"]
        assert "torch.Size([" in shown["output"]
        assert "*** all ranks are held between two steps" in shown["output"]
        until(lambda: run.read_metrics()[-1].step > held.step + 3)
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        ends = [finish(run, agent) for agent in agents]
    assert [end.code for end in ends] == [75, 75], ends[0].error + ends[1].error
    assert ends[0].events("hang_detected", "no_progress", "worker_failed", "restarted") == []
    losses = [(line.step, line.loss) for line in run.read_metrics()]
    other = undisturbed(tmp_path / "other", losses[-1][0], "telemetry.log_every=1")
    assert [(line.step, line.loss) for line in other.read_metrics()] == losses
    last = f"step-{losses[-1][0]:08d}"
    assert_same_bits(run.checkpoints / last, other.checkpoints / last)
    assert_nothing_left(run)


def on_two_nodes(run: RunDirectory, plan: Sequence[Fault], **of_second: str) -> list[Trial]:
    """As far as the agents can tell; ``of_second`` are variables of the second node."""
    ends = on_nodes(run, plan, {}, of_second)
    assert [end.code for end in ends] == [0, 0], ends[0].error + ends[1].error
    return ends


def on_nodes(run: RunDirectory, plan: Sequence[Fault], *variables: dict[str, str]) -> list[Trial]:
    """Runs an agent for each of ``variables``, which it takes for those of its node."""
    return [finish(run, agent, plan) for agent in start_on_nodes(run, plan, *variables)]


def start_on_nodes(run: RunDirectory, plan: Sequence[Fault], *variables: dict[str, str]) -> list[subprocess.Popen[str]]:
    """Starts the agents of ``on_nodes``, as in a step of Slurm."""
    step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(len(variables))}
    agents = []
    for number, of_node in enumerate(variables):
        node = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"127.0.0.{number + 1}"}
        agents.append(start(run, plan, Surroundings(variables=step | node | of_node)))
    return agents


@pytest.mark.long_form(90)  # test_corruption.py has the verdicts, test_ledger.py the cost, tests/elastic what follows
@pytest.mark.timeout(900)
@pytest.mark.parametrize("spares", [pytest.param(1, id="spare"), pytest.param(0, id="fewer")])
def test_a_node_that_computes_wrong_numbers_is_left_behind(tmp_path: Path, spares: int) -> None:
    """The third of three nodes errs once, which is corrected, and later in all passes."""
    asked = (
        "train.verify.every=1", "checkpoint.every=2", "checkpoint.keep=1", "batch.global_size=12",
        "elastic.hang_timeout_s=auto", "telemetry.log_every=1", "cluster.preflight=off", "cluster.cpu_workers=1",
        "elastic.min_nodes=2", "model.dropout=0", "strategy.data_parallel=allreduce",
    )  # fmt: skip
    whole = freeze(tmp_path / "whole", 16, *asked)
    assert [end.code for end in on_nodes(whole, [], {}, {}, {})] == [0, 0, 0]
    run = freeze(tmp_path / "run", 16, *asked, f"elastic.spares={spares}")
    ends = on_nodes(run, [], {}, {}, {ERRS: "4 8"}, *[{}] * spares)
    assert ends[0].code == 0, ends[0].error
    first, second = ends[0].events("corruption")
    assert (first["node"], first["step"], first["steps"], first["final"]) == ("127.0.0.3", 4, 1, False)
    assert (second["node"], second["steps"], second["final"]) == ("127.0.0.3", 2, True)
    assert ends[0].reported == [("unfit_node", 2)]
    teams = [["127.0.0.1", "127.0.0.2", "127.0.0.3"], ["127.0.0.1", "127.0.0.2", *["127.0.0.4"] * spares]]
    assert [event["nodes"] for event in ends[0].events("started")] == teams
    [resumed] = ends[0].events("resumed")
    assert resumed["step"] <= second["first"] <= 8
    last = "step-00000016"
    if spares:
        assert_same_bits(run.checkpoints / last, whole.checkpoints / last)
    expected = [line["loss"] for line in whole.read_metrics()]
    assert [line["loss"] for line in run.read_metrics()] == pytest.approx(expected, rel=1e-5)
    shown = hpc_train("why", str(run.path), "--json", cwd=tmp_path)
    told = json.loads(shown.stdout)
    assert [excluded["node"] for excluded in told["excluded_nodes"]] == ["127.0.0.3"]
    assert told["ledger"]["corrupted_steps"] == second["step"] - resumed["step"] > 0
    assert told["ledger"]["verification_s"] > 0
    assert hpc_train("report", str(run.path), cwd=tmp_path).returncode == 0
    page = (run.path / "report.html").read_text()
    suspected = "rank 2 on 127.0.0.3 is suspected"
    assert suspected in shown.stdout and suspected in page and "Wrong numbers cost" in page
    assert_nothing_left(run)


@pytest.mark.long_form(60)  # tests/preflight has the findings, tests/elastic what follows
@pytest.mark.timeout(600)
def test_a_node_that_fails_the_burn_in_never_trains(tmp_path: Path) -> None:
    options = (
        "batch.global_size=12", "cluster.cpu_workers=1", "model.dropout=0", "strategy.data_parallel=allreduce",
        "cluster.preflight_action.slow_device=warn",
    )  # fmt: skip
    run = freeze(tmp_path / "run", 6, *options, "elastic.spares=1")
    ends = on_nodes(run, [], {}, {}, {BURN_IN_ERRS: "1"}, {})
    assert ends[0].code == 0, ends[0].error
    assert ends[0].reported == [("unfit_node", 2)]
    assert "rank 2 on 127.0.0.3 computes wrong numbers: a product in float32" in ends[0].error
    teams = [["127.0.0.1", "127.0.0.2", "127.0.0.3"], ["127.0.0.1", "127.0.0.2", "127.0.0.4"]]
    assert [event["nodes"] for event in ends[0].events("started")] == teams
    whole = freeze(tmp_path / "whole", 6, *options)
    assert [end.code for end in on_nodes(whole, [], {}, {}, {})] == [0, 0, 0]
    assert_same_bits(run.checkpoints / "step-00000006", whole.checkpoints / "step-00000006")
    shown = hpc_train("why", str(run.path), "--json", cwd=tmp_path)
    assert [excluded["node"] for excluded in json.loads(shown.stdout)["excluded_nodes"]] == ["127.0.0.3"]
    assert_nothing_left(run)


@IN_LONG_FORM  # test_hangs has the decision
def test_on_several_nodes_a_slow_step_is_told_and_nobody_is_killed(tmp_path: Path, whole: Path) -> None:
    """Rank 1 stands still; rank 0 waits for it in a collective."""
    run = freeze(tmp_path / "run", STEPS, EVERY, "cluster.cpu_workers=1", "elastic.hang_timeout_s=auto")
    end, _ = on_two_nodes(run, [Fault("pause", 1, 9)])
    assert end.reported == [], end.error
    assert end.events("restarted", "hang_detected") == []
    slow = {event["node"]: event for event in end.events("slow_step")}
    assert set(slow) == {"127.0.0.1", "127.0.0.2"}
    assert "it counts as a hang after 120.0 s" in slow["127.0.0.2"]["message"]
    stacks = [Path(event["stacks"]).read_text() for event in slow.values()]
    assert all("trainer.py" in text for text in stacks)
    assert "in _stand_still" in Path(slow["127.0.0.2"]["stacks"]).read_text()
    assert_same_bits(run.checkpoints / LAST, whole)
    assert_nothing_left(run)


@IN_LONG_FORM  # test_hangs has the decision
def test_a_rank_that_idles_ends_an_attempt_before_the_bound_of_gpus(tmp_path: Path, whole: Path) -> None:
    """Rank 1 stands still; rank 0 waits for it in a collective. The collectives and /proc are real."""
    run = freeze(tmp_path / "run", STEPS, EVERY, "elastic.hang_timeout_s=auto")
    plan = [Fault("pause", 1, 9)]
    end = finish(run, start(run, plan, Surroundings(variables={PATIENCE: "90"})), plan)
    assert end.code == 0, end.error
    assert end.reported == [("hang", 1)], end.error
    [slow], [hang] = end.events("slow_step"), end.events("hang_detected")
    assert slow["rank"] == hang["rank"] == 1
    assert re.search(r"rank 1 was idle for \d+ s and did not enter the collective that the others are", hang["message"])
    assert hang["seconds"] < 90
    assert_same_bits(run.checkpoints / LAST, whole)
    assert_nothing_left(run)


@pytest.mark.long_form(15)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a process namespace")
def test_an_agent_that_slept_while_another_did_its_work_changes_nothing(tmp_path: Path, whole: Path) -> None:
    """A job that Slurm has requeued, as its node was away; it comes back when the run is done."""
    run = freeze(tmp_path / "run", STEPS, EVERY)
    asleep = start(run, [Fault("asleep", 1, 6)], Surroundings(OTHER_PIDS, {"SLURM_JOB_ID": "77"}))
    until(lambda: happened(run.path, 0).exists())
    sleepers = processes(run)
    until(lambda: sum(process_state(pid) == "T" for pid in sleepers) == len(sleepers) - 2)  # unshare and sh wait
    again = Surroundings(variables=with_server(os.environ) | {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"})
    other = finish(run, start(run, around=again))
    assert other.code == 0, other.error
    assert_same_bits(run.checkpoints / LAST, whole)
    before, record = everything(run.checkpoints), run.record()
    for pid in sleepers:
        os.kill(pid, signal.SIGCONT)
    woken = finish(run, asleep)
    assert woken.code != 0, woken.error
    assert everything(run.checkpoints) == before
    assert run.record() == record
    assert run.newest_attempt() == 1
    reported = [event["event"] for event in run.read_events() if event["attempt"] == 1]
    assert not {"failed", "node_lost", "worker_failed", "stop_requested"} & set(reported)
    assert_nothing_left(run)
