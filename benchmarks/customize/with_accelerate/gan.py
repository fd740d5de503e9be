import torch
from accelerate import Accelerator
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.utils.data import DataLoader

from benchmarks.customize.shared import Critic, Generator, built, ring


def main(log):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(ring(), batch_size=8)
    generator, critic = built(Generator), built(Critic)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    generator, critic, *optimizers, loader = accelerator.prepare(generator, critic, *optimizers, loader)
    generator_optimizer, critic_optimizer = optimizers
    ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for noise, points in loader:
        fake = generator(noise)
        critic_loss = loss_of(critic(torch.cat([points, fake.detach()])), torch.cat([ones, zeros]))
        critic_optimizer.zero_grad()
        accelerator.backward(critic_loss)
        critic_optimizer.step()
        generator_loss = loss_of(accelerator.unwrap_model(critic)(fake), ones)
        generator_optimizer.zero_grad()
        accelerator.backward(generator_loss)
        generator_optimizer.step()
        log(loss=accelerator.reduce((critic_loss + generator_loss).detach(), "mean").item())
    accelerator.end_training()
