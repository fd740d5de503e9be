import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.customize.shared import Classifier, built, samples
from examples.own_optimizer import Lion


def groups(net):
    for name, value in net.named_parameters():
        lr = 1e-4 if name.startswith("convolutions") else 1e-3
        yield {"params": [value], "lr": lr, "weight_decay": 0.1 if value.ndim > 1 else 0.0}


def main(log):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples("train"), batch_size=8)
    model = built(Classifier)
    optimizer = Lion(groups(model))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        log(loss=accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
