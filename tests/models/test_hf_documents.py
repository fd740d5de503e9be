"""Decoders of transformers attend inside packed documents and windows without masks where there are kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from hpc_train.config.schema import HFModelConfig
from hpc_train.data.dataset import Batch
from hpc_train.data.device_copy import DOCUMENT_ENDS, with_document_ends
from hpc_train.models import packed_attention
from hpc_train.models.attention import attention_backend
from hpc_train.models.build import build_model
from hpc_train.models.hf.decoder import HFDecoder
from hpc_train.models.packed_attention import EFFICIENT, MASK, VARLEN
from tests.models import varlen as plain
from tests.models.test_hf import DECODERS, loaded
from tests.models.test_packed_attention import META, OPERATORS, Operators, packed_batch, trained

transformers = pytest.importorskip("transformers")

WITHOUT_SDPA = {"gemma2"}


def packed() -> Batch:
    """Sequences of several documents with positions that begin at 0 in each, and padding."""
    batch = packed_batch()
    ids = batch.context["document_ids"]
    firsts = torch.cat((torch.ones(len(ids), 1, dtype=torch.bool), ids[:, 1:] != ids[:, :-1]), 1)
    counted = torch.arange(ids.shape[1]).expand_as(ids)
    positions = counted - torch.where(firsts, counted, 0).cummax(1).values
    return replace(batch, inputs=batch.inputs % 32, targets=batch.targets.where(batch.targets < 0, batch.targets % 32),
                   context={**batch.context, "positions": positions})  # fmt: skip


def model_of(kind: str, folder: Path, **config: Any) -> Any:
    DECODERS[kind]().save_pretrained(folder)
    return loaded(folder, "causal_lm", pretrained=False, config={"max_position_embeddings": 64, **config}).train()


def compare(results: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Compares losses and gradients. Norms of transformers are fp32."""
    assert results[0] == pytest.approx(wanted[0].item(), rel=1e-6)
    assert results[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-5, atol=1e-5)


PAIRS = [(kind, kernel) for kernel in (VARLEN, EFFICIENT, MASK) for kind in DECODERS]
SHORT = [*zip(DECODERS, (VARLEN, EFFICIENT, MASK) * 2, strict=True)]  # each kind and each kernel


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [*SHORT, *(pytest.param(*pair, marks=pytest.mark.long_form(1)) for pair in PAIRS if pair not in SHORT)],
)
def test_kernels_with_boundaries_compute_what_masks_do(kind: str, kernel: str, tmp_path: Path) -> None:
    model, batch = model_of(kind, tmp_path), packed()
    wanted = trained(model, batch)
    with plain.kernels_in_plain_torch(kernel) as chosen:
        compare(trained(model, batch), wanted)
    assert len(chosen) == (0 if kind in WITHOUT_SDPA else 2)


@pytest.mark.parametrize(("kind", "residual"), [("llama", torch.bfloat16), ("qwen3", torch.float32)])
def test_under_autocast_kernels_get_the_dtype_of_products(kind: str, residual: torch.dtype, tmp_path: Path) -> None:
    """Rotation and norms may return queries and keys in fp32, which ``scaled_dot_product_attention`` casts itself."""
    model, batch = model_of(kind, tmp_path).float(), packed()
    model.hidden_dtype = residual
    with torch.autocast("cpu", torch.bfloat16):
        wanted = model(batch.inputs, batch.context, batch.targets)[0].item()
        with plain.kernels_in_plain_torch(VARLEN) as chosen:
            loss = model(batch.inputs, batch.context, batch.targets)[0].item()
    assert len(chosen) == 2 and loss == pytest.approx(wanted, rel=1e-2)


@pytest.mark.long_form(1, cases=["llama"])
@pytest.mark.parametrize("kind", ["mistral", "qwen2", "llama"])
def test_a_window_needs_no_mask_although_nothing_is_packed(kind: str, tmp_path: Path) -> None:
    model, given = model_of(kind, tmp_path), packed()
    batch = Batch(given.inputs, given.targets, {})
    wanted = trained(model, batch)
    with plain.kernels_in_plain_torch(VARLEN) as chosen:
        compare(trained(model, batch), wanted)
    assert len(chosen) == {"mistral": 2, "qwen2": 1, "llama": 0}[kind]


@pytest.mark.parametrize("removed", [DOCUMENT_ENDS, "document_ids"])
def test_without_ends_of_documents_there_is_a_mask(removed: str, tmp_path: Path) -> None:
    model, batch = model_of("mistral", tmp_path), packed()
    context = {name: value for name, value in batch.context.items() if name not in (DOCUMENT_ENDS, removed)}
    wanted = trained(model, replace(batch, context=context))
    with plain.kernels_in_plain_torch(VARLEN) as chosen:
        compare(trained(model, replace(batch, context=context)), wanted)
    assert chosen == []


def test_dropout_of_attention_and_a_given_mask_need_a_mask(tmp_path: Path) -> None:
    batch = packed()
    padded = Batch(batch.inputs, batch.targets, {"attention_mask": torch.ones_like(batch.inputs)})
    for model, given in (
        (model_of("mistral", tmp_path / "dropout", attention_dropout=0.1), batch),
        (model_of("mistral", tmp_path / "mask"), padded),
    ):
        with plain.kernels_in_plain_torch(VARLEN) as chosen:
            trained(model, given)
        assert chosen == []


def on_meta(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a model whose layers attend with the real operator, which ``meta`` has."""
    monkeypatch.setattr(packed_attention, "has_kernels", lambda device: True)
    monkeypatch.setattr(packed_attention, "kernel_for", _varlen)
    DECODERS["qwen2"]().save_pretrained(folder)
    config = {"max_position_embeddings": 512}
    return build_model(HFModelConfig(name_or_path=str(folder), task="causal_lm", pretrained=False, config=config), 0)


@torch.compiler.assume_constant_result
def _varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return VARLEN


def batch_on_meta(documents: int) -> Batch:
    ids = (torch.arange(512) * documents // 512).unsqueeze(0)
    context = {"document_ids": ids, "positions": torch.zeros_like(ids)}
    return with_document_ends(Batch(ids, ids, context), pin=False).to(META)


def test_no_tensor_of_all_pairs_of_tokens_is_made_and_no_value_of_the_device_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a value of ``meta`` would raise an error."""
    model = on_meta(tmp_path, monkeypatch)
    assert isinstance(model, HFDecoder)
    batch = batch_on_meta(16)
    with Operators() as found:
        loss, _ = model(batch.inputs, batch.context, batch.targets)
        loss.backward()
    assert found.largest < 512 * 512 / 4
    assert found.count(OPERATORS[VARLEN]) == 2


@pytest.mark.long_form(8)
def test_a_compiled_layer_is_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = on_meta(tmp_path, monkeypatch)
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    for documents in (16, 32, 64):
        batch = batch_on_meta(documents)
        loss, _ = model(batch.inputs, batch.context, batch.targets)
        loss.backward()
    assert len(graphs) == 4  # layers with and without a window; the second number of documents makes it a variable


def test_the_implementation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu, half = torch.device("cuda"), torch.bfloat16
    batch = packed()
    unpacked = replace(batch, context={})
    llama, qwen = (model_of(kind, tmp_path / kind) for kind in ("llama", "qwen2"))
    varlen = "varlen_attn (flash attention) inside each document"
    assert attention_backend([llama], unpacked, half, gpu) is None
    assert attention_backend([llama], batch, half, gpu) is not None  # heads of 4 elements
    llama = model_of("llama", tmp_path / "wide", head_dim=8)
    assert attention_backend([llama], batch, half, gpu) == f"{varlen}, without a mask"
    assert "memory-efficient kernel" in str(attention_backend([llama], batch, torch.float32, gpu))
    mask = "a mask of 24 x 24 elements, because"
    assert attention_backend([llama], batch, half, torch.device("cpu")) == (
        f"{mask} only NVIDIA GPUs have kernels that take the boundaries of documents"
    )
    for removed, reason in (
        ({"document_ids"}, "the data has positions but no document_ids"),
        ({DOCUMENT_ENDS}, "the tokens of a document are not contiguous"),
    ):
        context = {name: value for name, value in batch.context.items() if name not in removed}
        assert attention_backend([llama], replace(batch, context=context), half, gpu) == f"{mask} {reason}"
    padded = replace(batch, context={"attention_mask": torch.ones_like(batch.inputs)})
    assert attention_backend([llama], padded, half, gpu) == f"{mask} the data has an attention_mask"
    assert "by sdpa" in str(
        attention_backend([model_of("llama", tmp_path / "d", attention_dropout=0.1)], batch, half, gpu)
    )
    assert (
        attention_backend([qwen], unpacked, half, gpu)
        == f"{mask} no kernel for boundaries of documents supports torch.bfloat16 and heads of 4 elements here"
    )
