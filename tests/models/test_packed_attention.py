"""Packed documents: where they end, attention inside them without a mask, and which kernel computes it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_train.config.schema import GPTConfig
from hpc_train.config.values import parse_recomputation
from hpc_train.data.dataset import IGNORED, Batch
from hpc_train.data.device_copy import DOCUMENT_ENDS, DeviceCopy, with_document_ends, with_equal_numbers
from hpc_train.models import packed_attention
from hpc_train.models.attention import LOCAL, attention_backend
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.models.packed_attention import BOUNDARIES, EFFICIENT, MASK, VARLEN, Scores, kernel_for
from hpc_train.models.wrapped import WrappedModel
from hpc_train.parallel.activation_checkpointing import apply_activation_checkpointing
from tests.models import varlen as plain
from tests.models.models import TINY_GPT, TINY_VIT, with_values

CPU, GPU, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")


def batch_of(*ids: Sequence[int], padding: int = 0) -> Batch:
    """A micro-batch with documents ``ids``, in which the last ``padding`` targets do not count."""
    documents = torch.tensor(ids)
    targets = torch.zeros_like(documents)
    targets[:, documents.shape[1] - padding :] = IGNORED
    return Batch(torch.zeros_like(documents), targets, {"document_ids": documents})


def ends_of(batch: Batch) -> Any:
    ends = with_document_ends(batch, pin=False).context.get(DOCUMENT_ENDS)
    assert ends is None or ends.dtype == torch.int32
    return None if ends is None else ends.tolist()


def test_documents_end_where_their_ids_change() -> None:
    assert ends_of(batch_of([0, 0, 0, 0])) == [[4]]
    assert ends_of(batch_of([0, 0, 1, -1])) == [[2, 3, 4, 4]]  # a power of two
    assert ends_of(batch_of([0, 1, 2, 3], [7, 7, 3, 3])) == [[1, 2, 3, 4], [2, 4, 4, 4]]
    assert ends_of(batch_of([0, 0, 1, 2, 3])) == [[2, 3, 4, 5]]
    assert ends_of(batch_of([5])) == [[1]]


def test_documents_in_pieces_have_no_ends() -> None:
    assert ends_of(batch_of([0, 1, 0, 2])) is None
    assert ends_of(batch_of([0, 0, 1, 1], [0, 1, 1, 0])) is None
    assert ends_of(batch_of([0, 1, 1, 0], padding=1)) == [[1, 3, 4, 4]]  # padding: nothing that counts attends to it
    assert ends_of(batch_of([0, 1, 1, 0, 0], padding=1)) is None


def test_what_is_not_packed_gets_no_ends() -> None:
    images = Batch(torch.zeros(2, 3, 4, 4), torch.zeros(2, dtype=torch.int64), {})
    assert with_document_ends(images, pin=False) is images
    labels = Batch(torch.zeros(2, 3), torch.zeros(2), {"document_ids": torch.zeros(2, dtype=torch.int64)})
    assert with_document_ends(labels, pin=False) is labels


def test_micro_batches_of_a_pipeline_are_joined_with_equal_numbers_of_documents() -> None:
    contexts = [{DOCUMENT_ENDS: torch.tensor([[4]])}, {DOCUMENT_ENDS: torch.tensor([[1, 4], [2, 4]])}]
    first, second = (each[DOCUMENT_ENDS].tolist() for each in with_equal_numbers(contexts))
    assert first == [[4, 4]] and second == [[1, 4], [2, 4]]
    mixed = [{**contexts[0], "task": torch.ones(1)}, {"task": torch.ones(1)}]
    assert [list(each) for each in with_equal_numbers(mixed)] == [["task"], ["task"]]


def test_batches_reach_the_device_with_the_ends() -> None:
    (batch,) = DeviceCopy(CPU, None).send([batch_of([0, 0, 1, 1])]).receive()
    assert batch.context[DOCUMENT_ENDS].tolist() == [[2, 4]]


class Keywords(nn.Module):
    """Takes the context of its dataset as arguments and nothing else."""

    def forward(self, inputs: Tensor, document_ids: Tensor) -> Tensor:
        return nn.functional.one_hot(document_ids, 4).float()


def test_a_module_gets_what_its_dataset_returns() -> None:
    batch = with_document_ends(batch_of([0, 0, 1, 1]), pin=False)
    assert WrappedModel(Keywords(), "cross_entropy")(batch.inputs, batch.context).shape == (1, 4, 4)


def packed_batch(length: int = 24) -> Batch:
    """Three sequences of documents of many lengths, one of them with padding."""
    lengths = [[3, 1, 12, 8], [24], [5, 7, 2]]
    ids = torch.full((len(lengths), length), -1)
    for row, sizes in zip(ids, lengths, strict=True):
        row[: sum(sizes)] = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(TINY_GPT.vocab_size, ids.shape, generator=generator)
    targets = torch.where(ids < 0, IGNORED, tokens.roll(-1, 1))
    return with_document_ends(Batch(tokens, targets, {"document_ids": ids}), pin=False)


def trained(model: Model, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss, _ = model(batch.inputs, batch.context, batch.targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients


WINDOWS: dict[str, Any] = {
    "sliding_window": 4, "global_every": 2, "local_rope_theta": 100.0, "query_scalar": 5, "qk_norm": True
}  # fmt: skip


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_windows_in_the_kernel_are_those_of_the_mask(is_packed: bool, told: bool) -> None:
    """Layers with and without a window; sequences that are not packed are one document for the kernel."""
    model, batch = with_values(replace(TINY_GPT, **WINDOWS), torch.float64), packed_batch()
    batch = batch if is_packed else Batch(batch.inputs, batch.targets, {})
    wanted, expected = trained(model, batch)
    with plain.kernels_in_plain_torch(VARLEN, told) as chosen:
        context = model.prepare(batch.inputs, batch.context)
        assert (BOUNDARIES in context, LOCAL + BOUNDARIES in context) == (is_packed, not is_packed)
        loss, gradients = trained(model, batch)
    assert len(chosen) == (4 if is_packed else 2)
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", [EFFICIENT, MASK])
@pytest.mark.parametrize("options", [WINDOWS, WINDOWS | {"attention_softcap": 2.0}])
def test_what_a_kernel_lacks_is_computed_with_a_mask(kernel: str, options: dict[str, Any]) -> None:
    model, batch = with_values(replace(TINY_GPT, **options), torch.float64), packed_batch()
    for given in (batch, Batch(batch.inputs, batch.targets, {})):
        wanted, expected = trained(model, given)
        with plain.kernels_in_plain_torch(kernel):
            loss, gradients = trained(model, given)
        assert loss == pytest.approx(wanted.item(), rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(("kernel", "told"), [(VARLEN, True), (VARLEN, False), (EFFICIENT, True)])
def test_kernels_with_boundaries_compute_what_the_mask_does(kernel: str, told: bool, heads: int) -> None:
    config = GPTConfig(**{**vars(TINY_GPT), "n_kv_heads": heads})
    model, batch = with_values(config, torch.float64), packed_batch()
    wanted, expected = trained(model, batch)
    assert BOUNDARIES not in model.prepare(batch.inputs, batch.context)
    with plain.kernels_in_plain_torch(kernel, told) as chosen:
        assert "attention_mask" not in model.prepare(batch.inputs, batch.context)
        loss, gradients = trained(model, batch)
    assert chosen == [kernel] * config.n_layers
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)


def test_a_type_without_kernels_has_a_mask_although_the_device_has_some() -> None:
    model, batch = with_values(TINY_GPT, torch.float64), packed_batch()
    wanted, expected = trained(model, batch)
    with plain.kernels_in_plain_torch(MASK):
        loss, gradients = trained(model, batch)
    assert torch.equal(loss, wanted) and all(torch.equal(gradients[name], expected[name]) for name in gradients)


def test_the_stand_ins_have_the_signatures_of_torch() -> None:
    taken = inspect.signature(varlen.varlen_attn).parameters
    assert list(taken) in [
        list(inspect.signature(each).parameters) for each in (plain.varlen_attn, plain.varlen_attn_2_11)
    ]
    names = [each.name for each in torch.ops.aten._efficient_attention_forward.default._schema.arguments]
    assert names[:12] == list(inspect.signature(plain.efficient_attention_forward).parameters)


class Operators(TorchDispatchMode):
    """Records the names of the operators, and the most elements of a tensor that one returns."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.names.append(func._schema.name)
        for each in results if isinstance(results, tuple | list) else (results,):
            self.largest = max(self.largest, each.numel() if isinstance(each, Tensor) else 0)
        return results

    def count(self, name: str) -> int:
        return self.names.count(name)


LENGTH = 512
ON_META = GPTConfig(vocab_size=16, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, ffn_dim=64)
OPERATORS = {VARLEN: "torch_attn::_varlen_attn", EFFICIENT: "aten::_efficient_attention_forward"}


def operators(monkeypatch: pytest.MonkeyPatch, kernel: str, checkpointing: str = "none") -> Operators:
    """Of forward and backward pass of a sequence of 16 documents, with the real operators, which ``meta`` has."""
    monkeypatch.setattr(packed_attention, "has_kernels", lambda device: kernel != MASK)
    monkeypatch.setattr(packed_attention, "kernel_for", lambda *_: kernel)
    model = build_model(ON_META, 0)
    assert isinstance(model, Model)
    apply_activation_checkpointing(model, parse_recomputation(checkpointing))
    batch = with_document_ends(batch_of([token // 32 for token in range(LENGTH)]), pin=False).to(META)
    with Operators() as found:
        loss, _ = model(batch.inputs, batch.context, batch.targets)
        loss.backward()
    return found


@pytest.mark.parametrize("kernel", [VARLEN, EFFICIENT])
def test_no_tensor_of_all_pairs_of_tokens_is_made(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    found = operators(monkeypatch, kernel)
    assert found.largest < LENGTH * LENGTH / 4
    assert found.count(OPERATORS[kernel]) == ON_META.n_layers
    assert operators(monkeypatch, MASK).largest >= LENGTH * LENGTH


@pytest.mark.parametrize("kernel", [VARLEN, EFFICIENT])
def test_attention_is_kept_or_computed_again(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    for checkpointing, times in (("ops", 1), ("full", 2)):
        found = operators(monkeypatch, kernel, checkpointing)
        assert found.count(OPERATORS[kernel]) == times * ON_META.n_layers, checkpointing


@torch.compiler.assume_constant_result
def _varlen_on_meta(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return VARLEN


@torch.compiler.assume_constant_result
def _efficient_on_meta(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return EFFICIENT


@pytest.mark.long_form(5)  # the next test has graphs, and test_attention_is_kept_or_computed_again the recomputation
@pytest.mark.parametrize(
    ("chosen", "checkpointing"),
    [(_varlen_on_meta, "none"), (_varlen_on_meta, "full"), (_varlen_on_meta, "ops"), (_efficient_on_meta, "none")],
)
def test_a_compiled_layer_is_one_graph(monkeypatch: pytest.MonkeyPatch, chosen: Any, checkpointing: str) -> None:
    monkeypatch.setattr(packed_attention, "has_kernels", lambda device: True)
    monkeypatch.setattr(packed_attention, "kernel_for", chosen)
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = build_model(ON_META, 0)
    assert isinstance(model, Model)
    apply_activation_checkpointing(model, parse_recomputation(checkpointing))
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    for documents in (16, 32, 64):
        batch = with_document_ends(batch_of([token * documents // LENGTH for token in range(LENGTH)]), pin=False)
        batch = batch.to(META)
        loss, _ = model(batch.inputs, batch.context, batch.targets)
        loss.backward()
    assert len(graphs) == 2  # the second number of documents makes it a variable


@pytest.mark.long_form(5, cases=["2.0"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_layers_with_and_without_a_window_are_two_graphs(softcap: float | None) -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = with_values(replace(TINY_GPT, **WINDOWS, attention_softcap=softcap, post_norms=True), torch.float64)
    batch = Batch(packed_batch().inputs, packed_batch().targets, {})
    wanted, expected = trained(model, batch)
    for layer in model.layers.values():
        layer.compile(backend=backend, fullgraph=True)
    loss, gradients = trained(model, batch)
    assert len(graphs) == 2
    assert loss == pytest.approx(wanted.item(), rel=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "kernel"),
    [
        ((9, 0), torch.bfloat16, 128, VARLEN),
        ((8, 6), torch.float16, 64, VARLEN),
        ((8, 0), torch.bfloat16, 512, EFFICIENT),
        ((9, 0), torch.float32, 128, EFFICIENT),
        ((7, 5), torch.float16, 64, EFFICIENT),
        ((7, 0), torch.bfloat16, 64, MASK),
        ((9, 0), torch.float64, 64, MASK),
        ((9, 0), torch.bfloat16, 20, MASK),
    ],
)
def test_the_kernel_depends_on_device_type_and_width(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, head_dim: int, kernel: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert kernel_for(GPU, dtype, head_dim) == kernel


def told(
    context: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> str | None:
    tokens, config = torch.zeros(2, 8, dtype=torch.int64), replace(TINY_GPT, **options)
    return attention_backend([with_values(config)], Batch(tokens, tokens, context), dtype, device)


def test_the_implementation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    images, classes = torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.int64)
    flash = "scaled_dot_product_attention uses its flash implementation"
    assert told({}, CPU) == flash
    assert attention_backend([with_values(TINY_VIT)], Batch(images, classes, {}), torch.float32, CPU) == flash
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert told({}, CPU) == flash.replace("flash", "math")
    assert attention_backend([nn.Linear(2, 2)], Batch(images, classes, {}), torch.float32, CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    packed = {"document_ids": classes.expand(8, 2).T, DOCUMENT_ENDS: classes}
    assert told(packed, GPU) == "varlen_attn (flash attention) inside each document, without a mask"
    assert "memory-efficient kernel inside each document" in str(told(packed, GPU, torch.float32))
    assert told(packed, GPU, sliding_window=3, global_every=2) == (
        "layers with a window of 3: varlen_attn (flash attention) inside each document and a window of 3 tokens, "
        "without a mask; layers without a window: varlen_attn (flash attention) inside each document, without a mask"
    )
    assert told({}, CPU, sliding_window=8) == flash
    assert "because only NVIDIA GPUs have kernels that take windows" in str(told({}, CPU, sliding_window=3))
    assert "no kernel has a soft cap" in str(told(packed, GPU, attention_softcap=50.0))
    assert told(
        packed, CPU
    ) == f"{flash} with a mask of 8 x 8 elements, because only NVIDIA GPUs have kernels that " + (
        "take the boundaries of documents"
    )


def test_the_reason_for_a_mask_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {DOCUMENT_ENDS: torch.zeros(1)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = packed_attention.without_kernel
    whole, window = Scores(), Scores(window=4)
    ids = {"document_ids": torch.zeros(1, 8)}
    assert "are not contiguous" in reason(ids, GPU, torch.bfloat16, 64, whole)
    assert "torch.float64 and heads of 64" in reason(ids | ends, GPU, torch.float64, 64, whole)
    assert reason(ids | ends, GPU, torch.bfloat16, 64, whole) == ""
    assert reason({}, GPU, torch.bfloat16, 64, window) == reason(ids | ends, GPU, torch.bfloat16, 64, window) == ""
    assert "torch.float32 does not support a window in its backward" in reason({}, GPU, torch.float32, 64, window)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "only NVIDIA GPUs" in reason(ends, GPU, torch.bfloat16, 64, whole)
    assert "take windows" in reason({}, GPU, torch.bfloat16, 64, window)
