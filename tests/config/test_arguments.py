"""The command line before Hydra sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.arguments import expand, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.errors import UserError
from tests.config.composing import compose


def test_plus_is_added_without_an_experiment_and_dropped_with_one() -> None:
    for form in ("strategy=dp", "+strategy=dp", "++strategy=dp"):
        assert with_right_plus([form]) == ["+strategy=dp"]
    for form in ("strategy=dp", "+strategy=dp"):
        assert with_right_plus([form, "+experiment=hybrid_8gpu"]) == ["strategy=dp", "experiment=hybrid_8gpu"]


def test_overrides_may_stand_on_both_sides_of_an_option() -> None:
    assert with_right_plus(["optim.lr=1", "-m", "strategy=dp,pp"]) == ["optim.lr=1", "+strategy=dp,pp", "-m"]
    assert with_right_plus(["-cd", "conf", "a=1", "-m"])[-3:] == ["-cd", "conf", "-m"]


def test_an_experiment_of_the_users_own_may_leave_the_strategy_open(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    (folder / "open.yaml").write_text("# @package _global_\ntrain:\n  steps: 7\n")
    (folder / "closed.yaml").write_text("# @package _global_\ndefaults:\n  - /strategy: pp\n  - _self_\n")
    for where in (["-cd", str(tmp_path)], [f"hydra.searchpath=[file://{tmp_path}]"]):
        assert "+strategy=dp" in with_right_plus(["experiment=open", "strategy=dp", *where])
        assert "strategy=dp" in with_right_plus(["experiment=closed", "+strategy=dp", *where])
    with pytest.raises(UserError, match="choose a strategy"):
        with_right_plus(["experiment=open,closed", "strategy=dp", "-m", "-cd", str(tmp_path)])


def test_a_sweep_is_every_combination() -> None:
    assert expand(["optim.lr=1,2", "+strategy=dp,pp", "train.steps=5"]) == [
        ["optim.lr=1", "+strategy=dp", "train.steps=5"],
        ["optim.lr=1", "+strategy=pp", "train.steps=5"],
        ["optim.lr=2", "+strategy=dp", "train.steps=5"],
        ["optim.lr=2", "+strategy=pp", "train.steps=5"],
    ]


@pytest.mark.parametrize(
    ("given", "jobs"),
    [
        ("cluster.exclude=n1,n2", ["n1,n2"]),
        ("++cluster.nodelist=n[1-2,4],m7", ["n[1-2,4],m7"]),
        ("cluster.exclude='n1,n2'", ["n1,n2"]),
        ("cluster.exclude=choice(n1,n2)", ["n1", "n2"]),
        ("cluster.exclude='n1','n2'", ["n1", "n2"]),
        ("cluster.exclude=null", [None]),
    ],
)
def test_a_list_in_the_syntax_of_slurm_is_one_job(given: str, jobs: list[str | None]) -> None:
    (override,) = with_right_plus([given])
    key = given.lstrip("+").partition("=")[0].removeprefix("cluster.")
    assert [getattr(typed(compose(job)).cluster, key) for job in expand([override])] == jobs


def test_jobs_composed_by_merging_values_equal_hydras_own() -> None:
    overrides = ["+strategy=hybrid", "model=llama_7b", "optim.lr=2e-3", "data.pattern='*.txt'", "train.epochs=2"]
    overrides += ["strategy.pp_split=[1,2]", "model.dim=64", "run.name=x"]
    line = CommandLine.parse(overrides)
    with line.composer() as composer:
        assert typed(composer(overrides)) == typed(composer.compose(overrides))
