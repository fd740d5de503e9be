"""Encodes the records of ``data=sft`` as token ids, keeps them in a cache, and reads them as samples.

Only the tokens of the answers are trained on:

- ``text``: every token.
- ``prompt`` and ``completion``: the tokens of the completion and the token that ends the text (EOS).
- ``messages``: what the chat template encloses in ``{% generation %}`` tags, as ``return_assistant_tokens_mask`` of
  transformers. For other templates the conversation is rendered up to each turn of the assistant, with and without
  that turn. Both must be prefixes of the whole conversation, and the difference between them is the answer, including
  the token that ends the turn; white space after this token is not learned, since no generated answer has it.

Each text is encoded as a whole, as in the use of the model, and a token that is only partly in an answer is learned.

All processes that need the tokens share the work: each takes a part of the input that no other process has locked, each
process in a different order, until all parts exist. A part is committed by renaming its directory, so an interrupted
start continues with the other parts. The lock file of a dead process is found to be unlocked after some seconds. File
systems without locks rely on the age of the file, so a part that takes long may be computed twice.

A record has at most ``sequence_length`` inputs: the tokens after the first ``sequence_length + 1`` are not read.
Records without an answer token among the targets that are left are dropped. Without ``data.validation_path`` a hash of
its tokens assigns a record to a split, so that equal records are in the same one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.schema import SFTDataConfig
from hpc_train.data.dataset import IGNORED, Array, Dataset, Indices, Sample, hash_of
from hpc_train.data.sft_inputs import (
    SETTINGS,
    Part,
    Record,
    find_parts,
    fingerprint,
    form_of,
    no_end,
    read_records,
    template_text,
    tokenizer_file,
    vocabulary,
)
from hpc_train.data.tokens import PackedDataset
from hpc_train.errors import UserError
from hpc_train.users import user_cache

ANSWER = 1 << 31  # this bit of a stored token marks a token that is trained on
Tokens = NDArray[np.uint32]
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COLUMNS = "data.path"


class Encoder:
    """Encodes records with ``tokenizer``, a directory or a ``tokenizer.json``, and with the chat template in the file
    ``template``; None uses the template of the tokenizer."""

    def __init__(self, tokenizer: str, template: str | None) -> None:
        self._path = tokenizer
        self._tokenizer = _load(tokenizer)
        self._template = None if template is None else template_text(template)

    def encode(self, record: Record) -> Tokens:
        """Returns the token ids of a record, with ``ANSWER`` set in those that are trained on; raises UserError if a
        column has another type, the chat template does not fit, or the tokenizer has no end token for a text or
        completion."""
        values = record.values
        form = form_of([name for name in values if values[name] is not None], record.name)
        if form == "messages":
            return self._conversation(record)
        if form == "text":
            parts = ("", values["text"])
        else:
            parts = (values["prompt"], values["completion"])
        if not all(isinstance(part, str) for part in parts):
            raise UserError(
                f"{record.name}: {form} is not text",
                where=_COLUMNS,
                fix="use strings, or the column messages for turns",
            )
        prompt, completion = parts
        encoded = self._tokenizer(prompt + completion, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        learnt = _inside(encoded["offset_mapping"], [(len(prompt), len(prompt) + len(completion))])
        if not prompt:
            learnt[:] = True
        end = self._tokenizer.eos_token_id
        if end is None:
            raise no_end(self._path)
        if not ids or ids[-1] != end:
            ids = [*ids, end]
            learnt = np.append(learnt, True)
        learnt[-1] = True
        return _marked(ids, learnt)

    def _conversation(self, record: Record) -> Tokens:
        messages = record.values["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            raise UserError(
                f"{record.name}: messages is not a list of objects with role and content",
                where=_COLUMNS,
                fix='"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
            )
        # in a table every message has every key, with None for a key that the message lacks
        messages = [{key: value for key, value in m.items() if value is not None or key == "content"} for m in messages]
        tools = record.values.get("tools") or None
        try:
            template = self._tokenizer.get_chat_template(self._template, tools)
            if _GENERATION.search(template):
                encoded = self._tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
                )
                return _marked(encoded["input_ids"], np.array(encoded["assistant_masks"], dtype=bool))
            text, spans = self._spans(messages, tools, template, record)
        except UserError:
            raise
        except Exception as error:  # Jinja and the template raise arbitrary exceptions
            raise UserError(
                f"{record.name}: the chat template failed: {type(error).__name__}: {error}",
                where="data.chat_template",
                fix="correct the messages, or data.chat_template=FILE.jinja, which accepts them",
            ) from error
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return _marked(encoded["input_ids"], _inside(encoded["offset_mapping"], spans))

    def _spans(
        self, messages: Sequence[Any], tools: Any, template: str, record: Record
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns the rendered conversation and the first and last character (exclusive) of each answer."""

        def render(turns: Sequence[Any], prompt: bool) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    turns, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
                )
            )

        conversation = render(messages, False)
        spans = []
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                after = render(messages[: turn + 1], False)
                before = render(messages[:turn], True) if turn else _before_first(render, message, after)
                if before is None or not (conversation.startswith(after) and after.startswith(before)):
                    raise UserError(
                        f"{record.name}: the chat template renders the beginning of the conversation differently once "
                        f"message {turn} (an answer) or a later one follows, so the tokens of the answer are not known",
                        where="data.chat_template",
                        fix="data.chat_template=FILE.jinja with {% generation %} and {% endgeneration %} around the "
                        "answers, or split the conversations so that each ends with its only answer",
                    )
                spans.append((len(before), len(after.rstrip())))
        return conversation, spans


_QUESTION = [{"role": "user", "content": "?"}]


def _before_first(render: Callable[[Sequence[Any], bool], str], message: Mapping[str, Any], text: str) -> str | None:
    """Returns the part of ``text``, a conversation that begins with the answer ``message``, before the answer.

    It ends with what the template puts before an answer, and is found without rendering an empty conversation, which
    many templates cannot. None if it is not found.
    """
    marker = render(_QUESTION, True).removeprefix(render(_QUESTION, False))
    if marker:
        head, match, _ = text.partition(marker)
        if match:
            return head + marker
        return None
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        position = text.find(content.strip())
    else:
        position = -1
    if position >= 0:
        return text[:position]
    return None


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Returns for each token with these character offsets whether it overlaps a span."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), dtype=bool)
    for first, last in spans:
        inside |= (starts < last) & (ends > first) & (starts < ends)
    return inside


def _marked(ids: Sequence[int], learnt: NDArray[np.bool_]) -> Tokens:
    return np.array(ids, dtype=np.uint32) | np.where(learnt, np.uint32(ANSWER), np.uint32(0))


def _load(tokenizer: str) -> Any:
    import transformers

    file = tokenizer_file(tokenizer)
    try:
        if (file.parent / SETTINGS).is_file():
            return transformers.AutoTokenizer.from_pretrained(str(file.parent), local_files_only=True)
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    except Exception as error:
        raise UserError(
            f"transformers cannot load the tokenizer {file.parent}: {type(error).__name__}: {error}",
            where="data.tokenizer",
            fix="data.tokenizer=a directory that save_pretrained of the tokenizer wrote",
        ) from error


TOKENS, RECORDS = "tokens.bin", "records.npy"
RECORD = np.dtype([("length", "<u4"), ("first", "<u4"), ("hash", "<f8"), ("largest", "<u4")])
NO_ANSWER = 0xFFFFFFFF
_FORMAT = 2
_WAITS_S = 0.1, 5.0  # the first and the longest wait
_WITHOUT_LOCKS_S = 120.0  # on file systems without locks, an older lock file belongs to a dead process
_TRIED = 4  # the number of lock files of other processes that are tried after each of the longest waits


@dataclass(frozen=True)
class Stored:
    """Locates the files of one part.

    Attributes:
        part: the input.
        directory: has ``tokens.bin``, the tokens of all records as little-endian uint32, and ``records.npy``: for each
            record the number of its tokens, the index of the first one that is trained on (or ``NO_ANSWER``), a hash of
            its tokens in [0, 1), and its largest token id.
    """

    part: Part
    directory: Path

    @property
    def exists(self) -> bool:
        return (self.directory / RECORDS).is_file()

    @property
    def lock(self) -> Path:
        return self.directory.with_suffix(".lock")

    def records(self) -> Any:
        return np.load(self.directory / RECORDS)

    def tokens(self) -> Tokens:
        return np.memmap(self.directory / TOKENS, dtype="<u4", mode="r")


def tokenized(
    parts: Sequence[Part], directory: Path, settings: str, open_encoder: Callable[[], Encoder]
) -> list[Stored]:
    """Returns the tokens of ``parts`` in ``directory``; writes those that are missing, together with other processes.

    ``settings`` identifies the tokenizer and the chat template. Raises UserError if a record is invalid, or the
    directory cannot be written.
    """
    stored = [Stored(part, directory / _key(part, settings)) for part in parts]
    if all(part.exists for part in stored):
        return stored
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _complete(stored, directory, open_encoder())
    except OSError as error:
        raise UserError(
            f"the tokens of data.path cannot be computed and written to {directory}: {error}",
            where="data.cache, data.path",
            fix="data.cache=DIRECTORY with room for 4 bytes per token, or correct the permissions of the file",
        ) from error
    return stored


def _complete(stored: Sequence[Stored], directory: Path, encoder: Encoder) -> None:
    missing = list(stored)
    chance = random.Random()
    wait_s, longest_s = _WAITS_S
    while True:
        names = {path.name for path in directory.iterdir()}
        missing = [part for part in missing if part.directory.name not in names or not part.exists]
        if not missing:
            return
        chance.shuffle(missing)
        if any(_written(part, encoder) for part in missing if part.lock.name not in names):
            continue
        if wait_s == longest_s and any(_written(part, encoder) for part in missing[:_TRIED]):
            continue
        time.sleep(chance.uniform(wait_s / 5, wait_s))
        wait_s = min(2 * wait_s, longest_s)


def _written(stored: Stored, encoder: Encoder) -> bool:
    """Writes a part unless another process does or has; returns whether this process has written it."""
    with _claimed(stored.lock) as claimed:
        if not claimed or stored.exists:
            return False
        _write(stored, encoder)
        return True


def _key(part: Part, settings: str) -> str:
    return hash_of(json.dumps([asdict(part), settings, _FORMAT], sort_keys=True).encode())


@contextmanager
def _claimed(lock: Path) -> Iterator[bool]:
    """Yields whether this process has the lock, which is released if the process dies."""
    try:
        file = lock.open("x")
        new = True
    except FileExistsError:
        file = lock.open("a")
        new = False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            if not new and time.time() - os.fstat(file.fileno()).st_mtime < _WITHOUT_LOCKS_S:
                yield False
                return
        try:
            yield True
        finally:
            lock.unlink(missing_ok=True)


def _write(stored: Stored, encoder: Encoder) -> None:
    unfinished = stored.directory.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        with (unfinished / TOKENS).open("wb") as file:
            descriptions = []
            for record in read_records(stored.part):
                tokens = encoder.encode(record)
                file.write(tokens.astype("<u4").tobytes())
                learnt = np.flatnonzero(tokens[1:] >= ANSWER)  # the first token is never a target
                digest = hashlib.blake2b(tokens.tobytes(), digest_size=6).digest()
                first = int(learnt[0]) + 1 if len(learnt) else NO_ANSWER
                largest = int((tokens & np.uint32(ANSWER - 1)).max()) if len(tokens) else 0
                descriptions.append((len(tokens), first, int.from_bytes(digest, "big") / 2**48, largest))
        np.save(unfinished / RECORDS, np.array(descriptions, dtype=RECORD))
        if not stored.exists:
            unfinished.rename(stored.directory)
    except OSError:
        if not stored.exists:  # another process without locks was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def build_sft(config: SFTDataConfig, split: str, seed: int) -> Dataset:
    """Builds a split of ``data=sft``, packed with ``data.packing``; raises UserError if the input or the tokenizer is
    invalid, or no record has an answer."""
    records = AnswersDataset(config, split)
    if not config.packing:
        return records
    packed = PackedAnswers(records, config.sequence_length)
    packed.notice = records.notice
    return packed


def answer_sample(tokens: Array) -> Sample:
    """Returns the sample of S + 1 stored tokens: S inputs, with the next token as target where it is trained on."""
    ids = tokens.astype(np.int64) & (ANSWER - 1)
    targets = np.where(tokens[1:] >= ANSWER, ids[1:], IGNORED)
    return Sample(inputs=ids[:-1], targets=targets)


class AnswersDataset(Dataset):
    """Reads one record per sample; ``lengths`` are the numbers of their inputs."""

    loads_cheaply = True

    def __init__(self, config: SFTDataConfig, split: str) -> None:
        from_validation_path = split == "validation" and config.validation_path is not None
        where = "data.validation_path" if from_validation_path else "data.path"
        path = str(config.validation_path) if from_validation_path else config.path
        self._stored = _tokenized(config, path, where)
        self._maps: dict[int, Tokens] = {}
        part_records = [stored.records() for stored in self._stored]
        records = np.concatenate([np.zeros(0, RECORD), *part_records])
        parts = np.repeat(np.arange(len(part_records)), [len(part) for part in part_records])
        largest = int(records["largest"].max(initial=0))
        if config.vocab_size is None or largest >= config.vocab_size:
            needed = max(largest + 1, vocabulary(config.tokenizer))
            raise UserError(
                f"the data has token ids up to {largest}, but data.vocab_size is {config.vocab_size}",
                where="data.vocab_size",
                fix=f"data.vocab_size={needed}, and a model with as many token ids",
            )
        if config.validation_path:
            chosen = np.ones(len(records), bool)
        else:
            chosen = _in_split(records, config, split)
        learnt = (records["first"] >= 1) & (records["first"] <= config.sequence_length)
        usable = np.flatnonzero(chosen & learnt)
        count = int(chosen.sum())
        if len(usable) < count:
            words = f"have no answer within {config.sequence_length} tokens and are not used"
            self.notice = f"{count - len(usable)} of {count} {split} records {words}"
        if not len(usable):
            raise UserError(
                f"none of the {count} {split} records of {path} has an answer within {config.sequence_length} tokens",
                where=f"{where}, data.sequence_length",
                fix="records with answers, a longer data.sequence_length, or data.validation_path=FILE",
            )
        self._fingerprint = hash_of(records["hash"][usable])
        self._parts = parts[usable]
        starts = [np.cumsum(part["length"], dtype=np.int64) - part["length"] for part in part_records]
        self._starts = np.concatenate([np.zeros(0, np.int64), *starts])[usable]  # in the file of the part
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
    """Packs whole records into sequences; targets that are not trained on are ``IGNORED``."""

    def piece(self, start: int, size: int) -> Sample:
        return answer_sample(self.documents.window(start, size + 1))


def _tokenized(config: SFTDataConfig, path: str, where: str) -> list[Stored]:
    template = None
    if config.chat_template is not None:
        template = template_text(config.chat_template)
    settings = fingerprint(config.tokenizer, template)
    cache = user_cache() / "sft" if config.cache is None else Path(config.cache).expanduser()
    open_encoder = partial(Encoder, config.tokenizer, config.chat_template)
    return tokenized(find_parts(path, where), cache, settings, open_encoder)


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
