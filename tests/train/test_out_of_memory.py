"""An error of memory: its class, and a message that says what would help."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.config.compose import typed
from hpc_train.config.schema import Config
from hpc_train.layout.resolve import resolve_layout
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.exits import Failure, classify
from hpc_train.run.requests import StopFlag
from hpc_train.train.watch.memory import fixes
from tests.config.composing import compose
from tests.train.runs import frozen, run_attempt


def too_large(spec: WorkerSpec, stop: StopFlag) -> None:
    from hpc_train.parallel.replica_engine import ReplicaEngine

    def broken(self: Any, *args: Any) -> None:
        torch.empty(1 << 50)

    ReplicaEngine.train_step = broken  # type: ignore[assignment]


def test_the_message_says_what_helps_in_this_run(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=dp")
    message = (
        r"OutOfMemory: out of memory on rank \d, which had used \d+(\.\d+)? [MG]iB of host memory: .*allocate.* "
        r"Estimated memory per rank: [\d.]+ [KM]iB \(parameters .*\), mostly activations\. "
        r"To reduce memory in this run: "
        r"batch\.micro_size=2 \(now 4; .*\) saves [\d.]+ KiB; train\.activation_checkpointing=ops saves .*; "
        r"train\.activation_checkpointing=full saves"
    )
    with pytest.raises(AssertionError, match=message):
        run_attempt(run, 2, too_large)


def rank_of(*overrides: str, device: str = "cuda", ranks: int = 8) -> tuple[Config, Any]:
    """A config, and what of its mesh is looked at."""
    config = typed(compose(["data=synthetic", *overrides]))
    return config, SimpleNamespace(layout=resolve_layout(config, 1, ranks), device=torch.device(device))


def suggested(*overrides: str, device: str = "cuda") -> list[str]:
    return [fix.change.partition(" ")[0] for fix in fixes(*rank_of(*overrides, device=device))]


def test_the_three_cheapest_savings_that_are_worth_it_are_told_with_what_they_save() -> None:
    one_billion = ("model=llama_1b", "data.vocab_size=128256", "data.sequence_length=2048", "precision=bf16")
    few_samples = ("+strategy=dp", *one_billion, "batch.global_size=8")
    again = "train.activation_checkpointing"
    assert suggested(*few_samples) == [f"{again}=ops", "train.loss_chunks=8", f"{again}=full"]
    spared = (*few_samples, "train.activation_checkpointing=full", "train.loss_chunks=16")
    assert suggested(*spared) == ["strategy=zero3", "optim.moments=bf16", "strategy.offload=optimizer"]
    config, mesh = rank_of(*spared)
    sharded, halved, offloaded = fixes(config, mesh)
    parameters = 1_235_814_400
    # fp32 parameters, gradients and two moments, of which an eighth stays; and what of the table's gradient waits
    table = 4 * 128_256 * 2048
    assert sharded.saves == pytest.approx(parameters * 16 * 7 / 8 + table, rel=0.15)
    assert (halved.saves, offloaded.saves) == (4 * parameters, 8 * parameters)
    assert suggested(*spared, "optim.clip_norm=0")[:2] == ["optim.in_backward=true", "strategy=zero3"]
    used, of_layout = rank_of(*spared, "optim.clip_norm=0", "optim.in_backward=true")
    kept = fixes(*rank_of(*spared, "optim.clip_norm=0"))[0].saves
    assert kept == pytest.approx(4 * parameters, rel=0.15), "all but the table's, and what waits for its sum"
    assert not any("in_backward" in fix.change for fix in fixes(used, of_layout))
    custom = rank_of("+strategy=dp", "model=custom", "model._target_=hpc_train.models.resnet.resnet18",
                     "data.task=images", "batch.global_size=16", device="cpu", ranks=2)  # fmt: skip
    assert [fix.saves for fix in fixes(*custom)] == [None] * len(fixes(*custom))


def test_torch_says_it_in_several_ways() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 50)
    found = [error.value, torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]
    assert [classify(one) for one in found] == [Failure.OUT_OF_MEMORY] * 3
    assert classify(RuntimeError("[enforce fail at tcp.cc] Connection closed")) is Failure.COMMUNICATION
