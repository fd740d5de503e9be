"""What a run leaves behind: metrics, events, the result; and what the ranks refuse."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.scale import MODEL
from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.elastic.agent_loop import _pickled
from hpc_train.errors import UserError
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.network.decision import ALLOCATOR_SETTINGS, GROWING_SEGMENTS
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import freeze, load
from hpc_train.run.requests import StopFlag
from hpc_train.telemetry.metrics import MetricsLog
from hpc_train.telemetry.progress import summary
from hpc_train.train import processes
from hpc_train.train.report import Report
from hpc_train.train.step import SkippedSteps
from hpc_train.train.watch.suggestions import AdviceWatch, SuggestedSetting
from hpc_train.train.worker import frozen_config
from tests.config.composing import compose
from tests.train.runs import frozen, run_attempt

KEYS = {
    "time", "step", "epoch", "attempt", "world_size", "loss", "lr", "grad_norm", "samples", "tokens", "step_s",
    "tokens_per_s", "samples_per_s", "data_wait_share", "peak_memory_bytes", "save_s",
}  # fmt: skip


def test_metrics_and_result(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=hybrid", "telemetry.log_every=4", "train.eval_every=6")
    assert run_attempt(run) == [Exit.DONE] * 4
    lines = run.read_metrics()
    assert [line["step"] for line in lines] == [1, 4, 6, 8, 10]
    assert all(line.keys() >= KEYS for line in lines)
    assert [line["step"] for line in lines if "val_loss" in line] == [6, 10]
    for line in lines:
        shares = [line[key] for key in ("data_wait_share", "comm_share", "bubble_share")]
        assert all(0 <= share < 1 for share in shares) and sum(shares) < 1 and line["bubble_share"] > 0
        assert line["memory_imbalance"] >= 1 and line["compute_imbalance"] >= 1 and line["arrival_skew_s"] > 0
        assert not {"gpu_util", "host_share", "mfu"} & line.keys()  # not known without a GPU
    last = lines[-1]
    assert (last["samples"], last["tokens"], last["epoch"], last["world_size"]) == (80, 640, 1, 4)
    record = run.record()
    memory = record["memory"]
    assert len(memory["ranks"]) == 4 and memory["estimated"] > 0
    for rank in memory["ranks"]:
        assert rank["optimizer"] > 2 * rank["parameters"] == 2 * rank["gradients"] > 0  # and the steps
        assert rank["peak"] == sum(rank[part] for part in ("parameters", "gradients", "optimizer", "activations"))
    assert record["total_steps"] == 10
    result = record["result"]
    assert (result["steps"], result["loss"], result["val_loss"]) == (10, last["loss"], last["val_loss"])
    picture, *others = run.read_events()
    assert (picture["event"], picture["schedule"], picture["micro_batches"]) == ("pipeline_step", "1f1b", 4)
    assert [rank["rank"] for rank in picture["ranks"]] == [0, 2], "one rank of each stage"
    for stage, rank in enumerate(picture["ranks"]):
        kinds = [kind for kind, of_stage, begin, end in rank["chunks"] if of_stage == stage and 0 <= begin < end]
        assert kinds.count("forward") == kinds.count("backward") == 4 and len(kinds) == 2 * 4
    assert max(end for rank in picture["ranks"] for *_, end in rank["chunks"]) <= 1.1 * picture["seconds"]
    assert all(rank["device"] > rank["peak"] for rank in memory["ranks"])
    events = ["evaluation_started", "evaluation_started", "checkpoint_saved", "training_finished"]
    assert [event["event"] for event in others] == events


def test_epochs_and_padded_batches_count_samples_once(tmp_path: Path) -> None:
    run = frozen(
        tmp_path / "run", "+strategy=dp", "train.steps=null", "train.epochs=2", "batch.drop_last=false",
        "batch.global_size=24", "optim.lr_scaling=sqrt", "train.eval_samples=4",
    )  # fmt: skip
    assert run_attempt(run, 2) == [0, 0]
    lines = run.read_metrics()
    assert [line["samples"] for line in lines] == [24, 48, 64, 88, 112, 128]
    assert [line["tokens"] for line in lines] == [8 * line["samples"] for line in lines]
    assert [line["epoch"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert run.record()["result"]["evaluated"] == "4 of 10 samples" in summary(run)
    log = (run.logs / "rank-0-000.log").read_text()
    assert f"val_loss {lines[-1]['val_loss']:.4f} (evaluated 4 of 10 samples)" in log
    assert log.count("attention: scaled_dot_product_attention uses its flash implementation") == 1
    assert f"learning rate: {0.003 * (24 / 256) ** 0.5:g} (0.003 x sqrt 24/256)" in log


def see_another_config(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.train import worker

    if spec.rank == 1:
        worker.config_hash = lambda run: "an old copy"  # type: ignore[assignment]


class Numbers:
    """Shards of 3, 10, 1 and 6 items in float64 without a target that counts."""

    def __init__(self, split: str, shard: int, shards: int) -> None:
        self.items = (3, 10, 1, 6)[shard]

    def __iter__(self) -> Iterator[Any]:
        return ((np.ones(4), np.full(4, -100.0)) for _ in range(self.items))


def test_a_stream_that_ends_counts_its_items_and_missing_targets_and_metrics_are_told(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    stream = ["data=stream", f"data._target_={__name__}.Numbers", "data.shards=4", "data.repeat=false"]
    model = ["model=custom", "model._target_=torch.nn.Linear", "+model.args={in_features: 4, out_features: 4}"]
    settings = ["model.loss=mse", "batch.global_size=4", "batch.loader_workers=0", "telemetry.wandb.mode=disabled"]
    more = ["train.steps=100", "train.eval_every=2", "checkpoint.keep_best=val_accuracy", "telemetry.log_every=1"]
    freeze(typed(compose(["+strategy=dp", *stream, *model, *settings, *more])), run)
    assert run_attempt(run, 2) == [Exit.DONE] * 2
    assert [line["samples"] for line in run.read_metrics()] == [4, 7, 10, 12, 14, 16, 17, 18, 19, 20]
    assert run.record()["result"]["samples"] == 20
    warnings = [line["message"] for line in run.read_events() if line["event"] == "warning"]
    assert sum("no target counts in the batch of step 1" in message for message in warnings) == 1
    assert sum("no target counts in the validation data" in message for message in warnings) == 1
    assert sum("checkpoint.keep_best=val_accuracy keeps no checkpoint" in message for message in warnings) == 1


def test_ranks_that_see_different_files_do_not_train(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp")
    with pytest.raises(AssertionError, match=r"the ranks see different inputs.*rank 1: {'config': 'an old copy'"):
        run_attempt(run, 2, see_another_config)
    assert run.read_metrics() == []


def bind_to_one_core(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.data.build import SyntheticDataset
    from hpc_train.train import worker

    cores = sorted(os.sched_getaffinity(0))
    object.__setattr__(spec, "cpus", (cores[spec.rank % len(cores)],))
    os.sched_setaffinity(0, spec.cpus)  # as elastic.worker_process does
    SyntheticDataset.loads_cheaply = False

    def note(**values: Any) -> SuggestedSetting:
        setting = SuggestedSetting(**values)
        processes = len(multiprocessing.active_children())
        counts = f"{setting.cores} core, {setting.loader_workers} loader, {processes} process"
        (Path(spec.run_dir) / f"loaders-{spec.rank}").write_text(counts)
        return setting

    worker.SuggestedSetting = note  # type: ignore[assignment,misc]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="ranks that share a core get no advice")
def test_a_rank_that_is_bound_to_its_cores_uses_all_of_them_for_loaders(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp", "train.steps=2")
    assert run_attempt(run, 2, bind_to_one_core) == [0, 0]
    found = [(run.path / f"loaders-{rank}").read_text() for rank in range(2)]
    assert found == ["1 core, 1 loader, 1 process"] * 2


def test_advice_goes_to_the_log_and_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp")
    config = load(run)
    watch = AdviceWatch(SuggestedSetting(config, resolve_layout(config, 1, 2), 1, 2, loader_workers=0, cores=2))
    events = EventLog.open(run, "rank-0000", 0, 0)
    report = Report(run, events, torch.device("cpu"), 2, 10, MetricsLog(run, 0), advice=watch)
    for step in range(1, 6):
        line = {"step": step, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 1.0, "data_wait_share": 0.7}
        report.line(line, SkippedSteps(0, 0))
    (event,) = run.read_events()
    assert (event["event"], event["step"], event["limit"], event["value"]) == ("advice", 4, "data", 0.7)
    assert event["overrides"] == [["batch.loader_workers=1"]]
    assert event["message"] in capsys.readouterr().out.splitlines()


def spec_of(run: Path, config: bytes | None = None) -> WorkerSpec:
    return WorkerSpec(
        run_dir=str(run), attempt=0, rank=0, local_rank=0, local_world_size=1, node_rank=0, nodes=1, config=config,
        layout=resolve_layout(Config(model=MODEL), 1, 1), master_address="", master_port=0, gpus_per_node=1, threads=1,
    )  # fmt: skip


def test_a_worker_takes_the_config_of_its_agent_or_else_reads_the_file(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single", "train.steps=3")
    passed = replace(load(run), train=replace(load(run).train, steps=4))
    assert frozen_config(spec_of(run.path), run).train.steps == 3
    assert frozen_config(spec_of(run.path, _pickled(passed)), run) == passed
    assert "train" not in repr(spec_of(run.path, _pickled(passed))), "it may have values of cluster.env"


def test_a_config_that_cannot_be_passed_on_is_read_by_the_workers() -> None:
    hidden = make_dataclass("Hidden", ["kind"])  # as a description of a user may make it
    assert _pickled(replace(Config(), model=hidden("own"))) is None


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 0), ["sm_75", "sm_80", "sm_90"], True),
        ((8, 9), ["sm_75", "sm_80", "sm_90"], True),  # kernels of the same major version
        ((7, 0), ["sm_75", "sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90", "sm_100"], False),
        ((12, 0), ["sm_80", "compute_90"], True),  # compiled by the driver
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((9, 0), [], True),  # unknown
    ],
)
def test_a_gpu_without_kernels_is_refused_before_the_first_step(
    capability: tuple[int, int], built: list[str], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GPU")
    gpu = torch.device("cuda", 0)
    if runs:
        processes.check_architecture(gpu)
    else:
        with pytest.raises(UserError, match="has no kernels for NVIDIA GPU"):
            processes.check_architecture(gpu)


def test_an_amd_gpu_needs_kernels_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a", "gfx942"])
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    processes.check_architecture(torch.device("cuda", 0))
    properties.gcnArchName = "gfx1201"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Radeon AI PRO R9700")
    with pytest.raises(UserError, match=r"\(gfx1201\); it is built for gfx90a, gfx942"):
        processes.check_architecture(torch.device("cuda", 0))


def test_a_driver_that_is_too_old_for_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_cuda(device: torch.device) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    versions = [("driver", "535.129.03"), ("cuda_of_torch", "13.0")]
    monkeypatch.setattr(processes, "use_device", start_cuda)
    monkeypatch.setattr(processes, "read_versions", lambda: versions)
    with pytest.raises(UserError, match=r"driver 535\.129\.03 is too old for torch with CUDA 13\.0") as refused:
        processes.prepare_device(spec_of(Path()))
    assert "install a build of torch for CUDA 12" in refused.value.fix
    versions.pop()
    with pytest.raises(RuntimeError, match="found version 12020"):
        processes.prepare_device(spec_of(Path()))


@pytest.mark.parametrize("value", [GROWING_SEGMENTS, "max_split_size_mb:64", None])
def test_the_allocator_of_a_forked_worker_is_told_our_choice_and_no_other(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has read the variable before the worker was forked."""
    done: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", done.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.delenv(ALLOCATOR_SETTINGS, raising=False)
    if value is not None:
        monkeypatch.setenv(ALLOCATOR_SETTINGS, value)
    processes.prepare_device(spec_of(Path()))
    assert done == [GROWING_SEGMENTS] * (value == GROWING_SEGMENTS) + ["cuda:0"]
