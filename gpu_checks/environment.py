"""Checks of the machine and of the processes that hpc_train starts on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu_checks.check import Probe
from gpu_checks.commands import ROOT, clean_environment, train
from gpu_checks.models import disturbed
from hpc_train.elastic.agent import ENTRY, STORE
from hpc_train.machine.gpus import visible_devices
from hpc_train.train.watch.peak_rates import peak_flops

PACKAGES = ("numpy", "hydra-core", "omegaconf", "submitit", "psutil", "xxhash", "torchao", "wandb", "triton")
COLLECTIONS = [1]  # in nine steps: after the first, and then after every 100th
QUERY = "name,uuid,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,ecc.mode.current"


def facts(probe: Probe) -> None:
    """What the machine is, and whether hpc_train counts the GPUs that CUDA sees."""
    for package in PACKAGES:
        probe.note(package, _version(package))
    probe.note("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    probe.equal("GPUs that hpc_train counts", len(visible_devices()), torch.cuda.device_count())
    if not probe.on_gpu:
        return
    name = torch.cuda.get_device_name(0)
    probe.note("NCCL", ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    probe.note("nvidia-smi", _smi("--query-gpu=" + QUERY))
    peak = peak_flops(name, "bf16")
    probe.expect(f"bf16 peak of {name}", peak, "a figure of its data sheet", peak is not None)
    _counts_like_cuda(probe)


def _counts_like_cuda(probe: Probe) -> None:
    """Compares the count of hpc_train with CUDA's under values of CUDA_VISIBLE_DEVICES, all at the same time."""
    uuid = _smi("--query-gpu=uuid").partition("\n")[0]
    values = ["", "0", uuid, uuid[:12], "NoDevFiles", "GPU-not-there", "0,0", "0,99", "-1"]
    code = "import torch; print(torch.cuda.device_count())"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=clean_environment() | {"CUDA_VISIBLE_DEVICES": value},
            stdout=subprocess.PIPE,
            text=True,
        )
        for value in values
    ]
    for value, process in zip(values, started, strict=True):
        counted = len(visible_devices(dict(os.environ) | {"CUDA_VISIBLE_DEVICES": value}))
        probe.equal(f"GPUs with CUDA_VISIBLE_DEVICES={value!r}", counted, int(process.communicate(timeout=60)[0]))


_PARENT = """
import json, os, sys, time
for name in ("wandb", "tensorboard", "pytest"):
    sys.modules[name] = None  # an import of it raises ImportError
import {modules}
import torch
begin = time.monotonic()
before = torch.cuda.is_initialized()
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        torch.zeros(8, device="{device}").sum().item()
        os.write(writer, b"ran")
    finally:
        os._exit(0)
os.close(writer)
child = os.read(reader, 100).decode()
os.waitpid(pid, 0)
print(json.dumps(dict(pid=os.getpid(), initialized=before or torch.cuda.is_initialized(), child=child)), flush=True)
sys.stdin.read()
"""


def warm_parent(probe: Probe) -> None:
    """What the parent of the workers imports does not start CUDA and needs no wandb, and its child can use the GPU."""
    modules = {entry.partition(":")[0] for entry in (ENTRY, STORE)} | {"hpc_train.parallel.pipeline.engine"}
    code = _PARENT.format(modules=", ".join(sorted(modules)), device=probe.device)
    command = [sys.executable, "-c", code]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    told = json.loads(parent.stdout.readline() or "{}")
    probe.equal("imports without wandb", bool(told), True)
    probe.equal("CUDA is started in the parent", told.get("initialized"), False)
    probe.equal("a computation in a child", told.get("child"), "ran")
    if probe.on_gpu:
        probe.equal("the parent has a context (nvidia-smi)", str(told.get("pid")) in _context_pids(), False)
    parent.communicate("")


def worker(probe: Probe) -> None:
    """What is set in a worker (device, allocator, TF32, files, garbage collection), and how long its start takes."""
    once, begin = probe.folder / "facts.json", time.time()
    run = train(probe, "run", *disturbed("tell", once, call=9), "precision=fp32")
    facts: dict[str, Any] = json.loads(once.read_text())
    probe.equal("device", facts["device"].partition(":")[0], probe.device)
    soft, hard = facts["descriptors"]
    probe.equal("descriptors that a worker may open", soft, hard)
    probe.note("sockets of a worker", facts["sockets"])
    probe.note("variables of a worker", " ".join(f"{n}={v}" for n, v in sorted(facts["environment"].items())))
    probe.equal("Python collects garbage by itself", facts["collector"], False)
    probe.equal("steps after which it is collected", facts["collections"], COLLECTIONS)
    probe.within("error of an fp32 product, which TF32 makes 1000 times larger", facts["error"], high=1e-5)
    probe.within("from the command to the first step", run.metrics()[0]["time"] - begin, high=60, unit="s")
    if probe.on_gpu:
        conf = facts["environment"].get("PYTORCH_CUDA_ALLOC_CONF", facts["environment"].get("PYTORCH_ALLOC_CONF", ""))
        probe.expect("allocator", conf or "default", "expandable_segments:True", "expandable_segments:True" in conf)
        grows = facts["expandable"]
        probe.expect("segments that can grow", f"{sum(grows)} of {len(grows)}", "all", bool(grows) and all(grows))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _smi(query: str) -> str:
    return smi(query, "--format=csv,noheader,nounits")


def smi(*arguments: str) -> str:
    """Returns what nvidia-smi prints, or why it prints nothing."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip()


def contexts() -> list[tuple[str, str]]:
    """Returns (UUID of the GPU, pid) of each process with a CUDA context, as nvidia-smi shows them."""
    lines = _smi("--query-compute-apps=gpu_uuid,pid").splitlines()
    return [(uuid.strip(), pid.strip()) for uuid, _, pid in (line.partition(",") for line in lines) if pid]


def _context_pids() -> set[str]:
    return {pid for _, pid in contexts()}
