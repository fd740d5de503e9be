"""What a loop loads after kills in its saves, and from damaged files: ``hpc_train.checkpoint`` and plain DCP.

``python -m benchmarks.killed_saves 50`` trains a small FSDP2 model on two CPU ranks, kills one or both of them at a
random moment of a save, starts them again and compares what they load with what was saved, 50 times for each way to
save. Then it truncates, changes and removes each file of the newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpc_train.checkpoint import load, save
from tests.ranks import CONTEXT

WAYS = ("hpc_train", "dcp, a directory per step", "dcp, one directory")
RANKS = 2
SAVES = 3
LONGEST_S = 0.15  # from the begin of a save to the kill


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    batch = torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(batch.chunk(RANKS)[dist.get_rank()]).square().mean().backward()
    optimizer.step()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Returns a hash of all weights and moments. Collective."""
    value = xxhash.xxh3_128()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {})
        for tensor in (parameter, *(state[key] for key in sorted(state))):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            value.update(full.detach().contiguous().numpy().tobytes())
    return value.hexdigest()


def save_by(way: str, folder: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if way == "hpc_train":
        save(folder, step, model=model, optimizer=optimizer)
        return
    weights, moments = get_state_dict(model, optimizer)
    name = "newest" if way == "dcp, one directory" else f"step-{step:08d}"
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=f"{folder}/{name}")


def load_by(way: str, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, str]:
    """Returns the step that was loaded, 0 without any, and the exceptions on the way to it."""
    if way == "hpc_train":
        return load(folder, model=model, optimizer=optimizer) or 0, ""
    problems = []
    for path in sorted(Path(folder).glob("*"), reverse=True):
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
        try:
            dcp.load(state, checkpoint_id=path)
        except (Exception, CheckpointException) as error:  # the latter is not an Exception
            problems.append(type(error).__name__)
            continue
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["step"]), " ".join(problems)
    return 0, " ".join(problems)


def rank_main(rank: int, number: int | None, saves: int, way: str, folder: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    choose = random.Random(number)
    victims: tuple[int, ...] = ()
    if number is not None:
        victims = (0, 1) if number % 3 == 0 else (number % RANKS,)
    fatal = choose.randint(1, SAVES)
    delay = choose.uniform(0, LONGEST_S)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=RANKS)
        model, optimizer = build()
        first, problems = load_by(way, f"{folder}/checkpoints", model, optimizer)
        sender.send(("loaded", first, digest(model, optimizer), problems))
        for step in range(first + 1, first + saves + 1):
            train_step(model, optimizer, step)
            sender.send(("saves", step, digest(model, optimizer)))
            dist.barrier()
            if step == first + fatal and rank in victims:
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            save_by(way, f"{folder}/checkpoints", step, model, optimizer)
            sender.send(("saved", step))
    except BaseException as error:
        sender.send(("failed", f"{type(error).__name__}: {error}"))
    os._exit(0)


def run_ranks(number: int | None, saves: int, way: str, folder: Path) -> list[tuple[Any, ...]]:
    """Returns the messages of both ranks, those of rank 0 first; ``number`` chooses a kill, and None does not kill."""
    (folder / "join").unlink(missing_ok=True)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        CONTEXT.Process(target=rank_main, args=(rank, number, saves, way, str(folder), pipes[rank][1]))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    messages: list[tuple[Any, ...]] = []
    for receiver, sender in pipes:
        sender.close()
        with suppress(EOFError):
            while receiver.poll(60):
                messages.append(receiver.recv())
    for process in processes:
        process.kill()
        process.join()
    return messages


class History:
    """Counts what was loaded, by comparing it with what was saved."""

    def __init__(self) -> None:
        self.digests: dict[int, set[str]] = {}
        self.committed = 0
        self.counts: Counter[str] = Counter()

    def add(self, messages: list[tuple[Any, ...]]) -> None:
        loads = [message for message in messages if message[0] == "loaded"]
        if len(loads) < RANKS:
            self.counts["nothing loads"] += 1
        else:
            _, step, value, problems = loads[0]
            if step and value not in self.digests[step]:
                self.counts["wrong values"] += 1
            elif step < self.committed:
                self.counts["an older step"] += 1
            else:
                self.counts["right"] += 1
            if problems:
                self.counts["exceptions before that"] += 1
        for message in messages:
            if message[0] == "saves":
                self.digests.setdefault(message[1], set()).add(message[2])
        self.committed = max([self.committed, *(message[1] for message in messages if message[0] == "saved")])


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {"truncated": truncate, "a bit changed": change, "removed": Path.unlink}


def main(kills: int) -> None:
    for way in WAYS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            history = History()
            for number in range(kills):
                history.add(run_ranks(number, SAVES, way, folder))
            print(f"{way}: {dict(history.counts)}", flush=True)
            history.counts.clear()
            history.committed = 0
            shutil.rmtree(folder / "checkpoints")
            history.add(run_ranks(None, SAVES, way, folder))
            history.committed = SAVES - 1  # the step before is right
            intact = folder / "intact"
            shutil.copytree(folder / "checkpoints", intact)
            newest = max(path for path in intact.iterdir() if not path.name.startswith("."))
            for kind, damage in DAMAGES.items():
                history.counts.clear()
                for file in newest.iterdir():
                    shutil.rmtree(folder / "checkpoints")
                    shutil.copytree(intact, folder / "checkpoints")
                    damage(folder / "checkpoints" / newest.name / file.name)
                    history.add(run_ranks(None, 0, way, folder))
                print(f"{way}, {kind}: {dict(history.counts)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
