"""No dead options: every key of the schema is read by the code of some run, in some process of it.

And no wrong condition: where the schema says that a run does not read a key, no process of the run has read it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_train.config import schema
from hpc_train.config.extensions import SOURCES, load_source
from hpc_train.config.schema.key import info
from hpc_train.layout.layout import JobShape, Place
from hpc_train.layout.resolve import resolve_layout
from hpc_train.layout.without_effect import without_effect
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from tests.data.chats import chats, write_jsonl, write_tokenizer
from tests.doors.command import REPOSITORY, TINY, environment, hpc_train

AT_ONCE = 3  # runs
RECORDING = REPOSITORY / "tests" / "doors" / "recording"


def every_key() -> set[str]:
    classes = [value for value in vars(schema).values() if isinstance(value, type) and is_dataclass(value)]
    found = {f"{cls.__name__}.{f.name}" for cls in classes for f in fields(cls)} - {"ModelKeys.kind", "DataKeys.kind"}
    return found - {"DataKeys.collate", "CIFAR100DataConfig.collate"}  # of each source that is built, like the others


def make_tokens(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
    done = hpc_train("prepare", str(text), "--out", str(folder / "tokens"), "--validation-share", "0.3", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def make_chats(folder: Path) -> None:
    folder.mkdir()
    write_tokenizer(folder)
    write_jsonl(folder / "chats.jsonl", chats(9))


def make_images(folder: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0)
    for split in ("train", "validation"):
        for label in ("cat", "dog"):
            target = folder / "images" / split / label
            target.mkdir(parents=True)
            for number in range(8):
                Image.fromarray(pixels.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(target / f"{number}.png")
    done = hpc_train("prepare", "--images", "images", "--out", "shards", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


def runs(folder: Path) -> list[list[str]]:
    """Few runs that between them use every group and every kind of model, data and optimizer."""
    two = ["cluster.cpu_workers=2"]
    gpt = [argument for argument in TINY if not argument.startswith("data")]
    short = ["train.steps=2", "batch.global_size=8", "telemetry.log_every=1", "telemetry.wandb.mode=disabled"]
    vit = ["model=vit_tiny", "model.n_layers=4", "model.patch_size=8", *short]
    pictures = ["data=synthetic", "data.task=images", "data.validation_samples=8"]
    sft = ["kind=sft", f"path={folder}/chats/chats.jsonl", f"tokenizer={folder}/chats", "vocab_size=300"]
    custom = ["model=custom", "model._target_=hpc_train.models.resnet.resnet18", *short]
    return [
        ["+strategy=hybrid", *gpt, "data=text", "data.pattern=json/*.py", "cluster=local", "telemetry.tensorboard=true",
         "telemetry.prometheus.port=auto", "telemetry.profile.steps=1", "data.packing=true",
         "checkpoint.every=2", "telemetry.wandb.mode=offline", "strategy.compression=powersgd"],
        ["+strategy=zero2", *TINY, *two, "+hooks=ema", "+metrics=f1", "checkpoint.keep_best=val_f1",
         "precision=fp16", "optim.lr_scaling=linear", "optim.schedule=wsd", "strategy.cp=2",
         "run.name=base"],
        ["+strategy=dp", *vit, *pictures, *two, "optim=sgd", "train.reproducible=any_world_size"],
        ["+strategy=dp", *custom, *pictures, *two, "+model.args.n_classes=10", "strategy.compression=topk",
         "-m"],
        ["+strategy=dp", "model=hf", f"model.name_or_path={folder}/hf", "model.task=image_classification", *pictures,
         "train.steps=2", "batch.global_size=8", "model.pretrained=false", "launch.dry_run=true"],
        ["+strategy=single", *gpt, "data=tokens", f"data.path={folder}/tokens", "data.vocab_size=300",
         "data.sequence_length=16", "train.steps=null", "train.epochs=0.2", "data.packing=true",
         *(f"+eval_sets.chats.{key}" for key in sft)],
        ["+strategy=single", *gpt, "data=mixture", "+data@data.sources.one=custom", "model.vocab_size=16",
         "data.sources.one._target_=tests.doors.custom_data.Counting", "data.collate=tests.doors.custom_data.stacked",
         "optim._target_=torch.optim.RMSprop", "model.moe.experts=4", "model.moe.bias_rate=0.1",
         "model.moe.capacity_factor=1"],
        ["+strategy=single", *gpt, "data=stream", "data._target_=tests.doors.custom_data.Counted", "data.shards=2",
         "model.vocab_size=16", "precision=fp8", "precision.weights=bf16", "strategy.local_steps=1"],
        ["+strategy=dp", "cluster=local", "run.command=[python,--version]", "run.per=node"],
        ["script", "+strategy=dp", *TINY],
        ["plan", *TINY, "--machine=cpu", "--gpus=1", "cluster.price.purchase=9000", "cluster.price.spot=1"],
        ["+strategy=auto", *TINY, "cluster=slurm", "cluster.gpus_per_node=2", "cluster.machine=h100", "-m",
         "train.compile=true",
         "launch.dry_run=true", "cluster.container.image=docker://site/image", "elastic.grow=idle",
         "elastic.max_nodes=4"],
    ]  # fmt: skip


BUILT = """
from hpc_train.config.schema import HFModelConfig, LoraConfig
from hpc_train.models.build import build_model
adapted = LoraConfig(rank=2)
build_model(HFModelConfig(name_or_path="hf", task="image_classification", pretrained=False, lora=adapted), 0)
from pathlib import Path
from hpc_train.config.schema import CIFAR100DataConfig
from hpc_train.data.cifar100 import CIFAR100Dataset
from tests.data.test_pictures import write_cifar
from hpc_train.config.schema import Config, MlflowConfig, TelemetryConfig, WandbConfig
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.tracker import Session
from hpc_train.telemetry.sinks.mlflow import Mlflow
from hpc_train.telemetry.sinks.wandb import Wandb
trackers = TelemetryConfig(wandb=WandbConfig(mode="offline"), mlflow=MlflowConfig(uri="http://localhost:5000"))
session = Session(Config(telemetry=trackers), RunDirectory(Path.cwd()), first_attempt=0)
Mlflow(session)
offline = Wandb(session)
offline.open()
offline.finish()
from types import SimpleNamespace
from hpc_train.config.schema import ElasticConfig, RunConfig
from hpc_train.elastic.priority import PriorityWatch
PriorityWatch(None, SimpleNamespace(elastic=ElasticConfig(), run=RunConfig()), "7")
sums = write_cifar(Path("."), {"train": 4})
CIFAR100Dataset(CIFAR100DataConfig(path="."), "train", 0, md5=sums).sample(0, 0)
from hpc_train.config.schema import ImagesDataConfig, ShardsDataConfig
from hpc_train.data.build import build_dataset
for data in (ImagesDataConfig(path="images", n_classes=2), ShardsDataConfig(path="shards", n_classes=2)):
    for split in ("train", "validation"):
        build_dataset(data, split, 0).sample(0, 0)
"""


def build_parts(folder: Path, env: dict[str, str]) -> None:
    """Builds a model with adapters, which needs no weights here, images, and the clients of MLflow and W&B.

    The files of the test are not the official ones, so their md5 is handed in. A run waits for W&B only for a limited
    time, which the import of wandb alone may take on a busy machine.
    """
    subprocess.run([sys.executable, "-c", BUILT], cwd=folder, env=env, check=True)


def interpolated() -> set[str]:
    """Keys that other keys take their value from: the model's sizes from the data, the directory from run.name."""
    groups = {"data": [load_source(kind).schema for kind in SOURCES], "run": [schema.RunConfig]}
    found = set()
    for path in (REPOSITORY / "conf").rglob("*.yaml"):
        for group, key in re.findall(r"\$\{(data|run)\.(\w+)\}", path.read_text()):
            found |= {f"{cls.__name__}.{key}" for cls in groups[group]}
    return found


def make_sbatch(folder: Path) -> str:
    """A PATH with an sbatch that has nothing against any job."""
    (folder / "bin").mkdir()
    sbatch = folder / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    return f"{sbatch.parent}:{os.environ['PATH']}"


def run_in_own_folder(folder: Path, env: dict[str, str], number: int) -> None:
    arguments = runs(folder)[number]
    own = folder / str(number)
    own.mkdir()
    record = Path(env["HPC_TRAIN_RECORD_KEYS"], str(number))
    record.mkdir()
    env = env | {"HPC_TRAIN_RECORD_KEYS": str(record)}
    done = hpc_train(*arguments, cwd=own, env=env)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"


CHECKS = ("hpc_train.layout.", "hpc_train.config.", "sitecustomize")  # they read a key to check or estimate
# Modules that hold or compare the value of a key, and use it only where the condition of the key holds.
WITHOUT_USE = {
    "CheckpointConfig.best_mode": {"checkpoint.run_store", "train.trainer", "launch.launcher"},  # beside keep_best
    "ClusterConfig.extra": {"elastic.attempts"},  # for a warning about several nodes
    "ClusterConfig.health_check_timeout_s": {"elastic.nodes"},  # beside health_check
    "ClusterConfig.interface": {"elastic.agent"},  # meeting_at returns at once on one node
    "ClusterConfig.mem": {"elastic.agent"},  # of steps that Slurm has killed
    "ClusterConfig.preflight": {"preflight.run"},
    "ClusterConfig.visible_gpus": {"elastic.agent_loop"},  # for each GPU
    "ElasticConfig.exclude_hours": {"elastic.agent_session"},  # one node is not excluded
    "ElasticConfig.join_timeout_s": {"elastic.agent_session"},  # one node waits for no other
    "ElasticConfig.min_nodes": {"elastic.rendezvous.coordinator"},
    "ElasticConfig.spares": {"elastic.rendezvous.coordinator"},  # 0 outside of Slurm
    "GPTConfig.global_every": {"models.gpt_sizes"},  # check_windows
    "GPTConfig.local_rope_theta": {"models.gpt_sizes", "models.gpt"},  # no layer asks for it
    "OptimConfig.base_batch": {
        "train.optimizers.learning_rate",
        "__main__",
    },  # the ratio, and the trial of an optimizer
    "PrecisionConfig.residual": {"parallel.precision.dtypes"},  # fp32 has no narrower format
    "PrecisionConfig.tf32": {"parallel.precision.dtypes"},  # for device.type == "cuda"
    # checked to be fp32
    "PrecisionConfig.weights": {"parallel.parallelize", "parallel.precision.dtypes", "planner.passes"},
    "RunConfig.max_gpu_hours": {"elastic.agent_session"},  # used up by GPUs
    "StrategyConfig.bucket_cap_mb": {"parallel.replicas"},  # of parameters that ZeRO does not shard
    "StrategyConfig.data_parallel": {"run.snapshot"},  # looks for the import path of a row
    "StrategyConfig.pp_split": {"parallel.pipeline.balance"},  # returns if there is one pipeline rank
    "StrategyConfig.schedule": {"run.snapshot"},  # looks for the import path of a row
    "TelemetryConfig.gpu_idle_minutes": {"elastic.agent_session"},  # for each GPU
}


def conditional(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields each key that has a condition: its dotted name, and its name in the record."""
    for each in fields(node):
        value, known, name = getattr(node, each.name), info(each), f"{path}.{each.name}".lstrip(".")
        if is_dataclass(value):
            yield from conditional(value, name)
        elif known is not None and known.reads:
            yield name, f"{type(node).__name__}.{each.name}"


def read_despite_condition(record: Path, run: RunDirectory, launched: bool) -> list[str]:
    """Returns the keys that a run on this machine has read and used, although its config does not meet a condition."""
    config = load(run)
    keys = dict(conditional(config))
    place = Place.MACHINE if launched else Place.FOREGROUND
    shape = JobShape(1, 1, 0, config.cluster.cpu_workers, place)
    layout = resolve_layout(config, 1, config.cluster.cpu_workers)
    unread = {keys[each.key] for each in without_effect(config, layout, shape, dict.fromkeys(keys, ""))}
    assert len(unread) > 40, "most conditions are about Slurm, GPUs, or a technique that a run does not use"
    read = {tuple(line.split()) for file in record.iterdir() for line in file.read_text().splitlines()}
    return [
        f"{key} is read in {module}"
        for key, module in sorted(read)
        if key in unread
        and not module.startswith(CHECKS)
        and module.removeprefix("hpc_train.") not in WITHOUT_USE.get(key, ())
    ]


@pytest.mark.long_form(120, every_share=True)
def test_every_key_is_read_where_the_schema_says_so_and_only_there(tmp_path: Path) -> None:
    record = tmp_path / "keys"
    record.mkdir()
    make_tokens(tmp_path)
    make_images(tmp_path)
    make_chats(tmp_path / "chats")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "vit"}')
    env = environment(HPC_TRAIN_RECORD_KEYS=str(record))
    env["PYTHONPATH"] = f"{RECORDING}:{env['PYTHONPATH']}"
    env["PATH"] = make_sbatch(tmp_path)
    with ThreadPoolExecutor(AT_ONCE) as pool:  # most of a run is imports, of which much is waiting
        list(pool.map(partial(run_in_own_folder, tmp_path, env), range(len(runs(tmp_path)))))
    build_parts(tmp_path, env)
    files = [file for file in record.rglob("*") if file.is_file()]
    read = {line.split()[0] for file in files for line in file.read_text().splitlines()}
    kinds = {
        key
        for key in every_key()
        if key.endswith(("DataConfig.kind", "GPTConfig.kind", "ViTConfig.kind", "HFModelConfig.kind"))
    }
    told_apart_by = kinds | {"CustomModelConfig.kind"}  # read where plain values become typed ones
    unread = every_key() - read - interpolated() - told_apart_by
    assert not unread, "\n".join(sorted(unread))
    found = {path.parent for path in tmp_path.glob("[0-9]*/outputs/**/run.json")}
    assert len(found) >= 7, found
    for path in found:
        number = path.relative_to(tmp_path).parts[0]
        launched = "-m" in runs(tmp_path)[int(number)]
        assert not read_despite_condition(record / number, RunDirectory(path), launched), runs(tmp_path)[int(number)]
