"""A custom loop survives every fault with the right numbers: those of one process that nothing disturbs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.checkpoint.transfer import export
from hpc_train.config.compose import typed
from hpc_train.errors import UserError
from hpc_train.parallel.engine import stream_seed
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.config.composing import compose
from tests.train.custom_loop.functions import loss_of, model, optimizers, update
from tests.train.custom_loop.runs import LOCAL, failures, frozen, run_agent
from tests.train.runs import run_attempt

STEPS = 18
ENTRY = "run.entry=tests.train.custom_loop.functions:trains"


def undisturbed(ranks: int) -> list[float]:
    """Returns the losses of the bare loop in this process, over the samples of all ranks."""
    module = model()
    adam, sgd, schedule = optimizers(module)
    losses = []
    for step in range(1, STEPS + 1):
        adam.zero_grad()
        sgd.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(ranks):
            torch.manual_seed(stream_seed("step", 0, step - 1, rank, 0))
            loss = loss + loss_of(module) / ranks
        loss.backward()
        update(step, adam, sgd, schedule)
        losses.append(loss.item())
    return losses


@pytest.mark.long_form(20)  # test_command.py does it with a script
def test_a_loop_that_is_killed_hangs_and_is_preempted_goes_on(tmp_path: Path) -> None:
    """After the preemption it goes on with sharded parameters, from a checkpoint of replicated ones."""
    faults = "[[kill,1,5],[hang,0,9],[SIGUSR2,1,12]]"
    case = [ENTRY, f"train.steps={STEPS}", "checkpoint.every=2", f"+run.args.faults={faults}"]
    run = frozen(tmp_path / "run", *case, "elastic.hang_timeout_s=4")
    code, error = run_agent(run)
    assert code == 75, error
    assert failures(run) == [("killed", 1), ("hang", 0)]
    stopped = run.read_metrics()[-1]["step"]
    assert stopped in (12, 13, 14)
    run = frozen(tmp_path / "run", *case, "+run.args.shard=true", "strategy.data_parallel=zero3")
    code, error = run_agent(run)
    assert code == 0, error
    lines = run.read_metrics()
    expected = undisturbed(2)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in lines] == pytest.approx(expected, rel=1e-10)
    assert lines[-1]["total"] == pytest.approx(sum(expected), rel=1e-10)
    resumed = [event["step"] for event in run.read_events() if event["event"] == "resumed"]
    assert resumed == [4, 8, stopped]
    result = run.record()["result"]
    assert (result["steps"], result["attempt"]) == (STEPS, 3)


def quiet_bar(what: str, total: int) -> nullcontext[Any]:
    return nullcontext(lambda size: None)


def test_a_function_that_leaves_early_is_done_and_its_last_state_is_saved(tmp_path: Path) -> None:
    run = frozen(
        tmp_path / "run", "run.entry=tests.train.custom_loop.functions:leaves_early", "elastic.stop_grace_s=1e-6"
    )
    assert run_attempt(run, 1) == [0]
    assert [path.name for path in run.checkpoints.glob("step-*")] == ["step-00000005"]
    with pytest.raises(UserError, match=r"the objects of run\.entry=tests\.train\.custom_loop\.functions:leaves_early"):
        export(run, None, tmp_path / "hf", "hf", None, quiet_bar)
    assert export(run, None, tmp_path / "exported", None, None, quiet_bar)["format"] == "pt"
    assert torch.load(tmp_path / "exported") == {"done": torch.tensor(5)}
    (left,) = [event for event in run.read_events() if event["event"] == "loop"]
    assert (left["name"], left["rank"], left["step"], left["done"]) == ("left", 0, 5, 5)
    assert [line["loss"] for line in run.read_metrics()] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]
    assert run.record()["result"]["steps"] == 5
    (warning,) = [event for event in run.read_events() if event["event"] == "warning"]
    assert warning["step"] == 2 and "set elastic.stop_grace_s" in warning["message"]


@pytest.mark.long_form(6)  # tests/checkpoint has the objects that a checkpoint lacks
def test_a_schedule_that_comes_later_needs_a_fork(tmp_path: Path) -> None:
    base = ["run.entry=tests.train.custom_loop.functions:with_schedule", "cluster.cpu_workers=1"]
    assert run_attempt(frozen(tmp_path / "base", *base, "train.steps=2"), 1) == [0]
    more = [*base, "train.steps=5", "+run.args.schedule=true"]
    with pytest.raises(AssertionError, match=r"the checkpoint has no object schedule(.|\n)*run\.fork=NEW"):
        run_attempt(frozen(tmp_path / "base", *more), 1)
    fork = RunDirectory(tmp_path / "fork")
    freeze(typed(compose([*LOCAL, *more, f"run.root={tmp_path}", "run.name=base", "run.fork=fork"])), fork)
    assert run_attempt(fork, 1) == [0]
    events = {event["event"]: event for event in fork.read_events()}
    assert events["resumed"]["changes"] == ["the checkpoint has no object schedule"]
    assert (events["loop"]["name"], events["loop"]["epoch"]) == ("rate", 3)
