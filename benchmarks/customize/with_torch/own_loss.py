import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.customize.shared import built, samples
from examples.own_model import WeightedClassifier


def main(log):
    dist.init_process_group("gloo")
    data = samples("train")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    net = built(WeightedClassifier, n_classes=4)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pixels, labels in loader:
        count = net.weights[labels].sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(model(pixels), labels, weight=net.weights, reduction="sum") / count
        optimizer.zero_grad()
        (loss * dist.get_world_size()).backward()  # DDP divides the gradients by the number of ranks
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        log(loss=total.item())
    dist.destroy_process_group()
