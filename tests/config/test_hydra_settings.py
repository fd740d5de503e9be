"""Settings of Hydra's own: those that are followed, and those that are refused because they have no effect."""

from __future__ import annotations

import copy
from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hpc_train.config.arguments import expand, first_values, refuse_search, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import WITH_STRATEGY, initialized, typed
from hpc_train.config.hydra_settings import refuse_without_effect
from hpc_train.config.schema import Config
from hpc_train.config.translate import SUBMITIT_KEYS, translate
from hpc_train.errors import UserError

GRID = 'hydra.sweeper.params={optim.lr:"1e-3,3e-4",strategy:"dp,pp"}'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with experiments as users of Hydra write them."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "experiment").mkdir()
    files = {
        "grid": "hydra: {mode: MULTIRUN, sweeper: {params: {optim.lr: '1e-3,3e-4', +strategy: 'dp,pp'}}}",
        "over": "defaults:\n  - override /strategy: zero2\n  - override /optim: sgd",
        "add": "defaults:\n  - /strategy: zero3",
        "late": "defaults:\n  - override /optim: sgd\n  - /strategy: dp",
        "chdir": "hydra: {job: {chdir: true}}",
        "dir": "hydra: {run: {dir: 'logs/${now:%Y}'}}",
        "submitit": "hydra: {launcher: {timeout_min: 60, partition: gpu}}",
        "launcher": "defaults:\n  - override /hydra/launcher: submitit_slurm",
        "sweeper": "defaults:\n  - override /hydra/sweeper: optuna",
    }
    for name, text in files.items():
        (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    return folder


def jobs(*arguments: str) -> list[list[str]]:
    return expand(CommandLine.parse(with_right_plus(arguments)).overrides)


def test_params_of_the_sweeper_are_a_sweep_unless_the_command_line_sets_their_keys() -> None:
    for plus in ("", "+"):
        assert [job[:2] for job in jobs(plus + GRID, "-m")] == [
            [f"optim.lr={lr}", f"+strategy={name}"] for lr in ("0.001", "0.0003") for name in ("dp", "pp")
        ]
    assert len(jobs(GRID, "optim.lr=1e-2", "strategy=dp", "-m")) == 1
    assert jobs(GRID, "experiment=hybrid_8gpu", "-m")[0][1] == "strategy=dp", "the experiment chooses one"
    assert len(jobs(GRID)) == 1, "without -m Hydra does not sweep"


def test_an_experiment_may_be_a_sweep_and_choose_the_mode(site: Path) -> None:
    arguments = with_right_plus(["-cd", str(site), "+experiment=grid", "train.steps=3"])
    assert arguments[-1] == "--multirun"
    line = CommandLine.parse(arguments)
    assert len(expand(line.overrides)) == 4
    with line.composer() as compose:
        config = typed(compose(expand(line.overrides)[3]))
    assert (config.optim.lr, config.strategy.name, config.train.steps) == (3e-4, "pp", 3)
    assert with_right_plus(["hydra.mode=MULTIRUN"])[-1] == "--multirun"
    assert "--multirun" not in with_right_plus(["hydra.mode=MULTIRUN", "--cfg", "job"])


def test_glob_lists_the_options_of_a_group(site: Path) -> None:
    assert with_right_plus(["strategy=glob(zero*)", "-m"])[0] == "+strategy=zero1,zero2,zero3"
    pattern = "+experiment=glob([a*,hybrid*],exclude=b*)"
    assert with_right_plus([pattern, "-cd", str(site), "-m"])[0] == "experiment=add,hybrid_8gpu"
    with pytest.raises(UserError, match="matches no file of conf/strategy"):
        with_right_plus(["strategy=glob(nope*)", "-m"])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["experiment=over"], "zero2"),
        (["experiment=over", "strategy=pp"], "pp"),
        (["experiment=add"], "zero3"),
        (["experiment=add", "+strategy=pp"], "pp"),
    ],
)
def test_an_experiment_overrides_or_adds_a_strategy_that_the_user_replaces(
    site: Path, arguments: list[str], name: str
) -> None:
    line = CommandLine.parse(with_right_plus([*arguments, "-cd", str(site)]))
    with line.composer() as compose:
        config = typed(compose(line.overrides))
    assert config.strategy.name == name
    assert (config.optim.name == "sgd") == ("experiment=over" in arguments)


def test_experiments_that_choose_a_strategy_in_different_ways_are_not_one_sweep(site: Path) -> None:
    with pytest.raises(UserError, match="differ in how they choose a strategy"):
        with_right_plus(["experiment=over,add", "-cd", str(site), "-m"])


def test_mistakes_in_a_defaults_list_name_the_file(site: Path) -> None:
    (site / "base.yaml").write_text("defaults: [config, _self_]\n")
    wanted = {
        ("-cd", "experiment=late"): "the Defaults List of experiment/late has `override optim: sgd`",
        ("-cp", "-cn", "base"): "base.yaml includes config, which does not exist",
    }
    for (option, *others), what in wanted.items():
        line = CommandLine.parse([option, str(site), *others])
        with pytest.raises(HydraException) as caught, line.composer() as compose:
            compose(line.overrides)
        mistake = translate(caught.value)
        assert mistake is not None and what in mistake.what, mistake


WITHOUT_EFFECT = [
    ("run.dir", "logs/mine", "run.root=logs run.name=mine"),
    ("run.dir", "logs/${now:%Y}", "run.root=DIR run.name=NAME"),
    ("sweep.dir", "/x/y", "run.root=/x run.name=y"),
    ("sweep.subdir", "${hydra.job.override_dirname}", "multirun.yaml"),
    ("job.chdir", True, "HPC_TRAIN_RUN_DIR"),
    ("verbose", True, "logging.basicConfig"),
    ("verbose", ["torch"], "logging.basicConfig"),
    ("job.env_set", {"A": "b"}, "+cluster.env.NAME=VALUE"),
    ("output_subdir", ".hydra", "remove it"),
]


def test_a_setting_without_effect_is_refused_with_what_replaces_it() -> None:
    with initialized():
        settings = hydra.compose("config", return_hydra_config=True).hydra
    refuse_without_effect(settings)
    for key, value, fix in WITHOUT_EFFECT:
        changed = settings.copy()
        OmegaConf.set_readonly(changed, False)
        with open_dict(changed):
            OmegaConf.update(changed, key, value)
        with pytest.raises(UserError) as caught:
            refuse_without_effect(changed)
        assert caught.value.where == f"hydra.{key}"
        assert fix in caught.value.fix


def test_so_is_one_that_a_file_sets_and_harmless_values_are_not(site: Path) -> None:
    for name, key in (("chdir", "hydra.job.chdir"), ("dir", "hydra.run.dir")):
        with pytest.raises(UserError, match=f"{key} has no effect"):
            with_right_plus([f"experiment={name}", "-cd", str(site)])
    assert with_right_plus(["hydra.job.chdir=false", "hydra.verbose=false"])


@pytest.mark.parametrize(
    ("name", "what", "where", "fix"),
    [
        ("submitit", "hydra.launcher.timeout_min has no effect", "submitit.yaml:2", "cluster.time=VALUE"),
        ("launcher", "hydra/launcher=submitit_slurm has no effect", "launcher.yaml:3", "cluster=slurm -m"),
        ("sweeper", "hydra/sweeper=optuna has no effect", "sweeper.yaml:3", "pip install hydra-optuna-sweeper"),
    ],
)
def test_a_launcher_in_a_file_is_refused(site: Path, name: str, what: str, where: str, fix: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        with_right_plus([f"experiment={name}", "-cd", str(site), "-m"])
    assert where in caught.value.where and fix in caught.value.fix


def test_a_setting_of_the_launcher_in_the_main_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nhydra: {launcher: {nodes: 2}}\n")
    with pytest.raises(UserError, match=r"launcher\.nodes has no effect") as caught:
        with_right_plus(["-cd", str(tmp_path), "-cn", "mine"])
    assert caught.value.fix == "cluster.nodes=VALUE"


def test_what_replaces_other_launchers_is_told() -> None:
    wanted = {
        "hydra/launcher=submitit_slurm": "cluster=slurm -m",
        "hydra.launcher.timeout_min=60": "cluster.time=VALUE",
        "hydra.launcher.partition=short": "cluster.partition=VALUE",
        "hydra/sweeper=ax": "pip install hydra-ax-sweeper",
    }
    for argument, fix in wanted.items():
        with pytest.raises((HydraException, OmegaConfBaseException)) as caught, initialized():
            hydra.compose("config", [argument], return_hydra_config=True)
        mistake = translate(caught.value)
        assert mistake is not None and fix in mistake.fix, argument
    schema = OmegaConf.structured(Config)
    assert all(OmegaConf.select(schema, key, default=key) != key for key in SUBMITIT_KEYS.values())


def test_the_jobs_of_a_search_are_not_listed_in_advance() -> None:
    store = ConfigStore.instance()
    node = {"_target_": "hydra_plugins.search.Sweeper", "params": {"optim.lr": "interval(1,2)"}}
    store.store(group="hydra/sweeper", name="of_a_test", node=node)
    try:
        overrides = ["hydra/sweeper=of_a_test", "optim.lr=interval(1e-4,1e-2)", "model.n_layers=2,4", "strategy=dp"]
        line = CommandLine.parse(with_right_plus([*overrides, "-m"]))
        assert first_values(line.overrides)[1:] == ["optim.lr=0.0001", "model.n_layers=2", "+strategy=dp"]
        with pytest.raises(UserError, match="freeze needs all jobs in advance"):
            refuse_search(line, "freeze")
    finally:
        del store.repo["hydra"]["sweeper"]["of_a_test.yaml"]


def test_a_file_that_overrides_the_strategy_leaves_nothing_behind(site: Path) -> None:
    with initialized():
        hydra.compose("config")
    before = copy.deepcopy({name: node for name, node in ConfigStore.instance().repo.items() if name != "hydra"})
    arguments = with_right_plus(["experiment=over", "-cd", str(site), "optim.lr=1"])
    assert arguments[2] == WITH_STRATEGY, "after the overrides of the user"
    assert with_right_plus(arguments) == arguments
    line = CommandLine.parse(arguments)
    assert WITH_STRATEGY not in line.overrides, "the dry run, run.json and scripts show the user's overrides only"
    with line.composer() as compose:
        assert typed(compose(line.overrides)).strategy.name == "zero2"
    with initialized():
        assert "strategy" not in hydra.compose("config", return_hydra_config=True).hydra.runtime.choices
    after = {name: node for name, node in ConfigStore.instance().repo.items() if name != "hydra"}
    assert str(after) == str(before)
