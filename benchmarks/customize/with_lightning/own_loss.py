import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.customize.shared import TRAINER, built, in_order, samples
from examples.own_model import WeightedClassifier


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = built(WeightedClassifier, n_classes=4)

    def training_step(self, batch):
        pixels, labels = batch
        weights = self.model.weights
        count = self.all_gather(weights[labels].sum()).sum()
        loss = F.cross_entropy(self.model(pixels), labels, weight=weights, reduction="sum") / count
        self.log("loss", loss, sync_dist=True, reduce_fx="sum")
        return loss * self.trainer.world_size  # DDP divides the gradients by the number of ranks

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(logger):
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=1, logger=logger, **TRAINER)
    trainer.fit(Training(), DataLoader(samples("train"), batch_size=8, sampler=in_order("train")))
