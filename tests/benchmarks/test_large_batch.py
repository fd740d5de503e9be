"""The rows of benchmarks/large_batch.py train, with a few images in batches of eight."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.large_batch import DATA, MODEL, ROWS, trained
from hpc_train.config.compose import typed
from tests.config.composing import compose


@pytest.mark.long_form(20)  # tests/train/test_own_optimizers.py has LARS and LAMB
def test_each_row_trains() -> None:
    images = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16)
    for row in ROWS:
        config = typed(
            compose(["+strategy=single", *DATA, *MODEL, *row, "batch.global_size=8", "optim.warmup_steps=1"])
        )
        assert all(map(math.isfinite, trained(config, 2, images, images)))
