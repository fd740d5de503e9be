"""Trains with the faults of a plan (``tests.faults.plan``): ``hpc_train.train.worker:train`` with faults in its steps.

The product contains no code for this. Each fault is injected once per run; bad batches are bad at every read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hpc_train.data.sampler import Skipped
from hpc_train.parallel.engine import StepResult
from hpc_train.preflight import measure
from hpc_train.run.agent_worker import WorkerSpec
from hpc_train.run.exits import Exit
from hpc_train.run.requests import StopFlag
from hpc_train.train import step, trainer, worker
from hpc_train.train.trainer import Trainer
from tests.faults.agent import shift_clock
from tests.faults.injections import INJECTIONS
from tests.faults.plan import RECOVERY, Fault, bad_windows, happened, read_plan

SLOW_S = 0.1
NOT_A_NUMBER = torch.tensor(float("nan"))
ERRS = "HPC_TRAIN_TEST_ERRS"  # steps of a node: in the first, one product is wrong, and all since the second
BURN_IN_ERRS = "HPC_TRAIN_TEST_BURN_IN_ERRS"  # whether the products of the burn-in of a node are wrong


def train(spec: WorkerSpec, stop: StopFlag) -> Exit:
    shift_clock()
    with Path(spec.run_dir, "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    plan = read_plan()
    if spec.attempt > 0:
        _inject(plan, spec, RECOVERY, stop)
    trainer.LEAST = 4
    if os.environ.get(BURN_IN_ERRS):
        measure._product = _wrong_product
    if spec.nodes > 1:
        step.RING_RANKS = 1  # the ranks agree as those of large worlds do
    take = Trainer._train

    def faulty(self: Trainer, *arguments: Any) -> Any:
        _let_products_err(self)
        _inject(plan, spec, self.step, stop, self)
        with _Bad(self, plan, spec):
            return take(self, *arguments)

    Trainer._train = faulty  # type: ignore[assignment, method-assign]
    return worker.train(spec, stop)


def train_past(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Trains the undisturbed run, which skips the bad batches of the plan from the beginning."""
    pass_over(bad_windows(read_plan()))
    with Path(spec.run_dir, "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    return worker.train(spec, stop)


def pass_over(windows: Sequence[tuple[int, int]]) -> None:
    """Makes a run in this process skip these batches."""
    past, prepare = Skipped(tuple(windows)), Trainer.__post_init__

    def begin(self: Trainer) -> None:
        prepare(self)
        self.skipped = past

    worker.NOTHING, Trainer.__post_init__ = past, begin  # type: ignore[method-assign, attr-defined]


def _inject(plan: Sequence[Fault], spec: WorkerSpec, step: int, stop: StopFlag, trainer: Trainer | None = None) -> None:
    for number, fault in enumerate(plan):
        if fault.rank != spec.rank or fault.leads_to.bad_batches:
            continue
        due = fault.step == step and all(happened(spec.run_dir, earlier).exists() for earlier in range(number))
        if fault.kind == "slow":
            time.sleep(SLOW_S)
        elif due and not (mark := happened(spec.run_dir, number)).exists():
            mark.write_text(str(time.time()))
            if fault.kind == "pause":
                _stand_still(Path(spec.run_dir))
            elif fault.kind == "weight" and trainer is not None:
                with torch.no_grad():
                    weight = next(iter(trainer.engine.named_parameters().values())).view(-1)
                    weight.view(torch.int32)[0] ^= 1 << 20
            else:
                INJECTIONS[fault.kind](stop)


def _let_products_err(trainer: Trainer) -> None:
    first, second = map(int, os.environ.get(ERRS, "-1 1000000").split())
    *_, module, _ = [module for module in trainer.engine.parts[0].modules() if isinstance(module, torch.nn.Linear)]
    happens_once = Path(trainer.report.run.path, "product-erred")

    def err(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if trainer.step < second and (trainer.step != first or happens_once.exists()):
            return None
        happens_once.touch()
        wrong = torch.zeros_like(output)
        wrong.view(-1)[0] = 0.125
        return output + wrong

    if first >= 0 and not module._forward_hooks:
        module.register_forward_hook(err)


def _wrong_product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: torch.mm(left, right).index_fill(0, torch.tensor(0), 0.125)


def _stand_still(run: Path) -> None:
    until = time.monotonic() + 100
    while len(list(run.glob("logs/stacks/slow-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(1)  # both nodes continue to collect evidence meanwhile


class _Bad:
    """Wraps a step: if its batch is bad, the loss of one rank is multiplied by 10,000 or its gradients are NaN."""

    def __init__(self, trainer: Trainer, plan: Sequence[Fault], spec: WorkerSpec) -> None:
        position, bad = trainer.skipped.position(trainer.step), [one for one in plan if one.leads_to.bad_batches]
        injected = [
            fault
            for fault, (first, last) in zip(bad, bad_windows(plan), strict=True)
            if first <= position < last and fault.rank == spec.rank
        ]
        self._kind = injected[0].kind if injected else None
        self._engine: Any = trainer.take_step._engine
        if injected:
            happened(spec.run_dir, plan.index(injected[0])).write_text(str(time.time()))

    def __enter__(self) -> None:
        compute, kind = self._engine.train_step, self._kind

        def poisoned(step: int, batch: Any, loss_scale: Any = None) -> StepResult:
            result: StepResult = compute(step, batch, NOT_A_NUMBER if kind == "nan" else loss_scale)
            return result if kind == "nan" else StepResult(result.loss_sum * 10_000, result.target_count)

        if kind is not None:
            self._engine.train_step = poisoned

    def __exit__(self, *exception: object) -> None:
        vars(self._engine).pop("train_step", None)
