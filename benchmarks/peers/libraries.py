"""Imports the libraries of all contenders, in the process from which the ranks of all cases are forked."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed.fsdp
import torch.distributed.pipelining  # noqa: F401

from benchmarks.peers.case import NotThereError
from benchmarks.peers.contenders import installed
from benchmarks.peers.titan import take_the_cpu

PEER_MODULES = ("lightning.fabric", "accelerate", "transformers.trainer", "transformers.models.llama.modeling_llama")
TITAN_MODULES = ("torchtitan.trainer", "torchtitan.models.llama3")  # after its device was replaced

for module in PEER_MODULES:
    with suppress(NotThereError):
        installed(module)
with suppress(NotThereError):
    take_the_cpu()
    for module in TITAN_MODULES:
        installed(module)
