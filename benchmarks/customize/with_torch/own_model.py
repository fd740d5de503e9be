import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.customize.shared import Classifier, built, samples


def main(log):
    dist.init_process_group("gloo")
    data = samples("train")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(built(Classifier))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        log(loss=mean.item())
    dist.destroy_process_group()
