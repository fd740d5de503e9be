"""Every file under conf/ composes, and what it holds can be laid out."""

from __future__ import annotations

import re
from itertools import cycle

import pytest
import yaml

from benchmarks.savers import ROWS
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.config.conf_files import config_directory
from hpc_train.config.run_path import SCRATCH
from hpc_train.config.schema import Config, StrategyConfig
from hpc_train.errors import UserError
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.validate import check_values, validate
from tests.config.composing import config_of

CONF = config_directory()
FILES = sorted(
    path.relative_to(CONF).with_suffix("") for path in CONF.glob("*/*.yaml") if path.stem != "extension"
)  # tests/extensions composes that one


def names(group: str) -> list[str]:
    return [file.name for file in FILES if file.parent.name == group]


STRATEGIES, EXPERIMENTS = names("strategy"), names("experiment")
# what the files leave to the user
TOKENS = (
    ["data=text"],
    ["data=tokens", "data.path=/data", "data.vocab_size=256"],
    ["data=sft", "data.path=/data", "data.tokenizer=/model", "data.vocab_size=256"],
    ["data=synthetic"],
    ["data=custom", "data._target_=package.Data", "model.vocab_size=256"],
    ["data=stream", "data._target_=package.Data", "data.shards=4", "model.vocab_size=256"],
    ["data=mixture", "+data@data.sources.one=text"],
)
IMAGES = (
    ["data=synthetic", "data.task=images", "data.image_size=112"],
    ["data=cifar100", "data.path=/data", "model.patch_size=8"],
    ["data=images", "data.path=/data", "data.n_classes=5"],
    ["data=shards", "data.path=/data", "data.n_classes=5"],
)
LEFT = {"optim=custom": ("optim._target_=torch.optim.RMSprop",)}
SITE = ["cluster.account=project_1", "run.root=/runs"]


def of_experiment(name: str) -> list[str]:
    path = [] if "hybrid" in name or name.startswith("gpt") else ["data.path=/data"]
    return [f"experiment={name}", *path]


def models() -> list[list[str]]:
    """Every model and every data source, in pairs that fit."""
    images = zip([name for name in names("model") if name.startswith("vit")], cycle(IMAGES), strict=False)
    language = ("gpt", "llama", "qwen", "mistral", "mixtral", "moe", "switch", "gemma")
    texts = zip([name for name in names("model") if name.startswith(language)], cycle(TOKENS), strict=False)
    custom = ["model=custom", "model._target_=package.Model"]
    hf = ["model=hf", "model.name_or_path=/models/mine", "model.task=causal_lm"]
    return [custom, hf, *([f"model={model}", *data] for model, data in (*images, *texts))]


def rows() -> list[list[str]]:
    """Command lines that together choose every file but the experiments: composing each one by itself takes minutes."""
    groups = ("cluster", "strategy", "optim", "precision", "train", "run")
    columns = [
        models(),
        *([[f"{group}={name}", *LEFT.get(f"{group}={name}", ())] for name in names(group)] for group in groups),
        *([[f"+{group}={name}"] for name in names(group)] for group in ("metrics", "hooks")),
    ]
    count = max(map(len, columns))
    return [[*SITE, *(part for column in columns for part in column[row % len(column)])] for row in range(count)]


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the variables that sites set."""
    monkeypatch.delenv("HPC_TRAIN_ROOT", raising=False)
    for name in SCRATCH:
        monkeypatch.setenv(name, "/mine")
    monkeypatch.setenv("USER", "me")


def test_every_file_is_in_a_row() -> None:
    chosen = {part.removeprefix("+") for row in rows() for part in row}
    assert {f"{file.parent}={file.name}" for file in FILES if file.parent.name != "experiment"} <= chosen


@pytest.mark.parametrize("row", rows(), ids=" ".join)
def test_every_file_composes_to_valid_values(row: list[str]) -> None:
    check_values(config_of(*row))


def test_a_site_keeps_runs_on_its_scratch_space(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = {
        "clariden": "/capstor/scratch/cscs/me/hpc_train",
        "lumi": "/scratch/project_1/hpc_train",
        "leonardo_booster": "/mine/hpc_train",
        "aws_parallelcluster": "/fsx/hpc_train",
        "lambda_1cc": "/data/hpc_train",
    }
    for site, root in roots.items():
        assert config_of(f"cluster={site}", "cluster.account=project_1").run.root == root
    monkeypatch.setenv("HPC_TRAIN_ROOT", "/own")
    for site in roots:
        assert config_of(f"cluster={site}", "cluster.account=project_1").run.root == "/own"


def test_every_public_site_names_its_sources() -> None:
    general = ("auto", "kubernetes", "local", "slurm")
    sites = [path for path in (CONF / "cluster").glob("*.yaml") if path.stem not in general]
    assert len(sites) >= 8
    assert all("https://" in path.read_text() for path in sites)


@pytest.mark.parametrize(("site", "below"), [("roihu", "/scratch"), ("berzelius", "/proj")])
def test_a_directory_that_depends_on_the_project_is_asked_for(site: str, below: str) -> None:
    with pytest.raises(UserError, match=f"the directory of your project below {below} is unknown"):
        config_of(f"cluster={site}")


def composed(*jobs: list[str]) -> list[Config]:
    """Composes jobs that differ in values only from one composed config, like the jobs of a sweep."""
    with CommandLine.parse([]).composer() as compose:
        return [typed(compose(job)) for job in jobs]


def strategy_alone(name: str) -> StrategyConfig:
    """The strategy as composed without an experiment. The row is composed once for all tests."""
    return config_of(*next(row for row in rows() if f"strategy={name}" in row)).strategy


# Each experiment has a case of the short form; each strategy is composed without one.
@pytest.mark.long_form(1, cases=STRATEGIES[len(EXPERIMENTS) :])
@pytest.mark.parametrize(("strategy", "experiment"), [*zip(STRATEGIES, cycle(EXPERIMENTS), strict=False)])
def test_any_strategy_replaces_that_of_any_experiment(strategy: str, experiment: str) -> None:
    """The pairs contain every strategy and every experiment. An experiment chooses a strategy, so no plus is needed."""
    (config,) = composed([*of_experiment(experiment), f"strategy={strategy}"])
    check_values(config)
    assert config.strategy == strategy_alone(strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_file_sets_each_key_of_the_split(strategy: str) -> None:
    text = yaml.safe_load((CONF / "strategy" / f"{strategy}.yaml").read_text())
    base = text.pop("defaults", [])
    keys = set(text) | (set(yaml.safe_load((CONF / "strategy" / f"{base[0]}.yaml").read_text())) if base else set())
    assert keys >= {"name", "dp", "pp", "tp", "data_parallel", "shard", "schedule", "stages_per_rank", "pp_split"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_fits_or_says_what_would(strategy: str) -> None:
    config = config_of("model=gpt_tiny")
    config.strategy, config.batch.global_size = strategy_alone(strategy), 24
    for workers in (1, 2, 3, 4, 8):
        try:
            layout = resolve_layout(config, nodes=1, workers_per_node=workers)
        except UserError as error:
            assert error.where and error.fix
            assert not re.search(r"=0\b|\b0 ", f"{error.what} {error.fix}"), "no sizes of zero"
            left = ("auto",)  # to the planner
            assert strategy in (*left, "cp", "tp", "hybrid3d", "hybrid4"), "the others fit any number of workers"
        else:
            assert 1 <= layout.world_size <= workers


def test_all_stages_come_from_the_workers_that_there_are() -> None:
    pipeline = config_of("model=gpt_tiny")
    pipeline.strategy = strategy_alone("pp")
    assert [resolve_layout(pipeline, 1, workers).pp for workers in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert "4 layers" in resolve_layout(pipeline, 1, 8).notes[0]
    pipeline.strategy.schedule, pipeline.strategy.stages_per_rank = "interleaved_1f1b", 2
    assert resolve_layout(pipeline, 1, 4).pp == 2
    pipeline.strategy = strategy_alone("model_parallel")
    assert resolve_layout(pipeline, 1, 4).micro_batches == 1
    with pytest.raises(
        UserError, match=r"4 pipeline ranks x cp 1 x tp 2 need more than the 2 available workers"
    ) as refused:
        resolve_layout(config_of("strategy=hybrid3d", "strategy.pp=4", "strategy.tp=2"), 1, 2)
    assert refused.value.fix.startswith("strategy.pp=1 or fewer")


def test_the_experiments_are_the_cases_they_are_named_for() -> None:
    rows = {n: config_of(f"experiment=cifar100_vit_large_{n}gpu", "data.path=/data") for n in (32, 8, 1)}
    nodes = {n: int(row.cluster.nodes) for n, row in rows.items()}
    layouts = {n: resolve_layout(row, nodes[n], n // nodes[n]) for n, row in rows.items()}
    assert {row.batch.global_size for row in rows.values()} == {4096}
    assert {n: (layout.dp, layout.micro_batches) for n, layout in layouts.items()} == {
        32: (32, 1),
        8: (8, 4),
        1: (1, 32),
    }
    llama = config_of("experiment=llama7b_4xa100", "data.path=/data")
    assert (llama.strategy.data_parallel, llama.train.activation_checkpointing) == ("zero3", "full")
    hybrid = resolve_layout(config_of("experiment=hybrid_8gpu"), 1, 8)
    assert (hybrid.pp, hybrid.dp) == (4, 2)


@pytest.mark.long_form(5)  # of benchmarks/savers.py, which needs the GPU
def test_each_row_of_the_benchmark_of_savers_fits_on_an_h200() -> None:
    for config in composed(*(["experiment=gpt1b_h200", *switched] for switched in ROWS.values())):
        memory = estimate(config, validate(config, 1, 1))
        assert memory is not None and memory.total < 0.9 * 141e9
