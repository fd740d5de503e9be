"""Versions, told without importing anything."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from hpc_train.cluster.fabric.facts import NodeFacts
from hpc_train.launch.doctor.finding import ERROR, OK, WARNING, Finding


def check_software(facts: NodeFacts) -> Iterator[Finding]:
    versions = dict(facts.versions)
    told = ", ".join(f"{name} {text}" for name, text in versions.items())
    yield Finding("versions", OK, f"python {platform.python_version()}, {told}")
    if "torch" not in versions:
        yield Finding("versions", ERROR, "torch is not installed for this interpreter", "pip install torch")
        return
    if facts.gpus and versions["torch"].endswith("+cpu"):
        mend = "torch for CUDA: https://pytorch.org/get-started"
        yield Finding("versions", ERROR, f"torch {versions['torch']} is built without CUDA, and there are GPUs", mend)
    elif facts.gpus and "nccl" not in versions:
        mend = "doctor --nccl VERSION judges for a version; torch.cuda.nccl.version() shows it"
        yield Finding("versions", WARNING, "NCCL comes with no wheel here: its version is not known", mend)
