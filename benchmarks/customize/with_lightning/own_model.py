import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.customize.shared import TRAINER, Classifier, built, in_order, samples


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = built(Classifier)

    def training_step(self, batch):
        pixels, labels = batch
        loss = F.cross_entropy(self.model(pixels), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(logger):
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=1, logger=logger, **TRAINER)
    trainer.fit(Training(), DataLoader(samples("train"), batch_size=8, sampler=in_order("train")))
