"""A run that resumes with other data than before: refused where hpc_train knows the files, told where it does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpc_train.config.compose import typed
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from hpc_train.train.data_progress import IDENTITY, data_changes
from tests.config.composing import compose
from tests.train.runs import TINY, run_attempt


class Growing:
    """A user's dataset with as many samples as ``file`` says."""

    def __init__(self, split: str, file: str) -> None:
        self.samples = int(Path(file).read_text())

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
        return np.full(8, index % 32), np.full(8, index % 32)


def changes(before: dict[str, Any], after: dict[str, Any], forked: bool = False) -> list[str]:
    restored: Any = SimpleNamespace(forked=forked, step=3, extra={IDENTITY: before})
    feed: Any = SimpleNamespace(identity=after)
    return data_changes(restored, feed)


def test_files_that_changed_are_refused_and_data_of_a_user_may_grow() -> None:
    files = {"samples": 64, "fingerprint": "a"}
    for changed, words in (
        ({"samples": 63, "fingerprint": "b"}, "has 63 samples, but had 64 in the checkpoint of step 3"),
        ({"samples": 64, "fingerprint": "b"}, "differs from the data of the checkpoint of step 3, although it also"),
    ):
        with pytest.raises(UserError, match=words) as refused:
            changes(files, changed)
        assert refused.value.fix.startswith("restore the data, or run.fork=NEWNAME")
        assert changes(files, changed, forked=True) == []
        assert changes({}, changed) == [], "an earlier version saved no identity"
    assert changes(files, files) == []
    own, grown = {"samples": 64, "fingerprint": None}, {"samples": 80, "fingerprint": None}
    (warning,) = changes(own, grown)
    assert warning.startswith("the training data has 80 samples, but had 64 in the checkpoint of step 3")
    (warning,) = changes({"sources": {"mine": own, "files": files}}, {"sources": {"mine": grown, "files": files}})
    assert warning.startswith("the training data of the source mine has 80 samples")


def texts(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:02d}.py").write_text("a text of some words\n" * 8)
    return folder


def frozen(path: Path, *overrides: str, steps: int) -> RunDirectory:
    run, others = RunDirectory(path), [each for each in TINY if not each.startswith("data")]
    given = ["+strategy=dp", "optim.schedule=constant", "model.n_layers=1", *overrides, f"train.steps={steps}"]
    freeze(typed(compose([*others, *given])), run)
    return run


def of_text(folder: Path) -> tuple[str, ...]:
    return ("data=text", f"data.path={folder}", "data.vocab_size=256", "model.vocab_size=256", "data.sequence_length=8")


@pytest.mark.long_form(7)
def test_files_that_changed_are_refused_and_a_fork_goes_on(tmp_path: Path) -> None:
    folder = texts(tmp_path / "texts", 20)
    run = frozen(tmp_path / "run", *of_text(folder), steps=3)
    assert run_attempt(run, 1) == [0]
    frozen(run.path, *of_text(folder), steps=6)
    removed = folder / "07.py"
    content = removed.read_text()
    removed.unlink()
    numbers = r"has 3\d\d samples, but had 3\d\d in the checkpoint of step 3"
    with pytest.raises(AssertionError, match=rf"UserError(.|\n)*{numbers}(.|\n)*restore the data, or run.fork=NEWNAME"):
        run_attempt(run, 1)
    (folder / "77.py").write_text(content)
    with pytest.raises(AssertionError, match=r"differs from the data of the checkpoint of step 3, although"):
        run_attempt(run, 1)
    fork = frozen(tmp_path / "fork", *of_text(folder), steps=6)
    fork.update_record(forked_from=str(run.path))
    assert run_attempt(fork, 1) == [0]
    (folder / "77.py").rename(removed)
    assert run_attempt(run, 1) == [0]
    assert [line["step"] for line in run.read_metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("where", ["data", "data.sources.mine"])
@pytest.mark.long_form(7)
def test_data_of_a_user_may_grow(tmp_path: Path, where: str) -> None:
    (tmp_path / "size").write_text("64")
    others = ["data=mixture", "+data@data.sources.mine=custom", "+data@data.sources.other=synthetic"]
    others += ["data.sources.other.vocab_size=32", "data.sources.other.sequence_length=8"]
    overrides = ["data=custom"] if where == "data" else others
    overrides += [f"{where}._target_={__name__}.Growing", f"+{where}.args.file={tmp_path}/size"]
    run = frozen(tmp_path / "run", *overrides, steps=3)
    assert run_attempt(run, 1) == [0]
    frozen(run.path, *overrides, steps=6)
    (tmp_path / "size").write_text("80")
    assert run_attempt(run, 1) == [0]
    (warning,) = [event for event in run.read_events() if "training data" in event.get("message", "")]
    source = "" if where == "data" else " of the source mine"
    assert warning["event"] == "warning" and warning["message"].startswith(
        f"the training data{source} has 80 samples, but had 64 in the checkpoint of"
    )
    assert warning["message"] in (run.logs / "rank-0-001.log").read_text()
