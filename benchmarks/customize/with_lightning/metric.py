import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from benchmarks.customize.shared import TRAINER, Classifier, built, in_order, samples


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = built(Classifier)
        self.f1 = MulticlassF1Score(num_classes=4, average="macro")

    def training_step(self, batch):
        pixels, labels = batch
        loss = F.cross_entropy(self.model(pixels), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch):
        pixels, labels = batch
        self.f1(self.model(pixels), labels)
        self.log("f1", self.f1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(logger):
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=1, logger=logger, **TRAINER)
    loader = DataLoader(samples("train"), batch_size=8, sampler=in_order("train"))
    trainer.fit(Training(), loader, DataLoader(samples("validation"), batch_size=8))
