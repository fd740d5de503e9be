"""Datasets of tests."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch

from hpc_train.data.dataset import Dataset, Sample


class Numbers(Dataset):
    """Sample i is the number i, in inputs, targets and context; with accidents on demand."""

    def __init__(self, samples: int, *, raises_at: int = -1, dies_at: int = -1, odd_at: int = -1) -> None:
        self._samples = samples
        self._raises_at, self._dies_at, self._odd_at = raises_at, dies_at, odd_at

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int, epoch: int) -> Sample:
        if index == self._raises_at:
            raise ZeroDivisionError("no such number")
        if index == self._dies_at:
            time.sleep(0.5)  # let what was read before arrive
            os.kill(os.getpid(), signal.SIGKILL)
        number = np.full(3 if index == self._odd_at else 2, index, dtype=np.int64)
        return Sample(number, number.copy(), {"epoch": np.array(epoch)})

    def source(self, index: int) -> str:
        return f"/numbers/{index}.txt"


class Where(Dataset):
    """Sample i says which process reads it, with how many threads."""

    def __len__(self) -> int:
        return 64

    def sample(self, index: int, epoch: int) -> Sample:
        return Sample(np.array([os.getpid(), torch.get_num_threads()]), np.array(index))


class MapStyle:
    """What a user brings: no base class of ours."""

    def __init__(self, split: str, form: str, samples: int = 5) -> None:
        self._form, self._samples, self._offset = form, samples, 0 if split == "train" else 100

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        inputs, targets = torch.full((2,), float(index + self._offset)), index
        forms: dict[str, Any] = {
            "pair": (inputs, targets),
            "triple": (inputs.tolist(), targets, {"place": [index]}),
            "dict": {"inputs": inputs.numpy(), "targets": targets, "place": [index]},
            "sample": Sample(inputs.numpy(), np.array(targets)),
            "text": "neither",
        }
        return forms[self._form]


def numbers(split: str, samples: int) -> Numbers:
    return Numbers(samples)


def no_random_access(split: str) -> Any:
    return iter(())
