import lightning
import torch
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.utils.data import DataLoader

from benchmarks.customize.shared import TRAINER, Critic, Generator, built, in_order, ring


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = built(Generator), built(Critic)

    def training_step(self, batch):
        noise, points = batch
        generator_optimizer, critic_optimizer = self.optimizers()
        ones, zeros = torch.ones_like(points[:, :1]), torch.zeros_like(points[:, :1])
        fake = self.generator(noise)
        critic_loss = loss_of(self.critic(torch.cat([points, fake.detach()])), torch.cat([ones, zeros]))
        critic_optimizer.zero_grad()
        self.manual_backward(critic_loss)
        critic_optimizer.step()
        generator_loss = loss_of(self.critic(fake), ones)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.log("loss", critic_loss + generator_loss, sync_dist=True)

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.generator, self.critic)]


def main(logger):
    strategy = "ddp_find_unused_parameters_true"
    trainer = lightning.Trainer(devices=2, strategy=strategy, max_epochs=1, logger=logger, **TRAINER)
    trainer.fit(Training(), DataLoader(ring(), batch_size=8, sampler=in_order("train")))
