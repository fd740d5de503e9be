"""No dead options: every key of the schema is read by the code of some run, in some process of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hpc_train.config import schema
from hpc_train.config.extensions import SOURCES, load_source
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
         "precision=fp16", "optim.lr_scaling=linear", "optim.schedule=wsd",
         "run.name=base"],
        ["+strategy=dp", *vit, *pictures, *two, "optim=sgd", "train.reproducible=any_world_size"],
        ["+strategy=single", *vit, "data=images", f"data.path={folder}/images", "data.n_classes=2",
         "data.image_size=32", "optim._target_=torch.optim.RMSprop"],
        ["+strategy=single", *vit, "data=shards", f"data.path={folder}/shards", "data.n_classes=2",
         "data.image_size=32"],
        ["+strategy=dp", *custom, *pictures, *two, "+model.args.n_classes=10", "strategy.compression=topk",
         "-m"],
        ["+strategy=dp", "model=hf", f"model.name_or_path={folder}/hf", "model.task=image_classification", *pictures,
         "train.steps=2", "batch.global_size=8", "model.pretrained=false", "launch.dry_run=true"],
        ["+strategy=single", *gpt, "data=tokens", f"data.path={folder}/tokens", "data.vocab_size=300",
         "data.sequence_length=16", "train.steps=null", "train.epochs=0.2", "data.packing=true",
         *(f"+eval_sets.chats.{key}" for key in sft)],
        ["+strategy=single", *gpt, "data=mixture", "+data@data.sources.one=custom", "model.vocab_size=16",
         "data.sources.one._target_=tests.doors.custom_data.Counting", "data.collate=tests.doors.custom_data.stacked"],
        ["+strategy=single", *gpt, "data=stream", "data._target_=tests.doors.custom_data.Counted", "data.shards=2",
         "model.vocab_size=16"],
        ["script", "+strategy=dp", *TINY],
        ["+strategy=dp", *TINY, "cluster=slurm", "cluster.gpus_per_node=2", "-m", "launch.dry_run=true",
         "cluster.container.image=docker://site/image"],
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
from hpc_train.config.schema import MlflowConfig
from hpc_train.telemetry.sinks.identity import Identity
from hpc_train.telemetry.sinks.mlflow import Mlflow
Mlflow(MlflowConfig(uri="http://localhost:5000"), Identity("run", "run", None, Path("."), {}))
sums = write_cifar(Path("."), {"train": 4})
CIFAR100Dataset(CIFAR100DataConfig(path="."), "train", 0, md5=sums).sample(0, 0)
"""


def build_parts(folder: Path, env: dict[str, str]) -> None:
    """Builds a model with adapters, which needs no weights here, CIFAR-100, and the client of an MLflow server.

    The files of the test are not the official ones, so their md5 is handed in.
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
    env = env | {"HPC_TRAIN_RECORD_KEYS": env["HPC_TRAIN_RECORD_KEYS"] + f"/{number}"}
    Path(env["HPC_TRAIN_RECORD_KEYS"]).mkdir()
    done = hpc_train(*arguments, cwd=own, env=env)
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"


def test_every_key_is_read(tmp_path: Path) -> None:
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
    read = {line.split()[0] for file in record.rglob("*") if file.is_file() for line in file.read_text().splitlines()}
    import shutil

    shutil.copytree(record, "/work/wt/unread.tmp/rec")
    kinds = {
        key
        for key in every_key()
        if key.endswith(("DataConfig.kind", "GPTConfig.kind", "ViTConfig.kind", "HFModelConfig.kind"))
    }
    told_apart_by = kinds | {"CustomModelConfig.kind"}  # read where plain values become typed ones
    unread = every_key() - read - interpolated() - told_apart_by
    assert not unread, "\n".join(sorted(unread))
