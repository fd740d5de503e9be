import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.nn.parallel import DistributedDataParallel

import hpc_train
from benchmarks.customize.shared import Critic, Generator, built, ring


def train(context):
    data = ring()
    generator, critic = DistributedDataParallel(built(Generator)), DistributedDataParallel(built(Critic))
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    context.resume(generator=generator, critic=critic, of_generator=generator_optimizer, of_critic=critic_optimizer)
    ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for step in context.steps():
        noise, points = data[16 * (step - 1) + context.rank : 16 * step : context.world_size]
        fake = generator(noise)
        critic_loss = loss_of(critic(torch.cat([points, fake.detach()])), torch.cat([ones, zeros]))
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        generator_loss = loss_of(critic.module(fake), ones)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        mean = (critic_loss + generator_loss).detach() / context.world_size
        dist.all_reduce(mean)
        context.log(step, loss=mean)


def main(same):
    return hpc_train.submit(["+strategy=dp", "train.steps=20", *same], entry=train, detach=False)
