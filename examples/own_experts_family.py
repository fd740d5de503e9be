"""Describes the GPT with the experts of ``own_experts.py``. This file imports no torch, since login nodes load it.

Sizes and operations are those of the built-in GPT, since these experts have the same matrices.
"""

from __future__ import annotations

from dataclasses import replace

from hpc_train.models.families import GPT_FAMILY

FAMILY = replace(GPT_FAMILY, builder="examples.own_experts:build", tensor_parallel=None, hugging_face=None)
