from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import feather, parquet

from hpc_train.commands.prepare import main
from hpc_train.config.compose import typed
from hpc_train.config.schema import TokensDataConfig
from hpc_train.data import documents, prepare
from hpc_train.data.conversion import Progress, sole_builder
from hpc_train.data.documents import find_inputs, fingerprint, read_documents
from hpc_train.data.tokens import TokensDataset
from hpc_train.errors import UserError
from hpc_train.run.file_lock import STALE_S, LockOwner, acquire, newest_lock
from hpc_train.train.prompts import choose_tokenizer
from tests.config.composing import compose
from tests.doors.schema import check_output

SEPARATOR = "<|endoftext|>"


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts))
    return path


def write_tokenizer(path: Path, *special: str) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", *(f"w{i}" for i in range(100)), *special]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


def tokens(out: Path, split: str) -> np.ndarray[Any, Any]:
    meta = json.loads((out / "meta.json").read_text())
    return np.fromfile(out / f"{split}.bin", dtype={"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]])


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_bytes_of_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"document {i} é. " for i in range(300)]
    source = write_jsonl(tmp_path / "documents.jsonl", texts)
    out = tmp_path / "out"
    assert run(source, "--out", out, "--validation-share", 0.1, "--json", "--workers", 1) == 0
    printed = capsys.readouterr().out
    check_output(["prepare"], printed)
    result = json.loads(printed)
    train, validation = (bytes(tokens(out, split).astype(np.uint8)).decode() for split in ("train", "validation"))
    found = [text for text in texts if text in validation]
    assert train == "".join(text for text in texts if text not in found) and validation == "".join(found)
    assert 10 < len(found) < 60
    assert result["counts"] == {"train": len(train.encode()), "validation": len(validation.encode())}
    assert result["vocab_size"] == 256 and result["dtype"] == "uint16" and result["separator"] is None
    dataset = TokensDataset(TokensDataConfig(path=str(out), sequence_length=16, vocab_size=256), "train")
    assert bytes(dataset.sample(0, 0).inputs.astype(np.uint8)) == train.encode()[:16]
    assert not (out / ".shards").exists()


def test_a_tokenizer_file_puts_its_end_token_behind_each_document(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", SEPARATOR, "[STOP]")
    source = write_jsonl(tmp_path / "documents.jsonl", ["w0 w1", "w2", "w3 w4 w5"] * 20, field="content")
    common = (source, "--tokenizer", tokenizer, "--jsonl-field", "content", "--workers", 1)
    for extra, separator in (((), 101), (("--eos", "[STOP]"), 102)):
        out = tmp_path / f"out-{separator}"
        assert run(*common, "--out", out, *extra) == 0
        both = np.concatenate([tokens(out, split) for split in ("train", "validation")])
        assert len(both) == 60 + 120 and (both == separator).sum() == 60
        meta = json.loads((out / "meta.json").read_text())
        assert meta["separator"] == separator and meta["vocab_size"] == 103


@pytest.mark.parametrize(
    ("special", "arguments", "expected", "warns"),
    [
        ((SEPARATOR,), (), f"each document ends with {SEPARATOR} (101)", False),
        (("[STOP]",), ("--eos", "[STOP]"), "each document ends with [STOP] (101)", False),
        (("[STOP]",), (), "no token separates the documents", True),
        (None, (), "no token separates the documents", False),
    ],
)
def test_the_separator_is_printed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    special: tuple[str, ...] | None,
    arguments: tuple[str, ...],
    expected: str,
    warns: bool,
) -> None:
    tokenizer = "bytes" if special is None else write_tokenizer(tmp_path / "tokenizer.json", *special)
    source = write_jsonl(tmp_path / "documents.jsonl", ["w0 w1"] * 20)
    for _ in range(2):  # the second call finds the files complete
        assert run(source, "--out", tmp_path / "out", "--tokenizer", tokenizer, "--workers", 1, *arguments) == 0
        printed = capsys.readouterr()
        assert expected in printed.out and ("--eos TOKEN" in printed.err) == warns


def with_template(path: Path, template: str, start: str) -> Path:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(write_tokenizer(path, start, "</s>")))
    special = [(token, tokenizer.token_to_id(token)) for token in (start, "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_documents_begin_with_the_start_token_of_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str
) -> None:
    tokenizer = with_template(tmp_path / "tokenizer.json", template, "<s>")
    source = write_jsonl(tmp_path / "documents.jsonl", ["w3 w4", "w5"])
    command = (source, "--tokenizer", tokenizer, "--workers", 1, "--out")
    for arguments, expected, line in (
        ((), [101, 4, 5, 102, 101, 6, 102], "each document begins with <s> (101)"),
        (
            ("--no-bos",),
            [4, 5, 102, 6, 102],
            "documents begin without <s>, the start token of the tokenizer (--no-bos)",
        ),
    ):
        out = tmp_path / f"out{len(expected)}"
        for _ in range(2):  # the second call finds the files complete
            assert run(*command, out, *arguments) == 0
            assert line in capsys.readouterr().out
        assert [*tokens(out, "train"), *tokens(out, "validation")] == expected
        config = typed(compose(["data=tokens", f"data.path={out}", "data.vocab_size=103"]))
        prompt = choose_tokenizer(config, None).open().encode("w3")
        assert prompt == [*expected[: expected.index(4)], 4], "prompts begin as documents do"
        with pytest.raises(UserError, match="contains tokens of other inputs or settings"):
            run(*command, out, *(() if arguments else ("--no-bos",)))


def test_a_directory_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", SEPARATOR)
    write_jsonl(tmp_path / "documents.jsonl", ["w3 w4", "w5"])
    inputs = find_inputs([str(tmp_path / "documents.jsonl")])
    settings = prepare.Settings(tokenizer=str(tokenizer))
    meta = prepare.prepare(inputs, settings, tmp_path / "out", 1, lambda done: None)
    values = {name: value for name, value in asdict(settings).items() if name != "bos"}
    key = prepare._key(inputs[0], values | {"tokenizer": fingerprint(str(tokenizer))})
    assert meta.source["key"] == hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def spaced(path: Path, kind: str) -> Any:
    """Saves a tokenizer that puts a space before each text, as SentencePiece does, and returns it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    words = ["▁", *(f"▁{word}" for word in ("w0", "w1", "w2")), "w0", "w1", "w2", "\n", "\n\n", "w", "0", "1", "2"]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram([("<unk>", -9.0), *((word, -1.0) for word in words)], 0))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("\n", " "), normalizers.Replace("  ", " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    else:
        tokenizer = Tokenizer(models.Unigram([("<unk>", -9.0), *((word, -1.0) for word in words)], 0))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.save(str(path))
    return tokenizer


@pytest.mark.parametrize("kind", ["unigram", "prepended"])
@pytest.mark.parametrize("ending", ["\n", "\n\n", " \n \n", "\n\n  "])
def test_pieces_of_a_document_have_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ending: str
) -> None:
    monkeypatch.setattr(documents, "_PIECE", 40)
    monkeypatch.setattr(documents, "_CONTEXT", 16)
    tokenizer = spaced(tmp_path / "tokenizer.json", kind)
    text = "".join(f"w{i % 3} w{i % 2}{ending}" for i in range(60))
    (tmp_path / "a.txt").write_text(text)
    (file,) = find_inputs([str(tmp_path / "a.txt")])
    pieces = list(read_documents(file, "text", "utf-8"))
    assert "".join(piece.text for piece in pieces) == text and len(pieces) > 5
    encoder = documents.open_encoder(str(tmp_path / "tokenizer.json"), None)
    assert np.concatenate(encoder.encode(pieces)).tolist() == tokenizer.encode(text).ids


def test_truncation_and_padding_of_the_tokenizer_are_ignored(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    path = write_tokenizer(tmp_path / "tokenizer.json", SEPARATOR, "[PAD]")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(pad_id=102, pad_token="[PAD]", length=8)
    tokenizer.save(str(path))
    source = write_jsonl(tmp_path / "documents.jsonl", ["w0 " * 5, "w0 " * 1000] * 10)
    assert run(source, "--out", tmp_path / "out", "--tokenizer", path, "--workers", 1) == 0
    both = np.concatenate([tokens(tmp_path / "out", split) for split in ("train", "validation")])
    assert np.bincount(both)[[1, 101]].tolist() == [10 * 1005, 20] and 102 not in both


def test_text_files_are_documents_and_gzip_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_PIECE", 20_000)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", SEPARATOR)
    folder = tmp_path / "books" / "deep"
    folder.mkdir(parents=True)
    long = "".join(f"w{i % 100} w7\n" for i in range(10_000))  # more than one piece
    (folder / "long.txt").write_text(long)
    with gzip.open(folder / "short.txt.gz", "wt") as file:
        file.write("w1 w2 w3")
    (folder / "ignored.bin").write_bytes(b"\xff")
    out = tmp_path / "out"
    assert run(tmp_path / "books", folder / "long.txt", "--out", out, "--tokenizer", tokenizer, "--workers", 1) == 0
    both = np.concatenate([tokens(out, split) for split in ("train", "validation")])
    assert len(both) == 20_000 + 1 + 3 + 1  # the second mention of long.txt is the same file
    assert (both == 101).sum() == 2
    assert json.loads((out / "meta.json").read_text())["source"]["validation"] == "the end of the tokens"
    assert len(tokens(out, "validation")) == round(len(both) * 0.01)


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    vocabulary = {"[UNK]": 0} | {f"t{i}": i for i in range(1, 70_000)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(tmp_path / "large.json"))
    source = write_jsonl(tmp_path / "documents.jsonl", ["t69999"] * 10)
    assert run(source, "--out", tmp_path / "out", "--tokenizer", tmp_path / "large.json", "--workers", 1) == 0
    assert tokens(tmp_path / "out", "train").tolist()[0] == 69_999
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["dtype"] == "uint32"


def test_running_it_again_does_nothing_and_other_settings_are_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "documents.jsonl", ["some text"] * 50)
    out = tmp_path / "out"
    assert run(source, "--out", out, "--workers", 1) == 0
    written = (out / "train.bin").stat()
    assert run(source, "--out", out, "--workers", 1) == 0
    assert (out / "train.bin").stat().st_ino == written.st_ino
    with pytest.raises(UserError, match="contains tokens of other inputs or settings"):
        run(source, "--out", out, "--validation-share", 0.5, "--workers", 1)


@pytest.mark.long_form(10)  # test_shards has the same for images
def test_killed_in_the_middle_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "SHARD_BYTES", 1)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(40):
        write_jsonl(folder / f"{number:02d}.jsonl", [f"{number} {i} " * 40 for i in range(1500)])
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run(folder, "--out", whole, "--workers", 2) == 0
    _kill_when_some_shards_are_there(folder, out)
    assert not (out / "meta.json").exists()
    shards = [path for path in (out / ".shards").iterdir() if not path.name.startswith("unfinished-")]
    assert 0 < len(shards) < 40
    marked = np.fromfile(shards[0] / "train.bin", dtype="<u2")
    (marked + 1000).astype("<u2").tofile(shards[0] / "train.bin")  # would be lost if the input were read again
    assert run(folder, "--out", out, "--workers", 2) == 0
    for split in ("train", "validation"):
        resumed = tokens(out, split)
        assert (resumed >= 1000).sum() == (len(marked) if split == "train" else 0)
        assert np.array_equal(resumed % 1000, tokens(whole, split))


def _kill_when_some_shards_are_there(folder: Path, out: Path) -> None:
    start = "import sys\nfrom hpc_train.commands.prepare import main\nfrom hpc_train.data import prepare\n"
    start += "prepare.SHARD_BYTES = 1\n"
    code = f"{start}assert 'torch' not in sys.modules, 'two seconds for each process'\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", code, str(folder), "--out", str(out), "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while len(list((out / ".shards").glob("[0-9a-f]*"))) < 3:
            assert process.poll() is None
            time.sleep(0.001)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "encoders live on"
        time.sleep(0.02)


def test_small_inputs_share_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for number in range(300):
        (tmp_path / "in" / f"{number:03d}.txt").write_text(f"document {number}\n" * 20)
    monkeypatch.setattr(prepare, "SHARD_BYTES", 20_000)
    inputs, reports, read = find_inputs([str(tmp_path / "in")]), list[Progress](), list[str]()
    monkeypatch.setattr(prepare, "fingerprint", lambda tokenizer: read.append(tokenizer) or tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_join", None)
        with pytest.raises(TypeError):
            prepare.prepare(inputs, prepare.Settings(), tmp_path / "out", 1, reports.append)
    assert read == ["bytes"], "a tokenizer has some MB"
    shards = list((tmp_path / "out" / ".shards").iterdir())
    assert 3 <= len(shards) <= 5
    shutil.rmtree(shards[0])
    prepare.prepare(inputs, prepare.Settings(), tmp_path / "out", 1, reports.append)
    both = np.concatenate([tokens(tmp_path / "out", split) for split in ("train", "validation")])
    text = "".join(path.read_text() for path in sorted((tmp_path / "in").iterdir()))
    assert sorted(both.tolist()) == sorted(text.encode())
    assert reports[-1] == Progress(len(text), 300) and max(report.items for report in reports) == 300
    lengths = [np.fromfile(tmp_path / "out" / f"{split}.documents", "<u4") for split in ("train", "validation")]
    assert sum(map(len, lengths)) == 300


def test_the_lengths_of_many_documents_take_little_memory(tmp_path: Path) -> None:
    count, border = 1_000_000, 7 * 999_999 + 3
    for split, number in (("train", count - 10), ("validation", 10)):
        np.full(number, 7, dtype="<u4").tofile(tmp_path / f"{split}.documents")
    (tmp_path / "out").mkdir()
    tracemalloc.start()
    shard = prepare._Shard([], str(tmp_path), 1)
    prepare._join_documents([shard], tmp_path / "out", border)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * count
    train, validation = (np.fromfile(tmp_path / "out" / f"{s}.documents", "<u4") for s in ("train", "validation"))
    assert train.tolist() == [7] * 999_999 + [3] and validation.tolist() == [4]


@pytest.mark.long_form(5)  # test_shards ends a prepare with its workers
def test_ctrl_c_ends_all_and_says_how_to_go_on(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "documents.jsonl", ["text " * 100] * 30_000)
    code = "import sys\nfrom hpc_train.commands.prepare import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(source), "--out", str(tmp_path / "out"), "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while not list((tmp_path / "out").glob(".shards/unfinished-*/*.bin")):
            assert process.poll() is None
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGINT)
        _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again" in message and "Traceback" not in message


@contextmanager
def preparing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that prepares ``tmp_path / "out"`` for some seconds, in a group of its own."""
    source = write_jsonl(tmp_path / "documents.jsonl", ["text " * 100] * 60_000)
    command = [sys.executable, "-m", "hpc_train", "prepare", str(source), "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        [*command, "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        while not list((tmp_path / "out").glob(".shards/unfinished-*/*.bin")):
            assert process.poll() is None
            time.sleep(0.005)
        yield process
        process.kill()


@pytest.mark.long_form(8)
def test_one_process_prepares_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)  # Lustre without -o flock
    with preparing(tmp_path) as other:
        with pytest.raises(UserError, match=f"process {other.pid} on .* is preparing"):
            run(tmp_path / "documents.jsonl", "--out", tmp_path / "out")
        other.kill()
        other.wait()
        assert run(tmp_path / "documents.jsonl", "--out", tmp_path / "out") == 0


def test_a_full_disk_is_what_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("hpc_train.data.conversion.patiently", full)
    with pytest.raises(OSError, match=r"train.bin is full"), sole_builder(tmp_path):
        raise OSError(errno.ENOSPC, "train.bin is full")


def test_a_successor_ends_an_earlier_builder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another process has begun to prepare"), sole_builder(tmp_path) as builder:
        os.utime(builder.lock.path, (time.time() - STALE_S - 1,) * 2)
        assert acquire(tmp_path / ".locks", replace(LockOwner.of_this_process(), machine="another")).number == 2
        builder.check()


@pytest.mark.long_form(8)  # the case before has the check
def test_a_suspended_process_leaves_the_directory_to_its_successor(tmp_path: Path) -> None:
    with preparing(tmp_path) as suspended:
        os.killpg(suspended.pid, signal.SIGSTOP)
        lock = newest_lock(tmp_path / "out" / ".locks")
        assert lock is not None
        os.utime(lock.path, (time.time() - STALE_S - 1,) * 2)
        successor = replace(LockOwner.of_this_process(), machine="another")
        assert acquire(tmp_path / "out" / ".locks", successor).number == 2
        os.killpg(suspended.pid, signal.SIGCONT)
        _, message = suspended.communicate(timeout=60)
    assert suspended.returncode == 2 and "another process has begun to prepare" in message
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        ('{"text": "a"}\n{"text"\n', (), r"documents.jsonl:2 is not a JSON object"),
        ('{"body": "a"}\n', (), r"documents.jsonl:1 has no text in 'text'; it has \['body'\]"),
        ("[1]\n", (), r"documents.jsonl:1 is not a JSON object: it is a list"),
        ("\n", (), "the inputs contain 0 tokens"),
        ('{"text": "ab"}\n', ("--tokenizer", "nowhere.json"), "nowhere.json is not a file"),
        ('{"text": "ab"}\n', ("--tokenizer", __file__), "is not a tokenizer file"),
        ('{"text": "ab"}\n', ("--eos", "</s>"), "the tokenizer bytes has no end token"),
        ('{"text": "ab"}\n', ("--validation-share", "1"), "--validation-share is 1.0"),
        ('{"text": "ab"}\n', ("--workers", "0"), "at least 1, got 0"),
    ],
)
def test_wrong_input(tmp_path: Path, content: str, arguments: tuple[str, ...], message: str) -> None:
    source = tmp_path / "documents.jsonl"
    source.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        run(source, "--out", tmp_path / "out", *arguments)
    assert error.value.fix and error.value.where


def test_other_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="matches no input file"):
        run(tmp_path / "*.txt", "--out", tmp_path / "out")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.txt is not utf-8"):
        run(tmp_path / "latin.txt", "--out", tmp_path / "out")
    assert run(tmp_path / "latin.txt", "--out", tmp_path / "out", "--encoding", "latin-1", "--workers", 1) == 0
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:-10])
    with pytest.raises(UserError, match="not a complete gzip file"):
        run(tmp_path / "cut.txt.gz", "--out", tmp_path / "other")
    source = write_jsonl(tmp_path / "documents.jsonl", ["text"])
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match="has no token '</s>'"):
        run(source, "--out", tmp_path / "out", "--tokenizer", tokenizer, "--eos", "</s>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs the tokenizers library") as error:
        run(source, "--out", tmp_path / "out", "--tokenizer", tokenizer)
    assert "[tokenizers]" in error.value.fix


def test_json_and_json_gz_are_json_lines(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    folder.mkdir()
    source = write_jsonl(folder / "c4-train.00000.json", ["first"] * 30)
    (tmp_path / "blob").write_bytes(gzip.compress(source.read_bytes()))
    (folder / "c4-train.00001.json.GZ").symlink_to(tmp_path / "blob")  # as in the cache of the Hugging Face hub
    for number, inputs in enumerate(([folder], sorted(folder.iterdir()))):
        out = tmp_path / f"out{number}"
        assert run(*inputs, "--out", out, "--workers", 1, "--validation-share", 0.1) == 0
        both = np.concatenate([tokens(out, split) for split in ("train", "validation")])
        assert bytes(both.astype(np.uint8)) == b"first" * 60
    for text in ('[{"text": "a"}, {"text": "b"}]', json.dumps([{"text": "a"}], indent=2)):
        source.write_text(text)
        with pytest.raises(UserError, match=r"00000.json:1 is not a JSON object") as error:
            run(source, "--out", tmp_path / "other", "--workers", 1)
        assert "jq" in error.value.fix


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.feather", "a.tar.gz", "A.ZIP", "a.txt.xz", "a.parquet.gz"])
def test_formats_other_than_text_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "README.md").write_text("the only text of a downloaded data set")
    (tmp_path / name).write_text("text to the eye")
    for source in (tmp_path / name, tmp_path, tmp_path / "[aA].*"):
        with pytest.raises(UserError, match=f"{name} is not text") as error:
            run(source, "--out", tmp_path / "out")
        assert any(word in error.value.fix for word in ("decompress", "unpack", "JSON Lines"))


def test_a_field_without_json_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"content": "text"}')
    with pytest.raises(UserError, match="no input is JSON Lines or a table"):
        run(tmp_path / "a.txt", "--out", tmp_path / "out", "--jsonl-field", "content")


def both_splits(out: Path) -> bytes:
    """Returns the bytes of all tokens: with a share of almost 0, the documents stay in their order."""
    return b"".join(bytes(tokens(out, split).astype(np.uint8)) for split in ("train", "validation"))


def test_tables_have_the_tokens_of_json_lines(tmp_path: Path) -> None:
    """Parquet with several row groups, Arrow's file format, and a directory of Dataset.save_to_disk."""
    texts = [f"row {i} é. " for i in range(300)]
    write_jsonl(tmp_path / "rows.jsonl", texts)
    table = pyarrow.table({"other": range(300), "text": pyarrow.array(texts, pyarrow.large_string())})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    feather.write_feather(table, tmp_path / "rows.arrow", chunksize=70)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"of a map that was cached")
    for name in ("rows.jsonl", "rows.parquet", "rows.arrow", "saved"):
        common = (tmp_path / name, "--out", tmp_path / f"out-{name}", "--workers", 1, "--validation-share", 1e-9)
        assert run(*common, "--jsonl-field", "text") == 0
        assert both_splits(tmp_path / f"out-{name}") == "".join(texts).encode()
    assert len(list(read_documents(find_inputs([str(tmp_path / "saved")])[0], "text", "utf-8"))) == 100


def test_a_table_is_read_some_rows_at_a_time(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [f"{i:0100}" for i in range(20_000)], "wide": ["x" * 1000] * 20_000})
    parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=2000)
    pieces = read_documents(find_inputs([str(tmp_path / "rows.parquet")])[0], "text", "utf-8")
    before = pyarrow.total_allocated_bytes()
    consumed = []
    most = 0
    for piece in pieces:
        consumed.append(piece.consumed)
        most = max(most, pyarrow.total_allocated_bytes() - before)
    assert len(consumed) == 20_000 and consumed == sorted(consumed)
    assert consumed[-1] == (tmp_path / "rows.parquet").stat().st_size
    assert most < table.nbytes / 20


def test_tables_that_cannot_be_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pyarrow.table({"text": ["a", None], "ids": [[1, 2], [3]]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    content = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1")
    datasets.DatasetDict({"train": datasets.Dataset(table), "test": datasets.Dataset(table)}).save_to_disk(
        tmp_path / "splits"
    )
    common = ("--out", tmp_path / "out", "--workers", 1)
    for name, arguments, words in (
        ("rows.parquet", (), r"row 1 of .*rows.parquet has no text in 'text', but None"),
        ("rows.parquet", ("--jsonl-field", "ids"), r"row 0 of .* has no text in 'ids', but \[1, 2\]"),
        ("rows.parquet", ("--jsonl-field", "body"), r"no column 'body'; it has \['text', 'ids'\]"),
        ("cut.parquet", (), "cut.parquet is not a complete parquet file"),
        ("cut.arrow", (), "cut.arrow is not a complete arrow file"),
        ("splits", (), "has the splits test, train"),
    ):
        with pytest.raises(UserError, match=words):
            run(tmp_path / name, *arguments, *common)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="needs pyarrow") as refused:
        run(tmp_path / "rows.parquet", *common)
    assert "parquet" in refused.value.fix


def test_help_is_useful(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and "--jsonl-field" in text and "After an interruption" in text
