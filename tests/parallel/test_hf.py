"""Models of transformers train under every layout as a bare loop of transformers does.

The tiny models are built here and saved with ``save_pretrained``. They are compared with a loop in this process: losses
and the weights after the last step, in fp64; on four ranks over ten steps, in the short form on two ranks over two.
transformers computes norms and rotary tables in fp32 also then.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hpc_train.config.schema import Config, CustomModelConfig, GPTConfig, HFModelConfig, LoraConfig
from hpc_train.data.dataset import IGNORED
from hpc_train.models.hf.family import hf_name
from hpc_train.models.hf.pretrained import WeightFiles
from hpc_train.parallel.build import build_engine
from tests.checkpoint.progress import LONG
from tests.parallel.cells import CLASSES, IMAGE, SEQUENCE, VOCABULARY, Cell
from tests.parallel.memory import PeakMemory
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, relative, whole
from tests.ranks import run_on_world
from tests.warm_parents import HUGGING_FACE

transformers = pytest.importorskip("transformers")

STEPS, LR = 10 if LONG else 2, 1e-2
EPS = 1e-6  # torch's 1e-8 makes large updates of rounding errors: the gradient of a bias of keys is zero
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 2 * SEQUENCE}
TASKS = {"llama": "causal_lm", "qwen3": "causal_lm", "vit": "image_classification"}
CLASS_OF = {"causal_lm": "AutoModelForCausalLM", "image_classification": "AutoModelForImageClassification"}
SPLITS: list[dict[str, Any]] = [
    {"dp": 4},
    {"dp": 4, "data_parallel": "zero1"},
    {"dp": 4, "data_parallel": "zero2"},
    {"dp": 4, "data_parallel": "zero3"},
    {"dp": 4, "data_parallel": "zero3", "shard": 2},  # hsdp
    {"dp": 4, "data_parallel": "allreduce"},
]
PIPELINES: list[dict[str, Any]] = [
    {"dp": 2, "pp": 2, "schedule": "zbv", "stages_per_rank": 2, "data_parallel": "allreduce"},
    {"dp": 2, "pp": 2, "schedule": "1f1b", "data_parallel": "zero3"},
    {"pp": 4, "schedule": "1f1b"},
]
CHECKPOINTED = {"activation_checkpointing": "full"}


def hf_configs() -> dict[str, Any]:
    return {
        "llama": transformers.LlamaConfig(**TEXT, num_hidden_layers=4, tie_word_embeddings=True),
        "qwen3": transformers.Qwen3Config(**TEXT, head_dim=8, use_sliding_window=True, sliding_window=4,
                                          num_hidden_layers=2, max_window_layers=1),
        "vit": transformers.ViTConfig(**SMALL, num_hidden_layers=2, image_size=IMAGE, patch_size=4, num_labels=CLASSES),
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with one saved model per name."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in hf_configs().items():
        torch.manual_seed(3)
        model = getattr(transformers, CLASS_OF[TASKS[name]]).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
    return folder


def cell_of(model: str, strategy: dict[str, Any], ranks: int = 4, **fields: Any) -> Cell:
    """The cell whose layout and batches are those of ``model``."""
    return Cell(ranks, "gpt" if TASKS[model] == "causal_lm" else "vit", strategy=strategy, **fields)


def config_of(cell: Cell, model: str, saved: Path) -> Config:
    if model == "custom":
        args = {"pretrained_model_name_or_path": str(saved / "llama")}
        target = "transformers.AutoModelForCausalLM.from_pretrained"
        return replace(cell.config(), model=CustomModelConfig(_target_=target, args=args))
    return replace(cell.config(), model=HFModelConfig(name_or_path=str(saved / model), task=TASKS[model]))


def bare_loop(model: str, saved: Path, z_loss: float = 0.0) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """Trains with transformers alone; returns the losses and the weights after the last step."""
    auto = getattr(transformers, CLASS_OF[TASKS[model]])
    module = auto.from_pretrained(saved / model, dtype=torch.float32).double().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, eps=EPS)
    losses = []
    for step in range(STEPS):
        inputs, targets = global_batch(cell_of(model, {}), step)
        optimizer.zero_grad()
        logits = module(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        if z_loss:
            loss = loss + z_loss * logits.logsumexp(-1)[targets != IGNORED].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return tuple(losses), {name: parameter.detach() for name, parameter in module.named_parameters()}


def train(rank: int, world_size: int, cases: list[tuple[str, Cell]], saved: Path) -> list[Any]:
    """Trains each case; returns the losses and the weights in transformers' names."""
    transformers.logging.disable_progress_bar()  # it would leave a thread behind
    return [_train(rank, model, cell, saved) for model, cell in cases]


def _train(rank: int, model: str, cell: Cell, saved: Path) -> Any:
    mesh = mesh_of(cell, rank)
    engine = build_engine(config_of(cell, model, saved), mesh)
    parameters = engine.named_parameters()
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=LR, eps=EPS)
    losses = []
    for step in range(STEPS):
        batch = local_batch(cell, mesh.layout, mesh.dp_rank, step)
        losses.append(engine.reduce(engine.train_step(step, batch)).loss)
        optimizer.step()
    found = {hf_name(name): whole(value.detach()).numpy() for name, value in parameters.items()}
    return tuple(losses), found


def cases() -> dict[str, list[tuple[str, Cell]]]:
    """In the short form each model has one layout of two ranks."""
    long = {"llama": [*SPLITS, *PIPELINES], "qwen3": [*SPLITS, *PIPELINES], "vit": SPLITS}
    stages = {"pp": 2, "schedule": "1f1b"}
    zero2, zero3 = ({"dp": 2, "data_parallel": kind} for kind in ("zero2", "zero3"))
    return {
        "short": [
            ("llama", cell_of("llama", stages, 2, batch={"micro_batches": 2}, train={"loss_chunks": 2})),
            ("qwen3", cell_of("qwen3", zero3, 2, train=CHECKPOINTED)),
            ("vit", cell_of("vit", zero2, 2, batch={"micro_batches": 2})),
        ],
        "every": [*in_pairs(long), *((model, cell_of(model, SPLITS[3], train=CHECKPOINTED)) for model in TASKS)],
    }


def in_pairs(splits: dict[str, list[dict[str, Any]]]) -> list[tuple[str, Cell]]:
    """Returns each model with its cells: four micro-batches in pipelines, and two for what ZeRO and DDP accumulate.

    Every other decoder computes its loss in chunks.
    """
    found = []
    for model, its in splits.items():
        for number, split in enumerate(its):
            batch = {} if split in (SPLITS[0], SPLITS[4]) else {"micro_batches": 4 if "pp" in split else 2}
            keys = {"loss_chunks": 2} if number % 2 and TASKS[model] == "causal_lm" else {}
            found.append((model, cell_of(model, split, batch=batch, train=keys)))
    return found


def files_read(rank: int, world_size: int, cell: Cell, saved: Path, lora: int | None) -> tuple[int, dict[str, Any]]:
    """The number of tensors that a rank reads, and its first weights."""
    config = config_of(cell, "llama", saved)
    config = replace(config, model=replace(config.model, lora=LoraConfig(rank=lora)))
    with mock.patch.object(WeightFiles, "read", autospec=True, side_effect=WeightFiles.read) as read:
        engine = build_engine(config, mesh_of(cell, rank))
    weights = {hf_name(name): whole(value.detach()).numpy() for name, value in engine.named_parameters().items()}
    return read.call_count, weights


@pytest.mark.long_form(15)
@pytest.mark.parametrize(
    ("strategy", "lora"),
    [(SPLITS[0], None), (PIPELINES[0], None), (SPLITS[0], 2), (SPLITS[4], None)],
    ids=["dp", "stages", "adapters", "hsdp"],
)
def test_one_replica_reads_the_files(strategy: dict[str, Any], lora: int | None, saved: Path) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(saved / "llama", dtype=torch.float32).state_dict()
    found = run_on_world(4, files_read, cell_of("llama", strategy), saved, lora, imports=HUGGING_FACE)
    readers = strategy.get("pp", strategy.get("shard", 1))
    assert sum(count > 0 for count, _ in found) == readers, [count for count, _ in found]
    for _, weights in found if lora is None else ():
        assert weights and error({name: torch.from_numpy(one) for name, one in weights.items()}, expected) == 0


@pytest.mark.long_form(140, cases=["every"])
@pytest.mark.parametrize("form", ["short", "every"])
def test_every_layout_trains_as_a_bare_loop_of_transformers(form: str, saved: Path) -> None:
    chosen = cases()[form]
    expected = {model: bare_loop(model, saved) for model in TASKS}
    ranks = run_on_world(chosen[0][1].world_size, train, chosen, saved, timeout=250, imports=HUGGING_FACE)
    for (model, cell), *results in zip(chosen, *ranks, strict=True):
        losses, parameters = expected[model]
        for found_losses, found in results:
            assert relative(found_losses, losses) < 1e-10, (model, cell)
            tensors = {name: torch.from_numpy(value) for name, value in found.items()}
            assert error(tensors, parameters) < 1e-10, (model, cell)
        assert {name for _, found in results for name in found} == set(parameters), (model, cell)


@pytest.mark.long_form(25)
def test_blocks_of_a_plain_module_train_as_one_process(saved: Path) -> None:
    """A class of transformers as ``model=custom``: sharded by its blocks, recomputed, offloaded, or as one group."""
    splits = SPLITS[1:5] if LONG else SPLITS[3:5]
    chosen = [("custom", cell_of("llama", split, batch={"micro_batches": 2})) for split in splits]
    chosen += [("custom", cell_of("llama", SPLITS[3] | {"offload": "all"}, train={"activation_checkpointing": "ops"}))]
    losses, parameters = bare_loop("llama", saved)
    for (_, cell), *results in zip(chosen, *run_on_world(4, train, chosen, saved, imports=HUGGING_FACE), strict=True):
        for found_losses, found in results:
            assert relative(found_losses, losses) < 1e-10, cell
            tensors = {name: torch.from_numpy(value) for name, value in found.items()}
            assert error(tensors, parameters) < 1e-10, cell


@pytest.mark.long_form(10)  # tests/parallel/test_loss.py has native models
def test_a_decoder_has_the_z_loss_of_a_bare_loop(saved: Path) -> None:
    train_keys: list[dict[str, Any]] = [
        {"z_loss": 0.3, "loss_chunks": 2},
        {"z_loss": 0.3, "loss_chunks": 1} | CHECKPOINTED,
    ]
    splits = [SPLITS[3], PIPELINES[2]]
    chosen = [
        ("llama", cell_of("llama", split, batch={"micro_batches": 4 if "pp" in split else 1}, train=keys))
        for split, keys in zip(splits, train_keys, strict=True)
    ]
    losses, parameters = bare_loop("llama", saved, 0.3)
    for case, *results in zip(chosen, *run_on_world(4, train, chosen, saved, imports=HUGGING_FACE), strict=True):
        for found_losses, found in results:
            assert relative(found_losses, losses) < 1e-10, case
            assert error({name: torch.from_numpy(value) for name, value in found.items()}, parameters) < 1e-10, case


BUFFERS = 1024  # bytes
WIDE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 4}
NATIVE = GPTConfig(vocab_size=64, dim=64, ffn_dim=160, n_layers=6, n_heads=4, n_kv_heads=4, norm_eps=1e-6)


def peaks(rank: int, world_size: int, models: list[Any]) -> list[tuple[int, int, int]]:
    """The bytes of a rank's parameters, of what the build created at a time, and of the peak of a step, per model."""
    found = []
    cell = Cell(4, strategy={"dp": 4, "data_parallel": "zero3"}, precision="fp32", batch={"global_size": 4})
    mesh = mesh_of(cell, rank)
    for model in models:
        with PeakMemory() as building:
            engine = build_engine(replace(cell.config(), model=model), mesh)
        parameters = engine.named_parameters().values()
        own = sum(value.to_local().nbytes for value in parameters)  # type: ignore[attr-defined]
        engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))  # it also creates what stays
        with PeakMemory() as training:
            engine.train_step(1, local_batch(cell, mesh.layout, mesh.dp_rank, 1))
        found.append((own, building.peak, training.peak))
    return found


class TextOf(torch.nn.Module):
    """Returns the logits of a language model."""

    def __init__(self, language_model: torch.nn.Module) -> None:
        super().__init__()
        self.language_model = language_model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.language_model(tokens, use_cache=False).logits


def plain_blocks() -> torch.nn.Module:
    """A module without parts whose blocks are found by their repetition."""
    return TextOf(transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)))


@pytest.mark.long_form(15)
def test_zero3_shards_a_model_of_transformers_as_a_native_one(tmp_path: Path) -> None:
    """A plain module is sharded in the same way, and only rank 0 builds its values; as one group it is not."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).save_pretrained(tmp_path)
    decoder = HFModelConfig(name_or_path=str(tmp_path), task="causal_lm")
    plain = CustomModelConfig(_target_="tests.parallel.test_hf.plain_blocks")
    one_group = CustomModelConfig(_target_="tests.parallel.test_hf.plain_blocks", wrap=[])
    largest = 64 * 160 * 4  # bytes of the largest parameter
    models = [NATIVE, decoder, plain, one_group]
    for rank, found in enumerate(run_on_world(4, peaks, models, imports=HUGGING_FACE)):
        (own, building, training), of_decoder, of_plain, of_one_group = found
        assert building < own + 2 * largest + BUFFERS
        assert of_decoder[0] == of_plain[0] == own, "each rank holds the same share of the parameters"
        assert of_decoder[1] < own + 2 * largest + BUFFERS, "a rank reads only its shards"
        assert rank == 0 or of_plain[1] < own + 2 * largest + BUFFERS, "only rank 0 builds the values of a plain module"
        assert of_decoder[2] < 1.1 * training
        assert of_plain[2] < 1.1 * training
        assert of_one_group[2] > 1.5 * training
