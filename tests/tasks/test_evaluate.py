"""``evaluate`` gives the numbers of the training's own evaluation, whatever the layout that it runs under."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.listing import choose_by_name
from hpc_train.commands import checkpoint
from hpc_train.config.compose import typed
from hpc_train.config.evaluation import LOWEST_LOSS as VAL_LOSS
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.tasks.evaluate import evaluation_config
from tests.config.composing import compose
from tests.doors.command import TINY, hpc_train
from tests.doors.recorded import recorded_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps under dp with checkpoints after every second step."""
    folder = tmp_path_factory.mktemp("trained")
    recorded_run(folder / "outputs" / "base")
    return folder


def evaluated(trained: Path, *arguments: str) -> dict[str, Any]:
    done = hpc_train("evaluate", "base", "--json", "cluster=local", *arguments, cwd=trained)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def losses(trained: Path) -> dict[int, float]:
    lines = RunDirectory(trained / "outputs" / "base").read_all_metrics()
    return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}


def test_the_metrics_are_those_of_the_training_under_another_layout(trained: Path) -> None:
    found = evaluated(trained, "+strategy=pp", "cluster.cpu_workers=2", "--checkpoint", "4")
    assert found["step"] == 4 and found["samples"] == {"validation": 8}
    assert found["layout"].startswith("dp 1 x pp 2")
    assert found["metrics"]["val_loss"] == pytest.approx(losses(trained)[4], rel=1e-12)


def test_the_best_checkpoint_is_evaluated_on_other_data(trained: Path) -> None:
    best = min(losses(trained).items(), key=lambda item: item[1])
    same = choose_by_name(RunDirectory(trained / "outputs" / "base"), "best", VAL_LOSS)
    assert same.step == best[0]
    more = evaluated(
        trained, "--checkpoint", "best", "data.validation_samples=24", "cluster.cpu_workers=1", "strategy.dp=1"
    )
    assert more["step"] == best[0] and more["samples"] == {"validation": 24}
    assert more["metrics"]["val_loss"] != pytest.approx(best[1], rel=1e-6)


def test_the_best_checkpoint_is_marked_and_exported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, loss = min(losses(trained).items(), key=lambda item: item[1])
    run, to = str(trained / "outputs" / "base"), tmp_path / "best.pt"
    assert checkpoint.main(["list", run]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["step", "age", "size", "val_loss"]
    assert [row.split()[0] for row in rows if f"{loss:.4f} (best)" in row] == [str(best)]
    assert checkpoint.main(["export", run, "--to", str(to), "--checkpoint", "best", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["step"], result["format"], to.is_file()) == (best, "pt", True)


def test_a_damaged_checkpoint_is_refused(trained: Path) -> None:
    (weights, *_) = sorted((trained / "outputs" / "base" / "checkpoints" / "step-00000002").glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    done = hpc_train("evaluate", "base", "cluster=local", "--checkpoint", "2", cwd=trained)
    assert done.returncode == 2
    assert "the checkpoint is damaged" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["model.dim=32"], "model.dim=32 changes the model"),
        (["model=vit_tiny"], "model=vit_tiny changes the model"),
        (["optim.lr=1"], "optim.lr=1 has no effect"),
        (["train.steps=9"], "train.steps=9 has no effect"),
        (["optim.lr=1,2"], "describe a sweep"),
        (["data.no_such_key=1"], "there is no key data.no_such_key"),
        (["~metrics.no_such_metric"], "there is no key metrics.no_such_metric"),
        (["~metrics.f1._target_=other"], r"metrics\.f1\._target_ is .*F1, not other"),
        (["+experiment=gpt1b_h200"], "experiment=gpt1b_h200 .* not a group of the config"),
        (["-cn", "own"], "another primary config has no effect"),
        (["-cp", "own"], "another primary config has no effect"),
    ],
)
def test_what_does_not_fit_an_evaluation_is_refused(arguments: Sequence[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        evaluation_config(typed(compose(["+strategy=dp", *TINY, "+metrics=f1"])), arguments)


def test_what_only_backward_passes_do_is_left_out() -> None:
    saving = ["train.activation_checkpointing=1KiB", "train.activation_offload=1KiB", "train.cuda_graphs=true"]
    run = typed(compose(["+strategy=dp", *TINY, *saving, "optim.in_backward=true"]))
    config = evaluation_config(run, [])
    assert (config.train.activation_checkpointing, config.train.activation_offload) == ("none", "none")
    assert (config.train.cuda_graphs, config.optim.in_backward) == (False, False)
    exact = typed(compose(["+strategy=single", *TINY, "train.reproducible=any_world_size"]))
    assert evaluation_config(exact, ["+strategy=zero3"]).train.reproducible is None
    narrow = typed(compose(["+strategy=dp", *TINY, "precision=bf16", "precision.weights=bf16"]))
    assert evaluation_config(narrow, []).precision.weights == "fp32"


def test_groups_of_the_command_line_replace_those_of_the_run() -> None:
    run = typed(compose(["+strategy=zero3", *TINY, "batch.micro_size=2", "precision=bf16"]))
    same = evaluation_config(run, [])
    assert (same.strategy, same.batch, same.model, same.data) == (run.strategy, run.batch, run.model, run.data)
    other = evaluation_config(run, ["+strategy=pp", "data=text", "batch.micro_size=1"])
    assert (other.strategy.pp, other.data.kind, other.batch.micro_size) == ("fill", "text", 1)
    assert (other.model, other.precision) == (run.model, run.precision)


def test_metrics_and_eval_sets_of_the_run_can_be_left_out() -> None:
    sets = ["+eval_sets.a.samples=16", "+eval_sets.b.samples=32"]
    run = typed(compose(["+strategy=dp", *TINY, "+metrics=[f1,top_k]", *sets]))
    config = evaluation_config(run, ["~metrics.f1", "~eval_sets.a", "~metrics.top_k.args.k=5"])
    assert (config.metrics.keys(), config.eval_sets) == ({"top_k"}, {"b": {"samples": 32}})
    assert config.metrics["top_k"].args == {}
    assert evaluation_config(run, ["metrics={}"]).metrics == {}


def test_a_group_that_is_placed_elsewhere_replaces_only_what_it_changes() -> None:
    run = typed(compose(["+strategy=dp", *TINY, "data.samples=48", "+eval_sets.a.samples=16"]))
    config = evaluation_config(run, ["+data@eval_sets.b=synthetic", "+data@eval_sets.c=text"])
    assert config.data == run.data
    assert config.eval_sets.keys() == {"b", "c"}


@pytest.mark.parametrize(("name", "what"), [("last", "unknown checkpoint"), ("7", "no checkpoint of step 7")])
def test_a_checkpoint_that_does_not_exist_is_refused(trained: Path, name: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        choose_by_name(RunDirectory(trained / "outputs" / "base"), name, VAL_LOSS)
