"""Keys that the user sets and nothing reads: one line for each reason, from the conditions of the schema."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.arguments import expand, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.extensions import FAMILIES, SOURCES, load_family, load_source
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import FACTS, AnyOf, keys
from hpc_train.config.values import for_debugging
from hpc_train.launch.request import check_job, notices_of
from hpc_train.layout.layout import JobShape, Place
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.without_effect import WithoutEffect, facts_of, notices, user_keys, without_effect
from hpc_train.run.directory import RunDirectory
from tests.config.composing import config_of

HERE = JobShape(1, 1, 0, 1, Place.MACHINE)
ON_SLURM = JobShape(1, 1, 4, 4, Place.QUEUE, in_job=True)


def unread(arguments: list[str], shape: JobShape = HERE) -> list[list[WithoutEffect]]:
    """What ``arguments`` set without effect, for each job."""
    line = CommandLine.parse(with_right_plus(arguments))
    found = []
    for overrides in expand(line.overrides):
        own = [] if line.config_directory is None else ["-cd", str(line.config_directory)]
        config = config_of(*overrides, *own)
        layout = resolve_layout(config, 1, shape.workers)
        found.append(without_effect(config, layout, shape, user_keys(line, overrides)))
    return found


def told(*arguments: str, shape: JobShape = HERE) -> list[str]:
    return notices(dict(enumerate(unread([*arguments], shape))))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    files = {
        "optim/mine": "defaults: [sgd, _self_]\nlr: 0.5\nbetas: [0.5, 0.9]\nstate_per_parameter: null",
        "cluster/here": "kind: local\npartition: gpu\nexclusive: false\nconstraint: rack1",
        "experiment/mine": "# @package _global_\ndefaults:\n  - override /optim: mine\n  - override /cluster: here\n"
        "precision:\n  residual: fp32\nrun:\n  name: ${cluster.comment}\ncluster:\n  comment: told",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(text + "\n")
    return folder


CASES = [
    (["optim=sgd", "optim.betas=[0.9,0.99]"],
     "note: optim.betas=[0.9,0.99] has no effect with optim=sgd; remove it, or set optim=adamw"),
    (["strategy.context=ring"],
     "note: strategy.context=ring has no effect with strategy.cp=1; remove it, or set strategy.cp to another "
     "value"),
    (["strategy.compression_rank=8", "strategy=dp"],
     "note: strategy.compression_rank=8 has no effect with strategy.compression=none; remove it, or set "
     "strategy.compression=powersgd"),
    (["optim.base_batch=64"],
     "note: optim.base_batch=64 has no effect with optim.lr_scaling=none; remove it, or set optim.lr_scaling to "
     "another value"),
    (["checkpoint.best_mode=max"],
     "note: checkpoint.best_mode=max has no effect with checkpoint.keep_best=null; remove it, or set "
     "checkpoint.keep_best"),
    (["cluster.partition=gpu", "cluster.time=02:00:00"],
     "note: cluster.partition=gpu and cluster.time=02:00:00 have no effect outside of jobs submitted to Slurm; remove "
     "them, or use cluster=slurm -m"),
    (["optim={betas:[0.1,0.2],name:sgd}"],
     "note: optim.betas has no effect with optim=sgd; remove it, or set optim=adamw"),
    (["train.activation_offload=64GiB"],
     "note: train.activation_offload=64GiB has no effect on layers that keep 72 MiB for a micro-batch; remove it, or "
     "set train.activation_offload to less than the size of a tensor"),
    (["train.debug=true", "telemetry.log_every=7"],
     "note: telemetry.log_every=7 has no effect with train.debug=true; remove it, or set train.debug=false"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "line"), CASES, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_key_without_effect_gets_a_line(arguments: list[str], line: str) -> None:
    assert told(*arguments) == [line]


def test_keys_with_an_effect_values_that_set_nothing_and_presets_are_not_told() -> None:
    assert told("optim.betas=[0.9,0.99]", "precision=fp16", "precision.residual=fp32", "train.seed=3") == []
    assert told("cluster.partition=null", "train.debug=true", "train.compile=false") == []
    assert told("strategy=hybrid3d", "strategy.dp=1", "strategy.pp=1", "strategy.tp=1", "optim=muon") == []
    assert told("cluster=local", "cluster.gpu_type=a100", "precision.tf32=true", shape=ON_SLURM) == []


def test_a_sweep_is_told_once_with_its_jobs() -> None:
    found = told("optim=sgd,adamw", "optim.momentum=0.5", "strategy=dp", "strategy.pp_split=flops", "-m")
    assert found == [
        "note: strategy.pp_split=flops has no effect without a pipeline; remove it, or use several ranks and a "
        "strategy such as +strategy=pp or hybrid",
        "note: optim.momentum=0.5 has no effect with optim=adamw in job 1; remove it, or set optim=sgd",
    ]


def test_later_batches_of_a_sweep_tell_only_what_is_new(tmp_path: Path) -> None:
    line = CommandLine.parse(["optim=sgd,adamw", "optim.momentum=0.5", "optim.betas=[0,0]", "cluster=local", "-m"])
    jobs = [
        check_job(config_of(*overrides), RunDirectory(tmp_path / str(number)), number=number, overrides=overrides)
        for number, overrides in enumerate(2 * expand(line.overrides))
    ]
    told: set[tuple[str, str]] = set()
    batches = [notices_of([job], line, told) for job in jobs]
    first = [[text.split()[1] for text in batch] for batch in batches]
    assert first == [["optim.betas=[0,0]"], ["optim.momentum=0.5"], [], []]
    assert "in jobs 0, 2;" in notices_of(jobs, line)[0]


def test_own_files_count_with_those_that_they_include(site: Path) -> None:
    partition, betas, scale = told("experiment=mine", "-cd", str(site))
    assert f"optim.betas in {site}/optim/mine.yaml:3 has no effect with optim=sgd" in betas
    assert f"cluster.partition in {site}/cluster/here.yaml:2 and cluster.constraint in {site}" in partition
    assert "cluster.comment" not in partition, "the name of the run refers to it"
    assert f"precision.residual in {site}/experiment/mine.yaml:6 has no effect" in scale


def test_what_debugging_replaces_is_what_has_no_effect_with_it() -> None:
    config = config_of()
    config.train.debug = config.train.compile = True
    before = {name: value for name, value, _ in keys(config)}
    after = {name: value for name, value, _ in keys(for_debugging(config))}
    replaced = {name for name in before if before[name] != after[name]}
    said = {name for name, _, info in keys(config) if any("train.debug" in str(each) for each in info.reads)}
    assert replaced == said


def test_every_condition_is_about_a_key_or_a_known_fact() -> None:
    config = config_of("strategy=dp")
    assert {*facts_of(config, resolve_layout(config, 1, 2), HERE)} == {*FACTS}
    schemas = [(Config, ""), *((load_family(kind).schema, "model") for kind in FAMILIES)]
    schemas += [(load_source(kind).schema, "data") for kind in SOURCES]
    names = {name for schema, group in schemas for name, _, _ in keys(schema(), group)}
    for schema, group in schemas:
        for name, _, info in keys(schema(), group):
            parts = [part for each in info.reads for part in (each.conditions if isinstance(each, AnyOf) else [each])]
            assert {part.subject for part in parts} <= names | {*FACTS}, name
