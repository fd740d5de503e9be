"""Implements the attention that the built-in transformers share.

It has grouped queries (Ainslie et al. 2023, arXiv:2305.13245) and reads the number of heads from the projected tensors,
so the same code runs on the heads of a tensor-parallel rank. As options it has a sliding window (Beltagy et al. 2020,
arXiv:2004.05150), norms of queries and keys (Henry et al. 2020, arXiv:2010.04245) and a soft cap of the scores (Gemma
2, arXiv:2408.00118). ``packed_attention`` selects the kernels that compute them.

Queries and keys are rotated by their positions (Su et al. 2021, arXiv:2104.09864). Coordinate ``i`` of a head is paired
with ``i + head_dim / 2``, like Llama on Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from hpc_train.data.dataset import Batch
from hpc_train.errors import UserError
from hpc_train.layout.techniques import ATTENTION_KERNELS, check_attention_device
from hpc_train.models import packed_attention as packed
from hpc_train.models.linear_layers import Together, project
from hpc_train.models.model import Model
from hpc_train.models.packed_attention import Scores
from hpc_train.models.transformer import widened

Exchange = Callable[[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor, Tensor, Tensor], Tensor]
LOCAL = "local_"  # the prefix of names in the context that only layers with a sliding window read


class Attention(nn.Module):
    """Computes attention; ``wk`` and ``wv`` project to ``n_kv_heads`` heads, which the ``n_heads`` queries share.

    Args:
        bias: whether all projections have biases.
        qkv_bias: whether the projections to queries, keys and values have biases.
        head_dim: the width of a head; None divides ``dim`` by ``n_heads``.
        norm: returns a norm for queries and keys, for heads of the given width; None means no norm.
        scores: how scores are computed.

    Attributes:
        exchange: set by context parallelism. It is called with a function that computes attention over full sequences
            for some of the heads, and with queries, keys and values of all heads for the tokens of this rank.
        ring: set by context parallelism. It computes causal attention for tokens of this rank over those of all ranks
            of a ring, from queries, keys, values, the document ids of whole sequences, and how scores are computed.
    """

    exchange: Exchange | None = None
    ring: Callable[[Tensor, Tensor, Tensor, Tensor | None, Scores], Tensor] | None = None
    together = Together(("wq", "wk", "wv"))

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        *,
        causal: bool,
        bias: bool,
        qkv_bias: bool = False,
        head_dim: int | None = None,
        norm: Callable[[int], nn.Module] | None = None,
        scores: Scores | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim or dim // n_heads
        self.causal = causal
        self.scores = scores or Scores()
        self._without_window = replace(self.scores, window=None)
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=bias or qkv_bias)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=bias or qkv_bias)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=bias or qkv_bias)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=bias)
        self.q_norm = norm(self.head_dim) if norm else None
        self.k_norm = norm(self.head_dim) if norm else None

    def forward(self, hidden: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Returns the output for ``hidden`` ``[micro, seq, dim]`` in the same shape.

        Args:
            context: may hold ``rotary_cosine`` and ``rotary_sine`` (see ``rotate``), and either ``attention_mask``, a
                bool tensor that broadcasts to ``[micro, heads, seq, seq]`` and replaces the causal mask, or
                ``packed_attention.BOUNDARIES`` of documents, inside which attention is causal. With a sliding window
                the names that begin with ``LOCAL`` come first, and without ``LOCAL`` + ``BOUNDARIES`` or
                ``LOCAL`` + ``attention_mask`` the window must not be shorter than the sequence.
        """
        query, key, value = (projection.unflatten(-1, (-1, self.head_dim)) for projection in project(self, hidden))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if "rotary_cosine" in context:
            if self.q_norm is None:
                value = value.contiguous()  # a view would keep the queries and keys from before the rotation
            cosine, sine = (self._from(context, name) for name in ("rotary_cosine", "rotary_sine"))
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        attend = partial(self._attend, context)
        if self.exchange is None:
            mixed = attend(query, key, value)
        else:
            mixed = self.exchange(attend, query, key, value)
        return self.wo(mixed.flatten(2))

    def _from(self, context: Mapping[str, Tensor], name: str) -> Any:
        """Returns the tensor ``name`` of the context; in a layer with a sliding window, the tensor for such layers.
        None if there is none."""
        local = context.get(LOCAL + name) if self.scores.window is not None else None
        if local is None:
            return context.get(name)
        return local

    def _scores_within(self, length: int) -> Scores:
        """Returns the computation of scores for ``length`` tokens. A window that contains all of them counts as no
        window."""
        if packed.is_narrow(self.scores, length):
            return self.scores
        return self._without_window

    def _attend(self, context: Mapping[str, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns ``[micro, seq, heads, head_dim]``, the shape of ``query``."""
        if self.ring is not None:
            return self.ring(query, key, value, context.get("document_ids"), self.scores)
        mask = self._from(context, "attention_mask")
        boundaries = self._from(context, packed.BOUNDARIES)
        scores = self._scores_within(query.shape[1])
        if mask is None and boundaries is not None:
            kernel = packed.kernel_of_scores(query.device, query.dtype, self.head_dim, scores)
            if kernel != packed.MASK:
                return packed.attend_inside_documents(kernel, query, key, value, boundaries, scores)
            mask = packed.attention_mask(context.get("document_ids"), query.shape[1], scores.window, query.device)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if scores.cap is not None:
            key, value = _of_every_query(query, key, value)
            scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
            capped = soft_cap(widened(query @ key.transpose(-2, -1)) * scale, scores.cap)
            if mask is None and self.causal:
                mask = packed.attention_mask(None, query.shape[2], None, query.device)
            if mask is not None:
                capped = capped.masked_fill(~mask, -torch.inf)
            return (capped.softmax(dim=-1).to(value.dtype) @ value).transpose(1, 2)
        call = _call(query, key, value, mask, self.causal, scores.scale)
        return F.scaled_dot_product_attention(**call).transpose(1, 2)

    def backend(self, length: int, dtype: torch.dtype, device: torch.device, context: Mapping[str, Tensor]) -> str:
        """Describes the implementation of attention for sequences of ``length`` tokens, for the log. The projected
        tensors of a batch with ``context`` have ``dtype``, which autocast may have chosen."""
        scores = self._scores_within(length)
        if self.ring is not None:
            if "document_ids" in context or scores != Scores(scores.scale):
                return "a ring, with plain products where documents, windows or a soft cap change scores"
            return "a ring, with flash attention if precision and device support it"
        if scores.cap is not None:
            return f"plain operations with {length} x {length} scores per head, because no kernel has a soft cap"
        if "document_ids" not in context and scores.window is None:
            return self._choice(length, dtype, device, masked=False)
        missing = packed.without_kernel(context, device, dtype, self.head_dim, scores)
        if not missing:
            return packed.description(packed.kernel_for(device, dtype, self.head_dim), scores)
        choice = self._choice(length, dtype, device, masked=True)
        return f"{choice} with a mask of {length} x {length} elements, because {missing}"

    def _choice(self, length: int, dtype: torch.dtype, device: torch.device, masked: bool) -> str:
        """Describes the implementation that ``scaled_dot_product_attention`` chooses."""
        widths = (projection.out_features for projection in (self.wq, self.wk, self.wv))
        query, key, value = (
            torch.empty(
                1, width // self.head_dim, length, self.head_dim, dtype=dtype, device=device, requires_grad=True
            )
            for width in widths
        )
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if masked else None
        call = _call(query, key, value, mask, self.causal, self.scores.scale)
        backend = SDPBackend(torch._fused_sdp_choice(**call))
        name = backend.name.removesuffix("_ATTENTION").lower()
        if backend == SDPBackend.FLASH_ATTENTION:
            name = packed.flash_kernel().replace(" attention", "")
        return f"scaled_dot_product_attention uses its {name} implementation"


def _call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> dict[str, Any]:
    """Returns the arguments of ``scaled_dot_product_attention`` for heads ``[micro, heads, seq, head_dim]``.

    On GPUs, only flash attention always supports grouped queries, but it supports neither masks nor fp32. The
    memory-efficient kernel supports both, but needs the keys and values of every query. Otherwise torch would fall back
    to its plain implementation, which keeps scores of ``micro x heads x seq x seq`` for the backward pass.
    """
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and (mask is not None or query.dtype not in (torch.float16, torch.bfloat16)):
        key, value = _of_every_query(query, key, value)
        grouped = False
    return {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "is_causal": causal and mask is None,
        "scale": scale,
        "enable_gqa": grouped,
    }


def _of_every_query(query: Tensor, *shared: Tensor) -> Iterable[Tensor]:
    """Returns the keys or values ``shared`` with as many heads as ``query``."""
    return (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in shared)


def soft_cap(values: Tensor, cap: float | None) -> Tensor:
    """Returns ``cap * tanh(values / cap)``, or ``values`` without a cap."""
    if cap is None:
        return values
    return cap * torch.tanh(values / cap)


def attention_backend(parts: Iterable[nn.Module], batch: Batch, dtype: torch.dtype, device: torch.device) -> str | None:
    """Describes the implementations of attention in the layers of ``parts`` for ``batch``; None if there is no
    attention."""
    for part in parts:
        if not isinstance(part, Model):
            continue
        windows = part.attention_backends(batch, dtype, device)
        for module in part.modules():
            if isinstance(module, Attention):
                length = part.hidden_shape(batch.inputs)[1]
                windows[module.scores.window] = module.backend(length, dtype, device, batch.context)
        if len({*windows.values()}) == 1:
            return next(iter(windows.values()))
        if windows:
            layers = ((f"with a window of {window}" if window else "without a window") for window in windows)
            return "; ".join(f"layers {layer}: {text}" for layer, text in zip(layers, windows.values(), strict=True))
    return None


def choose_kernel(name: str, device: torch.device) -> str | None:
    """Makes all attention of this process use the kernel ``name`` of ``train.attention``, also in compiled code.

    PyTorch has this choice once per process: the registered implementation of its flash attention, which the operators
    of ``scaled_dot_product_attention`` and ``varlen_attn`` call, and the order in which the former tries its backends.

    Returns:
        A description for the log; None for ``auto``.

    Raises:
        UserError: the device or the installed packages do not have the kernel.
    """
    if name == "auto":
        return None
    kernel = ATTENTION_KERNELS[name]
    setting = f"train.attention={name}"
    architecture = "no GPU"
    found = device.type
    if device.type == "cuda":
        found = torch.cuda.get_device_name(device)
        architecture = "AMD"
        if torch.version.hip is None:
            architecture = "{}.{}".format(*torch.cuda.get_device_capability(device))
    check_attention_device(name, found, architecture)
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    origin = "cuDNN, and flash attention of PyTorch for packed documents"
    if kernel.registered:
        origin = f"{kernel.package} in the place of PyTorch's flash attention"
        try:
            torch.nn.attention.activate_flash_attention_impl(kernel.registered)
        except (AttributeError, ImportError, RuntimeError, ValueError) as error:
            raise UserError(
                f"{setting} needs the module {kernel.package}, which torch {torch.__version__} cannot "
                f"activate: {error}",
                where="train.attention, the installed packages",
                fix="install the kernels of https://github.com/Dao-AILab/flash-attention for this torch, or "
                "train.attention=auto",
            ) from error
    else:
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    torch.nn.attention._sdpa_kernel(order, set_priority=True)
    return f"{setting}: {origin}"


@dataclass(frozen=True)
class RotaryScaling:
    """Scales rotary frequencies as Llama 3.1 does for sequences longer than those of the pre-training.

    A frequency with fewer than ``low_freq_factor`` periods in the original length is divided by ``factor``. A frequency
    with more than ``high_freq_factor`` periods does not change, and frequencies in between are interpolated. The
    formula follows Meta's ``apply_scaling`` (github.com/meta-llama/llama-models); the names follow Hugging Face.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def factors(self, frequencies: Tensor) -> Tensor:
        """Returns the factor for each of ``frequencies``, which are in radians per position."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        ramp = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        ramp = ramp.clamp(0, 1)
        return ramp + (1 - ramp) / self.factor


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the cosine and sine of every position's angles.

    Args:
        positions: integers of any shape ``[...]``.
        head_dim: the width of a head, an even number.
        theta: the base of the frequencies ``theta ** (-2 i / head_dim)``.

    Returns:
        Two tensors ``[..., 1, head_dim]``, for all heads of a position; the sines of the first half are negated. They
        are float32 even under fp64, since the table is part of the model's definition.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    periods = theta**exponents
    angles = positions.unsqueeze(-1).float() / periods
    if scaling is not None:
        angles = angles * scaling.factors(1 / periods)
    cosine, sine = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates ``heads`` ``[micro, seq, heads, head_dim]`` by the tables of ``rotary_tables`` for ``[seq]`` or
    ``[micro, seq]``.

    Half-precision heads are rotated in float32 and rounded once, since rounded tables would lose the relative positions
    in long sequences.
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cosine + swapped * sine).to(heads.dtype)


class RotaryCache:
    """Caches the tables of positions ``0 … length - 1`` for the longest sequence seen on each device.

    The tables are not buffers of the model, so they need no memory while the model is on ``meta``, are not saved in
    checkpoints, and do not limit the sequence length. They are read outside compiled layers.
    """

    def __init__(self, head_dim: int, theta: float, scaling: RotaryScaling | None = None) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._scaling = scaling
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the cosine and sine tables, each ``[length, 1, head_dim]``."""
        cached = self._tables.get(device)
        if cached is None or cached[0].shape[0] < length:
            with torch.inference_mode(False), torch.no_grad():
                cached = self.compute(torch.arange(length, device=device))
            self._tables[device] = cached
        return cached[0][:length], cached[1][:length]

    def compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tables of any ``positions``, as ``rotary_tables`` does."""
        return rotary_tables(positions, self._head_dim, self._theta, self._scaling)
