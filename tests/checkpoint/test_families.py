"""Each family of ``transformers``: tiny random models give the same logits here, and go there and back bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpc_train.checkpoint.transfer import PublishedFiles, export, import_hf
from hpc_train.config.schema import GPTConfig, MoEConfig
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.hf_names import FAMILIES, gpt_config, hf_config
from hpc_train.models.model import Model, keep_shared
from hpc_train.run.directory import RunDirectory
from hpc_train.run.imported import imported_model
from tests.checkpoint.made import quiet_bar

SEQUENCE, WINDOW = 19, 5
SIZES: dict[str, Any] = {
    "vocab_size": 64, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.7}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 8, "rope_theta": 1e4}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # keys of config.json, and some of ours
    "llama": ({"rope_parameters": SCALING}, {"head_dim": None}),
    "qwen2": ({}, {"qkv_bias": True, "sliding_window": None}),
    "qwen2 windows": (
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
        {"sliding_window": WINDOW, "global_every": 0},
    ),
    "qwen3": ({"head_dim": 24, "tie_word_embeddings": True}, {"qk_norm": True, "head_dim": 24}),
    "mistral": ({"sliding_window": WINDOW}, {"sliding_window": WINDOW, "global_every": 0}),
    "gemma": ({"head_dim": 32}, {"norm_offset": True, "scaled_embeddings": True, "activation": "gelu_tanh"}),
    "gemma2": (
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 7, **CAPS},
        {"global_every": 2, "attention_softcap": 0.5, "logit_softcap": 0.7, "query_scalar": 7, "post_norms": True},
    ),
    "gemma3_text": (
        {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
        {"global_every": 6, "local_rope_theta": 1e4, "rope_theta": 1e6, "qk_norm": True, "query_scalar": None},
    ),
    "mixtral": (
        {"num_local_experts": 5, "num_experts_per_tok": 3},
        {"moe": MoEConfig(experts=5, top_k=3), "sliding_window": None},
    ),
    "qwen3_moe": (
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [0],
            "head_dim": 16,
        },
        {"moe": MoEConfig(experts=6, top_k=2, expert_dim=24, dense_layers=1, normalize=False), "qk_norm": True},
    ),
}


class InDouble(TorchFunctionMode):
    """Computes in fp64 what both sides compute in fp32 whatever the model's dtype is: norms, softmax and rotary
    tables."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: _wide(value) for name, value in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].double()
        return func(*(_wide(value) for value in args), **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def random_model(case: str) -> Any:
    """The model of ``transformers`` in fp64 with weights that are far from uniform."""
    transformers = pytest.importorskip("transformers")
    values, kind = SIZES | CASES[case][0], case.partition(" ")[0]
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.5 if "norm" in name else 0.0, 0.25)
    return model


def loaded(files: PublishedFiles) -> Model:
    model = build_model(files.model, 0)
    assert isinstance(model, Model)
    with keep_shared(model):
        model.to_empty(device="cpu").double().eval()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(files.read(name))
    return model


@pytest.mark.long_form(3, cases=["qwen2 windows", "gemma"])  # mistral and gemma2 have their options
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_and_the_files_go_there_and_back(tmp_path: Path, case: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 64, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    with in_double(), torch.no_grad():
        theirs = random_model(case)
        theirs.save_pretrained(tmp_path / "published")
        expected = theirs(tokens).logits
        files = PublishedFiles.open(tmp_path / "published")
        torch.testing.assert_close(loaded(files)(tokens, {}), expected, rtol=0, atol=1e-8)
    given = {name: getattr(files.model, name) for name in CASES[case][1]}
    assert given == CASES[case][1]
    assert gpt_config(hf_config(files.model, 64, "float64"), "") == files.model

    import_hf(tmp_path / "published", "run", tmp_path, "float64", quiet_bar)
    run = RunDirectory(tmp_path / "run")
    assert imported_model(run) == files.model
    export(run, None, tmp_path / "exported", "hf", None, quiet_bar)
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == theirs.config.model_type
    with in_double(), torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "exported",
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float64,
        ).eval()
        assert type(again) is type(theirs)
        torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-12)
        state = theirs.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
def test_gradients_of_experts_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    tokens = torch.randint(0, 64, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    with in_double():
        theirs = random_model(case)
        theirs.save_pretrained(tmp_path / "published")
        model = loaded(PublishedFiles.open(tmp_path / "published"))
        for logits in (theirs(tokens).logits, model(tokens, {})):
            logits.cos().sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert None not in ours.values()
    for layer, block in enumerate(theirs.model.layers):
        if f"layers.{layer}.ffn.experts.w1" in ours:
            both = [ours[f"layers.{layer}.ffn.experts.{name}"] for name in ("w1", "w3")]
            experts = block.mlp.experts
            torch.testing.assert_close(torch.cat(both, 1), experts.gate_up_proj.grad, rtol=1e-9, atol=1e-9)
            router = ours[f"layers.{layer}.ffn.router.weight"]
            torch.testing.assert_close(router, block.mlp.gate.weight.grad, rtol=1e-9, atol=1e-9)
    embedding = theirs.model.embed_tokens.weight.grad
    ours_embedding = ours["stem.embedding.weight"][1:]  # transformers gives the padding token no gradient
    torch.testing.assert_close(ours_embedding, embedding[1:], rtol=1e-9, atol=1e-9)


PUBLISHED: dict[str, dict[str, Any]] = {  # what transformers 4 wrote
    "gemma2": {
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
        "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1000000, "rope_local_base_freq": 10000,
        "sliding_window": 512, "sliding_window_pattern": 6, "rope_scaling": None, "query_pre_attn_scalar": 256,
        "head_dim": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 7,
    },
    "gemma": {"hidden_act": "gelu", "hidden_activation": None, "head_dim": 256},
    "qwen2": {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2, "rope_theta": 1e6},
    "mistral": {"sliding_window": None, "rope_theta": 1e6, "head_dim": None},
}  # fmt: skip


def test_configs_of_transformers_4_are_read() -> None:
    read = {kind: gpt_config(SIZES | values | {"model_type": kind}, "") for kind, values in PUBLISHED.items()}
    assert all(model.tied_embeddings == kind.startswith("gemma") for kind, model in read.items())
    assert (read["gemma2"].sliding_window, read["gemma2"].global_every, read["gemma2"].query_scalar) == (4096, 2, None)
    three = read["gemma3_text"]
    assert (three.global_every, three.rope_theta, three.local_rope_theta) == (6, 1e6, 1e4)
    assert read["gemma"].activation == "gelu_tanh" and read["gemma"].head_dim == 256
    assert read["qwen2"].sliding_window is None and read["mistral"].sliding_window is None


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("gemma3", {}, "model_type 'gemma3'"),
        ("qwen3", {"attention_bias": True}, "attention_bias True"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "windows in layers [1, 2"),
        ("gemma2", {"layer_types": ["full_attention"] + 3 * ["sliding_attention"], "sliding_window": 4}, "[1, 2, 3]"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attention_softcap 50.0"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "with 'linear'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ],
)
def test_what_our_model_does_not_compute_is_refused(kind: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        gpt_config(SIZES | change | {"model_type": kind}, "config.json")
    assert words in caught.value.what


def test_options_that_no_family_has_together_are_not_exported() -> None:
    model = gpt_config(SIZES | {"model_type": "llama"}, "")
    for options in ({"qkv_bias": True, "qk_norm": True}, {"sliding_window": 4, "global_every": 2}):
        with pytest.raises(UserError, match=r"no family of transformers has all of model\."):
            hf_config(replace(model, **options), 64, "float32")
    with pytest.raises(UserError, match="divides the width"):
        hf_config(replace(model, dim=66, head_dim=16), 64, "float32")
    assert hf_config(replace(model, sliding_window=4), 64, "float32")["model_type"] == "mistral"


def test_each_family_sets_options_of_the_gpt() -> None:
    known = {*GPTConfig.__dataclass_fields__, *(f"moe.{name}" for name in MoEConfig.__dataclass_fields__)}
    assert all({*family.may, *family.always} <= known for family in FAMILIES.values())
