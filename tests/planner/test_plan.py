"""What a plan counts against torch's own counts, its candidates, and the command."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_train.commands import plan
from hpc_train.commands.plan.output import FOLDED, LEAST_NEEDED, WHY, split
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.memory import estimate
from hpc_train.layout.resolve import resolve_layout
from hpc_train.planner.candidates import candidates, fastest
from hpc_train.planner.machine import Figure, Machine, read_machine
from hpc_train.planner.passes import pipeline_seconds
from hpc_train.planner.prediction import Prediction, predict_step
from hpc_train.planner.work import count_work
from hpc_train.telemetry.terminal import print_fitting
from tests.checkpoint.progress import LONG
from tests.config.composing import compose
from tests.doors.schema import check_output

TINY = ["data=synthetic", "model=gpt_tiny", "batch.global_size=64"]
SEVEN = ["model=llama_7b", "data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.global_size=256"]


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert plan.main([*arguments, "--json"]) == 0
    printed = capsys.readouterr().out
    check_output(["plan"], printed)
    found: list[dict[str, Any]] = json.loads(printed)
    return found


def config_of(*overrides: str) -> Config:
    return typed(compose(["+strategy=single", *overrides]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["data=synthetic", "model=gpt_tiny"],
        ["data=synthetic", "model=llama_1b", "model.n_layers=2", "data.sequence_length=256"],
        ["data=synthetic", "data.task=images", "model=vit_tiny"],
    ],
)
def test_parameters_and_operations_are_those_that_torch_counts(overrides: list[str]) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from hpc_train.models.build import build_model

    config = config_of(*overrides)
    work = count_work(config)
    model = build_model(config.model, seed=0)
    with torch.device("meta"):
        shape = (1, config.data.sequence_length) if work.tokens == getattr(config.data, "sequence_length", 0) else None
        inputs = torch.zeros(shape, dtype=torch.int64) if shape else torch.zeros(1, 3, *[config.model.image_size] * 2)
    assert work.parameters == pytest.approx(sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(inputs, context={})
    counted = sum(block.products + block.attention for block in work.blocks)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_custom_data_counts_as_sequences_of_1024_tokens() -> None:
    custom = count_work(config_of("data=custom", "data._target_=mine.Texts", "model=gpt_tiny", "model.vocab_size=256"))
    synthetic = count_work(config_of("data=synthetic", "data.sequence_length=1024", "model=gpt_tiny"))
    assert custom == synthetic


def test_a_model_of_unknown_size_is_refused() -> None:
    config = config_of("data=synthetic", "model=custom", "model._target_=torch.nn.Linear")
    with pytest.raises(UserError, match="does not state its size"):
        count_work(config)


FULL = "train.activation_checkpointing=full"


def test_each_technique_costs_what_it_should() -> None:
    machine = read_machine("h100")

    def step(*overrides: str) -> Any:
        config = config_of(*SEVEN, "batch.micro_size=1", *overrides)
        return predict_step(config, resolve_layout(config, 4, 8), machine)

    base = step("strategy.dp=fill", "strategy.data_parallel=zero1")
    again = step("strategy.dp=fill", "strategy.data_parallel=zero1", "train.activation_checkpointing=full")
    # a third, less the last of seven products and the head, which are not recomputed
    assert 1.23 < again.compute_s / base.compute_s < 1.30
    assert again.needed_bytes < base.needed_bytes
    moved = step("strategy.dp=fill", "strategy.data_parallel=zero1", "train.activation_offload=1MiB")
    assert moved.needed_bytes < base.needed_bytes and moved.compute_s > again.compute_s, "the host is far away"
    inputs = step("strategy.dp=fill", "strategy.data_parallel=zero1", "train.activation_offload=1MiB", FULL)
    assert inputs.needed_bytes < moved.needed_bytes and inputs.compute_s == again.compute_s, "their way is covered"
    budget = step("strategy.dp=fill", "strategy.data_parallel=zero1", "train.activation_checkpointing=4GiB")
    assert again.needed_bytes < budget.needed_bytes < base.needed_bytes
    assert base.compute_s < budget.compute_s < again.compute_s
    sharded = step("strategy.dp=fill", "strategy.data_parallel=zero3")
    assert sharded.needed_bytes < base.needed_bytes and sharded.communication_s > base.communication_s
    piped = step("strategy.dp=fill", "strategy.pp=4", "strategy.data_parallel=zero1")
    assert piped.bubble_s > 0.9 * piped.compute_s * 3 / 32 and base.bubble_s == 0
    split = step("strategy.dp=fill", "strategy.tp=4", "strategy.data_parallel=zero1")
    assert split.compute_s > base.compute_s
    parts = base.compute_s + base.bubble_s + base.communication_s + base.optimizer_s
    assert base.samples_per_s == pytest.approx(256 / parts) and 0 < base.mfu < 0.6


def test_candidates_keep_what_is_set_and_the_simplest_of_equals_is_first() -> None:
    machine, kept = read_machine("a100-80"), {"strategy.tp", "train.activation_checkpointing"}
    config = config_of(*SEVEN, "strategy.tp=2", "train.activation_checkpointing=full")
    found = candidates(config, machine, 16, kept)
    assert found and all(each.layout.tp == 2 and each.devices == 16 for each in found)
    assert {each.values["train.activation_checkpointing"] for each in found} == {"full"}
    shared = candidates(config_of(*SEVEN, "strategy.cp=2"), machine, 8, {"strategy.cp", "strategy.tp"})
    assert shared and all(each.layout.cp == 2 and each.devices == 8 for each in shared)
    small = next(fastest(candidates(config_of(*TINY), machine, 8, ()), tolerance=1.0))
    assert (small.layout.dp, small.layout.data_parallel) == (8, "ddp")
    assert all(each.prediction.fits for each in fastest(found))
    with pytest.raises(UserError, match="12 devices do not fill nodes of 8"):
        candidates(config, machine, 12, ())


def test_expert_parallel_ranks_are_compared_for_mixtures_only() -> None:
    words = ["data=synthetic", "data.sequence_length=4096", "precision=bf16", "batch.global_size=64"]
    fixed = {"strategy.pp", "strategy.tp", "train.activation_checkpointing", "batch.micro_size", "strategy.shard"}
    for model, wanted in (("mixtral_8x7b", {1, 2, 4, 8}), ("llama_7b", {1})):
        config = config_of(f"model={model}", *words, "batch.micro_size=1")
        found = candidates(config, read_machine("h100"), 16, fixed)
        assert {candidate.layout.ep for candidate in found} == wanted
    assert split(replace(found[0].layout, ep=8)).startswith("dp 16, ep 8")


def test_the_printed_command_trains_with_the_predicted_layout(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SEVEN, "train.steps=100", "batch.micro_size=1"]
    rows = rows_of(capsys, *given, "--gpus", "16", "--machine", "h100", "--price", "2")
    assert len(rows) > 3
    for row in rows:
        words = shlex.split(row["command"])[3:-1]
        config = typed(compose(words))
        assert str(resolve_layout(config, row["nodes"], 8)) == row["layout"]
        assert row["cost"] == pytest.approx(2 * row["gpu_hours"])
        assert row["seconds"] == pytest.approx(100 * sum(row["parts_s"].values()))
        assert row["memory_bytes"] <= row["device_bytes"]
    assert rows == sorted(rows, key=lambda row: row["step_s"])


def test_compiled_layers_are_proposed_but_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model=llama_1b", "data=synthetic", "precision=bf16", "--gpus", "16", "--machine", "h100", "--rows", "3"]
    fixed = ["batch.micro_size=4", "train.activation_checkpointing=none", "strategy.pp=1"]
    rows = rows_of(capsys, *asked, *fixed)
    assert "strategy.tp=2 train.compile=true" in rows[0]["command"], "eager layers of DTensors keep the host busy"
    assert rows[-1]["settings"]["train.compile"] is False and rows[-1]["settings"]["strategy.tp"] == 1
    config = typed(compose(shlex.split(rows[-1]["command"])[3:-1]))
    assert not config.train.compile
    assert not any("train.compile" in row["settings"] for row in rows_of(capsys, *asked, *fixed, "train.compile=false"))


def test_pipelines_that_wait_or_save_nothing_are_no_candidates() -> None:
    config = config_of("model=llama_1b", "data=synthetic", "precision=bf16", "batch.global_size=32")
    kept = {"strategy.tp", "train.activation_checkpointing"}
    machine = read_machine("h100")
    found = candidates(config, machine, 16, kept)
    stages = [each.layout for each in found if each.layout.pp > 1]
    assert stages and all(each.micro_batches > 1 and each.data_parallel in ("ddp", "zero1") for each in stages)
    slow = replace(machine, figures={**machine.figures, "fabric_bytes_per_s": Figure(1e9, "assumed", "Ethernet")})
    assert any(each.layout.pp > 1 and each.layout.micro_batches == 1 for each in candidates(config, slow, 16, kept))
    named = candidates(replace(config, strategy=replace(config.strategy, pp=2)), machine, 16, {*kept, "strategy.pp"})
    assert any(each.layout.micro_batches == 1 for each in named)


def test_stages_hold_whole_gradients_under_each_zero_stage() -> None:
    held = []
    for kind in ("zero1", "zero2", "zero3"):
        config = config_of(
            *SEVEN, "strategy.dp=4", "strategy.pp=2", f"strategy.data_parallel={kind}", "batch.micro_size=1"
        )
        held.append(estimate(config, resolve_layout(config, 1, 8)))
    assert held[0] == held[1] == held[2]


@pytest.mark.long_form(6)
def test_ranks_on_cpus_share_a_node_and_their_number_is_in_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, *TINY, "train.steps=10", "--gpus", "2,4", "--machine", "cpu")
    assert {row["gpus"] for row in rows} == {2, 4}
    for row in rows:
        cluster = typed(compose(shlex.split(row["command"])[3:-1])).cluster
        assert (cluster.cpu_workers, cluster.gpus_per_node, cluster.nodes) == (row["gpus"], 0, 1)
    two, four = (min(row["step_s"] for row in rows if row["gpus"] == count) for count in (2, 4))
    assert four > 0.95 * two, "two cores do not compute faster with four ranks"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["cluster.gpus_per_node=0"], "cpu"),
        pytest.param(["cluster.cpu_workers=2"], "cpu", marks=pytest.mark.long_form(5)),
        (["cluster.cpu_workers=2", "cluster.gpus_per_node=8"], "h100"),
        (["cluster.gpu_type=a100-40gb"], "a100-40"),
        (["cluster.machine=h200", "cluster.gpu_type=a100"], "h200"),
        pytest.param([], "h100", marks=pytest.mark.long_form(5)),
    ],
)
def test_the_machine_is_that_of_the_config(overrides: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*TINY, "+strategy=dp", *overrides]) == 0
    assert f" on {name} (" in capsys.readouterr().out.splitlines()[0]


def test_on_cpus_nothing_overlaps() -> None:
    machine = read_machine("cpu")
    free = replace(machine, figures={**machine.figures, "launch_s": Figure(0.0, "assumed", "x")})

    def step(machine: Machine, *overrides: str) -> Prediction:
        config = config_of(*TINY, "batch.micro_size=8", *overrides)
        return predict_step(config, resolve_layout(config, 1, 2), machine)

    base = step(machine, "strategy.dp=fill")
    started = machine.shared_by(2).rates.launch_s * 4 * 3 * (4 * 40 + 4 + 12)  # 4 micro-batches; layers, stem, head
    assert base.compute_s - step(free, "strategy.dp=fill").compute_s == pytest.approx(started)
    size = 4 * count_work(config_of(*TINY)).parameters
    rates = machine.shared_by(2).rates
    assert base.communication_s == pytest.approx(rates.node_latency_s + size / rates.node_bytes_per_s)
    assert step(machine, "strategy.dp=fill", "strategy.data_parallel=zero1").communication_s > base.communication_s


def test_ranks_that_wait_leave_their_cores_to_others() -> None:
    rates = read_machine("cpu").rates
    assert pipeline_seconds(10.0, 6.0, 2, rates) == 10, "a core for each rank"
    assert pipeline_seconds(10.0, 4.0, 4, rates) == 5 and pipeline_seconds(10.0, 6.0, 4, rates) == 6
    assert pipeline_seconds(10.0, 6.0, 4, read_machine("h100").rates) == 10


@pytest.mark.long_form(5)
def test_the_table_says_why_a_row_is_slower_and_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*SEVEN, "--gpus", "8,16"]) == 0
    text = capsys.readouterr().out
    assert "8 GPUs instead of 16" in text and "assumed" in text and "python -m hpc_train" in text


def test_the_command_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SEVEN, "train.activation_checkpointing=none", "batch.micro_size=1", "train.compile=false"]
    first = rows_of(capsys, *given, "--gpus", "8", "strategy.pp=1", "strategy.tp=1", "strategy.data_parallel=zero1")[0]
    words = shlex.split(first["command"])
    assert words[-2:] == ["strategy.data_parallel=zero1", "-m"] or words[-2].startswith("+strategy=")
    four = rows_of(capsys, *TINY, "--gpus", "4")[0]
    assert "cluster.gpus_per_node=4" in four["command"], "half of a node"


@pytest.mark.long_form(15)
def test_an_experiment_that_chooses_a_strategy_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["+experiment=llama7b_4xa100", "data.path=tokens", "cluster=auto", "strategy.pp=1", "batch.micro_size=1"]
    first = rows_of(capsys, *asked, "--gpus", "4", "--machine", "a100-80")[0]
    words = shlex.split(first["command"])[3:-1]
    assert any(word.startswith("strategy=") for word in words)
    assert str(resolve_layout(typed(compose(words)), 1, 4)) == first["layout"]


@pytest.mark.long_form(8)
def test_a_site_of_the_users_own_has_a_machine_and_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    site = "defaults: [local, _self_]\nmachine: v100\nprice: {per_gpu_hour: 2.0, currency: CHF}\n"
    (tmp_path / "cluster" / "here.yaml").write_text(site)
    asked = ["-cd", str(tmp_path), "cluster=here", *TINY, "strategy.pp=1", "strategy.tp=1", "precision=fp16"]
    first = rows_of(capsys, *asked, "train.steps=1000")[0]
    assert first["device_bytes"] == read_machine("v100").rates.memory_bytes
    assert (first["cost"], first["currency"]) == (pytest.approx(2 * first["gpu_hours"]), "CHF")
    assert f"hpc_train -cd {tmp_path} cluster=here" in first["command"]


def test_a_deadline_finds_the_fewest_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["+strategy=zero1", "batch.micro_size=1", "train.activation_checkpointing=full"]
    asked = [*SEVEN, *fixed, "train.steps=1000", "--gpus", "8..64"]
    all_rows = {row["gpus"]: row for row in rows_of(capsys, *asked)}
    assert sorted(all_rows) == [8, 16, 24, 32, 48, 64]
    hours = all_rows[24]["seconds"] / 3600 + 0.01
    rows = rows_of(capsys, *asked, "--within", f"{hours:.3f}h")
    assert [row["gpus"] for row in rows] == [24, 32, 48, 64]
    with pytest.raises(UserError, match="no layout is done in time"):
        plan.main([*asked, "--within", "1m"])
    with pytest.raises(UserError, match="cannot be predicted"):
        plan.main([*SEVEN, "train.steps=null", "train.epochs=1", "--within", "1m"])
    cheapest = rows_of(capsys, *asked, "--price", "2", "--sort", "cost")
    assert cheapest[0]["cost"] == min(row["cost"] for row in cheapest)
    with pytest.raises(UserError, match="the cost is unknown"):
        plan.main([*asked, "--sort", "cost"])


@pytest.mark.long_form(10)
def test_the_largest_model_is_first_and_the_others_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model=llama_1b", "data=synthetic", "data.sequence_length=512", "precision=bf16", "batch.global_size=64"]
    asked += ["train.activation_checkpointing=full", "+strategy=zero3", "batch.micro_size=1", "--gpus", "4"]
    rows = rows_of(capsys, *asked, "train.steps=10", "--largest")
    counts = [row["parameters"] for row in rows]
    assert counts == sorted(counts, reverse=True) and {"llama_7b", "llama_1b"} <= {row["model"] for row in rows}
    assert any(note.startswith("not gpt_175b: no layout fits") for note in rows[0]["queue"])
    assert all(f"model={row['model']}" in row["command"] for row in rows)
    assert not any(row["model"].startswith("vit") for row in rows), "of another kind"


def test_offload_is_compared_if_nothing_fits_or_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    seventy = ["model=llama_70b", *SEVEN[1:], "strategy.pp=1", "batch.micro_size=1"]
    assert {row["settings"]["strategy.offload"] for row in rows_of(capsys, *seventy)} == {"optimizer"}
    with pytest.raises(UserError, match="no layout fits"):
        plan.main([*seventy, "strategy.offload=none"])
    fixed = [*SEVEN, "batch.micro_size=1", "train.activation_checkpointing=full", "strategy.tp=1"]
    rows = rows_of(capsys, *fixed, "--also", "compression,schedule", "--rows", "40")
    assert {row["settings"]["strategy.compression"] for row in rows} == {"none", "bf16"}
    assert len({row["settings"]["strategy.schedule"] for row in rows}) > 2
    for row in rows if LONG else rows[::5]:
        config = typed(compose(shlex.split(row["command"])[3:-1]))
        assert str(resolve_layout(config, row["nodes"], 8)) == row["layout"]
        assert config.strategy.compression == row["settings"]["strategy.compression"]


def test_ranks_share_sequences_if_nothing_fits_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["model=llama_7b", "data=synthetic", "data.sequence_length=524288", "precision=bf16", "batch.global_size=2"]
    fixed = ["train.activation_checkpointing=full", "strategy.pp=1", "strategy.ep=1", "batch.micro_size=1"]
    rows = rows_of(capsys, *long, *fixed, "train.steps=10", "--gpus=32", "--machine=h100")
    assert {row["settings"]["strategy.context"] for row in rows} == {"both"}
    for row in rows:
        config = typed(compose(shlex.split(row["command"])[3:-1]))
        assert str(resolve_layout(config, row["nodes"], 8)) == row["layout"]
        assert config.strategy.cp == row["settings"]["strategy.cp"] > 1


@pytest.mark.parametrize(
    "arguments",
    [["--by", "2099-01-01"], ["--within", "2 days"], ["--gpus", "16..8"], ["--gpus", "0"],
     ["--gpus", "x"], ["--figure", "launch_s=x"], ["--price", "cheap"], ["--also", "tp"],
     ["--rows", "0"], ["--rows", "ten"]],
    ids=" ".join,
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match=arguments[0]):
        plan.main([*TINY, *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=llama_70b", *SEVEN[1:], "--gpus", "1"], "no layout fits"),
        ([*SEVEN, "--machine", "h1000"], "no machine is called"),
        ([*TINY, "strategy.tp=3", "--gpus", "8"], "strategy.tp is 3, which does not divide the 8 workers of a node"),
        ([*TINY, "strategy.tp=3", "--gpus", "4,8"], "no layout is possible with these settings: strategy.tp is 3"),
        ([*TINY, "--machine", "v100", "precision=bf16"], "do not compute in bf16"),
        ([*TINY, "--gpus", "9..15"], "no number of --gpus fills nodes of 8"),
        ([*TINY, "cluster.gpu_type=a100"], "a100 does not decide which machine file describes the job"),
        ([*TINY, "cluster.gpu_type=rtx4090"], "no machine file describes the GPU type rtx4090"),
        (["experiment=hybrid_8gpu", "--figure", "wats=1"], "the machine has no number wats"),
        ([*TINY, "--figure", "matmul_share=3"], "matmul_share is 3"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan.main(arguments)


def test_a_strategy_that_the_command_names_is_planned_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*TINY, "train.steps=10", "train.compile=false", "--gpus", "8"]
    for name in ("hsdp", "hybrid"):
        (row,) = rows_of(capsys, *asked, f"+strategy={name}")
        words = shlex.split(row["command"])[3:-1]
        assert [word for word in words if "strategy" in word] == [f"+strategy={name}"]
        assert str(resolve_layout(typed(compose(words)), 1, 8)) == row["layout"]
    open_keys = [*asked, "strategy.pp=1", "strategy.tp=1"]
    every = rows_of(capsys, *open_keys)
    assert rows_of(capsys, *open_keys, "+strategy=auto") == every and len(every) > 2


@pytest.mark.parametrize(
    ("strategy", "key"),
    [
        ("zero1", "batch.micro_batches=4"),
        ("dp", "train.reproducible=any_world_size"),
        ("zero1", "strategy.shard=node"),
    ],
)
def test_keys_that_determine_others_are_kept(strategy: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = rows_of(capsys, *TINY, f"+strategy={strategy}", key, "--gpus", "8")[0]
    words = shlex.split(row["command"])[3:-1]
    assert key in words
    assert str(resolve_layout(typed(compose(words)), 1, 8)) == row["layout"]


@pytest.mark.parametrize(("width", "left_out"), [(80, True), (100, True), (200, False)])
def test_the_table_fits_the_terminal(width: int, left_out: bool, capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["", "GPUs", "layout", "batches", "recompute", "memory", "step", "MFU", "time", "GPU-hours"]
    columns += ["cost, EUR", WHY]
    row = ["10", "512", "dp 256 x pp 2, zero2 over 8, interleaved_1f1b", "128 x 2", "selective", "74.9 GiB", "53.7 s"]
    row += ["45%", "149:16:36", "1,200", "2,990", "communication +0.051 s"]
    print_fitting(Console(width=width), columns, [row], {*columns} - {"layout", WHY}, FOLDED, LEAST_NEEDED)
    text = capsys.readouterr().out
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    assert {"2,990", "74.9", "GiB", "149:16:36", "interleaved_1f1b"} <= {*text.split()}
    assert ("left out" in text) == left_out == ("45%" not in text)


def test_the_time_to_the_end_is_unknown_with_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*TINY, "train.steps=null", "train.epochs=1", "--gpus", "1"]) == 0
    assert "set train.steps" in capsys.readouterr().out
