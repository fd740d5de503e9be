"""A plain FSDP2 loop for torchrun whose checkpoints hpc_train writes. It needs no config and no run of hpc_train.

torchrun --nproc-per-node=2 examples/fsdp_script.py --steps 20
torchrun --nproc-per-node=3 examples/fsdp_script.py --steps 40
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hpc_train.checkpoint import Checkpoints

SAMPLES = 96  # of a step, over all ranks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--checkpoints", default="checkpoints")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    progress = {"samples": 0}

    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "progress": progress}
    with Checkpoints(options.checkpoints, asynchronous=True, **objects) as checkpoints:
        first = checkpoints.load() or 0
        if dist.get_rank() == 0 and first:
            print(f"continues after step {first} and {progress['samples']} samples on {dist.get_world_size()} ranks")
        for step in range(first + 1, options.steps + 1):
            samples = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(step))
            inputs = samples.chunk(dist.get_world_size())[dist.get_rank()].to(device)
            loss = (model(inputs).squeeze(1) - inputs.sum(1).sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress["samples"] += SAMPLES
            if step % options.every == 0:
                checkpoints.save(step)
                if dist.get_rank() == 0:
                    print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
