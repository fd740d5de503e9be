import lightning
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from benchmarks.customize.shared import TRAINER, Sentences, in_order, samples, tiny_llama


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float64)

    def training_step(self, batch):
        ids, targets = batch
        loss = F.cross_entropy(self.model(ids).logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(logger):
    trainer = lightning.Trainer(devices=2, strategy="ddp", max_epochs=1, logger=logger, **TRAINER)
    trainer.fit(Training(), DataLoader(samples("train", Sentences), batch_size=8, sampler=in_order("train")))
