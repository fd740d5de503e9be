"""REINFORCE on a policy with eight actions, which the server of ``rl_judge.py`` scores."""

import json
import os
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 40
HOST, PORT = os.environ["HPC_TRAIN_ROLE_JUDGE_ADDRESS"], os.environ["HPC_TRAIN_ROLE_JUDGE_PORT"]
CHECKPOINT = Path(os.environ["HPC_TRAIN_RUN_DIR"]) / "policy.pt"


def scores(actions: torch.Tensor) -> torch.Tensor:
    """Asks the judge, and again while it restarts."""
    request = urllib.request.Request(f"http://{HOST}:{PORT}", json.dumps(actions.tolist()).encode())
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return torch.tensor(json.load(answer), dtype=torch.float)
        except OSError:
            time.sleep(0.2)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(dist.get_rank())
    policy = torch.nn.Linear(1, 8)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        policy.load_state_dict(saved["policy"])
        step = saved["step"]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(policy.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    while step < STEPS:
        choices = torch.distributions.Categorical(logits=model(torch.ones(32, 1, device=device)))
        actions = choices.sample()
        rewards = scores(actions).to(device)
        optimizer.zero_grad()
        (-(rewards - rewards.mean()) * choices.log_prob(actions)).mean().backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: mean score {rewards.mean().item():.2f}", flush=True)
            new = CHECKPOINT.with_suffix(".new")
            torch.save({"policy": policy.state_dict(), "step": step}, new)
            new.replace(CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
