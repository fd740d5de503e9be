"""A script with Hugging Face Accelerate, which finds torchrun's variables: it needs no `accelerate launch`.

hpc-train exec --nproc-per-node 4 -- python examples/accelerate_script.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(os.environ.get("HPC_TRAIN_RUN_DIR", "."), "accelerate")
EPOCHS = 4


def save(accelerator: Accelerator, epoch: int) -> None:
    """Saves all states; the file ``newest`` is written last and names a whole checkpoint."""
    accelerator.save_state(str(FOLDER / f"epoch-{epoch}"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (FOLDER / "newest.new").write_text(str(epoch))
        (FOLDER / "newest.new").replace(FOLDER / "newest")


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    inputs = torch.randn(128, 16)
    data = TensorDataset(inputs, inputs @ torch.arange(16.0).sin())
    model = nn.Linear(16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
    newest = FOLDER / "newest"
    first = int(newest.read_text()) if newest.exists() else 0
    if first:
        accelerator.load_state(str(FOLDER / f"epoch-{first}"))
    for epoch in range(first, EPOCHS):
        for inputs, targets in loader:
            loss = (model(inputs).squeeze(1) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        save(accelerator, epoch + 1)
        if "HPC_TRAIN_PROGRESS" in os.environ:
            Path(os.environ["HPC_TRAIN_PROGRESS"]).write_text(str(epoch + 1))
    accelerator.print(f"{accelerator.num_processes} processes end after epoch {EPOCHS} with loss {loss.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
