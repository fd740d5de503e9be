"""A generative adversarial network with a loop of its own: two models, two optimizers, one checkpoint.

    python -m hpc_train +strategy=dp run.entry=examples.gan:main train.steps=40 run.name=gan

The generator learns to draw points of a ring. hpc_train calls ``main`` in every worker: the loop stops, resumes, saves
and logs through its context (docs/howto/own_loop.md).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from torch.nn.parallel import DistributedDataParallel

from hpc_train.loop import Context

NOISE, BATCH = 8, 64  # the dimensions of the generator's input; points per rank and step


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def ring(count: int, device: torch.device) -> Tensor:
    """Returns points with a distance of about 1 from the origin, [count, 2]."""
    angle = torch.rand(count, device=device) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2, device=device)


def main(context: Context) -> None:
    torch.manual_seed(context.seed)  # the same weights on all ranks
    generator = DistributedDataParallel(network(NOISE, 2).to(context.device))
    critic = DistributedDataParallel(network(2, 1).to(context.device))
    lr = context.args.get("lr", 1e-3)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=lr, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=lr, betas=(0.5, 0.99))
    context.resume(
        generator=generator,
        critic=critic,
        generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer,
    )
    ones, zeros = torch.ones(BATCH, 1, device=context.device), torch.zeros(BATCH, 1, device=context.device)
    for step in context.steps():
        fake = generator(torch.randn(BATCH, NOISE, device=context.device))
        points = torch.cat([ring(BATCH, context.device), fake.detach()])
        critic_loss = loss_of(critic(points), torch.cat([ones, zeros]))
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

        generator_loss = loss_of(critic.module(fake), ones)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        radius = fake.detach().norm(dim=1).mean()
        context.log(step, loss=generator_loss, critic_loss=critic_loss, radius=radius)
