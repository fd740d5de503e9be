"""Ten layouts: a checkpoint goes through all of them, each loading the one before, and stays the same bit for bit.

The long form loads every layout's checkpoint under every other.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.progress import LONG
from tests.checkpoint.tensors import assert_same_bits
from tests.checkpoint.test_layouts import TIED, restore_and_save, save_made_up
from tests.ranks import run_ranks
from tests.train.runs import frozen

PIPELINE = "strategy.data_parallel=reduce"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("+strategy=single",)),
    "dp4": (4, ("+strategy=dp",)),
    "zero3": (4, ("+strategy=zero3",)),
    "pp4": (4, ("+strategy=pp",)),
    "pp2-dp2": (4, ("+strategy=hybrid",)),
    "pp2-zero2": (4, ("+strategy=hybrid", "strategy.data_parallel=zero2")),
    "tp2-dp2": (4, ("+strategy=tp", "strategy.tp=2")),
    "interleaved": (2, ("+strategy=pp", "strategy.schedule=interleaved_1f1b", "strategy.stages_per_rank=2")),
    "zero-bubble": (2, ("+strategy=pp", "strategy.schedule=zbv", "strategy.stages_per_rank=2", PIPELINE)),
    "3d": (8, ("+strategy=hybrid3d",)),
}
NAMES = sorted(LAYOUTS)
PAIRS = list(itertools.permutations(NAMES, 2)) if LONG else [(NAMES[n - 1], NAMES[n]) for n in range(10)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """The run directories of the layouts that have saved, by name and whether weights are tied; made on demand."""
    return {("", False): tmp_path_factory.mktemp("layouts")}


def saved_under(saved: dict[tuple[str, bool], Path], name: str, tied: bool) -> Path:
    if (name, tied) not in saved:
        ranks, overrides = LAYOUTS[name]
        run = frozen(saved["", False] / f"{name}-{tied}", *overrides, *([TIED] if tied else []))
        run_ranks(ranks, save_made_up, str(run.path))
        saved[name, tied] = run.path
    return saved[name, tied]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_layout_loads_any_layouts(
    tmp_path: Path, saved: dict[tuple[str, bool], Path], source: str, target: str
) -> None:
    for tied in (False, True) if LONG else (NAMES.index(target) % 2 == 0,):
        shutil.copytree(saved_under(saved, source, tied), tmp_path / f"{tied}")
        ranks, overrides = LAYOUTS[target]
        run = frozen(tmp_path / f"{tied}", *overrides, *([TIED] if tied else []))
        results = run_ranks(ranks, restore_and_save, str(run.path))
        assert {result["step"] for result in results} == {7}
        assert_same_bits(run.checkpoints / "step-00000007", run.checkpoints / "step-00000008")
