import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.customize.shared import Classifier, built, samples
from examples.own_optimizer import Lion


def groups(net):
    for name, value in net.named_parameters():
        lr = 1e-4 if name.startswith("convolutions") else 1e-3
        yield {"params": [value], "lr": lr, "weight_decay": 0.1 if value.ndim > 1 else 0.0}


def main(log):
    dist.init_process_group("gloo")
    data = samples("train")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    net = built(Classifier)
    model = DistributedDataParallel(net)
    optimizer = Lion(groups(net))
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        log(loss=mean.item())
    dist.destroy_process_group()
