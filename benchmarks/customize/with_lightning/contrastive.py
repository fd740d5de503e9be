import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from benchmarks.customize.shared import TRAINER, built, in_order, samples
from examples.contrastive import TwoViews


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = built(TwoViews, noise=0.0)

    def training_step(self, batch):
        one, other = self.model(batch[0])
        ones, others = (self.all_gather(each, sync_grads=True).flatten(0, 1) for each in (one, other))
        pairs = self.global_rank * len(one) + torch.arange(len(one), device=self.device)
        scale = self.model.log_scale.exp()
        loss = F.cross_entropy(scale * one @ others.T, pairs) + F.cross_entropy(scale * other @ ones.T, pairs)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(logger):
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=1, logger=logger, **TRAINER)
    trainer.fit(Training(), DataLoader(samples("train"), batch_size=8, sampler=in_order("train")))
