"""Records what a release leaves on disk: a run directory with a checkpoint, and a site file that its commands accept.

``python -m tests.releases.record`` (root) trains a run with the present code, and writes
``tests/releases/VERSION.tar.gz``, which ``test_releases.py`` opens from then on. ``--source DIR`` records the code in
another checkout, such as ``git worktree add DIR TAG``. The run is trained on a machine whose name is ``node1``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = "/tmp/hpc_train-release"  # of the run, and part of its frozen config
OVERRIDES = [
    *("cluster=local", "cluster.cpu_workers=1", "run.snapshot=false", "telemetry.wandb.mode=disabled"),
    *("model.n_layers=1", "model.dim=8", "model.ffn_dim=16", "model.n_heads=2", "model.n_kv_heads=1"),
    *("data=synthetic", "data.samples=64", "data.vocab_size=16", "data.sequence_length=8"),
    *("data.validation_samples=4", "batch.global_size=4", "optim.warmup_steps=0", "train.steps=4"),
    *("train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=1", "telemetry.log_every=1"),
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
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "HOME": ROOT, "CUDA_VISIBLE_DEVICES": ""}
    environment["HPC_TRAIN_ROOT"] = f"{ROOT}/runs"
    with tempfile.TemporaryDirectory() as empty:
        python = [sys.executable, "-m", "hpc_train"]
        shown = subprocess.run([*python, "--version"], cwd=empty, env=environment, capture_output=True, check=True)
        version = shown.stdout.decode().split()[1]
        script = 'hostname node1 && exec "$@"'
        train = ["unshare", "--uts", "sh", "-c", script, "sh", *python, *OVERRIDES, "run.name=run"]
        subprocess.run(train, cwd=empty, env=environment, check=True)
    site = Path(ROOT, "site", "cluster", "here.yaml")
    site.parent.mkdir(parents=True)
    site.write_text(SITE + RENAMED_IN_SITE.get(version, ""))
    archive = HERE / f"{version}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=9) as file:
        file.add(f"{ROOT}/runs/run", "run")
        file.add(f"{ROOT}/site", "site")
    return archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, default=HERE.parents[1], help="the checkout whose code trains the run")
    Path(ROOT).mkdir()  # not that of another call
    print(record(parser.parse_args().source.resolve()))
