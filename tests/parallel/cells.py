"""Generates the matrix of layouts: cells that are compared with one process, and cells that are refused, with reasons.

No cell is listed by hand. Every split of 1, 2 and 4 ranks into dp x pp x tp is combined with every data parallelism,
schedule, number of micro-batches and model, and ``plan.validate`` decides which are refused. The module needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from hpc_train.config.schema import (
    BatchConfig,
    Config,
    CustomModelConfig,
    GPTConfig,
    MoEConfig,
    OptimConfig,
    PrecisionConfig,
    StrategyConfig,
    SyntheticDataConfig,
    TrainConfig,
    ViTConfig,
)
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.techniques import KINDS, SCHEDULES
from hpc_train.layout.validate import validate

Case = TypeVar("Case")
Form = Callable[..., list[Any]]  # see ``in_two_forms``
MODELS = ("gpt", "gpt-tied", "vit", "gpt-options")
OPTIONS: dict[str, Any] = {  # all that the families of transformers have; with two layers one has a window
    "head_dim": 6, "activation": "gelu_tanh", "qkv_bias": True, "qk_norm": True, "sliding_window": 3, "global_every": 2,
    "query_scalar": 5, "attention_softcap": 1.5, "logit_softcap": 2.0, "scaled_embeddings": True, "norm_offset": True,
    "post_norms": True, "local_rope_theta": 50.0, "tied_embeddings": True,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt-moe": {"experts": 4, "top_k": 2, "expert_dim": 8, "balance_loss": 0.5, "z_loss": 0.1},
    "gpt-moe-capacity": {
        "experts": 4, "top_k": 2, "expert_dim": 8, "normalize": False, "capacity_factor": 0.75, "balance_loss": 0.5,
    },
    "gpt-moe-bias": {
        "experts": 6, "top_k": 3, "expert_dim": 8, "router": "sigmoid", "bias_rate": 0.05, "shared_experts": 2,
        "dense_layers": 1,
    },
    "gpt-moe-switch": {
        "experts": 4, "top_k": 1, "normalize": False, "capacity_factor": 1.0, "balance_loss": 0.5, "bias_rate": 0.05,
    },
}  # fmt: skip
# its loss is the mean over the samples, so that parts of a batch can be computed apart
ADDITIVE_MIXTURE = {"gpt-moe-additive": {"experts": 4, "top_k": 2, "expert_dim": 8, "balance_loss": 0.0}}
DATA_PARALLEL: dict[str, dict[str, Any]] = {"dp": {"dp": 2}} | {
    kind: {"dp": 2, "data_parallel": kind} for kind in ("allreduce", "zero1", "zero2", "zero3")
}
SEQUENCE, VOCABULARY, IMAGE, CLASSES = 8, 14, 8, 5
UNEVEN_BATCH = 10  # 4 ranks use 12 slots, two of which are padding; accumulation adds more padding


OWN_LOSSES = {  # classes of tests/parallel/module.py
    "gpt-weighted": "WeightedGPT",
    "gpt-heads": "HeadsGPT",
    "gpt-untied-heads": "HeadsGPT",
    "gpt-contrastive": "ContrastiveGPT",
    "custom-weighted": "WeightedTiny",
    "custom-heads": "HeadsTiny",
    "custom-vae": "VariationalTiny",
    "custom-contrastive": "ContrastiveTiny",
}


@dataclass(frozen=True)
class Cell:
    """Describes one comparison: a model under a layout.

    Attributes:
        model: ``gpt``, ``gpt-tied``, ``gpt-options`` (a GPT with all ``OPTIONS``), ``gpt-few-heads`` (with two heads),
            ``gpt-windows`` (with those that fused attention has), one of ``MIXTURES`` or ``ADDITIVE_MIXTURE``,
            ``gpt-own-experts`` (the example of a mixture), ``vit`` or ``custom`` (a module without parts), or one of
            these with a loss of its own: see ``OWN_LOSSES``; ``own`` is the example of a model with parts.
        strategy, batch, train, optim: the fields of the config's groups that differ from their defaults.
        loss_scale: the loss scale that ``train_step`` and ``clip_grad_norm_`` receive.
        sequence: the tokens of a sample.
        counts: the micro-batches of each replica in each step, in turn; empty if all have equally many.
    """

    world_size: int
    model: str = "gpt"
    precision: str = "fp64"
    strategy: dict[str, Any] = field(default_factory=dict)
    batch: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    loss_scale: float | None = None
    optim: dict[str, Any] = field(default_factory=dict)
    sequence: int = SEQUENCE
    counts: tuple[tuple[int, ...], ...] = ()

    def config(self) -> Config:
        return Config(
            strategy=StrategyConfig(**self.strategy),
            model=self._model(),
            data=SyntheticDataConfig(
                task="tokens" if self.model.startswith("gpt") else "images",
                sequence_length=self.sequence,
                vocab_size=VOCABULARY,
                image_size=IMAGE,
                n_classes=CLASSES,
            ),
            precision=PrecisionConfig(name=self.precision),
            batch=BatchConfig(**{"global_size": UNEVEN_BATCH} | self.batch),
            optim=OptimConfig(**self.optim),
            train=TrainConfig(**{"seed": 3, "steps": 5} | self.train),
        )

    def layout(self) -> Layout:
        """Returns the layout; raises UserError if the cell is refused."""
        return validate(self.config(), nodes=1, workers_per_node=self.world_size)

    def __str__(self) -> str:
        groups = self.train | self.batch | self.optim
        extras = [f"{key}={value}" for key, value in groups.items() if key != "global_size"]
        extras += [f"loss_scale={self.loss_scale:g}"] if self.loss_scale else []
        extras += [f"counts={self.counts}"] if self.counts else []
        split = " ".join(f"{key}={value}" for key, value in self.strategy.items())
        return f"{self.model} {self.precision} [{split or 'single'}] {' '.join(extras)}".rstrip()

    def _model(self) -> Any:
        own = OWN_LOSSES.get(self.model)
        if self.model.startswith("custom"):
            args = {} if self.model == "custom-vae" else {"classes": CLASSES}
            return CustomModelConfig(_target_=f"tests.parallel.module.{own or 'Tiny'}", args=args)
        if self.model == "own":
            sizes = {"width": 16, "image_size": IMAGE, "n_classes": CLASSES}
            return CustomModelConfig(_target_="examples.own_pipeline_model.ResidualNet", args=sizes)
        stages = self.strategy.get("pp", 1) * self.strategy.get("stages_per_rank", 1)
        several = self.strategy.get("pp", 1) > 1 or self.train.get("activation_checkpointing") == "selective:3"
        layers = max(3 if several else 2, stages)
        if self.model == "vit":
            sizes = {"image_size": IMAGE, "patch_size": 4, "n_classes": CLASSES, "dim": 16, "n_heads": 4, "mlp_dim": 24}
            return ViTConfig(n_layers=layers, **sizes)
        sizes = {"vocab_size": VOCABULARY, "dim": 16, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 24}
        sizes |= {
            "n_layers": layers,
            "tied_embeddings": self.model == "gpt-tied" or (own is not None and self.model != "gpt-untied-heads"),
        }
        if own is not None:
            return CustomModelConfig(_target_=f"tests.parallel.module.{own}", args=sizes)
        if self.model in ("gpt-options", "gpt-windows", "gpt-few-heads"):
            sizes |= OPTIONS | ({"attention_softcap": None} if self.model == "gpt-windows" else {})
        if self.model == "gpt-few-heads":
            sizes |= {"n_heads": 2, "n_kv_heads": 1}
        mixture = (MIXTURES | ADDITIVE_MIXTURE).get(self.model)
        if mixture is not None:
            sizes["moe"] = MoEConfig(**mixture)
            sizes["n_kv_heads"] = max(2, self.strategy.get("tp", 1))
        if self.model == "gpt-own-experts":
            sizes |= {"moe": MoEConfig(**MIXTURES["gpt-moe"]), "kind": "examples.own_experts_family:FAMILY"}
        return GPTConfig(**sizes)


@dataclass(frozen=True)
class Refused:
    """Holds a cell that the config refuses, and the reason."""

    cell: Cell
    reason: str


def cells(world_size: int, pipelines: bool) -> tuple[list[Cell], list[Refused]]:
    """Returns all cells of ``world_size`` ranks with or without pipelines: those to compare and those refused."""
    allowed: list[Cell] = []
    refused: list[Refused] = []
    for strategy in _strategies(world_size):
        if (strategy["pp"] > 1) != pipelines:
            continue
        for model in MODELS:
            for batch in _batches(strategy):
                cell = Cell(world_size, model, strategy=strategy, batch=batch)
                try:
                    cell.layout()
                    allowed.append(cell)
                except UserError as error:
                    refused.append(Refused(cell, error.what))
    return allowed, refused


def every(cases: Sequence[Case], *keys: str) -> list[Case]:
    """Returns all cases, as the long form does."""
    return list(cases)


def covering(cases: Sequence[Case], *keys: str) -> list[Case]:
    """Returns few of ``cases`` that together have every value of each of ``keys``, or of every key, and are unlike."""
    facts = [_facts(case) for case in cases]
    missing = {fact for of_case in facts for fact in of_case if not keys or fact[0] in keys}
    used: Counter[tuple[str, str]] = Counter()
    chosen = []
    while missing:
        gains = [(len(of_case & missing), -sum(used[fact] for fact in of_case)) for of_case in facts]
        best = gains.index(max(gains))
        missing -= facts[best]
        used.update(facts[best])
        chosen.append(best)
    return [cases[index] for index in sorted(chosen)]


def _facts(case: Any) -> set[tuple[str, str]]:
    """Returns the keys of ``case`` with their values; those of groups of keys without the name of the group."""
    fields = case if isinstance(case, dict) else vars(case)
    groups = [value for value in fields.values() if isinstance(value, dict)]
    own = {(key, str(value)) for key, value in fields.items() if not isinstance(value, dict)}
    return own.union(*map(_facts, groups))


def in_two_forms(seconds: int) -> pytest.MarkDecorator:
    """Gives a test the parameter ``form``: ``covering``, and ``every`` in the long form, which takes ``seconds``."""
    marks = pytest.mark.long_form(seconds), pytest.mark.timeout(300 + 5 * seconds)
    forms = [pytest.param(covering, id="short"), pytest.param(every, id="every", marks=marks)]
    return pytest.mark.parametrize("form", forms)


SAVERS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"train": {"activation_checkpointing": "full"}},
    "selective:3": {"train": {"activation_checkpointing": "selective:3"}},
    "ops": {"train": {"activation_checkpointing": "ops"}},
    "loss_chunks": {"train": {"loss_chunks": 3}},
    "offload": {"strategy": {"offload": "all"}},
    "several": {"train": {"activation_checkpointing": "selective", "loss_chunks": 2}},
    "all at once": {"train": {"activation_checkpointing": "ops", "loss_chunks": 2}, "strategy": {"offload": "all"}},
    "compile": {"train": {"compile": True}},
    "topk": {"strategy": {"compression": "topk", "compression_share": 1.0}},  # it omits no element
}


def saver_cells(world_size: int, savers: Collection[str]) -> tuple[list[Cell], list[Refused]]:
    """Combines each of ``savers`` with every strategy of ``world_size`` ranks that is allowed without it."""
    allowed: list[Cell] = []
    refused: list[Refused] = []
    for strategy in _strategies(world_size):
        batch = _batches(strategy)[-1]
        try:
            Cell(world_size, "gpt-tied", strategy=strategy, batch=batch).layout()
        except UserError:
            continue
        for saver in (SAVERS[name] for name in savers):
            split = strategy | saver.get("strategy", {})
            cell = Cell(world_size, "gpt-tied", strategy=split, batch=batch, train=saver.get("train", {}))
            try:
                cell.layout()
                allowed.append(cell)
            except UserError as error:
                refused.append(Refused(cell, error.what))
    return allowed, refused


def _strategies(world_size: int) -> Iterator[dict[str, Any]]:
    for pp in _divisors(world_size):
        for tp in _divisors(world_size // pp):
            dp = world_size // pp // tp
            for data_parallel in KINDS if dp > 1 else ("ddp",):
                for schedule in SCHEDULES if pp > 1 else (None,):
                    yield from _shards({"dp": dp, "pp": pp, "tp": tp, "data_parallel": data_parallel}, schedule)


def _shards(strategy: dict[str, Any], schedule: str | None) -> Iterator[dict[str, Any]]:
    if schedule is not None:
        strategy = strategy | {"schedule": schedule, "stages_per_rank": SCHEDULES[schedule].stages_per_rank[0]}
    yield strategy
    if strategy["dp"] > 2 and KINDS[strategy["data_parallel"]].shards:
        yield strategy | {"shard": 2}


def _batches(strategy: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns 1 and 3 micro-batches; for a pipeline, a number with which all stages work at once for some time."""
    if strategy["pp"] == 1:
        return {"micro_batches": 1}, {"micro_batches": 3}
    if strategy["schedule"] == "sequential":
        return ({"micro_batches": 1},)
    return ({"micro_batches": strategy["pp"] * (strategy["stages_per_rank"] + 1)},)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
