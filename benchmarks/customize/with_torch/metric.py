import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchmetrics.classification import MulticlassF1Score

from benchmarks.customize.shared import Classifier, built, samples


def main(log):
    dist.init_process_group("gloo")
    data, validation = samples("train"), samples("validation")
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    own = Subset(validation, range(dist.get_rank(), len(validation), dist.get_world_size()))
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
    f1 = MulticlassF1Score(num_classes=4, average="macro")
    model.eval()
    with torch.no_grad():
        for pixels, labels in DataLoader(own, batch_size=8):
            f1.update(model.module(pixels), labels)
    log(f1=f1.compute().item())
    dist.destroy_process_group()
