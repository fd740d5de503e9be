"""Adapters train under every layout as a bare loop of peft does, and checkpoints and exports hold nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.checkpoint.export import export_hf
from hpc_train.checkpoint.listing import choose, verified_manifest
from hpc_train.checkpoint.reader import StoredTensors
from hpc_train.checkpoint.restoring import load_weights
from hpc_train.checkpoint.state import model_state
from hpc_train.config.schema import Config, HFModelConfig, LoraConfig
from hpc_train.models.build import build_model
from hpc_train.models.hf import lora
from hpc_train.models.hf.family import hf_name
from hpc_train.models.model import named_parameters
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.parallelise import materialise
from hpc_train.run.directory import RunDirectory
from hpc_train.train.optimizer import Optimizer
from tests.checkpoint.made import commit
from tests.layouts.cells import CLASSES, SEQUENCE, VOCABULARY, Cell
from tests.layouts.oracle import error, global_batch, local_batch, mesh_of, relative, whole
from tests.ranks import run_on_world

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS, LR, CLIP = 6, 1e-2, 0.5
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 2 * SEQUENCE}
VIT = {**SMALL, "image_size": 8, "patch_size": 4, "num_labels": CLASSES}
TASKS = {"llama": "causal_lm", "vit": "image_classification"}
CLASS_OF = {"causal_lm": "AutoModelForCausalLM", "image_classification": "AutoModelForImageClassification"}
LORA = LoraConfig(rank=3, alpha=6)
DP, ZERO1, ZERO2, ZERO3 = ({"dp": 4, "data_parallel": kind} for kind in ("ddp", "zero1", "zero2", "zero3"))
HSDP, ALLREDUCE = ZERO3 | {"shard": 2}, DP | {"data_parallel": "allreduce"}
