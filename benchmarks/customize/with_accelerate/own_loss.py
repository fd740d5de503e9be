import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.customize.shared import built, samples
from examples.own_model import WeightedClassifier


def main(log):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples("train"), batch_size=8)
    net = built(WeightedClassifier, n_classes=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for pixels, labels in loader:
        count = accelerator.gather(net.weights[labels].sum()).sum()
        loss = F.cross_entropy(model(pixels), labels, weight=net.weights, reduction="sum") / count
        optimizer.zero_grad()
        accelerator.backward(loss * accelerator.num_processes)  # DDP divides the gradients by the number of ranks
        optimizer.step()
        log(loss=accelerator.reduce(loss.detach(), "sum").item())
    accelerator.end_training()
