"""Seeded damage of all kinds: the damaged checkpoint is never loaded, the one before it is."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.checkpoint.store import CheckpointStore
from tests.checkpoint.progress import LONG, Progress
from tests.checkpoint.tiny import LIMIT_S, commit, newest_good
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(LIMIT_S + 50)

CASES = 5000 if LONG else 100


def flip(victim: Path, other: Path, choose: random.Random) -> None:
    data = bytearray(victim.read_bytes())
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    victim.write_bytes(data)


def truncate(victim: Path, other: Path, choose: random.Random) -> None:
    victim.write_bytes(victim.read_bytes()[: choose.randrange(victim.stat().st_size)])


def fill_with_zeros(victim: Path, other: Path, choose: random.Random) -> None:
    data = bytearray(victim.read_bytes())
    at = choose.choice([index for index, byte in enumerate(data) if byte])
    length = min(len(data) - at, choose.randrange(1, 512))
    data[at : at + length] = bytes(length)
    victim.write_bytes(data)


def delete(victim: Path, other: Path, choose: random.Random) -> None:
    victim.unlink()


def append(victim: Path, other: Path, choose: random.Random) -> None:
    with victim.open("ab") as file:
        file.write(bytes(choose.randrange(1, 9)))


def swap_with_the_one_before(victim: Path, other: Path, choose: random.Random) -> None:
    same = victim.read_bytes() == (other / victim.name).read_bytes()  # as the metadata of the same tensors
    name = "__0_0.distcp" if same else victim.name
    shutil.copyfile(other / name, victim.parent / name)


def swap_inside(victim: Path, other: Path, choose: random.Random) -> None:
    second = choose.choice([path for path in victim.parent.iterdir() if path != victim])
    one, two = victim.read_bytes(), second.read_bytes()
    victim.write_bytes(two)
    second.write_bytes(one)


def swap_the_directory(victim: Path, other: Path, choose: random.Random) -> None:
    shutil.rmtree(victim.parent)
    shutil.copytree(other, victim.parent)


def leave_a_foreign_file(victim: Path, other: Path, choose: random.Random) -> None:
    (victim.parent / f"__{choose.randrange(9)}_7.distcp").write_bytes(b"x")


DAMAGES: tuple[Callable[[Path, Path, random.Random], None], ...] = (
    flip, flip, flip, truncate, fill_with_zeros, delete, append,
    swap_with_the_one_before, swap_inside, swap_the_directory, leave_a_foreign_file,
)  # fmt: skip


def damage_many(rank: int, world_size: int, folder: str, progress: Progress) -> list[str]:
    template = Path(folder) / "template"
    for step in (1, 2):
        commit(CheckpointStore(template), step)
    wrong = []
    os.fsync = lambda descriptor: None  # of thousands of directories that nobody needs after a crash
    for seed in map(int, progress.open(range(CASES))):
        root = Path(folder) / "case"
        shutil.copytree(template, root)
        choose = random.Random(seed)
        damage = choose.choice(DAMAGES)
        victim = choose.choice(sorted((root / "step-00000002").iterdir()))
        damage(victim, root / "step-00000001", choose)
        found = newest_good(CheckpointStore(root))
        names = sorted(path.name for path in root.iterdir() if path.name != ".verified.json")
        harmless = damage is leave_a_foreign_file
        if harmless and found == 2 and names == ["step-00000001", "step-00000002"]:
            progress.passed(seed)
        elif found != 1 or names != ["bad.step-00000002.attempt-009", "step-00000001"]:
            wrong.append(f"seed {seed}, {damage.__name__} of {victim.name}: {found}, {names}")
        else:
            progress.passed(seed)
        shutil.rmtree(root)
    return wrong


def test_no_damaged_checkpoint_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(1, damage_many, str(tmp_path), Progress.of("damage"), timeout=LIMIT_S) == [[]]
