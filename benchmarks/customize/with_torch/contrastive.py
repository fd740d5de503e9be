import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.customize.shared import built, samples
from examples.contrastive import TwoViews


def main(log):
    dist.init_process_group("gloo")
    data = samples("train")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    net = built(TwoViews, noise=0.0)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pixels, _ in loader:
        one, other = model(pixels)
        ones, others = torch.cat(all_gather(one)), torch.cat(all_gather(other))
        pairs = dist.get_rank() * len(one) + torch.arange(len(one))
        scale = net.log_scale.exp()
        loss = F.cross_entropy(scale * one @ others.T, pairs) + F.cross_entropy(scale * other @ ones.T, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        log(loss=mean.item())
    dist.destroy_process_group()
