"""Models of transformers: the same function in the parts of a ``Model``, values read in pieces or drawn, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpc_train.checkpoint.listing import choose, verified_manifest
from hpc_train.checkpoint.reader import StoredTensors
from hpc_train.checkpoint.transfer import export_hf
from hpc_train.config.schema import (
    Config,
    CustomModelConfig,
    GPTConfig,
    HFModelConfig,
    LoraConfig,
    SyntheticDataConfig,
)
from hpc_train.errors import UserError
from hpc_train.layout.memory import estimate, state_bytes
from hpc_train.layout.sizes import NF4_BYTES, parameter_count, sizes_of
from hpc_train.layout.validate import validate
from hpc_train.models.build import build_model
from hpc_train.models.hf import family, sizes
from hpc_train.models.hf.decoder import HFDecoder
from hpc_train.models.hf.lora import AdapterValues
from hpc_train.models.hf.nf4 import GROUP, LEVELS, ROW, NF4Linear, pack, pairs_of_levels, unpack
from hpc_train.models.hf.pretrained import WeightFiles
from hpc_train.models.wrapped import WrappedModel, find_blocks
from hpc_train.parallel.parallelize import materialize
from hpc_train.run.directory import RunDirectory
from tests.checkpoint.made import commit
from tests.parallel.strangers import Nested

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**TEXT, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**TEXT, **WINDOW),
    "qwen3": lambda: transformers.Qwen3Config(**TEXT, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**TEXT, sliding_window=4),
    "gemma": lambda: transformers.GemmaConfig(**TEXT, head_dim=8),
    "gemma2": lambda: transformers.Gemma2Config(**TEXT, head_dim=8, sliding_window=4),
}
OTHERS = {
    "vit": (lambda: transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=5), "image_classification"),
    "bert": (lambda: transformers.BertConfig(**SMALL, vocab_size=32), "masked_lm"),
    "gpt2": (lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=32), "causal_lm"),
    "llama": (lambda: transformers.LlamaConfig(**{**TEXT, "pad_token_id": 0}), "sequence_classification"),
    "resnet": (
        lambda: transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
        "image_classification",
    ),
}
AUTO = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}


def saved(config: Any, task: str, folder: Path) -> Any:
    """Saves a model with random values in ``folder`` and returns it in fp64."""
    torch.manual_seed(1)
    model = getattr(transformers, AUTO[task]).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.double().eval()


def loaded(folder: Path, task: str, dtype: torch.dtype = torch.float64, **keys: Any) -> Any:
    """Builds our model on ``meta`` and gives it its values."""
    model: Any = build_model(HFModelConfig(name_or_path=str(folder), task=task, **keys), 0)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialize(model, torch.device("cpu"), 5, dtype)
    return model.eval()


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_in_three_parts_computes_the_same(kind: str, tmp_path: Path) -> None:
    theirs = saved(DECODERS[kind](), "causal_lm", tmp_path)
    ours = loaded(tmp_path, "causal_lm")
    assert isinstance(ours, HFDecoder)
    tokens = torch.randint(32, (2, 12))
    assert torch.equal(ours(tokens, {}), theirs(tokens).logits)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]] * 2)
    documents = torch.tensor([[0] * 7 + [1] * 5] * 2)
    packed = ours(tokens, {"positions": positions, "document_ids": documents})
    apart = torch.cat((theirs(tokens[:, :7]).logits, theirs(tokens[:, 7:]).logits), 1)
    # Gemma 2 computes norms and softmax in fp32, whose rounding depends on the processor
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-6)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 9:] = 0
    torch.testing.assert_close(ours(tokens, {"attention_mask": mask})[0, :9], theirs(tokens[:, :9]).logits[0])
    known = HFModelConfig(name_or_path=str(tmp_path), task="causal_lm")
    assert sizes.parameters(known) == sum(parameter.numel() for parameter in theirs.parameters())
    assert {family.hf_name(name) for name, _ in ours.named_parameters()} == dict(theirs.named_parameters()).keys()


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_model_is_read_in_pieces(kind: str, tmp_path: Path) -> None:
    make, task = OTHERS[kind]
    theirs = saved(make(), task, tmp_path)
    ours = loaded(tmp_path, task)
    assert isinstance(ours, WrappedModel) and len(ours.block_names) >= 2
    inputs = torch.randn(2, 3, 8, 8, dtype=torch.float64) if task[:5] == "image" else torch.randint(1, 32, (2, 6))
    assert torch.equal(ours(inputs, {}), theirs(inputs).logits)
    known = parameter_count(HFModelConfig(name_or_path=str(tmp_path), task=task))
    assert known in (None, sum(parameter.numel() for parameter in theirs.parameters()))
    assert (known is None) == (kind in ("gpt2", "resnet"))


def test_values_are_drawn_as_transformers_does(tmp_path: Path) -> None:
    """One parameter at a time, so that they do not depend on the others, with the overrides of the config."""
    DECODERS["gemma"]().save_pretrained(tmp_path)
    config = {"num_hidden_layers": 3, "hidden_size": 64}
    ours = loaded(tmp_path, "causal_lm", pretrained=False, config=config)
    assert len(ours.layers) == 3
    weight = ours.layers["2"].block.mlp.up_proj.weight
    assert weight.std().item() == pytest.approx(0.02, rel=0.1) and not ours.head.norm.weight.any()
    smaller = loaded(tmp_path, "causal_lm", pretrained=False, config={**config, "num_hidden_layers": 1})
    assert torch.equal(smaller.layers["0"].block.mlp.up_proj.weight, ours.layers["0"].block.mlp.up_proj.weight)
    torch.testing.assert_close(ours.stem.embed_tokens.embed_scale.item(), 8.0)


def test_a_head_of_another_size_is_drawn_and_a_body_of_another_size_is_refused(tmp_path: Path) -> None:
    make, task = OTHERS["vit"]
    theirs = saved(make(), task, tmp_path)
    with pytest.warns(UserWarning, match="no values for classifier.weight"):
        ours = loaded(tmp_path, task, config={"num_labels": 7})
    parameters = dict(ours.named_parameters())
    assert parameters["classifier.weight"].shape == (7, 16)
    name = "vit.layers.1.mlp.fc1.weight"  # the files have an older name
    assert torch.equal(parameters[name], dict(theirs.named_parameters())[name])
    with pytest.raises(UserError, match="in the files, but"):
        loaded(tmp_path, task, config={"intermediate_size": 32})


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(transformers.MixtralConfig(**TEXT, num_local_experts=2), "causal_lm", tmp_path / "experts")
    monkeypatch.setattr("transformers.core_model_loading.MergeModulelist", type(None))  # as if it were another one
    with pytest.raises(UserError, match="must be converted for a MixtralForCausalLM"):
        loaded(tmp_path / "experts", "causal_lm")
    DECODERS["llama"]().save_pretrained(tmp_path / "bare")
    with pytest.raises(UserError, match="has neither model"):
        loaded(tmp_path / "bare", "causal_lm")
    with pytest.raises(UserError, match="transformers cannot build"):
        loaded(tmp_path / "bare", "image_classification", pretrained=False)
    (tmp_path / "bare" / "config.json").write_text("[]")
    with pytest.raises(UserError, match="is not a JSON object"):
        HFModelConfig(name_or_path=str(tmp_path / "bare"), task="causal_lm").n_layers  # noqa: B018


def config_of(folder: Path, task: str, **strategy: Any) -> Config:
    base = Config(model=HFModelConfig(name_or_path=str(folder), task=task), data=SyntheticDataConfig(vocab_size=32))
    base.train.steps = 1
    base.data.task = "images" if task == "image_classification" else "tokens"
    for key, value in strategy.items():
        setattr(base.strategy, key, value)
    return base


def test_what_cannot_run_is_refused_at_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **TEXT}))
    with pytest.raises(UserError, match="has neither model"):
        validate(config_of(tmp_path, "causal_lm"), 1, 1)
    (tmp_path / "model.safetensors").touch()
    assert validate(config_of(tmp_path, "causal_lm", pp=2), 1, 2).pp == 2
    wrapped = config_of(tmp_path, "causal_lm")
    wrapped.model.wrap = ["Qwen2DecoderLayer"]
    with pytest.raises(UserError, match="the blocks of a qwen2 are its layers"):
        validate(wrapped, 1, 1)
    with pytest.raises(UserError, match="task sequence_classification cannot be cut"):
        validate(config_of(tmp_path, "sequence_classification", pp=2), 1, 2)
    with pytest.raises(UserError, match="too few for 4 pipeline stages"):
        validate(config_of(tmp_path, "causal_lm", pp=4), 1, 4)
    larger = config_of(tmp_path, "causal_lm")
    larger.data.vocab_size = 33
    with pytest.raises(UserError, match="the data has 33 token ids, but the model has 32"):
        validate(larger, 1, 1)
    with pytest.raises(UserError, match="learns from images"):
        validate(replace(larger, model=HFModelConfig(name_or_path=str(tmp_path), task="image_classification")), 1, 1)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **TEXT}))
    with pytest.raises(UserError, match="type gpt2 cannot be cut"):
        validate(config_of(tmp_path, "causal_lm", pp=2), 1, 2)
    monkeypatch.setattr(family.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs transformers, which is not installed"):
        validate(config_of(tmp_path, "causal_lm"), 1, 1)


def test_what_cannot_have_adapters_is_refused_at_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **TEXT}))
    (tmp_path / "model.safetensors").touch()

    def refuse(match: str, pp: int = 1, **keys: Any) -> None:
        config = config_of(tmp_path, "causal_lm", pp=pp)
        config.model.lora = LoraConfig(rank=2, targets=keys.pop("targets", None))
        config.model = replace(config.model, **keys)
        with pytest.raises(UserError, match=match):
            validate(config, 1, pp)

    refuse("adapters .model.lora.rank. cannot be cut into pipeline stages", pp=2)
    refuse("model.pretrained is false", pretrained=False)
    refuse("query is not a linear layer of this model", targets=["q_proj", "query"])
    find = family.importlib.util.find_spec
    monkeypatch.setattr(family.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    refuse("needs peft, which is not installed here")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=2, targets=["nothing"]), "peft cannot add adapters"),
        (LoraConfig(rank=2, targets=["embed_tokens"]), "model.embed_tokens is an embedding"),
        (LoraConfig(rank=2, targets=["lm_head"]), "lm_head.weight is shared by two layers"),
        (LoraConfig(rank=2, modules_to_save=["head"]), "the model has no module head"),
        (LoraConfig(rank=2, base="nf4"), "GPT2LMHeadModel has no frozen torch.nn.Linear"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(lora: LoraConfig, message: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    if "GPT2" in message:
        make = OTHERS["gpt2"][0]
    else:
        make = DECODERS["llama" if "shared" in message else "qwen2"]
    make().save_pretrained(tmp_path)
    model = HFModelConfig(name_or_path=str(tmp_path), task="causal_lm", pretrained=False, lora=lora)
    with pytest.raises(UserError, match=message):
        build_model(model, 0)


def test_routers_and_experts_cannot_have_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    transformers.Qwen3MoeConfig(**TEXT, **experts, mlp_only_layers=[0]).save_pretrained(tmp_path)
    for targets, name in ((["q_proj", "gate"], "gate"), (["q_proj", "experts"], "experts"), (None, "mlp.experts")):
        lora = LoraConfig(rank=2, targets=targets)
        with pytest.raises(UserError, match=f"{name} is not a linear layer of this model; its routers") as refused:
            build_model(HFModelConfig(name_or_path=str(tmp_path), task="causal_lm", pretrained=False, lora=lora), 0)
        assert "q_proj" in refused.value.fix
    adapted = LoraConfig(rank=2, targets=["q_proj", "o_proj"])
    built = build_model(HFModelConfig(name_or_path=str(tmp_path), task="causal_lm", pretrained=False, lora=adapted), 0)
    owners = {name.partition(".lora_")[0] for name, value in built.named_parameters() if value.requires_grad}
    assert {owner.rpartition(".")[2] for owner in owners} == {"q_proj", "o_proj"}


def test_frozen_parameters_have_neither_gradients_nor_optimizer_state(tmp_path: Path) -> None:
    """The estimates count the parameters that train, here of some layers, and of a classifier."""
    pytest.importorskip("peft")
    DECODERS["llama"]().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    config = config_of(tmp_path, "causal_lm")
    whole, whole_state = estimate(config, validate(config, 1, 1)), state_bytes(config)
    config.model.lora = LoraConfig(rank=2, targets=["k_proj", "down_proj"])
    adapted = estimate(config, validate(config, 1, 1))
    bare = replace(config.model, pretrained=False)
    for model in (bare, replace(bare, task="sequence_classification", lora=LoraConfig(rank=3))):
        parameters = [*build_model(model, 0).parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        assert sizes.parameters(model) == sum(parameter.numel() for parameter in parameters)
        assert sizes.trained_parameters(model) == trained
    assert whole is not None and adapted is not None and whole_state is not None
    trained = sizes.trained_parameters(bare) or 0
    of_parameter = sizes_of(config, validate(config, 1, 1)).per_parameter
    gradients = of_parameter.whole * (sizes.parameters(bare) or 0)
    assert gradients == pytest.approx(4 * trained) and adapted.optimizer == pytest.approx(8 * trained)
    assert adapted.parameters > whole.parameters and state_bytes(config) == 12 * trained < whole_state / 10


def test_the_estimate_is_that_of_the_native_model_with_what_its_norms_keep(tmp_path: Path) -> None:
    """No kernel computes the norms of transformers, so they keep their results, too."""
    values: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    values["num_attention_heads"] = 4
    values |= {"num_key_value_heads": 2, "vocab_size": 32, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").touch()
    native = GPTConfig(vocab_size=32, n_layers=4, dim=64, n_heads=4, n_kv_heads=2, ffn_dim=96)
    for split in ({"dp": 2}, {"dp": 2, "data_parallel": "zero3"}, {"pp": 2}):
        ours = config_of(tmp_path, "causal_lm", **split)
        theirs = replace(ours, model=native)
        layout = validate(ours, 1, 2)
        kept, less = (sizes_of(each, layout).activations for each in (ours, theirs))
        results = layout.micro_size * ours.data.sequence_length * 2 * 64 * 4
        # rotary tables are counted for the native model only
        assert kept == replace(less, kept={**less.kept, "none": less.kept["none"] + results}, tables=0.0)
        assert sizes_of(ours, layout).parameters == sizes_of(theirs, layout).parameters
    assert sizes.flops_per_sample(ours.model, (8,)) == pytest.approx(
        build_model(native, 0).flops_per_sample(torch.empty(1, 8, device="meta")), rel=1e-3  # type: ignore[operator]
    )  # fmt: skip


@pytest.mark.parametrize("rank", [None, 2])
def test_operations_of_the_forward_pass_are_those_of_torchs_counter(rank: int | None, tmp_path: Path) -> None:
    """Also with adapters, where frozen weights have no gradients; the counter does not count norms."""
    sizes_ = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4, "attention_bias": False}
    transformers.LlamaConfig(**{**TEXT, **sizes_, "max_position_embeddings": 64}).save_pretrained(tmp_path)
    model = loaded(tmp_path, "causal_lm", torch.float32, pretrained=False, lora=LoraConfig(rank=rank))
    tokens = torch.randint(32, (1, 48))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, {})
    found = model.forward_flops(tokens)
    assert sum(found) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert len(found) == 4 and found[1] == found[2]


@pytest.mark.parametrize("kind", ["qwen2", "vit"])
def test_an_export_is_loaded_by_from_pretrained(kind: str, tmp_path: Path) -> None:
    make, task = OTHERS.get(kind, (DECODERS.get(kind), "causal_lm"))
    assert make is not None
    theirs = saved(make(), task, tmp_path / "model").float()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "model" / "tokenizer_config.json")
    config = HFModelConfig(name_or_path=str(tmp_path / "model"), task=task)
    run = RunDirectory(tmp_path / "run")
    ours = loaded(tmp_path / "model", task, torch.float32)
    commit(run, 3, {f"model.{name}": parameter.detach() for name, parameter in ours.named_parameters()})
    found = choose(run, None)
    stored = StoredTensors(found.path, verified_manifest(found, lambda _: None))
    export_hf(stored, config, tmp_path / "out", positions=8, dtype=None, advance=lambda _: None)
    back = getattr(transformers, AUTO[task]).from_pretrained(tmp_path / "out")
    assert type(back) is type(theirs)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter), name
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


class Block(nn.Linear):
    pass


class Encoder(nn.Module):
    """Two lists of blocks and a table that the last block shares."""

    def __init__(self, share: bool = False) -> None:
        super().__init__()
        self.table = nn.Linear(8, 8, bias=False)
        self.few = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.blocks = nn.ModuleList([nn.Sequential(Block(8, 8), nn.ReLU()) for _ in range(3)])
        self.mixed = nn.ModuleList([nn.Linear(80, 80), nn.ReLU()])
        if share:
            self.blocks[2][0].weight = self.table.weight  # type: ignore[index]

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def test_blocks_are_found_by_repetition_or_by_class() -> None:
    assert find_blocks(Encoder(), None) == ("blocks.0", "blocks.1", "blocks.2")
    assert find_blocks(Encoder(share=True), None) == ("blocks.0", "blocks.1")
    assert find_blocks(Encoder(), ["Block", "ReLU"][:1]) == ("blocks.0.0", "blocks.1.0", "blocks.2.0")
    assert find_blocks(Encoder(), []) == ()
    with pytest.raises(UserError, match="no module of class Nothing") as error:
        find_blocks(Encoder(), ["Nothing"])
    called = ("dicts.0.attention", "dicts.1.attention", "dicts.2.attention")
    assert find_blocks(Nested(), None) == called, "the elements of a list that have no forward are not blocks"
    lists = [f"lists.{number}.{part}" for number in (0, 1) for part in (0, 1)]
    assert find_blocks(Nested(), ["ModuleList"]) == (*lists, *called)
    assert "Block, Encoder, Linear" not in error.value.fix and "Block, Linear" in error.value.fix


def a_llama() -> nn.Module:
    module: nn.Module = transformers.LlamaForCausalLM(DECODERS["llama"]())
    return module


def test_a_model_of_transformers_is_a_custom_model_as_it_is() -> None:
    """Its logits are taken, and the names of the context are translated."""
    model = build_model(CustomModelConfig(_target_=f"{__name__}.a_llama"), 0)
    assert isinstance(model, WrappedModel) and model.block_names == ("model.layers.0", "model.layers.1")
    tokens = torch.randint(32, (2, 6))
    loss, count = model(tokens, {"attention_mask": torch.ones(2, 6)}, tokens)
    assert count.item() == 12 and loss.requires_grad and model(tokens, {}).shape == (2, 6, 32)


def test_the_config_needs_neither_torch_nor_transformers() -> None:
    code = "import sys; from hpc_train.models.hf import family; print(*(n in sys.modules for n in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "torch", "transformers"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


CPU = torch.device("cpu")


def test_four_bits_are_the_nearest_levels_of_each_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(150, 300) * torch.logspace(-4, 1, 150).unsqueeze(1)  # 2.7 groups
    weight[0, :64] = 0
    packed = pack(weight.flatten())
    assert packed.shape == (3, ROW) and pytest.approx(NF4_BYTES) == ROW / GROUP
    rounded = unpack(packed, pairs_of_levels(CPU), (150, 300), torch.float32)
    blocks, given = rounded.flatten()[: 2 * GROUP].view(2, 256, 64), weight.flatten()[: 2 * GROUP].view(2, 256, 64)
    largest = given.abs().amax(2)
    scales = packed[:2, GROUP // 2 : -4] * packed[:2, -4:].contiguous().view(torch.float32)
    step = largest.amax(1, keepdim=True) / 255
    assert ((scales - largest).abs() <= step * 0.501).logical_or(scales < 1.01 * step).all()
    levels = torch.tensor(LEVELS) * scales.unsqueeze(2).unsqueeze(3)
    assert torch.equal((given - blocks).abs(), (given.unsqueeze(3) - levels).abs().amin(3))
    assert not blocks[0, 0].any()
    normal = torch.randn(2 * GROUP)
    error = unpack(pack(normal), pairs_of_levels(CPU), (2, GROUP), torch.float32).flatten() - normal
    assert error.norm() / normal.norm() == pytest.approx(0.092, abs=1e-3)  # as torchao and bitsandbytes


def test_a_rank_packs_its_rows_as_one_process_packs_the_matrix(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**TEXT | {"hidden_size": 200, "intermediate_size": 250})
    module = transformers.AutoModelForCausalLM.from_config(config)
    module.save_pretrained(tmp_path)
    values = AdapterValues(module, WeightFiles(tmp_path, module))
    name = "model.layers.1.mlp.up_proj"
    weight = module.get_parameter(f"{name}.weight").detach()
    whole = pack(weight.flatten())
    assert len(whole) == 4, "three full rows and one that is not"
    for infix in (".", ".base_layer."):
        assert torch.equal(values.read(f"{name}{infix}packed", (0, 0), (4, ROW)), whole)
    for begin, rows in ((0, 1), (1, 2), (3, 1), (2, 2)):
        assert torch.equal(values.read(f"{name}.packed", (begin, 0), (rows, ROW)), whole[begin : begin + rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_of_four_bits_multiplies_by_its_rounded_matrix(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(130, 70).requires_grad_(False).to(dtype)
    layer = NF4Linear(plain)
    layer.packed.copy_(pack(plain.weight.flatten()))
    plain.weight.copy_(unpack(layer.packed, layer.pairs, (70, 130), dtype))
    inputs = torch.randn(2, 5, 130, dtype=dtype, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):
        result = layer(inputs)
    assert sum(value.nbytes for value in saved) == layer.packed.nbytes + layer.pairs.nbytes, "and not the matrix"
    gradient = torch.randn_like(result)
    (given,) = torch.autograd.grad(result, inputs, gradient)
    expected = plain(inputs)
    assert torch.equal(result, expected)
    torch.testing.assert_close(given, torch.autograd.grad(expected, inputs, gradient)[0])
