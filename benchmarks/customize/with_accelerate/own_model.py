import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader

from benchmarks.customize.shared import Classifier, built, samples


def main(log):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples("train"), batch_size=8)
    model = built(Classifier)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        log(loss=accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
