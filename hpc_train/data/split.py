"""What is trained on and what is validated on: decided by name, so that nothing is ever in both."""

from __future__ import annotations

import hashlib

SPLITS = ("train", "validation")


def position(name: str) -> float:
    """A hash of ``name``, evenly spread over [0, 1). Names below the validation share are validation."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
