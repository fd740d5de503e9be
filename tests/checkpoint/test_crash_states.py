"""What a power loss can leave: every prefix of what a series of saves does to the disk, un-synced changes dropped.

Model: the content of a file is what the kernel held when it was last synced (else nothing); of the changes to a
directory since it was last synced any subset may have reached the disk, a rename as a whole.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpc_train.checkpoint import disk
from hpc_train.checkpoint.store import CheckpointStore, Retention
from tests.checkpoint.progress import LONG
from tests.checkpoint.tiny import LIMIT_S, commit, newest_good
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(LIMIT_S + 50)

SUBSETS = 20 if LONG else 1


@dataclass
class Node:
    """A file or directory: what it is, and what of it is on disk."""

    live: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)  # changes of names since the last sync
    content: bytes | None = None  # of a file; None: a directory

    def change(self, **names: Node | None) -> None:
        self.pending.append(names)
        _apply(self.live, names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.live), []

    def write_to(self, path: Path, choose: random.Random | None, everything: bool) -> None:
        """Makes one state that a crash now could leave: nothing un-synced, everything, or what ``choose`` picks."""
        if self.content is not None:
            path.write_bytes(self.content)
            return
        path.mkdir()
        names = dict(self.durable)
        for pending in self.pending:
            if everything or (choose is not None and choose.random() < 0.5):
                _apply(names, pending)
        for name, node in names.items():
            node.write_to(path / name, choose, everything)


def _apply(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Recorder:
    """Follows the calls of ``disk`` under ``root`` and checks all states after each of them."""

    def __init__(self, root: Path, states: Path) -> None:
        self.root, self.states, self.tree = root, states, Node()
        self.returned, self.checked, self.prefixes = 0, 0, 0

    def node(self, path: Path) -> Node:
        found = self.tree
        for name in path.relative_to(self.root).parts:
            found = found.live[name]
        return found

    def record(self, patch: pytest.MonkeyPatch, by_marker: bool) -> None:
        """Records a store that commits by a rename of the directory, or else ``by_marker`` and renames only files."""
        create, sync, mkdir, rename, remove = disk.create, disk.sync, os.mkdir, os.rename, disk.remove
        unlink = disk.unlink

        def recorded_create(path: Path) -> Any:
            file = create(path)
            self.node(path.parent).change(**{path.name: Node(content=b"")})
            self.check()
            return file

        def recorded_sync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            node = self.node(path)
            if node.content is None:
                node.sync()
            else:
                node.content = path.read_bytes()  # what the kernel has been given by now
            sync(descriptor)
            self.check()

        def recorded_mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            mkdir(path, *args, **kwargs)
            if Path(path).is_relative_to(self.root):
                self.node(Path(path).parent).change(**{Path(path).name: Node()})
                self.check()

        def recorded_rename(source: Any, target: Any) -> None:
            assert not (by_marker and Path(source).is_dir() and Path(source).is_relative_to(self.root)), source
            rename(source, target)
            source, target = Path(source), Path(target)
            self.node(source.parent).change(**{source.name: None, target.name: self.node(source)})
            self.check()

        def recorded_remove(path: Path) -> None:
            inside = self.node(path)
            for name in list(inside.live):
                inside.change(**{name: None})
                self.check()
            self.node(path.parent).change(**{path.name: None})
            remove(path)
            self.check()

        patch.setattr(disk, "create", recorded_create)
        patch.setattr(disk, "sync", recorded_sync)
        patch.setattr(disk, "remove", recorded_remove)
        patch.setattr(os, "mkdir", recorded_mkdir)
        patch.setattr(os, "rename", recorded_rename)

        def recorded_unlink(path: Path) -> None:
            if path.is_relative_to(self.root):
                self.node(path.parent).change(**{path.name: None})
            unlink(path)

        if by_marker:
            patch.setattr(disk, "unlink", recorded_unlink)

    def check(self) -> None:
        """All states that a crash at this moment could leave hold the last commit that returned, or a later one."""
        self.prefixes += 1
        variants: list[tuple[random.Random | None, bool]] = [(None, False), (None, True)]
        variants += [(random.Random(self.checked + n), False) for n in range(SUBSETS)]
        for choose, everything in variants:
            self.checked += 1
            state = self.states / f"{self.checked}"
            with pytest.MonkeyPatch.context() as plain:
                for name, module in (("create", disk), ("sync", disk), ("remove", disk), ("mkdir", os), ("rename", os)):
                    plain.setattr(module, name, ORIGINAL[name])
                self.tree.write_to(state, choose, everything)
                found = newest_good(CheckpointStore(state))
            assert (found or 0) >= self.returned, f"state {state}: {found}, but {self.returned} was committed"


ORIGINAL = {
    "create": disk.create, "sync": disk.sync, "remove": disk.remove, "mkdir": os.mkdir, "rename": os.rename,
}  # fmt: skip


def save_and_crash(rank: int, world_size: int, folder: str, by_marker: bool) -> tuple[int, int]:
    root, states = Path(folder) / "root", Path(folder) / "states"
    root.mkdir()
    states.mkdir()
    recorder, store = Recorder(root, states), CheckpointStore(root, by_marker=by_marker)
    with pytest.MonkeyPatch.context() as patch:
        recorder.record(patch, by_marker)
        for step in (1, 2, 3):
            recorder.returned = commit(store, step).step
            store.prune(Retention(1), attempt=0)
    return recorder.prefixes, recorder.checked


@pytest.mark.long_form(10, cases=["True"])  # the other case has the model of a crash
@pytest.mark.parametrize("by_marker", [False, True])
def test_every_state_that_a_crash_can_leave_holds_the_last_commit(tmp_path: Path, by_marker: bool) -> None:
    ((prefixes, checked),) = run_ranks(1, save_and_crash, str(tmp_path), by_marker, timeout=LIMIT_S)
    assert prefixes > 40
    assert checked == prefixes * (2 + SUBSETS)
    newest = "step-00000003.attempt-000.0" if by_marker else "step-00000003"
    assert [path.name for path in (tmp_path / "root").iterdir()] == [newest]
