"""A custom stream: the bytes of text files, read one after the other, that continues exactly after a restart.

    python -m hpc_train +strategy=dp data=stream data._target_=examples.stream.Bytes +data.args.path=. \
        data.shards=4 model.vocab_size=256
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


class Bytes:
    """One shard of the stream: every ``shards``-th window of the bytes of the files.

    Args:
        split: ``train`` or ``validation``; hpc_train passes it.
        shard, shards: the number of this shard, and how many there are; hpc_train passes them.
        path: the directory with the files.
        length: bytes per sample.
    """

    def __init__(self, split: str, shard: int, shards: int, path: str, length: int = 64) -> None:
        files = sorted(Path(path).glob("*.md"))
        self.files = files[:1] if split == "validation" else files[1:]
        self.length, self.shard, self.shards = length, shard, shards
        self.file, self.window = 0, shard  # the position: the next window to read

    def __iter__(self) -> Iterator[tuple[Tokens, Tokens]]:
        while self.file < len(self.files):
            content = np.frombuffer(self.files[self.file].read_bytes(), np.uint8).astype(np.int64)
            while (self.window + 1) * self.length < len(content):
                begin = self.window * self.length
                self.window += self.shards  # before the yield, so that state_dict counts this window
                yield content[begin : begin + self.length], content[begin + 1 : begin + self.length + 1]
            self.file, self.window = self.file + 1, self.shard

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last sample, as JSON can hold it."""
        return {"file": self.file, "window": self.window}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.file, self.window = state["file"], state["window"]
