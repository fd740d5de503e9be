"""``strategy=auto``: what the planner chooses, how it is frozen, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hpc_train.config.compose import typed
from hpc_train.config.schema import StrategyConfig
from hpc_train.errors import UserError
from hpc_train.launch.request import check_job
from hpc_train.layout.layout import JobShape
from hpc_train.layout.memory import estimate, needed_bytes
from hpc_train.layout.resolve import check_chosen, for_nodes, open_keys, resolve_layout
from hpc_train.layout.validate import validate
from hpc_train.planner import auto
from hpc_train.planner.auto import ERROR, choose
from hpc_train.planner.candidates import (
    SIMULATED,
    Candidate,
    candidates,
    close_and_others,
    distinct,
    fastest,
    with_values,
)
from hpc_train.planner.machine import Machine, files_of, machine_of_job, read_machine
from hpc_train.planner.prediction import predict_step
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from tests.config.composing import compose, config_of
from tests.doors.command import TINY, hpc_train

GPT = ["+strategy=auto", "data=synthetic", "model=gpt_tiny"]
SEVEN = [
    "+strategy=auto", "model=llama_7b", "data=synthetic", "data.sequence_length=4096", "precision=bf16",
    "batch.global_size=64", "strategy.stages_per_rank=1", "strategy.shard=fill",
]  # fmt: skip
FOUR = JobShape(nodes=4, fewest_nodes=1, gpus=4, workers=4)


def with_figures(name: str, **values: float) -> Machine:
    """Returns a shipped machine with other numbers."""
    machine = read_machine(name)
    changed = {key: replace(machine.figures[key], value=value) for key, value in values.items()}
    return replace(machine, figures={**machine.figures, **changed})


def cpu_file(path: Path, **values: float) -> str:
    """Writes a machine file of slow devices and returns its path."""
    machine = with_figures("v100", **{"fp32_flops": 3e10, "memory_bytes": 4e9, "reserved_bytes": 0.0, **values})
    figures = {name: vars(figure) for name, figure in machine.figures.items()}
    path.write_text(json.dumps({"name": "cores", "device": "cores", "figures": figures}))
    return str(path)


def test_the_layouts_for_all_numbers_of_nodes_are_those_of_the_table(tmp_path: Path) -> None:
    config = config_of(*SEVEN)
    choice = choose(config, FOUR, read_machine("a100-40"))
    chosen = choice.apply(config)
    validate(chosen, 4, 4)
    assert open_keys(chosen) == () and chosen.batch.micro_size != "auto"
    tables = {4: choice.content, **{int(count): found for count, found in choice.content["other_nodes"].items()}}
    assert set(tables) == {1, 2, 3, 4}
    for nodes, table in tables.items():
        if table["settings"] is None:
            with pytest.raises(UserError, match=f"found no layout for {nodes} node"):
                resolve_layout(chosen, nodes, 4)
            continue
        assert str(resolve_layout(chosen, nodes, 4)) == table["rows"][0]["layout"] in table["chosen"]
        own = for_nodes(chosen, nodes)
        assert own.train.activation_checkpointing == table["settings"]["train.activation_checkpointing"]
        assert own.batch.micro_size == table["settings"]["batch.micro_size"]
        best, *others = table["rows"]
        assert best["why"] == "chosen" and 0 < len(others) < 10
        assert all(best["step_s"] <= row["step_s"] * (1 + 2 * ERROR) for row in others)
    assert len({str(resolve_layout(chosen, nodes, 4)) for nodes in tables if tables[nodes]["settings"]}) > 1
    run = RunDirectory(tmp_path / "run")
    freeze(chosen, run, plan=choice.text)
    assert load(run).strategy == chosen.strategy and json.loads(run.plan.read_text()) == choice.content
    again = choose(config_of(*SEVEN, "optim.lr=1", "train.steps=7"), FOUR, read_machine("a100-40"))
    assert again is choice, "the jobs of a sweep over other keys share it"


@pytest.mark.long_form(8)
def test_too_few_nodes_have_no_layout() -> None:
    config = config_of(*SEVEN)
    small = with_figures("a100-40", memory_bytes=14e9)
    choice = choose(config, FOUR, small)
    chosen = choice.apply(config)
    assert chosen.strategy.for_nodes["1"] is None and resolve_layout(chosen, 4, 4).world_size == 16
    with pytest.raises(UserError, match="found no layout for 1 node "):
        validate(chosen, 1, 4)
    with pytest.raises(UserError, match=r"no layout that fits on 1 x 4 devices.*needs the least memory"):
        choose(config, JobShape(1, 1, 4, 4), small)


def test_keys_that_are_set_are_kept() -> None:
    keys = ["strategy.tp=2", "strategy.data_parallel=zero3", "train.activation_checkpointing=full"]
    for batch, micro in (("batch.micro_size=2", 2), ("batch.micro_batches=8", None)):
        config = config_of(*SEVEN, *keys, batch)
        choice = choose(config, FOUR, read_machine("h100"))
        chosen = choice.apply(config)
        layout = resolve_layout(chosen, 4, 4)
        assert (layout.tp, layout.data_parallel) == (2, "zero3")
        assert chosen.train.activation_checkpointing == "full"
        assert layout.micro_size == micro or (micro is None and layout.micro_batches == 8)
        assert choice.content["kept"]["strategy.tp"] == 2 and "strategy.tp" not in choice.content["settings"]
    same = config_of(*GPT, "train.reproducible=any_world_size")
    found = choose(same, JobShape(1, 1, 2, 2), read_machine("h100")).apply(same)
    assert resolve_layout(found, 1, 2).logical_micro_batches == 8


def test_of_equally_fast_layouts_the_simplest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("model=llama_7b", "data=synthetic", "precision=bf16", "batch.global_size=32")
    config, machine = config_of("+strategy=auto", *sizes), read_machine("a100-40")
    rows = choose(config, JobShape(1, 1, 8, 8), machine).content["rows"]
    assert "tp 1 (zero1)" in rows[0]["layout"] and min(row["step_s"] for row in rows) < rows[0]["step_s"]
    monkeypatch.setattr(auto, "ERROR", 0.0)
    auto._shared.cache_clear()
    exact = choose(config, JobShape(1, 1, 8, 8), machine).content["rows"]
    auto._shared.cache_clear()
    assert min(row["step_s"] for row in exact) == exact[0]["step_s"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=custom", "model._target_=torch.nn.Linear", "data=synthetic"], "cannot choose a layout.*its size"),
        (["data=synthetic", "strategy.tp=3"], r"strategy.tp is 3, which does not divide"),
        (["data=synthetic", "strategy.schedule=1f2b"], "1f2b"),
        (["data=synthetic", "optim.in_backward=true"], "^optim.in_backward is true, but clipping"),
    ],
)
def test_what_cannot_be_chosen_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(config_of("+strategy=auto", *overrides), JobShape(1, 1, 2, 2), read_machine("h100"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+strategy=auto", "run.entry=tests.faults.entry:train"], "cannot choose a layout for custom code"),
        (["+strategy=auto"], "this command does not submit one"),
        (["+strategy=dp", "strategy.tp=auto"], "strategy.tp is auto, which only strategy=auto chooses"),
        (["+strategy=dp", "strategy.data_parallel=auto"], "strategy.data_parallel is auto"),
        (["+strategy=pp", "strategy.stages_per_rank=auto"], "strategy.stages_per_rank is auto"),
    ],
)
def test_open_keys_elsewhere_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    config = config_of("data=synthetic", *overrides)
    for check in (check_chosen, lambda config: resolve_layout(config, 1, 2)):
        with pytest.raises(UserError, match=message):
            check(config)
    if config.run.entry is not None:
        with pytest.raises(UserError, match=message):
            check_job(config, RunDirectory(tmp_path / "own"))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("a100", ["a100-40", "a100-80"]),
        ("nvidia_a100-sxm4-80gb", ["a100-80"]),
        ("NVIDIA H100 80GB HBM3", ["h100"]),
        ("nvidia_h100_pcie", []),
        ("gh200", []),
        ("tesla_v100-sxm2-32gb", ["v100"]),
        ("mi250", ["mi250x"]),
    ],
)
def test_the_type_of_a_gpu_names_its_machine_file(name: str, files: list[str]) -> None:
    assert files_of(name) == files


@pytest.mark.parametrize(
    ("asked", "types", "message"),
    [
        ("auto", (), "needs the type of the GPUs"),
        ("auto", ("rtx3090",), "no machine file describes the GPU type rtx3090"),
        ("auto", ("a100",), "does not decide which machine file.*a100-40 or a100-80"),
        ("auto", ("h100", "rtx3090"), "h100 or rtx3090 does not decide"),
        ("h1000", (), "no machine is called 'h1000'"),
    ],
)
def test_an_unknown_machine_is_refused_with_the_key_that_names_it(
    asked: str, types: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        machine_of_job(asked, 8, types)
    assert "cluster.machine" in refused.value.where and refused.value.fix
    assert machine_of_job("auto", 8, {"h200"}).name == read_machine("h200").name


@pytest.mark.long_form(12)  # docs and README train with strategy=auto
def test_a_run_trains_with_the_choice_and_keeps_it(tmp_path: Path) -> None:
    """The jobs of a sweep choose by themselves; the second command finds another machine and keeps the layout."""
    machine = cpu_file(tmp_path / "cores.json")
    run = RunDirectory(tmp_path / "runs" / "one")
    overrides = [
        "+strategy=auto", *TINY, "cluster.kind=local", "cluster.gpus_per_node=0", "cluster.cpu_workers=2",
        f"cluster.machine={machine}", f"run.root={run.path.parent}", "run.name=one", "train.steps=2",
    ]  # fmt: skip
    done = hpc_train(*overrides, "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"table: {run.plan}" in done.stdout and "predicted" in done.stdout
    content, frozen = json.loads(run.plan.read_text()), yaml.safe_load(run.config.read_text())
    assert content["rows"][0]["layout"] in done.stdout
    attempt = json.loads((run.attempts / "000.json").read_text())["layout"]
    taken = content["settings"]
    for key in ("tp", "pp", "data_parallel", "stages_per_rank"):
        assert frozen["strategy"][key] == taken[f"strategy.{key}"]
    assert (attempt["pp"], attempt["tp"], attempt["micro_size"]) == (
        taken["strategy.pp"], taken["strategy.tp"], taken["batch.micro_size"],
    )  # fmt: skip
    assert (run.path / "report.html").read_text().count("chosen by strategy=auto") == 1
    cpu_file(tmp_path / "cores.json", node_bytes_per_s=1.0)  # on which replicas would be slow
    other = hpc_train(
        *overrides, "train.steps=3", "model.dim=16,32", "run.name=two", "launch.dry_run=true", "-m", cwd=tmp_path
    )
    assert other.stdout.count("strategy=auto: ") == 2, other.stdout + other.stderr
    same = check_job(config_of(*overrides, "train.steps=3"), run)
    assert same.plan == run.plan.read_text() and same.config.strategy == StrategyConfig(**frozen["strategy"])
    again = check_job(config_of(*overrides, "cluster.cpu_workers=1"), run)
    assert again.plan != same.plan, "other workers are another question"
    run.plan.unlink()
    assert check_job(config_of(*overrides), run).choice != same.choice


LONG = ["data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.global_size=64"]
VIT = ["model=vit_large", "data=synthetic", "data.task=images", "batch.global_size=64"]
SEARCHES: dict[str, tuple[list[str], str, int, set[str]]] = {  # overrides, machine, devices, keys that are set
    "llama_7b": (["model=llama_7b", *LONG], "a100-40", 8, {"strategy.tp", "strategy.schedule"}),
    "gpt_tiny": (["model=gpt_tiny", "data=synthetic", "batch.global_size=16"], "cpu", 4, set()),
    "two_nodes": (["model=llama_7b", *LONG], "a100-40", 16, {"strategy.tp"}),
    "llama_70b": (["model=llama_70b", *LONG, "strategy.tp=8"], "h100", 32, {"strategy.tp"}),
    "qwen3_8b": (["model=qwen3_8b", *LONG, "strategy.cp=2"], "h100", 8, {"strategy.cp", "strategy.schedule"}),
    "vit_large": (VIT, "v100", 8, set()),
}


def exhaustive(found: Sequence[Candidate], tolerance: float) -> list[Candidate]:
    """The candidates that fit, in the order of the table, from the whole memory of each."""
    ordered = sorted(found, key=lambda each: -each.prediction.samples_per_s)
    shares = [each.prediction.needed_bytes / each.prediction.device_bytes for each in ordered]
    roomy = [each for each, share in zip(ordered, shares, strict=True) if share <= 0.93]
    tight = [each for each, share in zip(ordered, shares, strict=True) if 0.93 < share <= 1]
    preferred = roomy or tight
    least = max((each.prediction.samples_per_s for each in preferred), default=0.0) * (1 - tolerance)
    close = [each for each in preferred if each.prediction.samples_per_s >= least]
    others = [*preferred[len(close) :], *(tight if roomy else [])]
    return [*sorted(close, key=lambda each: each.complexity), *others]


@pytest.mark.long_form(10, cases=[*SEARCHES][2:])  # the first two search in the short form
@pytest.mark.parametrize("search", SEARCHES)
def test_the_rows_are_those_of_an_exhaustive_search(search: str) -> None:
    overrides, name, devices, kept = SEARCHES[search]
    config, machine = typed(compose(["+strategy=single", *overrides])), read_machine(name)
    found = candidates(config, machine, devices, kept)
    nodes, workers = max(1, devices // machine.devices_per_node), min(devices, machine.devices_per_node)
    assert found and all(each.layout.world_size == nodes * workers for each in found)
    by_row = [predict_step(with_values(config, each.values), each.layout, machine, False) for each in found]
    for each, other in zip(found, by_row, strict=True):
        whole = estimate(with_values(config, each.values), each.layout)
        assert whole == each.prediction.memory and whole is not None
        assert each.prediction.needed_bytes == pytest.approx(
            needed_bytes(whole.total, each.prediction.demand.reserved_bytes, machine.rates.allocator_share)
        )
        assert each.prediction.fits == (each.prediction.needed_bytes <= each.prediction.device_bytes)
        assert each.prediction.compute_s == other.compute_s
    first = exhaustive([Candidate(nodes, each.values, row) for each, row in zip(found, by_row, strict=True)], 0.0)
    simulated = {str(each.values) for each in first[:SIMULATED]}
    for each, row in zip(found, by_row, strict=True):
        chosen = str(each.values) in simulated
        expected = predict_step(with_values(config, each.values), each.layout, machine, True) if chosen else row
        assert each.prediction == expected
    for tolerance in (0.0, 0.05):
        assert [*fastest(found, tolerance)] == exhaustive(found, tolerance)
        assert [*distinct(fastest(found, tolerance))] == [*distinct(exhaustive(found, tolerance))]
    close, others = close_and_others(found, 0.05)
    assert [*close, *others] == exhaustive(found, 0.05)
