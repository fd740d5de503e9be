import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader

from benchmarks.customize.shared import built, samples
from examples.contrastive import TwoViews


def main(log):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples("train"), batch_size=8)
    net = built(TwoViews, noise=0.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for pixels, _ in loader:
        one, other = model(pixels)
        ones, others = torch.cat(all_gather(one)), torch.cat(all_gather(other))  # accelerator.gather has no gradient
        pairs = accelerator.process_index * len(one) + torch.arange(len(one), device=accelerator.device)
        scale = net.log_scale.exp()
        loss = F.cross_entropy(scale * one @ others.T, pairs) + F.cross_entropy(scale * other @ ones.T, pairs)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        log(loss=accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
