"""Attention never asks for grouped queries where torch would fall back to its plain implementation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import (
    SDPBackend,
    _cur_sdpa_kernel_backends,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.overrides import TorchFunctionMode

from hpc_train.config.compose import typed
from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError
from hpc_train.layout.techniques import ATTENTION_KERNELS
from hpc_train.layout.validate import validate
from hpc_train.models.attention import Attention, RotaryScaling, choose_kernel, rotary_tables
from hpc_train.models.hf_names import gpt_config, hf_config, hf_name
from hpc_train.models.packed_attention import VARLEN, Scores, description, flash_kernel
from hpc_train.run.imported import model_overrides
from tests.config.composing import compose
from tests.models.models import with_values


class Calls(TorchFunctionMode):
    """Records the calls of ``scaled_dot_product_attention`` and does not run them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.found.append(kwargs)
        return kwargs["query"].clone()


def call(device: str, dtype: torch.dtype, n_kv_heads: int, masked: bool) -> dict[str, Any]:
    with torch.device("meta"):
        attention = Attention(64, 4, n_kv_heads, causal=True, bias=False).to(dtype)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
        attention.to_empty(device=device)
        mask = {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool, device=device)} if masked else {}
        assert attention(torch.empty(2, 8, 64, dtype=dtype, device=device), mask).shape == (2, 8, 64)
    return calls.found[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_keys_and_values_are_repeated_for_kernels_without_grouped_queries(dtype: torch.dtype, masked: bool) -> None:
    """On GPUs flash attention alone has them everywhere, and it has neither masks nor fp32."""
    flash = dtype is torch.bfloat16 and not masked
    found = call("cuda", dtype, 2, masked)
    assert found["key"].shape == found["value"].shape == (2, 2 if flash else 4, 8, 16)
    assert found["enable_gqa"] == flash
    assert call("cuda", dtype, 4, masked)["enable_gqa"] is False
    on_cpu = call("cpu", dtype, 2, masked)
    assert on_cpu["enable_gqa"] and on_cpu["key"].shape[1] == 2


def test_repeated_keys_and_values_are_those_of_grouped_queries() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    keys, values = (heads.repeat_interleave(2, dim=1) for heads in (key, value))
    found = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    assert torch.equal(found, wanted)
    for one, other in zip(_gradients(found, query, key, value), _gradients(wanted, query, key, value), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def _gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output.square().sum(), inputs)


SCALING: dict[str, float] = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0,
}  # fmt: skip
MODEL = GPTConfig(
    vocab_size=64, n_layers=2, dim=64, n_heads=2, n_kv_heads=1, ffn_dim=48, rope_theta=5e5, rope_scaling=SCALING
)


def llama(positions: int) -> Any:
    transformers = pytest.importorskip("transformers")
    values = {key: value for key, value in hf_config(MODEL, positions, "float32").items() if key != "architectures"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, attn_implementation="eager")).eval()


def test_tables_and_logits_are_those_of_transformers() -> None:
    theirs, tokens = llama(512), torch.arange(300).reshape(1, -1) % 64
    positions = torch.arange(512)
    tables = rotary_tables(positions, 32, MODEL.rope_theta, RotaryScaling(**SCALING))
    cosine, sine = (table.squeeze(1) for table in tables)
    sine[:, :16].neg_()  # by their sign the halves change places
    expected = theirs.model.rotary_emb(torch.zeros(1), positions.unsqueeze(0))
    assert torch.allclose(cosine, expected[0][0], atol=1e-4) and torch.allclose(sine, expected[1][0], atol=1e-4)
    plain, _ = rotary_tables(positions, 32, MODEL.rope_theta)
    assert not torch.allclose(cosine, plain.squeeze(1), atol=0.1), "the scaling changes something"

    ours = with_values(MODEL).eval()
    state = {hf_name(MODEL, name): value.detach() for name, value in ours.named_parameters()}
    assert theirs.load_state_dict(state, strict=False).unexpected_keys == []
    with torch.no_grad():
        assert torch.allclose(ours(tokens, {}), theirs(tokens).logits, atol=1e-5)


def test_the_config_goes_there_and_back(tmp_path: Path) -> None:
    assert gpt_config(hf_config(MODEL, 512, "float32"), "config.json") == MODEL
    overrides = [*model_overrides(MODEL), "+strategy=single", "data=synthetic", "data.vocab_size=64"]
    config = typed(compose([*overrides, "model.dropout=0.0"]))
    assert config.model == MODEL
    validate(config, 1, 1)


def test_what_makes_no_sense_is_refused() -> None:
    config = typed(compose(["+strategy=single", *(f"++model.rope_scaling.{name}={SCALING[name]}" for name in SCALING)]))
    validate(config, 1, 1)
    assert isinstance(config.model, GPTConfig)
    for change in ({"factor": 0.0}, {"low_freq_factor": 4.0}, {"other": 1.0}):
        scaled = replace(config, model=replace(config.model, rope_scaling=SCALING | change))
        with pytest.raises(UserError, match="factor"):
            validate(scaled, 1, 1)


GPU = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Describes a GPU of compute capability 9.0, and undoes the choice of a kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    with sdpa_kernel([*CURRENT], set_priority=True):
        yield
    restore_flash_attention_impl(_raise_warn=False)


CURRENT = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)


def backends() -> list[SDPBackend]:
    """Returns the backends in the order in which torch tries them."""
    return _cur_sdpa_kernel_backends(with_priority=True)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("name", "registered"), [("fa3", "FA3"), ("fa4", "FA4")])
def test_an_installed_kernel_takes_the_place_of_flash_attention(
    name: str, registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins are registered by torch itself; whole sequences no longer prefer cuDNN."""
    package = ATTENTION_KERNELS[name].package
    stand_in = ModuleType(package)
    stand_in._flash_attn_fwd = stand_in._flash_attn_bwd = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, stand_in)
    operators = SimpleNamespace(fwd=None, bwd=None)
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    monkeypatch.setattr(torch.nn.attention._fa4, "_fa4_import_module", lambda module: sys.modules[module])
    assert choose_kernel("auto", GPU) is None and backends() == [*CURRENT]
    text = choose_kernel(name, GPU)
    assert text == f"train.attention={name}: {package} in the place of PyTorch's flash attention"
    assert current_flash_attention_impl() == registered == flash_kernel()
    assert backends()[0] == SDPBackend.FLASH_ATTENTION and SDPBackend.CUDNN_ATTENTION not in backends()
    assert description(VARLEN, Scores()) == f"varlen_attn ({registered}) inside each document, without a mask"
    restore_flash_attention_impl()
    assert flash_kernel() == "flash attention"


@pytest.mark.usefixtures("hopper")
def test_cudnn_is_preferred() -> None:
    assert "cuDNN, and flash attention of PyTorch for packed documents" in str(choose_kernel("cudnn", GPU))
    assert backends()[0] == SDPBackend.CUDNN_ATTENTION and {*backends()} == {*CURRENT}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("name", "device", "capability", "what"),
    [
        (
            "fa3",
            torch.device("cpu"),
            (9, 0),
            r"needs an NVIDIA GPU of compute capability 9.x, but the device is cpu \(no GPU\)",
        ),
        ("fa3", GPU, (10, 0), r"compute capability 9.x, but the device is H100 \(10.0\)"),
        ("fa4", GPU, (8, 0), "compute capability 9.x, 10.x, but"),
        ("cudnn", GPU, (7, 5), "compute capability 8.x, 9.x, 10.x, 12.x, but"),
        ("fa3", GPU, (9, 0), "needs the module flash_attn_interface, which torch .* cannot activate: No module named"),
        (
            "fa4",
            GPU,
            (10, 3),
            "flash_attn.cute.interface, which torch .* cannot activate: No module named",
        ),
    ],
)
def test_a_kernel_that_is_missing_is_refused(
    name: str, device: torch.device, capability: tuple[int, int], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match=what):
        choose_kernel(name, device)
    assert backends() == [*CURRENT] and current_flash_attention_impl() is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["fa3", "cudnn"])
def test_an_amd_gpu_or_a_torch_without_the_registration_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl")
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert flash_kernel() == "flash attention"
    if name == "cudnn":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UserError, match="an NVIDIA GPU" if name == "cudnn" else "cannot activate: module"):
        choose_kernel(name, GPU)
