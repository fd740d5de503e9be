"""Counts what each block of a model computes and moves for one sample, from its config. Imports no torch.

A block is the stem, a layer or the head. The counts come from the facts of the model's family, so a model family in a
user's package is counted like a built-in one. A model without facts (custom, or of Hugging Face) is counted by another
process with torch, which runs it without values in seconds and with hardly any memory; ``layout/counted.py`` reads
these counts from a cache.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import tempfile
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from hpc_train.config.extensions import Activations, experts_of, family_of
from hpc_train.config.schema import Config
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.counted import CountedModel, counted, counts_file, key_of, needs_counts, read_counts, sample_shape
from hpc_train.layout.user_code import LIMIT_S, run_module

# Kernels of a layer's forward in eager mode: four projections, the three products of the feed-forward branch,
# attention, two norms, rotary positions, casts, residuals. torch.compile fuses all but products and attention.
EAGER_KERNELS, COMPILED_KERNELS = 40, 14
STEM_KERNELS, HEAD_KERNELS = 4, 12
EAGER_ROUTING, COMPILED_ROUTING = 45, 16  # more kernels of a layer with experts: scores, sorting, rows, weights
# Each kept element is written in the forward and read in the backward, and its gradient is written and read.
TOUCHES = 4
FUSED_TOUCHES = 2.5  # a fused kernel writes a result that the next operation would read again


@dataclass(frozen=True)
class Block:
    """Holds what a block computes for one sample.

    Attributes:
        products: operations of the forward in matrix products with weights; the backward takes twice as many.
        attention: operations of the forward in attention, not halved for a causal mask.
        elements: activations that the forward writes and the backward reads.
        kernels: kernels of the forward; the backward takes twice as many. They do not depend on the batch.
        parameters: of the block.
        last: those of ``products`` that are in the last product, whose result the backward does not need.
        grouped: those of ``products`` that are in the grouped products of experts.
        experts: those of ``parameters`` that are in experts, which expert-parallel ranks share.
        rows: elements that the experts of a layer receive, and return.
    """

    products: float
    attention: float
    elements: float
    kernels: int
    parameters: float
    last: float = 0.0
    grouped: float = 0.0
    experts: float = 0.0
    rows: float = 0.0


@dataclass(frozen=True)
class Work:
    """Holds what a model computes.

    Attributes:
        blocks: the stem, the layers and the head.
        hidden: elements of the hidden states of one sample, which pass from stage to stage.
        tokens: positions of a sample.
        touches: how often memory moves each element in forward and backward.
        sample_flops: the operations of forward and backward for one sample, as the MFU counts them.
    """

    blocks: tuple[Block, ...]
    hidden: float
    tokens: int
    touches: float
    sample_flops: float

    @property
    def parameters(self) -> float:
        return sum(block.parameters for block in self.blocks)


def count_work(config: Config) -> Work:
    """Returns what the model of ``config`` computes; raises UserError if neither its family nor custom code defines
    this."""
    config = counted(config)
    model = config.model
    family = family_of(config.model)
    if isinstance(model, CountedModel):
        counts = model.counts
        share = 1.0
        touches: float = TOUCHES
        if config.train.compile:
            share = COMPILED_KERNELS / EAGER_KERNELS
            touches = FUSED_TOUCHES
        blocks = tuple(
            Block(b.products, b.attention, model.saved(b) / model.width, ceil(b.kernels * share), b.parameters)
            for b in counts.blocks
        )
        return Work(blocks, counts.hidden, counts.tokens, touches, sum(block.total for block in counts.blocks))
    layers = getattr(model, "n_layers", None)
    activations = total = None
    if family.activations is not None:
        activations = family.activations(model, config.data)
        if family.flops_per_sample is not None:
            total = family.flops_per_sample(model, _shape(config, activations))
    count = None if family.parameters is None else family.parameters(model)
    if runs_own_code(config) or not isinstance(layers, int) or total is None or activations is None or count is None:
        raise UserError(
            f"a model of the family {model.kind} does not state its size and operations before it is built",
            where="model",
            fix="python -m hpc_train plan, which counts it; a built-in model of about the same size; or a ModelFamily "
            "with parameters, activations and flops_per_sample (docs/extend.md)",
        )
    return _count(config, layers, total, activations, count)


def _count(config: Config, layers: int, total: float, activations: Activations, count: int) -> Work:
    fewer = _one_layer_fewer(config, layers, total, count, activations)
    layer_flops = total - fewer[0]
    layer_parameters = count - fewer[1]
    ends = max(0.0, count - layers * layer_parameters)
    tied = getattr(config.model, "tied_embeddings", False)
    table = ends if tied else ends / 2
    compiled = config.train.compile
    experts = experts_of(config.model)
    inactive = grouped = routed = rows = 0.0
    if experts is not None:
        inactive = float((experts.number - experts.chosen) * experts.parameters)
        grouped = 2.0 * activations.tokens * experts.chosen * experts.parameters
        routed = float(experts.number * experts.parameters)
        rows = float(activations.tokens * experts.chosen * experts.row)
    products = min(layer_flops, 6.0 * (layer_parameters - inactive) * activations.tokens) / 3
    width = getattr(config.model, "ffn_dim", None) or getattr(config.model, "mlp_dim", None)
    kernels = COMPILED_KERNELS if compiled else EAGER_KERNELS
    if experts is not None:
        kernels += COMPILED_ROUTING if compiled else EAGER_ROUTING
    layer = Block(
        products=products,
        attention=layer_flops / 3 - products,
        elements=activations.tokens
        * (activations.norm_inputs + activations.layer + activations.passing + activations.scores),
        kernels=kernels,
        parameters=layer_parameters,
        # 0 if the width is unknown, and for experts, whose results are multiplied by weights
        last=0.0
        if experts is not None
        else 2.0 * activations.tokens * int(width or 0) * int(getattr(config.model, "dim", 0)),
        grouped=grouped,
        experts=routed,
        rows=rows,
    )
    hidden = activations.tokens * activations.layer_input
    stem = Block(0.0, 0.0, hidden, STEM_KERNELS, table)
    head = Block(
        products=max(0.0, total - layers * layer_flops) / 3,
        attention=0.0,
        elements=activations.tokens * activations.logits,
        kernels=HEAD_KERNELS,
        parameters=0.0 if tied else ends - table,
    )
    touches = FUSED_TOUCHES if compiled else TOUCHES
    return Work((stem, *[layer] * layers, head), hidden, activations.tokens, touches, total)


def _one_layer_fewer(
    config: Config, layers: int, total: float, count: int, activations: Activations
) -> tuple[float, float]:
    """Returns the operations and the parameters of the model with one layer fewer."""
    model = config.model
    family = family_of(config.model)
    assert family.flops_per_sample is not None and family.parameters is not None
    if family.layer_parameters is not None:
        of_layer = float(family.layer_parameters(model) or 0)
        return total - 6 * of_layer * activations.tokens, count - of_layer
    shorter = replace(model, n_layers=layers - 1)  # type: ignore[call-arg]
    flops = family.flops_per_sample(shorter, _shape(config, activations))
    parameters = family.parameters(shorter)
    assert flops is not None and parameters is not None
    return flops, parameters


def _shape(config: Config, activations: Activations) -> tuple[int, ...]:
    """Returns the shape of a sample's inputs; for custom data, that of the sequence whose activations are counted."""
    return sample_shape(config.data) or (activations.tokens,)


_FIX = (
    "correct the model, name another model of about the same size, or describe it as a ModelFamily with parameters, "
    "activations and flops_per_sample (docs/extend.md)"
)


def count_model(config: Config) -> None:
    """Counts the model of ``config`` if its family does not define its sizes and the cache has no counts of it; raises
    UserError if torch is not installed here, or the model cannot be counted."""
    if not needs_counts(config):
        return
    read_counts.cache_clear()  # the user's files may have changed
    key = key_of(config)
    if read_counts(key) is not None:
        return
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the size of this model is known only after it is built with torch, which is not installed here",
            where="model",
            fix="plan where torch is installed; the counts are kept in ~/.cache/hpc_train, where this machine finds "
            "them too if it has the same home directory",
        )
    file = counts_file(key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            answer = Path(folder, file.name)
            counts = _answer(config, answer)
            answer.write_text(json.dumps(counts), encoding="utf-8")
            answer.replace(file)
    except OSError as error:
        raise UserError(
            f"the counts of the model cannot be written to {file.parent}: {error}",
            where="$XDG_CACHE_HOME",
            fix="set XDG_CACHE_HOME to a directory with free space that you may write",
        ) from error
    read_counts.cache_clear()


def _answer(config: Config, file: Path) -> dict[str, Any]:
    """Returns the counts, which the other process writes to ``file``.

    Raises:
        UserError: the model cannot be counted. The message has the last line that its code printed.
    """
    try:
        done = run_module("hpc_train.models.counting", str(file), given=pickle.dumps(config))
    except subprocess.TimeoutExpired:
        raise _refusal(f"it took longer than {LIMIT_S:g} s") from None
    if not file.exists():
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        lines = lines or [f"its process ended with exit code {done.returncode}"]
        raise _refusal(lines[-1].strip())
    answer = json.loads(file.read_text(encoding="utf-8"))
    if "what" in answer:
        raise _refusal(answer["what"], answer.get("where") or "model", answer.get("fix") or _FIX)
    counts: dict[str, Any] = answer["counts"]
    return counts


def _refusal(why: str, where: str = "model", fix: str = _FIX) -> UserError:
    return UserError(f"the model cannot be counted: {why}", where=where, fix=fix)
