"""A script with Lightning's Trainer: it finds torchrun's variables, and hpc_train starts, restarts and requeues it.

    hpc-train exec --nproc-per-node 4 -- python examples/lightning_script.py

Lightning saves and loads its own checkpoints; their directory shows the progress (run.progress_dir), and the callback
below shows each step.
"""

from __future__ import annotations

import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(os.environ.get("HPC_TRAIN_RUN_DIR", "."), "lightning")
STEPS = 20


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.layer(inputs).squeeze(1) - targets).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Progress(Callback):
    """Tells hpc_train the number of the step."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *args: object) -> None:
        if "HPC_TRAIN_PROGRESS" in os.environ:
            Path(os.environ["HPC_TRAIN_PROGRESS"]).write_text(str(trainer.global_step))


def main() -> None:
    lightning.seed_everything(0)
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs @ torch.arange(16.0).sin())
    last = FOLDER / "last.ckpt"
    trainer = lightning.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        accelerator="auto",
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Progress(), ModelCheckpoint(FOLDER, save_last=True, every_n_train_steps=5)],
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=16), ckpt_path=last if last.exists() else None)
    print(f"rank {trainer.global_rank} of {trainer.world_size} ends at step {trainer.global_step}")


if __name__ == "__main__":
    main()
