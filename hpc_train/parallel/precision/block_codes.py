"""Stores tensors as 8-bit codes with one scale for each block of 256 values, at about a quarter of the bytes of fp32.

The format is Dettmers et al.'s (2021, arXiv:2110.02861) as torchao implements it: 256 dynamic codes, and the largest
magnitude of a block as its scale. Values are rounded to the nearest code, but a positive value of a tensor that has no
negative ones never to zero: in Adam a first moment that remains while the second is zero would be divided by epsilon
alone, and move its parameter by thousands of learning rates.

The blocks depend on the layout, so checkpoints contain the values in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpc_train.errors import UserError

BLOCK = 256
PIECE = 2**22  # elements; a multiple of BLOCK, which bounds the temporary memory
MIN_ELEMENTS = 4096  # smaller tensors and those whose size is not a multiple of BLOCK keep fp32 values


def coded_zeros(like: Tensor, signed: bool) -> Tensor:
    """Returns zeros of the shape and on the device of ``like``; in fp32 if the tensor is too small for blocks.

    Raises:
        UserError: torchao is not installed.
    """
    coded = _coded_class()
    if like.numel() < MIN_ELEMENTS or like.numel() % BLOCK:
        return torch.zeros_like(like)
    zeros: Any = coded.zeros(like.shape, signed, BLOCK, like.device)
    if signed:
        zeros.qmap[0] = -1.0  # symmetric to the code 1.0, so that storing a dequantized block again is exact
    zeros.codes.fill_(int((zeros.qmap == 0).nonzero()))
    return zeros  # type: ignore[no-any-return]


def _coded_class() -> Any:
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise UserError(
            f"optim.moments=8bit needs torchao, which cannot be imported: {error}",
            where="optim.moments",
            fix="pip install 'hpc_train[8bit]', or optim.moments=bf16, which needs no extra package",
        ) from error
    return OptimState8bit


def is_coded(tensor: Any) -> bool:
    """Returns whether ``tensor`` is in this format; torchao has others, with other attributes or blocks."""
    return all(hasattr(tensor, name) for name in ("codes", "scale", "qmap", "signed")) and tensor.block_size == BLOCK


def parts(coded: Any) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of a coded tensor."""
    return coded.codes, coded.scale


def codebook(coded: Any) -> Tensor:
    """Returns the values of the 256 codes in ascending order."""
    found: Tensor = coded.qmap
    return found


def decoded(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    """Returns the values of flat ``codes`` in fp32.

    Args:
        values: those of the 256 codes.
    """
    return (values[codes.int()].view(-1, BLOCK) * scale.view(-1, 1)).view(-1)


def encoded(value: Tensor, values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of the flat fp32 tensor ``value``; a value that is not finite gets any code.

    The codes are those of torchao, which searches the codebook with seven comparisons, except for the positive values
    that would become zero.

    Args:
        values: those of the 256 codes, in ascending order.
        signed: whether ``value`` may have negative elements.
    """
    blocks = value.view(-1, BLOCK)
    scale = blocks.abs().amax(-1).clip(1e-12)
    scaled = (blocks / scale.view(-1, 1)).view(-1)
    below = (torch.bucketize(scaled, values, right=True) - 1).clip_(0)
    above = (below + 1).clip_(max=255)
    low = values[below]
    nearer_above = scaled - low >= (values[above] - low) * 0.5
    codes = torch.where(nearer_above, above, below)
    if not signed:
        codes = torch.where(value > 0, codes.clip(min=1), codes)
    return codes.to(torch.uint8), scale


def copy_values(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies ``source``, coded or plain, to a contiguous plain ``target`` on any device, and returns the target."""
    if not is_coded(source):
        return target.copy_(source, non_blocking=non_blocking)
    for piece, codes, scale in _pieces(target, source):
        piece.copy_(decoded(codes, scale, codebook(source)), non_blocking=non_blocking)
    return target


def store_values(target: Tensor, source: Tensor) -> None:
    """Copies a plain contiguous ``source``, on any device, to ``target`` in the format of the target."""
    if not is_coded(target):
        target.copy_(source)
        return
    coded: Any = target
    for piece, codes, scale in _pieces(source, coded):
        found = encoded(piece.to(codes.device, torch.float32), coded.qmap, coded.signed)
        codes.copy_(found[0])
        scale.copy_(found[1])


def _pieces(plain: Tensor, coded: Tensor) -> zip[tuple[Tensor, Tensor, Tensor]]:
    codes, scale = parts(coded)
    return zip(plain.view(-1).split(PIECE), codes.view(-1).split(PIECE), scale.split(PIECE // BLOCK), strict=True)
