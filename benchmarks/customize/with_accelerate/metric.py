import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from benchmarks.customize.shared import Classifier, built, samples


def main(log):
    accelerator = Accelerator(cpu=True)
    loader, validation = (DataLoader(samples(split), batch_size=8) for split in ("train", "validation"))
    model = built(Classifier)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader, validation = accelerator.prepare(model, optimizer, loader, validation)
    for pixels, labels in loader:
        loss = F.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        log(loss=accelerator.reduce(loss.detach(), "mean").item())
    f1 = MulticlassF1Score(num_classes=4, average="macro", sync_on_compute=False).to(accelerator.device)
    model.eval()
    with torch.no_grad():
        for pixels, labels in validation:
            f1.update(*accelerator.gather_for_metrics((model(pixels), labels)))
    log(f1=f1.compute().item())
    accelerator.end_training()
