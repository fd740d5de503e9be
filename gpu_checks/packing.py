"""Checks of attention inside packed documents: its numbers, its time, and which operators a training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel

from gpu_checks.check import Probe
from gpu_checks.commands import largest_difference
from gpu_checks.steps import World, profiled
from hpc_train.data.dataset import Batch
from hpc_train.data.device_copy import with_document_ends
from hpc_train.errors import UserError
from hpc_train.layout.techniques import ATTENTION_KERNELS
from hpc_train.models import packed_attention
from hpc_train.models.attention import choose_kernel
from hpc_train.models.packed_attention import (
    BOUNDARIES,
    EFFICIENT,
    VARLEN,
    Scores,
    attend_inside_documents,
    attention_mask,
    document_context,
)

Heads = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = 16
ERRORS = {torch.bfloat16: 0.02, torch.float32: 1e-3}  # relative to the norm
FASTER = 2.0  # than with a mask, with which the kernels compute 32 times as many products
KERNELS = {"bf16": "torch_attn::_varlen_attn", "fp32": "aten::_efficient_attention_forward"}


def packed_documents(probe: Probe) -> None:
    """Documents that are packed attend inside themselves, faster than with a mask and with the same numbers."""
    length, heads = (8192, 32) if probe.on_gpu else (256, 4)
    uneven = [length // DOCUMENTS] * (DOCUMENTS - 8) + [length // 2]  # fewer, so that others have no tokens
    batch = _batch(probe.device, [[length // DOCUMENTS] * DOCUMENTS, uneven])
    context = document_context(batch.context)
    for dtype, kernel in ((torch.bfloat16, VARLEN), (torch.float32, EFFICIENT)):
        given = _heads(probe.device, (2, length, heads, 128), dtype)
        exact = _results(_each_document([[length // DOCUMENTS] * DOCUMENTS, uneven]), _in_fp32(given))
        ways = _ways(kernel, context, batch.context["document_ids"])
        for name, attend in ways.items():
            _compare(probe, f"{name}, {dtype}", _results(attend, given), exact, ERRORS[dtype])
        if dtype is torch.bfloat16:
            _check_window(probe, context, batch.context["document_ids"], given)
        if probe.on_gpu and dtype is torch.bfloat16:
            seconds = {name: _seconds(attend, given) for name, attend in ways.items()}
            probe.note("milliseconds, forward and backward", [f"{n} {1e3 * s:.3g}" for n, s in seconds.items()])
            probe.within("time with a mask / without", seconds["mask"] / seconds[kernel], low=FASTER)
    _check_training(probe)


def attention_kernels(probe: Probe) -> None:
    """Each kernel of ``train.attention`` that this machine has computes the numbers of PyTorch's, and is timed with
    whole sequences and with packed documents. The others are refused with the reason."""
    length, heads = (8192, 32) if probe.on_gpu else (256, 4)
    sizes = [[length // DOCUMENTS] * DOCUMENTS] * 2
    context = document_context(_batch(probe.device, sizes).context)
    for width in (64, 128):
        given = _heads(probe.device, (2, length, heads, width), torch.bfloat16)
        ways: dict[str, Attend] = {"whole": _grouped}
        if BOUNDARIES in context:
            ways["packed"] = lambda q, k, v: attend_inside_documents(VARLEN, q, k, v, context[BOUNDARIES], Scores())
        exact = {name: _results(attend, given) for name, attend in ways.items()}
        for kernel in ("auto", *ATTENTION_KERNELS):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, *_OTHERS], set_priority=kernel != "auto"):
                try:
                    choose_kernel(kernel, torch.device(probe.device))
                except UserError as error:
                    probe.expect(f"{kernel}: refused", error.what, "a GPU without it", True)
                    continue
                for name, attend in ways.items():
                    case = f"{kernel}, heads of {width}, {name}"
                    found = _results(attend, given)
                    _compare(probe, case, found, [each.float() for each in exact[name]], ERRORS[torch.bfloat16])
                    if probe.on_gpu:
                        probe.note(
                            f"{case}: milliseconds, forward and backward", f"{1e3 * _seconds(attend, given):.3g}"
                        )
            restore_flash_attention_impl(_raise_warn=False)


_OTHERS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _batch(device: str, lengths: list[list[int]]) -> Batch:
    rows = [torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)) for sizes in lengths]
    ids = torch.stack(rows)
    return with_document_ends(Batch(ids, ids, {"document_ids": ids}), pin=False).to(torch.device(device))


def _heads(device: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Heads:
    """Returns queries, and keys and values for a quarter of the heads."""
    generator = torch.Generator(device).manual_seed(1)
    few = (*shape[:2], shape[2] // 4, shape[3])
    query, key, value = (torch.randn(each, generator=generator, device=device).to(dtype) for each in (shape, few, few))
    return query, key, value


def _in_fp32(heads: Heads) -> Heads:
    query, key, value = (each.float() for each in heads)
    return query, key, value


def _ways(kernel: str, context: dict[str, Tensor], ids: Tensor) -> dict[str, Attend]:
    """Returns the ways to attend: with a mask, and with ``kernel`` if the device has it."""
    mask = attention_mask(ids, ids.shape[1], None, ids.device)
    ways: dict[str, Attend] = {"mask": lambda q, k, v: _masked(q, k, v, mask)}
    if BOUNDARIES in context:
        ways[kernel] = lambda q, k, v: attend_inside_documents(kernel, q, k, v, context[BOUNDARIES], Scores())
    return ways


def _check_window(probe: Probe, context: dict[str, Tensor], ids: Tensor, given: Heads) -> None:
    """Compares a sliding window in the kernel with one in a mask in fp32, inside documents."""
    scores = Scores(window=ids.shape[1] // DOCUMENTS // 2)
    mask = attention_mask(ids, ids.shape[1], scores.window, ids.device)
    ways: dict[str, Attend] = {"mask": lambda q, k, v: _masked(q, k, v, mask)}
    if BOUNDARIES in context:
        ways[VARLEN] = lambda q, k, v: attend_inside_documents(VARLEN, q, k, v, context[BOUNDARIES], scores)
    exact = _results(ways["mask"], _in_fp32(given))
    for name, attend in ways.items():
        _compare(probe, f"window, {name}", _results(attend, given), exact, ERRORS[torch.bfloat16])


def _masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    times = query.shape[2] // key.shape[2]
    heads = (query, key.repeat_interleave(times, dim=2), value.repeat_interleave(times, dim=2))
    query, key, value = (each.transpose(1, 2) for each in heads)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return mixed.transpose(1, 2)


def _each_document(lengths: list[list[int]]) -> Attend:
    """Returns attention that computes one document after another, without a mask of documents."""

    def attend(*heads: Tensor) -> Tensor:
        rows = []
        for row, sizes in enumerate(lengths):
            pieces = zip(*(each[row : row + 1].split(sizes, dim=1) for each in heads), strict=True)
            rows.append(torch.cat([_masked(*piece) for piece in pieces], dim=1))
        return torch.cat(rows)

    return attend


def _results(attend: Attend, heads: Heads) -> list[Tensor]:
    """Returns the output and the gradients of queries, keys and values."""
    leaves = [each.detach().requires_grad_() for each in heads]
    output = attend(*leaves)
    weights = torch.linspace(-1, 1, output.shape[-1], device=output.device, dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), leaves)]


def _compare(probe: Probe, case: str, found: list[Tensor], exact: list[Tensor], bound: float) -> None:
    for name, one, other in zip(("output", "dQ", "dK", "dV"), found, exact, strict=True):
        error = float((one.float() - other).norm() / other.norm())
        probe.within(f"{case}: relative error of {name}", error, high=bound)


def _seconds(attend: Attend, heads: Heads) -> float:
    for _ in range(3):
        _results(attend, heads)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(10):
        _results(attend, heads)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e-4


def _check_training(probe: Probe) -> None:
    """Compares losses of a training, also compiled, with those with a mask; expects the kernels and no waiting."""
    world = World(probe)
    sizes = ["data.sequence_length=1024"] if probe.on_gpu else ["data.sequence_length=64", "model.dim=32"]
    given = ["model=gpt_tiny", "data=text", "data.packing=true", "batch.global_size=4", "model.n_kv_heads=2", *sizes]
    for precision, operator in KERNELS.items():
        overrides = [*given, f"precision={precision}"]
        with _masks():
            wanted = _losses(world, overrides)
        probe.within(
            f"{precision}: losses with boundaries", largest_difference(_losses(world, overrides), wanted), high=0.01
        )
        if probe.on_gpu:
            compiled = _losses(world, [*overrides, "train.compile=true"])
            probe.within(f"{precision}: losses compiled", largest_difference(compiled, wanted), high=0.01)
            used = _operators(world, overrides)
            probe.expect(f"{precision}: operator", sorted(used & set(KERNELS.values())), operator, operator in used)


@contextmanager
def _masks() -> Iterator[None]:
    with patch.object(packed_attention, "has_kernels", return_value=False):
        yield


def _losses(world: World, overrides: list[str]) -> dict[int, float]:
    steps = world.steps(*overrides)
    losses = dict(enumerate(steps.losses(4)))
    steps.close()
    return losses


def _operators(world: World, overrides: list[str]) -> set[str]:
    """Returns the operators of a step, in which torch raises an error if the host waits for the device."""
    steps = world.steps(*overrides)
    steps.step()
    batch = steps.batch()
    with profiled(steps) as profiler:
        torch.cuda.set_sync_debug_mode("error")
        steps.step(batch)
        torch.cuda.set_sync_debug_mode("default")
    steps.close()
    return {event.key for event in profiler.key_averages()}
