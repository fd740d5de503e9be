"""Builds a transformers model on ``meta``: a decoder in three parts, or any other model as a module with blocks.

A causal language model gets the three parts of a ``Model``, so that it can be cut into stages.

The decoders in the table ``hf_config.DECODERS`` have the same structure: a table of embeddings, rotary positions,
layers, a norm and an output projection. The parts in this module call the parts of transformers with the same arguments
as the model in transformers.

transformers expresses packed documents and sliding windows as a mask of ``seq x seq`` elements, which flash attention
does not accept, and waits for the device to find out whether documents are packed. Here, the layers pass the boundaries
of documents to a function that is registered in transformers as an attention implementation. It calls the kernels of
``packed_attention``; without boundaries, it calls ``sdpa`` of transformers. Models with another implementation keep it:
Gemma 2 has a soft cap, for which transformers uses plain operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.hf_config import DECODERS, check_loss
from hpc_train.config.schema import HFModelConfig
from hpc_train.data.dataset import Batch, Ragged
from hpc_train.data.device_copy import DOCUMENT_ENDS
from hpc_train.errors import UserError
from hpc_train.models import packed_attention as packed
from hpc_train.models.hf import sizes
from hpc_train.models.hf.family import hf_name
from hpc_train.models.hf.lora import AdapterValues, adapt
from hpc_train.models.hf.loss import ConfiguredLoss
from hpc_train.models.hf.pretrained import FirstValues, WeightFiles, skeleton, weights_folder
from hpc_train.models.linear_head import LinearHead
from hpc_train.models.model import FlopTerms, Model
from hpc_train.models.packed_attention import Scores
from hpc_train.models.wrapped import WrappedModel

_FULL = "full_attention"  # the kind of layers without a sliding window
_SHARED = "hf_shared"  # the key in the context of layers for values that transformers computes once for all layers


class _Stem(nn.Module):
    """Embeds token ids ``[micro, seq]`` as hidden states ``[micro, seq, width]``."""

    def __init__(self, embed_tokens: nn.Module) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens

    def forward(self, inputs: Tensor, context: Mapping[str, Any]) -> Tensor:
        return self.embed_tokens(inputs)


class _Layer(nn.Module):
    """Calls a layer of transformers with the limits of its kind: ``full_attention`` or ``sliding_attention``."""

    def __init__(self, block: nn.Module, attention: str) -> None:
        super().__init__()
        self.block = block
        self.attention = attention

    def forward(self, hidden: Tensor, context: Mapping[str, Any]) -> Tensor:
        shared = context[_SHARED]
        outputs: Tensor = self.block(
            hidden,
            **shared[self.attention],
            position_ids=shared["position_ids"],
            position_embeddings=shared["position_embeddings"],
        )
        return outputs


class HFDecoder(Model):
    """Implements ``Model`` for a decoder of transformers. It uses the parts of ``module``, a causal language model on
    ``meta``, without a copy. The parameters get the initial ``values``."""

    stem: _Stem | None
    head: LinearHead | None

    def __init__(self, module: Any, values: FirstValues, config: HFModelConfig) -> None:
        super().__init__()
        check_loss(module.config.to_dict(), "causal_lm")
        self.config = config
        self._hf = module.config
        self._values = values
        self.saves_frozen = config.lora.rank is None
        body = module.model
        self.stem = _Stem(body.embed_tokens)
        kinds = _attention_kinds(module.config)
        self.layers = nn.ModuleDict({str(n): _Layer(block, kinds[n]) for n, block in enumerate(body.layers)})
        softcap = getattr(module.config, "final_logit_softcapping", None)  # of Gemma 2
        self.head = LinearHead(body.norm, module.lm_head, softcap, name="lm_head")
        self.rotary = body.rotary_emb  # every stage needs it
        if values.tied:
            self.tied = {"head.lm_head.weight": "stem.embed_tokens.weight"}
        self._kinds = tuple(sorted(set(kinds)))
        self._takes_boundaries = use_kernels(module)

    def prepare(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Adds positions, rotary tables, and the limits of attention for each kind of layers.

        ``context["attention_mask"]`` ``[micro, seq]`` is 0 for padding. ``context["positions"]`` ``[micro, seq]``
        replaces positions counted from 0. A new document begins where positions begin again; attention is limited to
        the document.
        """
        if "document_ids" in context and "positions" not in context:
            raise UserError(
                "the data has document_ids but no positions, from which transformers derives the documents",
                where="data",
                fix="add positions that begin at 0 in each document to the context of a sample",
            )
        given = context.get("positions", context.get("position_ids"))
        length = hidden.shape[1]
        dtype = self.hidden_dtype or next(p.dtype for p in self.parameters())
        if given is None:
            positions = torch.arange(length, device=hidden.device).unsqueeze(0)
        else:
            positions = given
        example = torch.empty((len(hidden), length, 1), dtype=dtype, device=hidden.device)
        shared: dict[str, Any] = {kind: self._limits(kind, example, context, given) for kind in self._kinds}
        shared["position_ids"] = positions
        shared["position_embeddings"] = self.rotary(example, positions)
        return {name: value for name, value in context.items() if name != DOCUMENT_ENDS} | {_SHARED: shared}

    def _limits(
        self, kind: str, example: Tensor, context: Mapping[str, Tensor], positions: Tensor | None
    ) -> dict[str, Any]:
        """Returns the arguments of layers of ``kind`` that define the tokens to which a token attends."""
        if self._takes_boundaries:
            inputs = (len(example), example.shape[1])
            limits = document_limits(context, inputs, example.device, self._window(kind))
            if limits is not None:
                return {"attention_mask": None} | limits
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        create = create_causal_mask if kind == _FULL else create_sliding_window_causal_mask
        return {
            "attention_mask": create(
                config=self._hf,
                inputs_embeds=example,
                attention_mask=context.get("attention_mask"),
                past_key_values=None,
                position_ids=positions,
            )
        }

    def _window(self, kind: str) -> int | None:
        if kind == _FULL:
            return None
        return int(self._hf.sliding_window)

    def attention_backends(self, batch: Batch, dtype: torch.dtype, device: torch.device) -> dict[int | None, str]:
        """Describes attention limited by documents or windows; see ``Model.attention_backends``."""
        if not self.layers:
            return {}
        head_dim = getattr(self._hf, "head_dim", None) or self._hf.hidden_size // self._hf.num_attention_heads
        describe = partial(document_backend, self._hf, batch, dtype, device, head_dim)
        windows = (self._window(kind) for kind in self._kinds)
        return {window: text for window in windows if (text := describe(window))}

    def hidden_shape(self, inputs: Tensor) -> tuple[int, ...]:
        return (*inputs.shape, int(self._hf.hidden_size))

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        self._values.fill(hf_name(name), value, generator)

    def starts_on_host(self, name: str) -> bool:
        return True

    def stored_box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        return self._values.read(hf_name(name), begin, size)

    def init_buffers(self, device: torch.device) -> None:
        self._values.fill_buffers(self.rotary, "model.rotary_emb", device)
        if self.stem is not None:
            self._values.fill_buffers(self.stem.embed_tokens, "model.embed_tokens", device)
        for key, layer in self.layers.items():
            self._values.fill_buffers(layer.block, f"model.layers.{key}", device)  # type: ignore[arg-type]

    def flops_per_sample(self, inputs: Tensor) -> float:
        return sizes.flops_per_sample(self.config, tuple(inputs.shape[1:])) or 0.0

    def flop_terms(self, inputs: Tensor) -> FlopTerms | None:
        decoder_sizes = sizes.sizes(self.config)
        length = inputs.shape[-1]
        if decoder_sizes is None:
            return None
        table = 0.0 if self.tied else 6.0 * length * decoder_sizes.stem
        return FlopTerms(6.0 * decoder_sizes.layers * decoder_sizes.query * length**2, embedding=table)

    def block_flops(self, inputs: Tensor) -> tuple[float, ...] | None:
        return sizes.block_flops(self.config, tuple(inputs.shape[1:]))

    def forward_flops(self, inputs: Tensor) -> tuple[float, ...] | None:
        return sizes.forward_flops(self.config, tuple(inputs.shape[1:]))


def _attention_kinds(config: Any) -> list[str]:
    """Returns the kind of attention of each layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    window = config.model_type == "mistral" and config.sliding_window is not None
    return ["sliding_attention" if window else _FULL] * config.num_hidden_layers


_NAME = "hpc_train"  # the name of the implementation in transformers
_GIVEN = frozenset(
    ("attention_mask", "positions", "position_ids", "document_ids")
)  # keys of a batch that limit attention
_IDS = "document_ids"  # an argument that layers pass on to attention, like packed_attention.BOUNDARIES


def use_kernels(module: Any) -> bool:
    """Replaces ``sdpa`` in a model of transformers; returns whether it did.

    No kernel has dropout of attention weights.
    """
    config = module.config
    if config._attn_implementation != "sdpa" or getattr(config, "attention_dropout", 0.0):
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    module.set_attn_implementation(_NAME)
    return True


def document_limits(
    context: Mapping[str, Tensor], inputs: tuple[int, int], device: torch.device, window: int | None
) -> dict[str, Any] | None:
    """Returns the arguments of layers whose attention takes boundaries; None if it needs a mask or no limit.

    ``inputs`` holds the number of sequences of the batch, and the number of tokens of each. A token attends to
    ``window`` tokens, itself included; None means all.
    """
    if "attention_mask" in context or not packed.has_kernels(device):
        return None
    if DOCUMENT_ENDS in context:
        return packed.document_context(context) | {_IDS: context["document_ids"]}
    if _GIVEN & context.keys():
        return None  # positions may begin again
    return packed.local_context(context, inputs, device, Scores(window=window)) or None


def document_backend(
    config: Any, batch: Batch, dtype: torch.dtype, device: torch.device, head_dim: int, window: int | None
) -> str | None:
    """Describes the implementation of limited attention in layers with ``window``; None if the attention is not
    limited. ``use_kernels`` must have been called for the model with ``config``."""
    context = batch.context
    length = batch.inputs.shape[1]
    scores = Scores(window=window)
    if not packed.is_narrow(scores, length):
        scores = Scores()
    given = _GIVEN & context.keys()
    if not given and scores.window is None:
        return None
    if config._attn_implementation != _NAME:
        missing = f"transformers computes the attention of this model by {config._attn_implementation}"
    elif "attention_mask" in given:
        missing = "the data has an attention_mask"
    elif given and "document_ids" not in given:
        missing = "the data has positions but no document_ids"
    else:
        missing = packed.without_kernel(context, device, dtype, head_dim, scores)
    if missing:
        return f"a mask of {length} x {length} elements, because {missing}"
    return packed.description(packed.kernel_for(device, dtype, head_dim), scores)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implements attention as transformers calls it.

    Args:
        query: ``[micro, heads, seq, head_dim]``.
        key, value: ``[micro, kv_heads, seq, head_dim]``.
        attention_mask: None with boundaries.
        options: may hold ``packed_attention.BOUNDARIES``, and ``_IDS`` if documents are packed.

    Returns:
        ``[micro, seq, heads, head_dim]``, and None in place of the weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    boundaries = options.pop(packed.BOUNDARIES, None)
    ids = options.pop(_IDS, None)
    if boundaries is not None:
        length = query.shape[2]
        # under autocast, norms and rotations may return fp32; autocast casts the arguments of sdpa, but not of kernels
        query, key = query.to(value.dtype), key.to(value.dtype)
        scores = Scores(scaling, sliding_window if packed.is_narrow(Scores(window=sliding_window), length) else None)
        kernel = packed.kernel_of_scores(query.device, query.dtype, query.shape[3], scores)
        if kernel != packed.MASK:
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
            return packed.attend_inside_documents(kernel, query, key, value, boundaries, scores), None
        attention_mask = packed.attention_mask(ids, length, scores.window, query.device)
    plain: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **options
    )
    return plain


def build(config: HFModelConfig) -> HFDecoder | HFWhole:
    """Builds the model of ``config``. It must be called on the ``meta`` device; the parameters get values when the
    model is sharded. Raises UserError if the config or the weights cannot be read, or transformers has no such
    model."""
    module = skeleton(config)
    module.tie_weights()
    files = WeightFiles(weights_folder(config), module) if config.pretrained else None
    if config.lora.rank is None:
        values = FirstValues(module, files)
    else:
        values = AdapterValues(module, files)
        with torch.device("meta"):
            adapt(module, config, values.tied)
    if config.task == "causal_lm" and module.config.model_type in DECODERS:
        return HFDecoder(module, values, config)
    return HFWhole(module, values, config)


class HFWhole(WrappedModel):
    """Wraps ``module``, a model on ``meta``, with the names of transformers. Its parameters get the initial
    ``values``."""

    def __init__(self, module: Any, values: FirstValues, config: HFModelConfig) -> None:
        super().__init__(module, "cross_entropy", config.wrap)
        self.own_count = False
        self._configured = ConfiguredLoss(module, config.task)
        self.balances_experts = self._configured.balance > 0
        self.config = config
        self._values = values
        self.saves_frozen = config.lora.rank is None
        self.tied = values.tied

    def forward(
        self, inputs: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """Runs the module like ``WrappedModel.forward``, with the loss of its config.

        An evaluation omits the load-balancing loss, so that its loss does not depend on the split of the batch.
        """
        if isinstance(inputs, Ragged):
            return super().forward(inputs, context, targets)
        outputs = self.bare(inputs, **self._arguments(context))
        if targets is None:
            return outputs["logits"]
        total, count, correct = self._configured(outputs["logits"], targets)
        if self.training:
            if self.balances_experts:
                total = total + self._configured.balance * outputs["aux_loss"] * count
            return total, count
        if self.observe is not None:
            self.observe(outputs["logits"], targets)
        return total, count, correct

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        self._values.fill(name, value, generator)

    def starts_on_host(self, name: str) -> bool:
        return True

    def stored_box(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        return self._values.read(name, begin, size)

    def init_buffers(self, device: torch.device) -> None:
        self._values.fill_buffers(self, "", device)
