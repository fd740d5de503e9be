import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from benchmarks.customize.shared import Sentences, samples, tiny_llama


def main(log):
    dist.init_process_group("gloo")
    data = samples("train", Sentences)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False))
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids, targets in loader:
        loss = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        log(loss=mean.item())
    dist.destroy_process_group()
