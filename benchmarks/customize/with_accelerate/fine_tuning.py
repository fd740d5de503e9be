import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from benchmarks.customize.shared import Sentences, samples, tiny_llama


def main(log):
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples("train", Sentences), batch_size=8)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids, targets in loader:
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        log(loss=accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
