"""Attention never asks for grouped queries where torch would fall back to its plain implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from hpc_train.models.attention import Attention


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
