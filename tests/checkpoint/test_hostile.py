"""Checkpoints made to run code, to reach outside, or to fill memory: all digests are right, and all are refused."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from hpc_train.checkpoint.manifest import METADATA, NAME, BadCheckpoint, FileEntry, Manifest, read_manifest, verify
from hpc_train.checkpoint.reader import SafeReader
from hpc_train.checkpoint.store import CheckpointStore
from hpc_train.checkpoint.writer import quiet
from tests.checkpoint.tiny import commit, state_of

DATA = "__0_0.distcp"
TENSOR = MetadataIndex("model.w0", torch.Size([0, 0]))


class Runs:
    """Pickles as a call of ``function``."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return commit(CheckpointStore(tmp_path / "checkpoints"), 1).path


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def seal(checkpoint: Path, **more: FileEntry) -> None:
    """A manifest with the right digests of whatever lies there now."""
    files = dict(more)
    for path in checkpoint.iterdir():
        if path.name != NAME and path.is_file():
            data = path.read_bytes()
            files[path.name] = FileEntry(len(data), xxhash.xxh3_128(data).hexdigest())
    (checkpoint / NAME).write_bytes(Manifest(1, files).encode())


def load(checkpoint: Path) -> None:
    """As a run loads: the manifest, the files, the metadata, the tensors."""
    manifest = read_manifest(checkpoint)
    verify(checkpoint, manifest)
    reader = SafeReader(checkpoint, manifest)
    reader.read_metadata()
    with quiet():
        dcp.load(state_of(0), storage_reader=reader, no_dist=True)


def refused(checkpoint: Path) -> str:
    with pytest.raises((BadCheckpoint, CheckpointException)) as caught:
        load(checkpoint)
    if isinstance(caught.value, CheckpointException):
        (found,) = caught.value.failures.values()
        assert isinstance(found[0], BadCheckpoint | pickle.UnpicklingError), found[0]
        return str(found[0])
    return str(caught.value)


def calls(canary: Path) -> dict[str, Any]:
    touch = f"open({str(canary)!r}, 'w').close()"
    return {
        "os.system": Runs(os.system, f"touch {canary}"),
        "eval": Runs(builtins.eval, touch),
        "exec": Runs(builtins.exec, touch),
        "getattr": Runs(getattr, "text", "upper"),
        "subprocess": Runs(subprocess.check_call, ["touch", str(canary)]),
        "torch.load": Runs(torch.load, str(canary)),
        "import": Runs(builtins.__import__, "antigravity"),
        "path": Runs(Path.touch, canary),
        "unpickle": Runs(pickle.loads, pickle.dumps(Runs(os.system, f"touch {canary}"))),
        "modules": Runs(sys.exit, 3),
    }


@pytest.mark.parametrize("name", sorted(calls(Path("x"))))
@pytest.mark.parametrize("inside", [False, True])
def test_metadata_runs_nothing(checkpoint: Path, canary: Path, name: str, inside: bool) -> None:
    call = calls(canary)[name]
    content = Metadata({}, planner_data=call) if inside else call
    (checkpoint / METADATA).write_bytes(pickle.dumps(content))
    seal(checkpoint)
    assert "which is not on the allow-list" in refused(checkpoint)
    assert not canary.exists()


@pytest.mark.parametrize("text", [
    b"cos\nsystem\n(S'touch %s'\ntR.",
    b"ctorch\nserialization.os.system\n(S'touch %s'\ntR.",
    b"\x80\x04\x8c\x05torch\x8c\x17serialization.os.system\x93\x8c\x01x\x85R.",
    b"ctorch.serialization\nload\n(S'%s'\ntR.",
    b"ctorch\ncompile\n.",
    b"\x80\x04Ptouch\n.",
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    b"(" * 100_000 + b".",
    b"",
])  # fmt: skip
def test_pickles_by_hand(checkpoint: Path, canary: Path, text: bytes) -> None:
    (checkpoint / METADATA).write_bytes(text.replace(b"%s", str(canary).encode()))
    seal(checkpoint)
    refused(checkpoint)
    assert not canary.exists()


def change(checkpoint: Path, action: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    action(metadata)
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    seal(checkpoint)


def place(path: str, offset: int, length: int) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.storage_data.update({TENSOR: _StorageInfo(path, offset, length)})


def huge(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["model.w0"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 30, 1 << 30])  # type: ignore[union-attr]


@pytest.mark.parametrize("action", [
    place("../../../../etc/passwd", 0, 900),
    place("/etc/passwd", 0, 900),
    place("nothing", 0, 900),
    place(DATA, -4, 900),
    place(DATA, 1 << 62, 900),
    place(DATA, 0, 1 << 62),
    place(DATA, 0, 0),
    lambda metadata: metadata.storage_data.update({TENSOR: _StorageInfo(DATA, 0, 2000, ["zstd"])}),
    lambda metadata: metadata.state_dict_metadata.update({"model.w0": BytesStorageMetadata()}),
    lambda metadata: metadata.state_dict_metadata["model.w0"].chunks.clear(),
    lambda metadata: metadata.storage_data.pop(TENSOR),
    huge,
])  # fmt: skip
def test_metadata_that_leads_elsewhere(checkpoint: Path, action: Callable[[Metadata], None]) -> None:
    change(checkpoint, action)
    assert METADATA in refused(checkpoint)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".", "", NAME, "x" * 300, "a\0b"])
def test_names_in_the_manifest(checkpoint: Path, name: str) -> None:
    seal(checkpoint, **{name: FileEntry(1, "00")})
    assert "not a valid file name of a checkpoint" in refused(checkpoint)


@pytest.mark.parametrize("size", [-1, 1 << 70, 1.5, True, None, "7"])
def test_sizes_in_the_manifest(checkpoint: Path, size: Any) -> None:
    seal(checkpoint, more=FileEntry(size, "00"))
    assert "is not a valid size" in refused(checkpoint)


def test_links_inside_are_refused_and_links_to_it_are_normal(checkpoint: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoint.parent, elsewhere)
    (tmp_path / "linked").symlink_to(elsewhere)
    load(tmp_path / "linked" / checkpoint.name)
    for name in (DATA, METADATA, NAME):
        path = elsewhere / checkpoint.name / name
        path.rename(tmp_path / name)
        path.symlink_to(tmp_path / name)
        assert f"{name}: not a regular file" in refused(elsewhere / checkpoint.name)


def test_pipes_and_directories_are_refused_without_waiting(checkpoint: Path) -> None:
    (checkpoint / DATA).unlink()
    os.mkfifo(checkpoint / DATA)
    assert "not a regular file" in refused(checkpoint)
    (checkpoint / DATA).unlink()
    (checkpoint / DATA).mkdir()
    assert "not a regular file" in refused(checkpoint)


def replace_tensor(checkpoint: Path, archive: bytes) -> None:
    (checkpoint / DATA).write_bytes((checkpoint / DATA).read_bytes() + archive)
    at = (checkpoint / DATA).stat().st_size - len(archive)
    change(checkpoint, place(DATA, at, len(archive)))


def test_a_tensor_that_runs_code(checkpoint: Path, canary: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Runs(os.system, f"touch {canary}"), buffer)
    replace_tensor(checkpoint, buffer.getvalue() + bytes(8 * 96))
    refused(checkpoint)
    buffer = io.BytesIO()
    torch.save([Runs(os.system, f"touch {canary}"), bytes(8 * 96)], buffer)
    replace_tensor(checkpoint, buffer.getvalue())
    refused(checkpoint)
    replace_tensor(checkpoint, pickle.dumps([Runs(os.system, f"touch {canary}"), bytes(8 * 96)]))
    assert "not a stored tensor" in refused(checkpoint)
    assert not canary.exists()


def test_an_archive_that_unfolds(checkpoint: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(1 << 20))
    replace_tensor(checkpoint, buffer.getvalue())
    assert "its elements are compressed" in refused(checkpoint)
