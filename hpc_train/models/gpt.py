"""Implements a decoder-only transformer like Llama (Touvron et al. 2023, arXiv:2307.09288).

It has RMSNorm before each branch, rotary positions, grouped-query attention, SwiGLU and no biases. The options of its
config define the other families of ``hf_names``: Qwen2 (arXiv:2407.10671), Qwen3 (arXiv:2505.09388), Mistral
(arXiv:2310.06825) and Gemma 1 to 3 (arXiv:2403.08295, 2408.00118, 2503.19786), and with experts (``moe.py``) Mixtral
(arXiv:2401.04088) and Qwen3-MoE. Its parameters map one to one to the parameters of Hugging Face's models:
``layers.N.attention.wq`` is ``model.layers.N.self_attn.q_proj``, ``ffn.w1 w2 w3`` are ``mlp.gate_proj down_proj
up_proj``. Only the matrices of the experts, which are stacked here, are several tensors there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from hpc_train.models import gpt_sizes
from hpc_train.models.attention import LOCAL, Attention, RotaryCache, RotaryScaling
from hpc_train.models.linear_head import LinearHead, WordEmbedding
from hpc_train.models.model import FlopTerms, Model
from hpc_train.models.moe import MixtureOfExperts, MoELayer, OwnTokens, Router, routing_context
from hpc_train.models.packed_attention import Scores, document_context, local_context
from hpc_train.models.transformer import OffsetRMSNorm, PreNormLayer, RMSNorm, in_compute_dtype

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GPTStem(nn.Module):
    """Embeds token ids ``[micro, seq]`` as hidden states ``[micro, seq, dim]``.

    It is not compiled: apart from the look-up, it does little more than a cast. The compiler would add up the gradients
    of a word by atomic additions, whose order, and therefore rounding, differs from step to step.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embedding = WordEmbedding(config.vocab_size, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self._scale = math.sqrt(config.dim) if config.scaled_embeddings else None

    def forward(self, inputs: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        embedded = in_compute_dtype(self.embedding(inputs))  # ZeRO has rounded the table
        if self._scale is not None:  # Gemma rounds the factor to the dtype of the hidden states
            embedded = embedded * torch.tensor(self._scale, dtype=embedded.dtype, device="cpu").item()
        return self.dropout(embedded)


class GatedFeedForward(nn.Module):
    """Computes ``w2(f(w1 x) * w3 x)``: SwiGLU if ``f`` is ``silu``, GeGLU if GELU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int, activation: str = "silu") -> None:
        super().__init__()
        self._activation = ACTIVATIONS[activation]
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(self._activation(self.w1(hidden)) * self.w3(hidden))


def gpt_norm(config: GPTConfig, width: int) -> RMSNorm:
    if config.norm_offset:
        return OffsetRMSNorm(width, eps=config.norm_eps)
    return RMSNorm(width, eps=config.norm_eps)


def gpt_scores(config: GPTConfig, local: bool) -> Scores:
    """Returns how a layer with or without a sliding window computes its scores."""
    scale = None if config.query_scalar is None else config.query_scalar**-0.5
    return Scores(scale, config.sliding_window if local else None, config.attention_softcap)


def gpt_layer(config: GPTConfig, index: int) -> PreNormLayer:
    norm = partial(gpt_norm, config)
    attention = Attention(
        config.dim,
        config.n_heads,
        config.n_kv_heads,
        causal=True,
        bias=False,
        qkv_bias=config.qkv_bias,
        head_dim=config.head_dim,
        norm=norm if config.qk_norm else None,
        scores=gpt_scores(config, gpt_sizes.is_local(config, index)),
    )
    ffn: nn.Module
    if gpt_sizes.is_sparse(config, index):
        shared = None
        if config.moe.shared_experts:
            shared = GatedFeedForward(config.dim, gpt_sizes.shared_width(config), config.activation)
        ffn = MixtureOfExperts(config, ACTIVATIONS[config.activation], shared)
        return MoELayer(partial(norm, config.dim), attention, ffn, config.dropout, config.post_norms)
    ffn = GatedFeedForward(config.dim, config.ffn_dim, config.activation)
    return PreNormLayer(partial(norm, config.dim), attention, ffn, config.dropout, config.post_norms)


class GPTHead(LinearHead):
    """Computes the logits ``[micro, seq, vocab]`` of the next token from hidden states."""

    def __init__(self, config: GPTConfig) -> None:
        output = nn.Linear(config.dim, config.vocab_size, bias=False)
        super().__init__(gpt_norm(config, config.dim), output, config.logit_softcap)


class GPT(Model):
    """Implements ``Model`` for the transformer that the module's docstring describes."""

    stem: GPTStem | None
    head: GPTHead | None
    family = "gpt"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        gpt_sizes.check_gpt(config, None)
        self.config = config
        self.stem = GPTStem(config)
        self.layers = nn.ModuleDict({str(index): gpt_layer(config, index) for index in range(config.n_layers)})
        self.head = GPTHead(config)
        if config.tied_embeddings:
            self.tied = {"head.output.weight": "stem.embedding.weight"}
            self.head.output.weight = self.stem.embedding.weight
        scaling = RotaryScaling(**config.rope_scaling) if config.rope_scaling else None
        width = gpt_sizes.head_width(config)
        self._rotary = {"": RotaryCache(width, config.rope_theta, scaling)}
        if config.local_rope_theta is not None:
            self._rotary[LOCAL] = RotaryCache(width, config.local_rope_theta)

    def batch_context(self, targets: Tensor) -> Mapping[str, Tensor]:
        if self.config.moe.experts is None:
            return {}
        return routing_context(targets)

    def prepare(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Adds the rotary tables and, for packed documents and windows, their boundaries or the attention mask.

        ``context["positions"]`` ``[micro, seq]`` replaces positions counted from 0. ``context["document_ids"]``
        ``[micro, seq]`` limits attention to tokens of the same document.
        """
        local_length = hidden.shape[1] * (1 if self.stem is not None else self.sequence_shards)
        shares = self.token_shares
        length = local_length * shares.ranks
        added: dict[str, Tensor] = {}
        for name, rotary in self._rotary.items():
            if "positions" in context:
                tables = rotary.compute(shares.of_rank(context["positions"], 1))
            else:
                cosine, sine = rotary.tables(length, hidden.device)
                tables = shares.of_rank(cosine, 0), shares.of_rank(sine, 0)
            added |= {f"{name}rotary_cosine": tables[0], f"{name}rotary_sine": tables[1]}
        if shares.ring > 1:  # it limits attention by ``document_ids`` and the window, without masks of whole sequences
            return {**context, **added}
        if "document_ids" in context:
            added |= document_context(context)
        local = local_context({**context, **added}, (len(hidden), length), hidden.device, gpt_scores(self.config, True))
        return {**context, **added, **{LOCAL + name: value for name, value in local.items()}}

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        return (*inputs.shape, self.config.dim)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Sets norms to 1 (0 with ``norm_offset``) and biases to 0, and draws all other parameters from N(0, 0.02).

        Projections into the residual stream are drawn from N(0, 0.02 / sqrt(2 layers)). Source: GPT-2 (Radford et al.
        2019, section 2.3).
        """
        with torch.no_grad():
            if "norm" in name:
                value.fill_(1.0 - self.config.norm_offset)
                return
            if name.endswith(".bias"):
                value.zero_()
                return
            into_residual = name.endswith(("attention.wo.weight", "w2.weight", "experts.w2"))
            deviation = 0.02 / math.sqrt(2 * self.config.n_layers) if into_residual else 0.02
            value.normal_(0.0, deviation, generator=generator)

    def init_buffers(self, device: torch.device) -> None:
        """Sets the buffers of the routers to 0. The rotary tables are computed when they are first needed."""
        for module in self.modules():
            if isinstance(module, Router):
                for buffer in module.buffers():
                    buffer.zero_()

    def flops_per_sample(self, inputs: Tensor) -> float:
        return gpt_sizes.gpt_flops_per_sample(self.config, tuple(inputs.shape[1:]))

    def flop_terms(self, inputs: Tensor) -> FlopTerms:
        """Returns the terms; a tied table is already counted as the output projection."""
        config = self.config
        length = inputs.shape[-1]
        table = 0.0 if config.tied_embeddings else 6.0 * length * config.vocab_size * config.dim
        return FlopTerms(gpt_sizes.gpt_masked_flops(config, length), embedding=table)

    def block_flops(self, inputs: Tensor) -> tuple[float, ...]:
        """Splits ``flops_per_sample``; the stem is a look-up and counts 0, the head counts the output projection."""
        config = self.config
        length = inputs.shape[-1]
        head = 6.0 * length * (config.dim + config.vocab_size * config.dim)
        return (0.0, *gpt_sizes.gpt_layer_flops(config, length), head)


def tensor_parallel_plan(model: GPT) -> dict[str, ParallelStyle]:
    """Returns Megatron's plan with sequence parallelism: hidden states between the branches are sequence shards."""
    shard = Shard(1)
    plan: dict[str, ParallelStyle] = {}
    if model.stem is not None:
        plan["stem.embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=shard)
    for key in model.layers:
        of_layer = _layer_plan(model.config, int(key), shard)
        plan |= {f"layers.{key}.{name}": style for name, style in of_layer.items()}
    if model.head is not None:
        plan["head.norm"] = SequenceParallel()
        plan["head.output"] = ColwiseParallel(input_layouts=shard, output_layouts=Replicate())
    return plan


def _layer_plan(config: GPTConfig, index: int, shard: Shard) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(shard, None), desired_input_layouts=(Replicate(), None)),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=shard),
        "ffn_norm": SequenceParallel(),
    }
    ffn = "ffn"
    if gpt_sizes.is_sparse(config, index):  # each rank routes its shard of the sequence
        plan |= {"ffn_norm": SequenceParallel(use_local_output=True), "ffn.router": OwnTokens()}
        plan["ffn.experts"] = OwnTokens()
        ffn = "ffn.shared"
    if ffn == "ffn" or config.moe.shared_experts:
        plan |= {
            ffn: PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),)),
            f"{ffn}.w1": ColwiseParallel(),
            f"{ffn}.w2": RowwiseParallel(output_layouts=shard),
            f"{ffn}.w3": ColwiseParallel(),
        }
    if config.post_norms:
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("attention_post_norm", "ffn_post_norm")}
    if config.qk_norm:  # the heads of this rank are a shard of dim 2, so gradients of the weight are summed over ranks
        names = ("attention.q_norm", "attention.k_norm")
        plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in names}
    return plan
