"""Loops of one's own for the tests; each runs in the workers as ``run.entry``."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import MultiStepLR

from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json
from hpc_train.train.custom_loop import Context

SAMPLES = 4  # per rank and step


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def loss_of(module: nn.Module) -> Tensor:
    """Returns the loss of this rank's samples, which depend on how torch is seeded before the step."""
    return module(torch.randn(SAMPLES, 4, dtype=torch.float64)).square().mean()


def optimizers(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer, MultiStepLR]:
    """Returns one for the matrices and one for the biases, which steps for the first time in step 8."""
    matrices = [value for name, value in module.named_parameters() if name.endswith("weight")]
    biases = [value for name, value in module.named_parameters() if name.endswith("bias")]
    adam = torch.optim.Adam(matrices, lr=0.05)
    return adam, torch.optim.SGD(biases, lr=0.1, momentum=0.9), MultiStepLR(adam, [6, 11], gamma=0.5)


def update(step: int, adam: torch.optim.Optimizer, sgd: torch.optim.Optimizer, schedule: MultiStepLR) -> None:
    adam.step()
    if step >= 8:
        sgd.step()
    schedule.step()


def trains(context: Context) -> None:
    """Trains with two optimizers; the faults of ``args.faults`` happen once each, in the attempt of their number."""
    module = model()
    if context.args.get("shard"):
        fully_shard(module, mesh=context.mesh["dp_shard"])
    else:
        module = DistributedDataParallel(module)
    adam, sgd, schedule = optimizers(module)
    total = torch.zeros((), dtype=torch.float64)
    context.resume(model=module, adam=adam, sgd=sgd, schedule=schedule, total=total)
    for step in context.steps():
        loss = loss_of(module)
        adam.zero_grad()
        sgd.zero_grad()
        loss.backward()
        update(step, adam, sgd, schedule)
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if context.device.type == "cuda" else dist.ReduceOp.SUM)
        total += mean / context.world_size
        context.log(step, loss=mean / context.world_size, total=total)
        fault(context, step)


def fault(context: Context, step: int) -> None:
    faults = context.args.get("faults", [])
    if context.attempt >= len(faults):
        return
    kind, rank, at = faults[context.attempt]
    if (rank, at) != (context.rank, step):
        return
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        time.sleep(1000)
    else:
        attempt = read_json(RunDirectory(context.directory).attempts / f"{context.attempt:03d}.json")
        os.kill(attempt["pid"], signal.Signals[kind])  # the agent
        until = time.monotonic() + 60
        while not context.stop_requested and time.monotonic() < until:
            time.sleep(0.01)


def leaves_early(context: Context) -> None:
    """Has epochs of its own and leaves the loops in the middle of one."""
    done = torch.zeros((), dtype=torch.int64)
    step = context.resume(done=done)
    for _ in range(4):
        for _ in range(3):
            step += 1
            done += 1
            context.log(step, loss=1 / step)
            context.heartbeat()
            if context.end_step(step) or step == 5:
                context.event("left", done=int(done))
                return


def slow(context: Context) -> None:
    """Trains the same on every rank, so that the numbers do not depend on the ranks; a step takes ``args.seconds``."""
    module = model()
    adam, sgd, schedule = optimizers(module)
    context.resume(model=module, adam=adam, sgd=sgd, schedule=schedule)
    for step in context.steps():
        torch.manual_seed(step)
        loss = loss_of(module)
        adam.zero_grad()
        sgd.zero_grad()
        loss.backward()
        update(step, adam, sgd, schedule)
        context.log(step, loss=loss)
        time.sleep(context.args["seconds"])


def with_schedule(context: Context) -> None:
    """Passes a schedule to ``resume`` if ``args.schedule`` is set."""
    module = model()
    adam, _, schedule = optimizers(module)
    objects = {"schedule": schedule} if context.args.get("schedule") else {}
    context.resume(model=module, adam=adam, **objects)
    for _ in context.steps():
        adam.step()
        schedule.step()
    context.event("rate", epoch=schedule.last_epoch)
