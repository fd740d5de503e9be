"""Adapters train under every layout as a bare loop of peft does; checkpoints and exports contain nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hpc_train.checkpoint.listing import choose, verified_manifest
from hpc_train.checkpoint.manager import CheckpointManager
from hpc_train.checkpoint.reader import StoredTensors
from hpc_train.checkpoint.run_store import RunStore
from hpc_train.checkpoint.transfer import export_hf, export_merged
from hpc_train.config.schema import Config, HFModelConfig, LoraConfig, OptimConfig, PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.layout.sizes import parameter_count, per_parameter
from hpc_train.models import counting
from hpc_train.models.build import build_model
from hpc_train.models.hf.family import hf_name
from hpc_train.models.hf.lora import BASE, MergedWeights, exported_name
from hpc_train.models.hf.nf4 import pack, pairs_of_levels, unpack
from hpc_train.models.hf.sizes import quantized_parameters, trained_parameters
from hpc_train.parallel import parallelize
from hpc_train.parallel.build import build_engine
from hpc_train.parallel.engine import Engine
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.parallelize import materialize
from hpc_train.parallel.precision.dtypes import set_hidden_dtype, set_parameter_dtypes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.train.optimizers.optimizer import Optimizer
from tests.parallel.cells import CLASSES, IMAGE, SEQUENCE, VOCABULARY, Cell
from tests.parallel.oracle import error, global_batch, local_batch, mesh_of, relative, whole
from tests.ranks import run_on_world
from tests.warm_parents import HUGGING_FACE

transformers = pytest.importorskip("transformers")
# The functions import peft: every process that collects the tests would take two seconds for it.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

CPU = torch.device("cpu")
STEPS, MIDDLE, LR, MAX_NORM, SEED = 4, 2, 1e-2, 0.05, 3
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SMALL, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 2 * SEQUENCE}
TASKS = {"llama": "causal_lm", "vit": "image_classification", "qwen3_moe": "causal_lm", "nf4": "causal_lm"}
CLASS_OF = {"causal_lm": "AutoModelForCausalLM", "image_classification": "AutoModelForImageClassification"}
LORA = LoraConfig(rank=3, alpha=6)
WIDE = {"hidden_size": 192, "intermediate_size": 400}  # several groups of quantized weights, the last one not full
THEIRS = {
    "llama": {"target_modules": "all-linear"},
    "nf4": {"target_modules": "all-linear"},
    "vit": {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"],
        "modules_to_save": ["classifier"],
    },
    "qwen3_moe": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}
ZERO3 = {"dp": 4, "data_parallel": "zero3"}
HSDP = ZERO3 | {"shard": 2}
ON_TWO = ZERO3 | {"dp": 2}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the base models."""
    folder = tmp_path_factory.mktemp("models")
    configs = {
        "llama": transformers.LlamaConfig(**TEXT, tie_word_embeddings=True),
        "nf4": transformers.LlamaConfig(**TEXT | WIDE, tie_word_embeddings=False),
        "vit": transformers.ViTConfig(**SMALL, image_size=IMAGE, patch_size=4, num_labels=CLASSES),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **TEXT, head_dim=4, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(3)
        getattr(transformers, CLASS_OF[TASKS[name]]).from_config(config).save_pretrained(folder / name)
    return folder


def cell_of(model: str, strategy: dict[str, Any], **fields: Any) -> Cell:
    return Cell(strategy.get("dp", 4), "gpt" if TASKS[model] == "causal_lm" else "vit", strategy=strategy, **fields)


def model_of(model: str, saved: Path) -> HFModelConfig:
    config = {"experts_implementation": "eager"} if model == "qwen3_moe" else {}  # the default has no kernel for fp64
    lora = replace(LORA, base="nf4" if model == "nf4" else "compute")
    return HFModelConfig(name_or_path=str(saved / model), task=TASKS[model], lora=lora, config=config)


def config_of(model: str, cell: Cell, saved: Path) -> Config:
    return replace(cell.config(), model=model_of(model, saved), optim=OptimConfig(weight_decay=0.0, betas=[0.9, 0.999]))


def base(model: str, saved: Path) -> Any:
    options = model_of(model, saved).config
    loaded = getattr(transformers, CLASS_OF[TASKS[model]]).from_pretrained(saved / model, **options)
    if model == "nf4":
        round_to_nf4(loaded.model)
    return loaded.double()


@torch.no_grad()
def round_to_nf4(body: torch.nn.Module) -> None:
    """Replaces the weights of linear layers by the weights that four bits hold."""
    for part in body.modules():
        if isinstance(part, torch.nn.Linear):
            shape = part.out_features, part.in_features
            part.weight.copy_(unpack(pack(part.weight.flatten()), pairs_of_levels(CPU), shape, torch.float32))


def bare_model(model: str, saved: Path) -> Any:
    """The model of peft with the first values that ours draws for the adapters."""
    import peft

    theirs = peft.get_peft_model(base(model, saved), peft.LoraConfig(r=3, lora_alpha=6, **THEIRS[model])).double()
    ours = build_model(model_of(model, saved), SEED)
    materialize(ours, torch.device("cpu"), SEED, torch.float64)  # type: ignore[arg-type]
    first = {exported_name(hf_name(n)): p.detach() for n, p in ours.named_parameters() if p.requires_grad}
    peft.set_peft_model_state_dict(theirs, first)
    assert set(first) == set(peft.get_peft_model_state_dict(theirs))
    return theirs.train()


def bare_loop(model: str, saved: Path) -> tuple[Any, tuple[float, ...], tuple[float, ...]]:
    """Trains with peft alone; returns the model, the losses and the gradient norms."""
    module = bare_model(model, saved)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = global_batch(cell_of(model, {}), step)
        optimizer.zero_grad()
        logits = module(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return module, tuple(losses), tuple(norms)


class Trained:
    """The engine and optimizer of one rank, and what its steps have given."""

    def __init__(self, config: Config, mesh: Mesh, cell: Cell) -> None:
        self.engine: Engine = build_engine(config, mesh)
        self.optimizer = Optimizer(config.optim, self.engine.named_parameters())
        self._mesh, self._cell = mesh, cell
        self.losses: list[float] = []
        self.norms: list[float] = []

    def steps(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            batch = local_batch(self._cell, self._mesh.layout, self._mesh.dp_rank, step)
            self.losses.append(self.engine.reduce(self.engine.train_step(step, batch)).loss)
            norm = self.engine.clip_grad_norm_(MAX_NORM)
            self.norms.append(norm.item())
            self.optimizer.step(LR, norm.isfinite())

    def found(self) -> tuple[tuple[float, ...], tuple[float, ...], dict[str, Any]]:
        every = [parameter for part in self.engine.parts for parameter in part.parameters()]
        assert all(parameter.grad is None for parameter in every if not parameter.requires_grad)
        parameters = self.engine.named_parameters()
        assert set(self.optimizer.named_state()) == set(parameters), "only adapters have state"
        weights = {exported_name(hf_name(name)): whole(value.detach()).numpy() for name, value in parameters.items()}
        return tuple(self.losses), tuple(self.norms), weights


def train(rank: int, world_size: int, cases: list[tuple[str, Cell]], saved: Path, folder: Path) -> list[Any]:
    """Trains each case; then a run that saves its checkpoint under ZeRO and resumes from it under HSDP or DDP."""
    transformers.logging.disable_progress_bar()  # it would leave a thread behind
    found = []
    for model, cell in cases:
        trained = Trained(config_of(model, cell, saved), mesh_of(cell, rank), cell)
        trained.steps(0, STEPS)
        found.append(trained.found())
    splits = (ZERO3, HSDP) if world_size == 4 else (ON_TWO, {"dp": 2})
    for model in RESUMED:
        found.append(resumed(model, rank, saved, folder / model, *(cell_of(model, split) for split in splits)))
    return found


def manager_of(trained: Trained, config: Config, mesh: Mesh, folder: Path) -> CheckpointManager:
    run = RunDirectory(folder)
    run.create()
    events = EventLog.open(run, f"rank-{mesh.rank}", 0, mesh.rank)
    store = RunStore(run, config, events, mesh.control)
    return CheckpointManager(store, trained.engine, trained.optimizer, mesh, mesh.layout.world_size)


def resumed(model: str, rank: int, saved: Path, folder: Path, before: Cell, after: Cell) -> Any:
    config, mesh = config_of(model, before, saved), mesh_of(before, rank)
    first = Trained(config, mesh, before)
    first.steps(0, MIDDLE)
    manager_of(first, config, mesh, folder).save(MIDDLE, {"tokens": 0}, final=True)
    config, mesh = config_of(model, after, saved), mesh_of(after, rank)
    second = Trained(config, mesh, after)
    restored = manager_of(second, config, mesh, folder).restore()
    assert restored is not None and restored.step == MIDDLE
    second.losses, second.norms = first.losses, first.norms
    second.steps(MIDDLE, STEPS)
    manager_of(second, config, mesh, folder).save(STEPS, {"tokens": 0}, final=True)
    other = replace(config, model=replace(config.model, name_or_path=str(saved / "vit")))
    with pytest.raises(UserError, match=r"trained on another base model: config\.json, model\.safetensors of"):
        manager_of(second, other, mesh, folder).restore()
    lora = replace(config.model.lora, base="compute" if model == "nf4" else "nf4")
    other = replace(config, model=replace(config.model, lora=lora))
    with pytest.raises(UserError, match=r"trained on another base model: model\.lora\.base of"):
        manager_of(second, other, mesh, folder).restore()
    return second.found()


def cases() -> list[tuple[str, Cell]]:
    accumulated = {"batch": {"micro_batches": 2}}
    checkpointed = {"train": {"activation_checkpointing": "full"}}
    return [
        ("llama", cell_of("llama", {"dp": 4})),
        ("llama", cell_of("llama", {"dp": 4, "data_parallel": "allreduce"}, **accumulated)),
        ("llama", cell_of("llama", {"dp": 4, "data_parallel": "zero1"}, **accumulated)),
        ("llama", cell_of("llama", {"dp": 4, "data_parallel": "zero2"}, **accumulated)),
        ("llama", cell_of("llama", ZERO3, **checkpointed)),
        ("vit", cell_of("vit", ZERO3, **accumulated)),
        ("vit", cell_of("vit", HSDP)),
        ("qwen3_moe", cell_of("qwen3_moe", {"dp": 4, "data_parallel": "allreduce"}, **accumulated)),
        ("qwen3_moe", cell_of("qwen3_moe", ZERO3, **checkpointed)),
        ("nf4", cell_of("nf4", {"dp": 4})),
        ("nf4", cell_of("nf4", {"dp": 4, "data_parallel": "allreduce"}, **accumulated)),
        ("nf4", cell_of("nf4", {"dp": 4, "data_parallel": "zero1"}, **accumulated)),
        ("nf4", cell_of("nf4", {"dp": 4, "data_parallel": "zero2"}, **accumulated)),
        ("nf4", cell_of("nf4", ZERO3, **checkpointed)),
        ("nf4", cell_of("nf4", HSDP)),
    ]


SHORT = [("vit", cell_of("vit", ON_TWO, batch={"micro_batches": 2}))]  # and decoders that resume
RESUMED = ("llama", "nf4")


@pytest.mark.long_form(22, cases=["short"], every_share=True)  # test_hf.py compares the layouts without adapters
@pytest.mark.long_form(35, cases=["every"])
@pytest.mark.parametrize("chosen", [SHORT, cases()], ids=["short", "every"])
def test_every_layout_trains_as_a_bare_loop_of_peft(
    chosen: list[tuple[str, Cell]], saved: Path, tmp_path: Path
) -> None:
    """And so does a run resumed under another layout, whose checkpoint has only adapters, and loads with peft."""
    import peft

    expected = {model: bare_loop(model, saved) for model in TASKS}
    ranks = run_on_world(chosen[0][1].world_size, train, chosen, saved, tmp_path / "run", imports=HUGGING_FACE)
    for (model, cell), *results in zip([*chosen, *((each, "resumed") for each in RESUMED)], *ranks, strict=True):
        module, losses, norms = expected[model]
        parameters = peft.get_peft_model_state_dict(module)
        for found_losses, found_norms, found in results:
            assert relative(found_losses, losses) < 1e-10, (model, cell)
            assert relative(found_norms, norms) < 1e-10, (model, cell)
            assert set(found) == set(parameters), (model, cell)
            tensors = {name: torch.from_numpy(value) for name, value in found.items()}
            assert error(tensors, parameters) < 1e-10, (model, cell)
    for model in RESUMED:
        run = RunDirectory(tmp_path / "run" / model)
        check_checkpoint(model, run, expected[model][0], saved, tmp_path / model)


def check_checkpoint(model: str, run: RunDirectory, trained: Any, saved: Path, to: Path) -> None:
    """Compares the newest checkpoint of ``run`` and its export with the model that peft has trained."""
    import peft

    checkpoint = choose(run, STEPS)
    manifest = verified_manifest(checkpoint, lambda _: None)
    expected = {"config.json", "model.safetensors"} | ({"model.lora.base"} if model == "nf4" else set())
    assert set(manifest.extra[BASE]) == expected
    stored, config = StoredTensors(checkpoint.path, manifest), model_of(model, saved)
    assert stored.model() and all(".lora_" in name for name in stored.shapes)
    assert sum(torch.Size(shape.shape).numel() for shape in stored.model().values()) == trained_parameters(config)
    export_hf(stored, config, to, positions=SEQUENCE, dtype=None, advance=lambda _: None)
    assert json.loads((to / "adapter_config.json").read_text())["base_model_name_or_path"] == str(saved / model)
    assert (to / "adapter_model.safetensors").exists() and not (to / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(base(model, saved), to).eval()
    tokens, logits = global_batch(cell_of(model, {}), STEPS)[0], dict[str, Tensor]()
    with torch.no_grad():
        logits = {name: each(tokens).logits for name, each in (("loaded", loaded), ("trained", trained.eval()))}
        plain = base(model, saved)(tokens).logits
    torch.testing.assert_close(logits["loaded"], logits["trained"], rtol=0, atol=1e-10)
    assert (plain - logits["loaded"]).abs().max() > 1e-3, "the adapter changes the function"
    merged = to.with_name(f"{to.name}-merged")
    export_merged(stored, config, merged, extra=manifest.extra, dtype=torch.float64, advance=lambda _: None)
    whole_model = transformers.AutoModelForCausalLM.from_pretrained(merged).double()
    torch.testing.assert_close(whole_model(tokens).logits, logits["trained"], rtol=0, atol=1e-5)
    assert names_in(merged) == names_in(saved / model)


@pytest.mark.long_form(9)  # the short form of test_hf.py packs and unpacks; merging itself is a sum
@pytest.mark.parametrize("model", ["vit", "qwen3_moe", "nf4"])
def test_merged_files_are_those_of_peft(model: str, saved: Path, tmp_path: Path) -> None:
    """Also of a mixture, whose experts are separate tensors in files, and of a classifier that trains in full."""
    import peft

    theirs = peft.get_peft_model(base(model, saved).float(), peft.LoraConfig(r=3, lora_alpha=6, **THEIRS[model]))
    torch.manual_seed(5)
    state = {name: torch.randn_like(value) for name, value in peft.get_peft_model_state_dict(theirs).items()}
    peft.set_peft_model_state_dict(theirs, state)
    config = model_of(model, saved)
    whole_model: Any = replace(config, lora=LoraConfig())
    nothing: Any = None
    with pytest.raises(UserError, match="the model has no adapters"):
        export_merged(nothing, whole_model, tmp_path, extra={}, dtype=None, advance=lambda _: None)
    names = [name for name, value in build_model(config, SEED).named_parameters() if value.requires_grad]
    trained = {hf_name(name): state[exported_name(hf_name(name))] for name in names}
    for file, tensors in MergedWeights(config, trained, trained.__getitem__, None).files():
        save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    assert names_in(tmp_path) == names_in(saved / model)
    (tmp_path / "config.json").write_text((saved / model / "config.json").read_text())
    loaded = getattr(transformers, CLASS_OF[TASKS[model]]).from_pretrained(tmp_path)
    expected = theirs.merge_and_unload().state_dict()
    assert expected.keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {*file.keys()}


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.mark.long_form(8)  # imports peft; the short form of test_masters.py has the dtypes of other frozen weights
def test_the_base_of_8_billion_parameters_takes_16_gb_or_6_in_nf4(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for precision, base, gigabytes in (("fp32", "compute", 32.1), ("bf16", "compute", 16.1), ("bf16", "nf4", 5.7)):
        lora = LoraConfig(rank=16, base=base)
        model = HFModelConfig(name_or_path=str(tmp_path), task="causal_lm", pretrained=False, lora=lora)
        built: Any = build_model(model, SEED)
        sharded = Cell(8, strategy=ZERO3 | {"dp": 8})
        set_hidden_dtype(built, PrecisionConfig(name=precision))
        set_parameter_dtypes(built, PrecisionConfig(name=precision), is_sharded=False)
        held = dict.fromkeys((True, False), 0)
        for parameter in built.parameters():
            held[parameter.requires_grad] += parameter.nbytes
        assert held[False] == pytest.approx(gigabytes * 1e9, rel=0.01)
        assert base == "compute" or sum(held.values()) < 6e9
        for cell in (Cell(1), sharded):
            config = replace(cell.config(), model=model, precision=PrecisionConfig(name=precision))
            layout = cell.layout()
            estimated = per_parameter(config, layout).held * (parameter_count(model) or 0) * layout.shard
            assert estimated == pytest.approx(sum(held.values()), rel=0.01)


@pytest.mark.long_form(8)  # the short form of test_traced.py counts frozen weights in bf16
def test_a_base_in_four_bits_has_the_counts_of_its_family(saved: Path) -> None:
    config = config_of("nf4", cell_of("nf4", {"dp": 1}), saved)
    blocks = counting.count(config).blocks
    assert sum(block.parameters for block in blocks) == parameter_count(config.model)
    assert sum(block.trained for block in blocks) == trained_parameters(config.model)
    quantized = sum(block.quantized for block in blocks)
    assert quantized == quantized_parameters(config.model) == 2 * (2 * 192 * (192 + 96) + 3 * 192 * 400)


def in_both_dtypes(rank: int, world_size: int, saved: Path) -> list[float]:
    """Returns the differences of the gradients from those with a base in fp32, under several layouts."""
    found = []
    for model, strategy in (("llama", {"dp": 2}), ("llama", ON_TWO), ("vit", ON_TWO | {"data_parallel": "zero1"})):
        cell = cell_of(model, strategy, precision="bf16")
        gradients = []
        for held in (torch.bfloat16, torch.float32):
            convert: Any = set_parameter_dtypes
            if held == torch.float32:
                convert = partial(in_fp32, set_parameter_dtypes)
            mesh = mesh_of(cell, rank)
            with mock.patch.object(parallelize, "set_parameter_dtypes", convert):
                engine = build_engine(config_of(model, cell, saved), mesh)
            base = [value for part in engine.parts for value in part.parameters() if not value.requires_grad]
            assert max(base, key=Tensor.numel).dtype == held
            engine.train_step(0, local_batch(cell, mesh.layout, mesh.dp_rank, 0))
            gradients.append({name: whole(value.grad) for name, value in engine.named_parameters().items()})
        found.append(error(*gradients))
    return found


def in_fp32(convert: Any, model: Any, precision: PrecisionConfig, *others: Any) -> None:
    convert(model, PrecisionConfig(name="fp32"), *others)


@pytest.mark.long_form(15)  # the short form of test_masters.py compares frozen weights of other modules
def test_a_base_in_bf16_gives_the_gradients_of_fp32(saved: Path) -> None:
    for found in run_on_world(2, in_both_dtypes, saved, imports=HUGGING_FACE):
        assert found == [0.0, 0.0, 0.0]
