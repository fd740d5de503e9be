"""A plain DDP script as one writes it for torchrun. It knows nothing of hpc_train, apart from one line about progress.

hpc-train exec --nproc-per-node 4 -- python examples/ddp_script.py
torchrun --nproc-per-node=4 examples/ddp_script.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save(path: Path, state: dict[str, object]) -> None:
    """Writes a checkpoint beside the old one and replaces that in one step, so that a kill leaves a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, default=Path(os.environ.get("HPC_TRAIN_RUN_DIR", "."), "model.pt"))
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 1).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    first = 0
    if options.checkpoint.exists():
        found = torch.load(options.checkpoint, map_location=device)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["step"]
        print(f"rank {rank} continues after step {first}")

    target = torch.arange(16.0, device=device).sin()
    for step in range(first, options.steps):
        torch.manual_seed(step * dist.get_world_size() + rank)  # the samples of this step and rank
        inputs = torch.randn(32, 16).to(device)
        loss = (model(inputs).squeeze(1) - inputs @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            save(options.checkpoint, state)
        if "HPC_TRAIN_PROGRESS" in os.environ:  # finds hangs, and shows the step in `status`
            Path(os.environ["HPC_TRAIN_PROGRESS"]).write_text(str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
