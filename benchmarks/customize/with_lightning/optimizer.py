import lightning
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.customize.shared import TRAINER, Classifier, built, in_order, samples
from examples.own_optimizer import Lion


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = built(Classifier)

    def training_step(self, batch):
        pixels, labels = batch
        loss = F.cross_entropy(self.model(pixels), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def groups(self):
        for name, value in self.model.named_parameters():
            lr = 1e-4 if name.startswith("convolutions") else 1e-3
            yield {"params": [value], "lr": lr, "weight_decay": 0.1 if value.ndim > 1 else 0.0}

    def configure_optimizers(self):
        return Lion(self.groups())


def main(logger):
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=1, logger=logger, **TRAINER)
    trainer.fit(Training(), DataLoader(samples("train"), batch_size=8, sampler=in_order("train")))
