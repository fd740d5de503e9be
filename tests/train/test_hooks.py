"""Hooks, metrics and evaluation sets in whole runs: early stopping, resume under another layout, export, errors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from hpc_train.checkpoint.listing import choose
from hpc_train.checkpoint.transfer import export
from hpc_train.commands import why
from hpc_train.config.compose import typed
from hpc_train.config.evaluation import eval_set_configs
from hpc_train.config.schema import TargetConfig
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.run.events import EVENTS
from hpc_train.run.exits import Failure, classify
from hpc_train.telemetry.progress import is_done, summary
from hpc_train.train.hooks import Hook, HookContext, Hooks
from hpc_train.train.hooks.early_stopping import EarlyStopping
from hpc_train.train.metrics import CallFailed
from tests.config.composing import compose
from tests.train.runs import TINY, frozen, run_attempt

ALL = (
    "+hooks=[ema,early_stopping,samples]", "hooks.ema.args.decay=0.5", "hooks.samples.args.prompts=[[1,2,3]]",
    "hooks.samples.args.new_tokens=2", "hooks.early_stopping.args.patience=2",
    "hooks.early_stopping.args.min_delta=1e9", "hooks.early_stopping.args.monitor=val_small_perplexity",
    "+hooks.mine._target_=tests.train.test_hooks.Recorder", "+metrics=[perplexity,f1]",
    "+eval_sets.small.validation_samples=3", "checkpoint.keep_best=val_small_f1", "checkpoint.keep=1",
    "train.eval_every=2", "train.steps=12", "model.vocab_size=32",
)  # fmt: skip


class Recorder(Hook):
    """Records the events of a run in its state, and asks for its end on rank 1 after step ``stop_at``."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[list[Any]] = []
        self.stop_at = stop_at

    def start(self, context: HookContext) -> None:
        self.events.append(["start", context.step])

    def step(self, context: HookContext) -> None:
        self.events.append(["step", context.step])
        if context.step == self.stop_at and context.rank == 1:
            context.stop("enough")

    def evaluation(self, context: HookContext) -> None:
        assert context.metrics["step"] == context.step
        self.events.append(["evaluation", context.step])

    def checkpoint(self, context: HookContext) -> None:
        self.events.append(["checkpoint", context.step])

    def end(self, context: HookContext) -> None:
        context.log_text("recorded", str(self.events))

    def state_dict(self) -> Mapping[str, Any]:
        return {"events": self.events}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.events = [*state["events"], ["loaded", len(state["events"])]]


@pytest.mark.long_form(20)  # test_readme.py resumes under another strategy
def test_a_hook_ends_the_run_and_its_state_goes_on_under_another_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", *ALL)
    assert run_attempt(run, 2) == [0, 0]
    result, lines = run.record()["result"], [line for line in run.read_metrics() if "val_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6], "the first is the best, and two more improve nothing"
    assert lines[0].keys() >= {"val_perplexity", "val_f1", "val_small_loss", "val_small_perplexity", "val_small_f1"}
    assert lines[0]["val_perplexity"] == pytest.approx(2.718281828459045 ** lines[0]["val_loss"], rel=1e-5)
    assert lines[0]["val_small_loss"] != lines[0]["val_loss"]
    assert (result["steps"], result["val_small_f1"]) == (6, lines[-1]["val_small_f1"])
    assert result["ended_early"].startswith(
        "val_small_perplexity has not improved in 2 evaluations; it was best at step 2"
    )
    assert is_done(run) and result["ended_early"] in summary(run)
    best = max(reversed(lines), key=lambda line: line["val_small_f1"])["step"]
    assert {path.name for path in run.checkpoints.iterdir()} == {f"step-{step:08d}" for step in {best, 6}}
    assert "ended_early" in EVENTS and [e["step"] for e in run.read_events() if e["event"] == "ended_early"] == [6]
    log = (run.path / "logs/rank-0-000.log").read_text()
    assert log.count("samples after step") == 3 and "[1, 2, 3] -> [" in log
    why.main([str(run.path)])
    assert f"ended early by a hook: {result['ended_early']}" in capsys.readouterr().out.replace("\n", " ")

    export(run, None, tmp_path / "model.pt", "pt", None, lambda *_: nullcontext(lambda _: None))
    export(run, None, tmp_path / "ema.pt", "pt", None, lambda *_: nullcontext(lambda _: None), "ema")
    model, average = torch.load(tmp_path / "model.pt"), torch.load(tmp_path / "ema.pt")
    assert model.keys() == average.keys() and not any(torch.equal(model[name], average[name]) for name in model)
    with pytest.raises(UserError, match="no weights of the hook mine; it has weights of ema"):
        export(run, None, tmp_path / "no.pt", "pt", None, lambda *_: nullcontext(lambda _: None), "mine")

    more = ("hooks.early_stopping.args.patience=9", "+hooks.mine.args.stop_at=7", "train.eval_every=100")
    frozen(run.path, "+strategy=zero3", *ALL, *more)
    assert run_attempt(run, 2) == [0, 0]
    result = run.record()["result"]
    assert (result["steps"], result["ended_early"]) == (9, "a hook on another rank asked to end the run")
    assert "val_loss" in run.read_metrics()[-1], "the last step is evaluated"
    log = (run.path / "logs/rank-0-001.log").read_text()
    events = eval(log.split("recorded after step 9:\n")[1].splitlines()[0])
    assert [event for event in events if event[0] == "step"] == [["step", step] for step in range(1, 10)]
    assert events[0] == ["start", 0] and events[-1] == ["checkpoint", 9] and ["start", 6] not in events
    assert "lacks the state" not in log
    state = choose(run, 9).manifest().extra["hooks"]["early_stopping"]
    assert (state["best_step"], state["without"]) == (2, 3), "early stopping has gone on counting"


class Broken(Hook):
    def step(self, context: HookContext) -> None:
        if context.step == 3:
            self.fail()

    def fail(self) -> None:
        raise KeyError("pictures")


def hooks_alone(**targets: TargetConfig) -> Hooks:
    found = Hooks(targets)
    nothing: Any = None
    found.context = HookContext(0, 9, {}, nothing, nothing, nothing, nothing, nothing, found.request_end, print)
    return found


def test_an_error_names_the_hook_its_method_the_step_and_the_line() -> None:
    found = hooks_alone(mine=TargetConfig("tests.train.test_hooks.Broken"))
    found.after_step(2)
    with pytest.raises(CallFailed) as caught:
        found.after_step(3)
    line = Broken.fail.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        "hook mine (tests.train.test_hooks.Broken) failed in step() after step 3: KeyError: 'pictures' "
        f"({__file__}:{line})"
    )
    assert classify(caught.value) is Failure.USER_ERROR
    with pytest.raises(CallFailed, match="failed in its constructor: TypeError"):
        Hooks({"mine": TargetConfig("tests.train.test_hooks.Broken", {"size": 1})})


def test_an_end_counts_only_with_the_same_hooks() -> None:
    stopping = {"patience": 2}
    found = hooks_alone(stop=TargetConfig("hpc_train.train.hooks.early_stopping.EarlyStopping", stopping))
    recorded = found.as_end("enough")
    assert found.same_end(recorded) == "enough" and found.same_end(None) is None
    more = hooks_alone(
        stop=TargetConfig("hpc_train.train.hooks.early_stopping.EarlyStopping", stopping | {"patience": 3})
    )
    assert more.same_end(recorded) is None


@pytest.mark.parametrize(("mode", "values", "ends"), [
    ("min", [3.0, 2.0, 1.0, 0.5], None), ("max", [3.0, 2.0, 1.0, 0.5], 2), ("min", [3.0, 2.95, 2.96, 1.0], 2),
    ("min", [float("nan"), float("inf"), 1.0, 1.0], 1), ("min", [3.0, 3.0, 2.0, 2.5], None),
])  # fmt: skip
def test_early_stopping(mode: str, values: list[float], ends: int | None) -> None:
    hook, asked = EarlyStopping("val_x", patience=2, min_delta=0.1, mode=mode), list[int]()
    nothing: Any = None
    for step, value in enumerate(values):
        rest = (nothing, nothing, nothing, nothing, nothing, lambda _, step=step: asked.append(step), print)
        hook.evaluation(HookContext(step, 9, {"val_x": value}, *rest))
    assert next(iter(asked), None) == ends


def test_early_stopping_of_another_metric_or_mode_begins_anew() -> None:
    nothing: Any = None
    before = EarlyStopping("val_loss")
    before.evaluation(HookContext(1, 9, {"val_loss": 3.0}, *[nothing] * 7))
    state = before.state_dict()
    for other in (EarlyStopping("val_accuracy"), EarlyStopping("val_loss", mode="max")):
        fresh = other.state_dict()
        other.load_state_dict(state)
        assert other.state_dict() == fresh
    same = EarlyStopping("val_loss")
    same.load_state_dict(state)
    assert same.state_dict() == state
    same.load_state_dict({"best": 2.0, "best_step": 1, "without": 0})  # of an earlier version
    assert same.state_dict()["best"] == 2.0


REACH = {"_target_": "examples.own_hook.ReachLoss"}
CONFIDENCE = {"x": {"_target_": "examples.own_metric.confidence"}}


@pytest.mark.parametrize(("overrides", "added", "message"), [
    ([], {"hooks.mine": {"args": {"n": 1}}}, "hooks.mine has no _target_"),
    ([], {"hooks.mine": {"_target_": "nope.Hook"}}, "there is no module nope"),
    ([], {"hooks.mine": {"_target_": "examples.own_hook.Nope"}}, "own_hook.py defines no Nope"),
    ([], {"hooks.mine": REACH}, "requires loss"),
    ([], {"hooks.mine": REACH | {"loss": 1}}, "hooks.mine.loss is not a config key"),
    ([], {"hooks.mine": REACH | {"args": {"loss": 1, "los": 2}}}, "has no parameter los"),
    ([], {"metrics.x": {"_target_": "examples.own_metric.nope"}}, "own_metric.py defines no nope"),
    ([], {"metrics.loss": CONFIDENCE["x"]}, "two metrics have the name val_loss"),
    (["+hooks=ema", "hooks.ema.args.decay=1"], {}, "must be at least 0 and below 1"),
    (["+hooks=early_stopping", "hooks.early_stopping.args.monitor=val_los"], {}, "no evaluation computes"),
    (["+hooks=early_stopping", "hooks.early_stopping.args.patience=0"], {}, "a number of evaluations, at least 1"),
    (["checkpoint.keep_best=val_f1"], {}, "no evaluation computes"),
    (["checkpoint.keep_best=val_x"], {"metrics": CONFIDENCE}, "does not know whether"),
    ([], {"eval_sets.other": {"path": "3x", "sampels": 2}}, "eval_sets.other.path is not a config key"),
    ([], {"eval_sets.other": {"task": "images"}}, "gives images as samples, but data gives tokens"),
])  # fmt: skip
def test_mistakes_are_refused_before_submission(
    overrides: list[str], added: dict[str, dict[str, Any]], message: str
) -> None:
    composed = compose([*TINY, *overrides])
    for key, value in added.items():
        OmegaConf.update(composed, key, value, force_add=True)
    with pytest.raises(UserError, match=message):
        validate(typed(composed), nodes=1, workers_per_node=2)


def test_an_evaluation_set_is_the_data_with_other_values(tmp_path: Path) -> None:
    config = typed(
        compose([*TINY, "+eval_sets.files={kind: text, path: a, vocab_size: 32}", "+eval_sets.few.samples=3"])
    )
    found = eval_set_configs(config.data, config.eval_sets)
    assert (found["few"].kind, found["few"].samples, found["few"].sequence_length) == ("synthetic", 3, 8)
    assert (found["files"].kind, found["files"].path) == ("text", str(Path("a").absolute()))
