import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.customize.shared import Critic, Generator, built, ring


def main(log):
    dist.init_process_group("gloo")
    data = ring()
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    generator, critic = DistributedDataParallel(built(Generator)), DistributedDataParallel(built(Critic))
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    ones, zeros = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
    for noise, points in loader:
        fake = generator(noise)
        critic_loss = loss_of(critic(torch.cat([points, fake.detach()])), torch.cat([ones, zeros]))
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        generator_loss = loss_of(critic.module(fake), ones)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        mean = (critic_loss + generator_loss).detach() / dist.get_world_size()
        dist.all_reduce(mean)
        log(loss=mean.item())
    dist.destroy_process_group()
