"""Implements a decoder-only transformer like Llama (Touvron et al. 2023, arXiv:2307.09288).

It has RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU and no biases. Its parameters map
one to one to those of Hugging Face's Llama: ``layers.N.attention.wq`` is ``model.layers.N.self_attn.q_proj``, ``ffn.w1
w2 w3`` are ``mlp.gate_proj down_proj up_proj``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from hpc_train.config.schema import GPTConfig
from hpc_train.models import families
from hpc_train.models.model import FlopTerms, Model
from hpc_train.models.packed_attention import document_context
from hpc_train.models.transformer import (
    Attention,
    CrossEntropyHead,
    PreNormLayer,
    RMSNorm,
    RotaryCache,
    RotaryScaling,
    in_compute_dtype,
    rotary_tables,
)


class GPTStem(nn.Module):
    """Embeds token ids ``[micro, seq]`` as hidden states ``[micro, seq, dim]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, inputs: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        return self.dropout(in_compute_dtype(self.embedding(inputs)))  # ZeRO has rounded the table


class SwiGLU(nn.Module):
    """Computes ``w2(silu(w1 x) * w3 x)`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))


def gpt_layer(config: GPTConfig) -> PreNormLayer:
    attention = Attention(config.dim, config.n_heads, config.n_kv_heads, causal=True, bias=False)
    norm = partial(RMSNorm, config.dim, eps=config.norm_eps)
    return PreNormLayer(norm, attention, SwiGLU(config.dim, config.ffn_dim), config.dropout)


class GPTHead(CrossEntropyHead):
    """Computes the logits ``[micro, seq, vocab]`` of the next token from hidden states."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(hidden))


class GPT(Model):
    """Implements ``Model`` for the transformer that the module's docstring describes."""

    stem: GPTStem | None
    head: GPTHead | None
    family = "gpt"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        families.check_gpt(config, None)
        self.config = config
        self.stem = GPTStem(config)
        self.layers = nn.ModuleDict({str(index): gpt_layer(config) for index in range(config.n_layers)})
        self.head = GPTHead(config)
        if config.tied_embeddings:
            self.tied = {"head.output.weight": "stem.embedding.weight"}
            self.head.output.weight = self.stem.embedding.weight
        self._scaling = RotaryScaling(**config.rope_scaling) if config.rope_scaling else None
        self._rotary = RotaryCache(config.dim // config.n_heads, config.rope_theta, self._scaling)

    def prepare(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Adds the rotary tables and, for packed documents, their boundaries or the attention mask.

        ``context["positions"]`` ``[micro, seq]`` replaces positions counted from 0. ``context["document_ids"]``
        ``[micro, seq]`` limits attention to tokens of the same document.
        """
        if "positions" in context:
            head_dim = self.config.dim // self.config.n_heads
            cosine, sine = rotary_tables(context["positions"], head_dim, self.config.rope_theta, self._scaling)
        else:
            shards = 1 if self.stem is not None else self.sequence_shards
            cosine, sine = self._rotary.tables(hidden.shape[1] * shards, hidden.device)
        added = {"rotary_cosine": cosine, "rotary_sine": sine}
        if "document_ids" in context:
            added |= document_context(context)
        return {**context, **added}

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        return (*inputs.shape, self.config.dim)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Sets norms to 1 and draws all other parameters from N(0, 0.02).

        Projections into the residual stream are drawn from N(0, 0.02 / sqrt(2 layers)). Source: GPT-2 (Radford et al.
        2019, section 2.3).
        """
        with torch.no_grad():
            if "norm" in name:
                value.fill_(1.0)
                return
            into_residual = name.endswith(("attention.wo.weight", "ffn.w2.weight"))
            deviation = 0.02 / math.sqrt(2 * self.config.n_layers) if into_residual else 0.02
            value.normal_(0.0, deviation, generator=generator)

    def init_buffers(self, device: torch.device) -> None:
        """Does nothing: the rotary tables are computed when they are first needed."""

    def flops_per_sample(self, inputs: Tensor) -> float:
        """Returns ``families.gpt_flops_per_sample``."""
        return families.gpt_flops_per_sample(self.config, tuple(inputs.shape[1:]))

    def flop_terms(self, inputs: Tensor) -> FlopTerms:
        """Returns the terms; a tied table is already counted as the output projection."""
        config, length = self.config, inputs.shape[-1]
        table = 0.0 if config.tied_embeddings else 6.0 * length * config.vocab_size * config.dim
        return FlopTerms(12.0 * config.n_layers * config.dim * length**2, causal=True, embedding=table)

    def block_flops(self, inputs: Tensor) -> tuple[float, ...]:
        """Splits ``flops_per_sample``; the stem is a look-up and counts 0, the head counts the output projection."""
        config, length = self.config, inputs.shape[-1]
        head = 6.0 * length * (config.dim + config.vocab_size * config.dim)
        layer = (self.flops_per_sample(inputs) - head) / config.n_layers
        return (0.0, *[layer] * config.n_layers, head)


def tensor_parallel_plan(model: GPT) -> dict[str, ParallelStyle]:
    """Returns Megatron's plan with sequence parallelism: hidden states between the branches are sequence shards."""
    shard = Shard(1)
    plan: dict[str, ParallelStyle] = {}
    if model.stem is not None:
        plan["stem.embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=shard)
    for key in model.layers:
        plan |= {f"layers.{key}.{name}": style for name, style in _layer_plan(shard).items()}
    if model.head is not None:
        plan["head.norm"] = SequenceParallel()
        plan["head.output"] = ColwiseParallel(input_layouts=shard, output_layouts=Replicate())
    return plan


def _layer_plan(shard: Shard) -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(shard, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=shard),
        "ffn_norm": SequenceParallel(),
        "ffn": PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),)),
        "ffn.w1": ColwiseParallel(),
        "ffn.w2": RowwiseParallel(output_layouts=shard),
        "ffn.w3": ColwiseParallel(),
    }
