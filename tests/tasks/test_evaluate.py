"""``evaluate`` gives the numbers of the training's own evaluation, whatever the layout that it runs under."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint.listing import choose_by_name
from hpc_train.commands import checkpoint
from hpc_train.config.compose import typed
from hpc_train.config.evaluation import LOWEST_LOSS as VAL_LOSS
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.tasks.evaluate import evaluation_config
from tests.config.composing import compose
from tests.doors.command import TINY, environment, hpc_train
from tests.doors.recorded import recorded_run
from tests.telemetry import mlflow_service


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps under dp with checkpoints after every second step."""
    folder = tmp_path_factory.mktemp("trained")
    recorded_run(folder / "outputs" / "base")
    return folder


def evaluated(trained: Path, *arguments: str) -> dict[str, Any]:
    done = hpc_train("evaluate", "base", "--json", "cluster=local", *arguments, cwd=trained)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def losses(trained: Path) -> dict[int, float]:
    lines = RunDirectory(trained / "outputs" / "base").read_all_metrics()
    return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}


def test_the_metrics_are_those_of_the_training_under_another_layout(trained: Path) -> None:
    best, loss = min(losses(trained).items(), key=lambda item: item[1])
    assert choose_by_name(RunDirectory(trained / "outputs" / "base"), "best", VAL_LOSS).step == best
    result = evaluated(trained, "+strategy=pp", "cluster.cpu_workers=2", "--checkpoint", "best")
    assert result["step"] == best and result["samples"] == {"validation": 8}
    assert result["layout"].startswith("dp 1 x pp 2")
    assert result["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-12)


def test_a_release_has_a_card_with_hashes_and_is_promoted_and_served(trained: Path) -> None:
    serve = 'head -n 2 "$MODEL/README.md" > served && exit 7'
    with mlflow_service.service() as server:
        done = hpc_train(
            "checkpoint", "release", "base", "--checkpoint", "4", "--to", "models/first", "--registry", "mlflow",
            "--as", "production", "--serve", serve, "--json", cwd=trained,
            env=environment(MLFLOW_TRACKING_URI=server.url),
        )  # fmt: skip
        assert server.aliases["production"] == "1"
    assert done.returncode == 7, done.stderr
    assert (trained / "served").read_text() == "---\nlibrary_name: transformers\n"
    released = json.loads(done.stdout)
    assert released["reference"] == "mlflow:base@production"
    assert released["metrics"]["val_loss"] == pytest.approx(losses(trained)[4], rel=1e-12)
    card = (trained / "models" / "first" / "README.md").read_text()
    [line] = [line for line in card.splitlines() if line.startswith("| model.safetensors |")]
    digest = hashlib.sha256((trained / "models" / "first" / "model.safetensors").read_bytes()).hexdigest()
    assert line.endswith(f" {digest} |")
    assert f"| val_loss | {released['metrics']['val_loss']:.6g} |" in card
    assert '"kind": "synthetic"' in card
    again = hpc_train("checkpoint", "release", "base", "--to", "models/first", cwd=trained)
    assert again.returncode == 2
    assert sorted(path.name for path in (trained / "models").iterdir()) == ["first"]


@pytest.mark.long_form(10)  # the config of such an evaluation is checked below
def test_a_checkpoint_is_evaluated_on_other_data(trained: Path) -> None:
    small = ["data.validation_samples=24", "cluster.cpu_workers=1", "strategy.dp=1"]
    result = evaluated(trained, "--checkpoint", "4", *small)
    assert result["step"] == 4 and result["samples"] == {"validation": 24}
    assert result["metrics"]["val_loss"] != pytest.approx(losses(trained)[4], rel=1e-6)


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


@pytest.mark.long_form(10)  # tests/checkpoint/test_verified.py has damaged checkpoints
def test_a_damaged_checkpoint_is_refused(trained: Path) -> None:
    (weights, *_) = sorted((trained / "outputs" / "base" / "checkpoints" / "step-00000002").glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    done = hpc_train("evaluate", "base", "cluster=local", "--checkpoint", "2", cwd=trained)
    assert done.returncode == 2
    assert "the checkpoint is damaged" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def config() -> Config:
    """The config of a run with metrics and sets of evaluation."""
    sets = ["data.samples=48", "+metrics=[f1,top_k]", "+eval_sets.a.samples=16", "+eval_sets.b.samples=32"]
    return typed(compose(["+strategy=dp", *TINY, "batch.micro_size=2", "precision=bf16", *sets]))


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
def test_what_does_not_fit_an_evaluation_is_refused(config: Config, arguments: Sequence[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        evaluation_config(config, arguments)


def test_what_only_backward_passes_do_is_left_out(config: Config) -> None:
    saving = replace(config.train, activation_checkpointing="1KiB", activation_offload="1KiB", cuda_graphs=True)
    run = replace(
        config,
        train=replace(saving, reproducible="any_world_size"),
        optim=replace(config.optim, in_backward=True),
        precision=replace(config.precision, weights="bf16"),
    )
    evaluation = evaluation_config(run, ["+strategy=zero3"])
    assert (evaluation.train.activation_checkpointing, evaluation.train.activation_offload) == ("none", "none")
    assert (evaluation.train.cuda_graphs, evaluation.train.reproducible) == (False, None)
    assert (evaluation.optim.in_backward, evaluation.precision.weights) == (False, "fp32")


def test_an_evaluation_has_the_groups_of_the_run_without_what_is_deleted(config: Config) -> None:
    same = evaluation_config(config, ["~metrics.f1", "~eval_sets.a", "~metrics.top_k.args.k=5"])
    assert (same.strategy, same.batch, same.model, same.data) == (
        config.strategy,
        config.batch,
        config.model,
        config.data,
    )
    assert (same.metrics.keys(), same.eval_sets) == ({"top_k"}, {"b": {"samples": 32}})
    assert same.metrics["top_k"].args == {}


def test_groups_of_the_command_line_replace_those_of_the_run(config: Config) -> None:
    other = evaluation_config(config, ["+strategy=pp", "data=text", "batch.micro_size=1", "metrics={}"])
    assert (other.strategy.pp, other.data.kind, other.batch.micro_size) == ("fill", "text", 1)
    assert (other.model, other.precision, other.metrics) == (config.model, config.precision, {})


def test_a_group_that_is_placed_elsewhere_replaces_only_what_it_changes(config: Config) -> None:
    other = evaluation_config(config, ["+data@eval_sets.b=synthetic", "+data@eval_sets.c=text"])
    assert other.data == config.data
    assert other.eval_sets.keys() == {"b", "c"}


@pytest.mark.parametrize(("name", "what"), [("last", "unknown checkpoint"), ("7", "no checkpoint of step 7")])
def test_a_checkpoint_that_does_not_exist_is_refused(trained: Path, name: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        choose_by_name(RunDirectory(trained / "outputs" / "base"), name, VAL_LOSS)
