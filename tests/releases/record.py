"""Records what a release leaves on disk: a run directory with a checkpoint, and a site file that its commands accept.

``python -m tests.releases.record`` (root) trains a run with the present code, and writes
``tests/releases/VERSION.tar.gz``, which ``test_releases.py`` opens from then on. ``--source DIR`` records the code in
another checkout, such as ``git worktree add DIR TAG``. The run is trained on a machine whose name is ``node1``.

``--interrupted`` writes ``interrupted-VERSION.tgz`` instead: for each of ``STRATEGIES`` a run on two ranks, killed
after its first checkpoint, and ``losses.json``, the losses and gradient norms of runs that were not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = "/tmp/hpc_train-release"  # of the run, and part of its frozen config
OVERRIDES = [
    *("cluster=local", "cluster.cpu_workers=1", "run.snapshot=false", "telemetry.wandb.mode=disabled"),
    *("model.n_layers=1", "model.dim=8", "model.ffn_dim=16", "model.n_heads=2", "model.n_kv_heads=1"),
    *("data=synthetic", "data.samples=64", "data.vocab_size=16", "data.sequence_length=8"),
    *("data.validation_samples=4", "batch.global_size=4", "optim.warmup_steps=0", "train.steps=4"),
    *("train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1", "telemetry.log_every=1"),
]
STRATEGIES = ("dp", "zero3")
INTERRUPTED = [
    *(override for override in OVERRIDES if not override.startswith(("train.steps", "checkpoint.every"))),
    *("cluster.cpu_workers=2", "train.threads=1", "train.steps=60", "checkpoint.every=20"),
]
SITE = """\
defaults:
  - slurm
  - _self_

partition: gpu
account: project_123
gpus_per_node: 4
cpus_per_gpu: 8
time: "24:00:00"
machine: h100
price:
  per_gpu_hour: 1.9
  currency: EUR
setup:
  - module load cuda
"""
# keys of a site file by version, which later versions have renamed
RENAMED_IN_SITE = {"0.1.0": "mail_type: END\nmail_user: someone@example.org\nnice: 10\nlicenses: lustre\n"}


def record(source: Path) -> Path:
    """Trains a run with the code in ``source``; returns the archive."""
    version = version_of(source)
    trained(source, [*OVERRIDES, "run.name=run"]).wait()
    site = Path(ROOT, "site", "cluster", "here.yaml")
    site.parent.mkdir(parents=True)
    site.write_text(SITE + RENAMED_IN_SITE.get(version, ""))
    archive = HERE / f"{version}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=9) as file:
        file.add(f"{ROOT}/runs/run", "run")
        file.add(f"{ROOT}/site", "site")
    return archive


def record_interrupted(source: Path) -> Path:
    """Trains two runs of each strategy with the code in ``source``, of which one is killed; returns the archive."""
    losses = {}
    for strategy in STRATEGIES:
        trained(source, [*INTERRUPTED, f"+strategy={strategy}", f"run.name={strategy}-whole"]).wait()
        losses[strategy] = losses_of(Path(ROOT, "runs", f"{strategy}-whole"))
        killed = trained(source, [*INTERRUPTED, f"+strategy={strategy}", f"run.name={strategy}"])
        while not [*Path(ROOT, "runs", strategy).glob("checkpoints/step-*/manifest.json")]:
            time.sleep(0.002)
        for process in (*psutil.Process(killed.pid).children(recursive=True), killed):
            process.send_signal(signal.SIGKILL)
        killed.wait()
    Path(ROOT, "losses.json").write_text(json.dumps(losses))
    archive = HERE / f"interrupted-{version_of(source)}.tgz"
    with tarfile.open(archive, "w:gz", compresslevel=9) as file:
        for strategy in STRATEGIES:
            file.add(f"{ROOT}/runs/{strategy}", strategy)
        file.add(f"{ROOT}/losses.json", "losses.json")
    return archive


def losses_of(run: Path) -> dict[str, list[float]]:
    """Returns the loss and the gradient norm of each step; of a step that was repeated the last ones."""
    lines = [json.loads(line) for file in sorted((run / "metrics").iterdir()) for line in file.read_text().splitlines()]
    return {str(line["step"]): [line["loss"], line["grad_norm"]] for line in lines}


def version_of(source: Path) -> str:
    command = [sys.executable, "-m", "hpc_train", "--version"]
    shown = subprocess.run(command, env=environment_of(source), cwd=ROOT, capture_output=True, check=True)
    return shown.stdout.decode().split()[1]


def trained(source: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    """Starts a training in an empty folder."""
    command = ["unshare", "--uts", "sh", "-c", 'hostname node1 && exec "$@"', "sh"]
    command += [sys.executable, "-m", "hpc_train", *overrides]
    return subprocess.Popen(command, cwd=tempfile.mkdtemp(dir=ROOT), env=environment_of(source))


def environment_of(source: Path) -> dict[str, str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "HOME": ROOT, "CUDA_VISIBLE_DEVICES": ""}
    return environment | {"HPC_TRAIN_ROOT": f"{ROOT}/runs"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=HERE.parents[1], help="the checkout whose code trains the run")
    parser.add_argument("--interrupted", action="store_true", help="record runs that were killed")
    options = parser.parse_args()
    Path(ROOT).mkdir()  # not that of another call
    print((record_interrupted if options.interrupted else record)(options.source.resolve()))
