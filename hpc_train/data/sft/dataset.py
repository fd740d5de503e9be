"""Reads the records of ``data=sft`` as samples of uneven length, or packs them into sequences.

A record has at most ``sequence_length`` inputs: the tokens after the first ``sequence_length + 1`` are not read.
Records without an answer token among the targets that are left are dropped. Without ``data.validation_path`` a hash of
its tokens assigns a record to a split, so that equal records are in the same one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.schema import SFTDataConfig
from hpc_train.data.dataset import IGNORED, Array, Dataset, Indices, Sample, check_sequence_length, hash_of
from hpc_train.data.sft.answers import ANSWER, Encoder, Tokens
from hpc_train.data.sft.cache import RECORD, Stored, cache_directory, tokenized
from hpc_train.data.sft.records import find_parts
from hpc_train.data.sft.tokenizer import fingerprint, template_text, vocabulary
from hpc_train.data.tokens import PackedDataset
from hpc_train.errors import UserError


def build_sft(config: SFTDataConfig, split: str, seed: int) -> Dataset:
    """Builds a split of ``data=sft``, packed with ``data.packing``.

    Raises:
        UserError: the input or the tokenizer is invalid, or no record has an answer.
    """
    records = AnswersDataset(config, split)
    if not config.packing:
        return records
    packed = PackedAnswers(records, config.sequence_length)
    packed.notice = records.notice
    return packed


def answer_sample(tokens: Array) -> Sample:
    """Returns the sample of S + 1 stored tokens: S inputs, with the next token as target where it is learnt."""
    ids = tokens.astype(np.int64) & (ANSWER - 1)
    targets = np.where(tokens[1:] >= ANSWER, ids[1:], IGNORED)
    return Sample(inputs=ids[:-1], targets=targets)


class AnswersDataset(Dataset):
    """Reads one record per sample; ``lengths`` are the numbers of their inputs."""

    loads_cheaply = True

    def __init__(self, config: SFTDataConfig, split: str) -> None:
        check_sequence_length(config.sequence_length)
        from_validation_path = split == "validation" and config.validation_path is not None
        where = "data.validation_path" if from_validation_path else "data.path"
        path = str(config.validation_path) if from_validation_path else config.path
        self._stored = _tokenized(config, path, where)
        self._maps: dict[int, Tokens] = {}
        part_records = [stored.records() for stored in self._stored]
        records = np.concatenate([np.zeros(0, RECORD), *part_records])
        parts = np.repeat(np.arange(len(part_records)), [len(part) for part in part_records])
        _check_vocabulary(config, records)
        if config.validation_path:
            chosen = np.ones(len(records), bool)
        else:
            chosen = _in_split(records, config, split)
        learnt = (records["first"] >= 1) & (records["first"] <= config.sequence_length)
        usable = np.flatnonzero(chosen & learnt)
        self.notice = _notice(split, int(chosen.sum()), len(usable), config.sequence_length)
        if not len(usable):
            raise UserError(
                f"none of the {int(chosen.sum())} {split} records of {path} has an answer within "
                f"{config.sequence_length} tokens",
                where=f"{where}, data.sequence_length",
                fix="records with answers, a longer data.sequence_length, or data.validation_path=FILE",
            )
        self._fingerprint = hash_of(records["hash"][usable])
        self._parts = parts[usable]
        self._starts = _starts(part_records)[usable]
        self.lengths: Indices = np.minimum(records["length"][usable].astype(np.int64) - 1, config.sequence_length)

    def __len__(self) -> int:
        return len(self._parts)

    def sample(self, index: int, epoch: int) -> Sample:
        return answer_sample(self._tokens(index))

    def fingerprint(self) -> str:
        return self._fingerprint

    def source(self, index: int) -> str:
        return self._stored[self._parts[index]].part.path

    def document_lengths(self) -> NDArray[Any]:
        """Returns the number of tokens of each record that are read."""
        return self.lengths + 1

    def window(self, start: int, length: int) -> Array:
        """Returns ``length`` stored tokens of a record; ``start`` counts the tokens of all records that are read."""
        index = self._index_at(start)
        skip = start - int(self._ends[index] - self.lengths[index] - 1)
        return self._tokens(index)[skip : skip + length]

    def source_at(self, token: int) -> str:
        return self.source(self._index_at(token))

    def _index_at(self, token: int) -> int:
        return int(np.searchsorted(self._ends, token, side="right"))

    @cached_property
    def _ends(self) -> Indices:
        return np.cumsum(self.document_lengths())

    def _tokens(self, index: int) -> Tokens:
        part = int(self._parts[index])
        start = int(self._starts[index])
        if part not in self._maps:
            self._maps[part] = self._stored[part].tokens()
        return self._maps[part][start : start + int(self.lengths[index]) + 1]


class PackedAnswers(PackedDataset):
    """Packs whole records into sequences; targets that are not learnt are ``IGNORED``."""

    def piece(self, start: int, size: int) -> Sample:
        return answer_sample(self.documents.window(start, size + 1))


def _tokenized(config: SFTDataConfig, path: str, where: str) -> list[Stored]:
    template = None
    if config.chat_template is not None:
        template = template_text(config.chat_template)
    settings = fingerprint(config.tokenizer, template)

    def open_encoder() -> Encoder:
        return Encoder(config.tokenizer, config.chat_template)

    return tokenized(find_parts(path, where), cache_directory(config.cache), settings, open_encoder)


def _starts(part_records: list[Any]) -> Indices:
    """Returns the first token of each record in the file of its part."""
    lengths = [records["length"].astype(np.int64) for records in part_records]
    return np.concatenate([np.zeros(0, np.int64), *(np.cumsum(sizes) - sizes for sizes in lengths)])


def _in_split(records: Any, config: SFTDataConfig, split: str) -> NDArray[np.bool_]:
    """Returns which records belong to ``split``; each split has at least one, if there are two different ones."""
    hashes = records["hash"]
    validation = hashes < config.validation_share
    if len(hashes) and not validation.any():
        validation = hashes == hashes.min()
    elif validation.all():
        validation = hashes < hashes.max(initial=0)
    if split == "validation":
        return validation
    return ~validation


def _notice(split: str, records: int, usable: int, length: int) -> str:
    if usable == records:
        return ""
    return f"{records - usable} of {records} {split} records have no answer within {length} tokens and are not used"


def _check_vocabulary(config: SFTDataConfig, records: Any) -> None:
    largest = int(records["largest"].max(initial=0))
    if config.vocab_size is None or largest >= config.vocab_size:
        needed = max(largest + 1, vocabulary(config.tokenizer))
        raise UserError(
            f"the data has token ids up to {largest}, but data.vocab_size is {config.vocab_size}",
            where="data.vocab_size",
            fix=f"data.vocab_size={needed}, and a model with as many token ids",
        )
