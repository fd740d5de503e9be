"""Says what each recipe of docs/howto/recipes.md needs besides the files and the command of the page.

The packages are installed without their dependencies, in front of the packages of this environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STEPS = 120  # of each program; N/120 in its output shows step N


@dataclass(frozen=True)
class Program:
    """Describes the run of a recipe.

    Attributes:
        packages: requirements with versions.
        processes: the number of processes per node.
        before: by file of the page, the beginning of the program, which the page leaves out.
        instead: replacements in the files of the page.
        checkpoint: a pattern of files in the directory of the command; the first match completes a checkpoint.
        saves: whether no step is repeated after the announcement of the time limit.
        modules: empty modules in place of packages that the run only imports.
        prepare: code that runs once, after the installation.
    """

    packages: tuple[str, ...]
    checkpoint: str
    processes: int = 1
    before: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    saves: bool = False
    modules: tuple[str, ...] = ()
    nodes: int = 2
    prepare: str = ""


LOOP = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from stop import stop
steps = 120
network = nn.Linear(16, 1)
"""
TORCHRUN = (
    LOOP
    + """
device = torch.device("cpu")
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters())

def train(step):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    print(f"{step + 1}/{steps}", flush=True)
    time.sleep(0.1)
"""
)
ACCELERATE = (
    LOOP
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(network, torch.optim.Adam(network.parameters()))

def train(step):
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(4, 16)).square().mean())
    optimizer.step()
    print(f"{step + 1}/{steps}", flush=True)
    time.sleep(0.1)
"""
)
LIGHTNING = """
import os, signal, time
from pathlib import Path
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from stop import note, stop
steps = 120

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch):
        print(f"{self.trainer.global_step + 1}/{steps}", flush=True)
        time.sleep(0.1)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

model = Model()
loader = torch.utils.data.DataLoader(torch.randn(4096, 16), batch_size=4)
"""
TRAINER = """
from pathlib import Path
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from stop import stop
data = [{"input_ids": [1, number % 200 + 3, 2], "labels": [1, number % 200 + 3, 2]} for number in range(512)]
arguments = TrainingArguments(
    "out", max_steps=120, save_steps=20, save_total_limit=2, logging_steps=1, per_device_train_batch_size=2,
    report_to="none", use_cpu=True,
)
trainer = Trainer(AutoModelForCausalLM.from_pretrained("model"), arguments, train_dataset=data)
"""
DEEPSPEED = (
    LOOP
    + """
import deepspeed
deepspeed.init_distributed()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=network, config=config)

def train(engine):
    engine.backward(engine(torch.randn(4, 16)).square().mean())
    engine.step()
    print(f"{engine.global_steps}/{steps}", flush=True)
    time.sleep(0.1)
"""
)
AXOLOTL = """
base_model: model
datasets: [{path: data/train.jsonl, ds_type: json, type: chat_template}]
max_steps: 120
micro_batch_size: 2
gradient_accumulation_steps: 1
sequence_len: 128
learning_rate: 1e-4
optimizer: adamw_torch
bf16: false
"""
LLAMA_FACTORY = """
model_name_or_path: model
stage: sft
do_train: true
finetuning_type: full
dataset_dir: data
dataset: chats
template: default
use_cpu: true
cutoff_len: 128
max_steps: 120
per_device_train_batch_size: 2
report_to: none
"""
CHATS = """
{"chats": {
    "file_name": "train.jsonl",
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
}}
"""
DRIVER = """
import os, time
from pathlib import Path
import ray
ray.init(log_to_driver=False)
nodes = int(os.environ["GROUP_WORLD_SIZE"])
while sum(node["Alive"] for node in ray.nodes()) < nodes:
    time.sleep(0.2)

@ray.remote(num_cpus=1)
class Worker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

workers = [Worker.options(scheduling_strategy="SPREAD").remote() for _ in range(nodes)]
saved = Path("driver")
for step in range(int(saved.read_text()) if saved.exists() else 0, 120):
    assert len(set(ray.get([worker.node.remote() for worker in workers]))) == nodes
    saved.write_text(str(step + 1))
    print(f"{step + 1}/120", flush=True)
    time.sleep(0.1)
"""
SMALL = {"save_steps: 100": "save_steps: 20"}
PROGRAMS = {
    "torchrun": Program((), "outputs/run/model.pt", 2, {"train.py": TORCHRUN}, saves=True),
    "Accelerate": Program(("accelerate==1.15.0",), "outputs/run/newest", 2, {"train.py": ACCELERATE}, saves=True),
    "Lightning": Program(
        ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0", "pytorch-lightning==2.6.6"),
        "outputs/run/last.ckpt",
        2,
        {"train.py": LIGHTNING},
        saves=True,
    ),
    "Trainer of transformers": Program(
        ("transformers==5.23.0", "accelerate==1.15.0"),
        "out/checkpoint-*/trainer_state.json",
        before={"train.py": TRAINER},
        saves=True,
    ),
    "TRL": Program(
        ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0"),
        "out/checkpoint-*/trainer_state.json",
        instead={
            "Qwen/Qwen3-0.6B": "model",
            "trl-lib/Capybara": "data --max_steps 120 --use_cpu --report_to none --max_length 64",
            "--save_steps 100": "--save_steps 20",
        },
    ),
    "Axolotl": Program(
        (
            "axolotl==0.19.0", "transformers==5.16.1", "accelerate==1.13.0", "peft==0.20.0", "trl==1.9.0",
            "datasets==4.8.4", "huggingface_hub==1.17.0", "tokenizers==0.23.1", "hf_xet==1.4.3", "pydantic==2.12.5",
            "pydantic_core==2.41.5", "addict==2.4.0", "art==6.5", "fire==0.7.1", "termcolor==3.3.0", "einops==0.8.2",
            "axolotl-contribs-lgpl==0.0.7", "axolotl-contribs-mit==0.0.6", "fastcore==2.2.41", "schedulefree==1.4.1",
            "optimum==1.16.2", "kernels==0.16.2", "kernels-data==0.16.2", "posthog==6.7.11", "evaluate==0.4.1",
            "typing-extensions==4.15.0", "dill==0.4.0", "multiprocess==0.70.18", "backoff==2.2.1", "numba==0.68.1",
            "llvmlite==0.50.0", "bitsandbytes==0.50.2", "triton==3.9.0", "colorama==0.4.6", "python-dotenv==1.0.1",
        ),
        "out/checkpoint-*/trainer_state.json",
        before={"config.yml": AXOLOTL},
        instead=SMALL,
        nodes=1,  # each of several ranks places its model on an accelerator
    ),
    "LLaMA-Factory": Program(
        (
            "llamafactory==0.9.5", "transformers==5.6.0", "accelerate==1.11.0", "peft==0.18.1", "trl==0.24.0",
            "datasets==4.0.0", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "fsspec==2025.3.0", "dill==0.3.8",
            "multiprocess==0.70.16", "pandas==2.3.3", "pydantic==2.12.3", "pydantic_core==2.41.4", "pytz==2026.6",
            "docstring-parser==0.18.0", "einops==0.8.2", "fire==0.7.1", "av==16.0.0", "tyro==0.8.14", "shtab==1.13.0",
            "termcolor==3.3.0", "pillow==11.3.0", "tiktoken==0.14.0", "sentencepiece==0.2.3", "torchdata==0.11.0",
        ),
        "out/checkpoint-*/trainer_state.json",
        before={"config.yaml": LLAMA_FACTORY, "data/dataset_info.json": CHATS},
        instead=SMALL,
        modules=("torchaudio",),  # the index has builds for CUDA only; text needs none
        nodes=1,  # several ranks on CPUs cannot load the state of the optimizer: their device is called cpu:0
    ),
    "DeepSpeed": Program(
        ("deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "einops==0.8.2", "ninja==1.13.2", "msgpack==1.2.4"),
        "out/latest",
        2,
        {"train.py": DEEPSPEED},
        saves=True,
        prepare="from deepspeed.comm.torch import build_shm_op; build_shm_op()",  # minutes
    ),
    "Ray": Program(
        ("ray==2.60.0", "msgpack==1.2.4"),
        "driver",
        before={"driver.py": DRIVER},
        instead={'--address "$RAY_ADDRESS"': '--address "$RAY_ADDRESS" --node-ip-address 127.0.0.3'},
        saves=True,
    ),
}  # fmt: skip
