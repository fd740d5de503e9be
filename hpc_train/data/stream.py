"""Reads iterables without a length, divided into numbered shards, in an order that does not depend on the ranks.

The stream is one global sequence: position p is the next item of shard p modulo the number of shards. A step takes the
next ``global_size`` positions. The readers of all ranks share them: of L readers, number l reads the positions that are
l modulo L. With S shards it visits the shards that are l modulo gcd(S, L), so with a multiple of L each item is read
once; otherwise several readers read a shard, and skip each other's items. How many items of a shard precede a step
follows from its number. The position of a shard, with what its ``state_dict`` returned, is therefore valid for any
number of ranks, and all positions after a step are in its checkpoint.

A shard that has ended starts again, or leaves its positions empty until all shards have ended.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

from hpc_train.config.schema import StreamDataConfig
from hpc_train.data.custom import CustomDataset, ItemReader, call_target, described, seeded_generators, target_count
from hpc_train.data.dataset import Dataset, Sample, SampleError
from hpc_train.data.loader import Stacked, check_shapes, padding_like, stacked
from hpc_train.data.sampler import StreamRequest
from hpc_train.errors import UserCodeError, UserError

_SPLITTERS = (
    "data.shards divides the stream already: WebDataset(..., nodesplitter=lambda s: s, workersplitter=lambda s: s)"
)
States = Mapping[str, Mapping[str, Any]]  # shard -> ShardState as a dict


def build_stream(config: StreamDataConfig, split: str, seed: int) -> Dataset:
    """Builds ``data=stream``: the stream for training, or the first validation samples in memory; raises UserError if
    the target cannot be imported, called or iterated, or has no validation items."""
    shards = Shards(config, split, seed)
    if split == "train":
        return StreamDataset(shards)
    items = list(shards.first(config.validation_samples))
    if not items:
        raise UserError(
            f"{config._target_} yields no items for the validation split",
            where="data._target_",
            fix="yield some items with split='validation'",
        )
    return CustomDataset(items, config, seed, config._target_)


@dataclass(frozen=True)
class ShardState:
    """Describes where a shard continues.

    Attributes:
        taken: the number of positions taken from the shard in all epochs, including positions after its end.
        within: the items that were read in this epoch.
        user: what ``state_dict`` returned; None if the class has none, and the items are read again and skipped.
    """

    taken: int = 0
    epoch: int = 0
    within: int = 0
    ended: bool = False
    user: Any = None


@dataclass(frozen=True)
class Shards:
    """Opens the shards of a stream."""

    config: StreamDataConfig
    split: str
    seed: int

    @property
    def count(self) -> int:
        return self.config.shards

    def name(self, shard: int) -> str:
        return f"shard {shard} of {self.config._target_}"

    def open(self, shard: int, epoch: int, state: Any = None) -> Any:
        """Returns the user's iterable for one epoch of a shard, which continues from ``state``; raises UserError if the
        target cannot be imported or called, or what it returns is not an iterable."""
        opened = call_target(self.config, split=self.split, shard=shard, shards=self.count)
        if not hasattr(opened, "__iter__"):
            raise UserError(
                f"{self.name(shard)} is {described(opened)}, which cannot be iterated",
                where="data._target_",
                fix="return an object with __iter__",
            )
        if hasattr(opened, "state_dict") != hasattr(opened, "load_state_dict"):
            raise UserError(
                f"{self.name(shard)} has only one of state_dict and load_state_dict",
                where="data._target_",
                fix="define both; without them a restart reads the items again and skips them",
            )
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(epoch)
        if state is not None:
            opened.load_state_dict(state)
        return opened

    def first(self, samples: int) -> Iterator[Any]:
        """Yields up to ``samples`` items, one of each shard in turn, until all shards have ended."""
        readers = [ShardReader(self, shard, ShardState(), repeat=False) for shard in range(self.count)]
        while readers and samples > 0:
            for reader in tuple(readers)[:samples]:
                item = reader.next()
                if item is None:
                    readers.remove(reader)
                else:
                    yield item
                    samples -= 1


def merged_states(states: Sequence[States]) -> States:
    """Returns the states of all shards from the reports of all ranks; several ranks may report the same shard."""
    return {shard: state for rank_states in states for shard, state in rank_states.items()}


class ShardReader:
    """Reads one shard from ``state`` on."""

    def __init__(self, shards: Shards, shard: int, state: ShardState, repeat: bool) -> None:
        self._shards = shards
        self._shard = shard
        self._repeat = repeat
        self.taken = state.taken
        self._epoch = state.epoch
        self._ended = state.ended
        self._within = 0 if state.user is None else state.within
        self._iterable: Any = None
        self._iterator: Iterator[Any] = iter(())
        if not self._ended:
            self._open(state.user)
            while self._within < state.within and self._read() is not None:
                pass

    def next(self) -> Any:
        """Returns the next item; None after the end, or at an item that is itself None. Raises UserError if the shard
        has no items, or an item is None. Raises SampleError if the user's code raised an exception."""
        self.taken += 1
        if self._ended:
            return None
        item = self._read()
        if item is None and self._repeat:
            if self._within == 0:
                raise UserError(
                    f"{self._shards.name(self._shard)} has no items",
                    where="data._target_, data.shards",
                    fix=f"yield at least one item for each of the {self._shards.count} shards, or use fewer shards",
                )
            self._epoch += 1
            self._within = 0
            self._open()
            item = self._read()
        self._ended = item is None
        return item

    def skip_to(self, taken: int) -> None:
        """Takes items until ``taken`` positions were taken; raises ValueError if more were taken before."""
        if self.taken > taken:
            raise ValueError(f"shard {self._shard} is at {self.taken}, after {taken}")
        while self.taken < taken:
            self.next()

    def state(self) -> ShardState:
        user = None if self._ended else self._user_state()
        return ShardState(self.taken, self._epoch, self._within, self._ended, user)

    def _user_state(self) -> Any:
        if not hasattr(self._iterable, "state_dict"):
            return None
        state = self._iterable.state_dict()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"state_dict of {self._shards.name(self._shard)} returned {described(state)}, which JSON cannot hold: "
                f"{error}",
                where="data._target_",
                fix="return numbers, strings, and lists and dicts of them with strings as keys",
            ) from None

    def _open(self, state: Any = None) -> None:
        self._iterable = self._shards.open(self._shard, self._epoch, state)
        try:
            self._iterator = iter(self._iterable)
        except UserError:
            raise
        except Exception as error:
            raise _failed(self._shards.name(self._shard), error) from None

    def _read(self) -> Any:
        which = f"item {self._within} in epoch {self._epoch} of {self._shards.name(self._shard)}"
        try:
            with seeded_generators(self._shards.seed, self._shard, self._epoch, self._within):
                item = next(self._iterator)
        except StopIteration:
            return None
        except UserError:
            raise
        except Exception as error:
            raise _failed(which, error) from None
        if item is None:
            raise UserError(f"{which} is None", where="data._target_", fix="yield items, and return at the end")
        self._within += 1
        return item


def _failed(which: str, error: Exception) -> UserCodeError:
    if "nodesplitter" in str(error):  # an error of webdataset
        error.add_note(_SPLITTERS)
    return SampleError.of(which, error)


def check_resumes(shards: Shards, shard: int) -> None:
    """Checks that a shard continues with its second item from the state after the first one; raises UserError if it
    continues with another item."""
    reader = ShardReader(shards, shard, ShardState(), repeat=True)
    reader.next()
    state = reader.state()
    if state.user is None:
        return
    expected = reader.next()
    resumed = ShardReader(shards, shard, state, repeat=True).next()
    if not _same(expected, resumed):
        raise UserError(
            f"{shards.name(shard)} does not continue where its state_dict says: after the first item, load_state_dict "
            "leads to another second item",
            where="data._target_",
            fix="update the state before each yield, so that state_dict counts the item that was yielded last, and "
            "let the items depend on the state and the arguments alone",
        )


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Sample) and isinstance(second, Sample):
        return _same([first.inputs, first.targets, first.context], [second.inputs, second.targets, second.context])
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return set(first) == set(second) and all(_same(first[name], second[name]) for name in first)
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    try:
        return np.array_equal(np.asarray(first), np.asarray(second))
    except (TypeError, ValueError):  # a user's object
        return bool(first == second)


class StreamDataset(Dataset):
    """Wraps a stream for training. ``StreamReader`` reads it; as a dataset it has only the first item of each shard,
    which measurements use before the first step.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.reads = ItemReader(shards.config, shards.config._target_)

    def __len__(self) -> int:
        return self.shards.count

    def sample(self, index: int, epoch: int) -> Sample:
        return self.reads.sample(self.item(index, epoch), self.describe(index))

    def item(self, index: int, epoch: int) -> Any:
        return ShardReader(self.shards, index % self.shards.count, ShardState(), repeat=True).next()

    def source(self, index: int) -> str:
        return self.shards.config._target_

    def describe(self, index: int) -> str:
        """Returns the name of the item at position ``index`` of the stream."""
        item, shard = divmod(index, self.shards.count)
        return f"item {item} of {self.shards.name(shard)}"


class StreamReader:
    """Reads the micro-batches of a stream, in a loader process or in this one. It has state: the shards' iterators.
    The shards continue from ``states``. All ranks together have ``lanes`` readers."""

    def __init__(self, dataset: StreamDataset, states: States, lanes: int) -> None:
        self._dataset = dataset
        self._shards = dataset.shards
        self._states = states
        self._lanes = lanes
        self._readers: dict[int, dict[int, ShardReader]] = {}
        self._template: Any = None

    def __call__(self, request: StreamRequest) -> Stacked:
        # Iterables such as those of webdataset divide their items among the ranks and loader processes that they see.
        # The shards of a stream are divided already, so this process acts as the only process of the run.
        if get_worker_info() is not None:
            worker._worker_info = None
            os.environ.update(RANK="0", WORLD_SIZE="1")
        readers = self._readers.get(request.lane)
        if readers is None:
            step = math.gcd(self._shards.count, self._lanes)
            visited = range(request.lane % step, self._shards.count, step)
            check_resumes(self._shards, visited[0])
            readers = self._readers[request.lane] = {shard: self._reader(shard) for shard in visited}
        slot_items = []
        for slot in request.slots:
            item, shard = divmod(slot, self._shards.count)
            readers[shard].skip_to(item)
            slot_items.append((slot, readers[shard].next()))
        slots = [slot for slot, item in slot_items if item is not None]
        items = [item for _, item in slot_items if item is not None]
        batch = self._batch(slots, items, request)._replace(items=len(items))
        if not request.taken:
            return batch._replace(ended=not items)
        for shard, reader in readers.items():
            reader.skip_to((request.taken - shard + self._shards.count - 1) // self._shards.count)
        states = {str(shard): asdict(reader.state()) for shard, reader in readers.items()}
        return batch._replace(ended=not items, state=json.dumps(states))

    def _reader(self, shard: int) -> ShardReader:
        state = ShardState(**self._states.get(str(shard), {}))
        return ShardReader(self._shards, shard, state, self._shards.config.repeat)

    def _batch(self, slots: list[int], items: list[Any], request: StreamRequest) -> Stacked:
        if items:
            self._template = items[0]
        elif self._template is None:
            self._template = self._dataset.item(request.lane, 0)
        if self._dataset.collate is not None:
            batch = self._dataset.collate(self._dataset, items or [self._template], slots, 0, request.size)
            return Stacked(batch.inputs, batch.targets, dict(batch.context), target_count(batch.targets))
        reads = self._dataset.reads
        describe = self._dataset.describe
        samples = [reads.sample(item, describe(slot)) for slot, item in zip(slots, items, strict=True)]
        check_shapes(slots, samples, describe)
        return stacked(samples, padding_like(reads.sample(self._template, "an earlier item")), request.size)
