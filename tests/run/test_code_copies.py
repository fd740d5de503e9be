"""Shared copies of the user's code: who may use them, when they are removed, and runs that are moved."""

from __future__ import annotations

import os
import shutil
import stat
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.run import snapshot
from hpc_train.run.code import FrozenCode, frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import check_owner, deciding_files
from hpc_train.run.snapshot import check_copy, has_changed, remove_unnamed, shared_copies, snapshot_code
from tests.config.composing import config_of
from tests.other_user import OTHER, as_other, common, needs_root
from tests.run.test_snapshot import files, git, taken, tree, usual_umask

__all__ = ["common", "tree", "usual_umask"]
DAY_S = 24 * 3600.0


def run_with(tree: Path, code: FrozenCode, name: str) -> RunDirectory:
    run = RunDirectory(tree / "outputs" / name)
    run.create()
    run.update_record(snapshot=asdict(code))
    return run


def age(copies: Path) -> None:
    """Makes all copies, and the last removal, two days old."""
    for path in (*copies.iterdir(), copies / ".removal"):
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)


def test_the_runs_of_a_root_share_one_private_copy(tree: Path) -> None:
    code = taken(tree)
    copies = tree / "outputs" / ".code" / str(os.geteuid())
    assert Path(code.snapshot).parent == copies
    assert stat.S_IMODE(copies.stat().st_mode) == 0o700
    config = config_of(f"run.root={tree}/outputs")
    again = snapshot_code([config], tree / "outputs" / "other" / "code", tree)
    assert again == code
    assert not has_changed(code, config)
    assert not (tree / "outputs" / "other").exists()


@pytest.mark.parametrize("arguments", [("run.snapshot=copy",), ("run.group=root",)])
def test_a_run_with_its_own_copy_can_be_moved(tree: Path, arguments: tuple[str, ...]) -> None:
    own = tree / "outputs" / "one" / "code"
    code = snapshot_code([config_of(f"run.root={tree}/outputs", *arguments)], own, tree / "package")
    assert code is not None and Path(code.snapshot).parent == own
    run = run_with(tree, code, "one")
    moved = RunDirectory(run.path.rename(tree.parent / "moved"))
    found = frozen_code(moved)
    assert found is not None and found.paths[0] == str(moved.code / Path(code.snapshot).name / "package")
    check_copy(moved)
    (Path(found.snapshot) / "untracked.py").write_text("value = 5\n")
    with pytest.raises(UserError, match="has changed since the run was frozen"):
        check_copy(moved)


def test_a_copy_that_was_changed_is_not_used(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = taken(tree)
    run = run_with(tree, code, "one")
    check_copy(run)
    changes = {
        "edited": lambda copy: (copy / "untracked.py").write_text("value = 5\n"),
        "added": lambda copy: (copy / "psutil.py").touch(),
        "removed": lambda copy: (copy / "tool.sh").unlink(),
        "a link": lambda copy: ((copy / "link.py").unlink(), (copy / "link.py").symlink_to("/etc/passwd")),
        "made a program": lambda copy: (copy / "untracked.py").chmod(0o755),
    }
    for change in changes.values():
        change(Path(code.snapshot))
        with pytest.raises(UserError, match="has changed since the run was frozen"):
            check_copy(run)
        assert taken(tree) == code, "written anew"
        assert "was changed; it is now .damaged-" in capsys.readouterr().err
        check_copy(run)
    (Path(code.snapshot) / "__pycache__").mkdir()
    (Path(code.snapshot) / "__pycache__" / "untracked.pyc").touch()
    check_copy(run)  # jobs write bytecode
    shutil.rmtree(code.snapshot)
    with pytest.raises(UserError, match="cannot be read"):
        check_copy(run)


def test_an_older_run_keeps_its_copy(tree: Path) -> None:
    """Its record has no digest of the content, and its copy is in the directory of the run."""
    own = tree / "outputs" / "one" / "code"
    code = snapshot_code([config_of(f"run.root={tree}/outputs", "run.snapshot=copy")], own, tree)
    assert code is not None
    run = RunDirectory(tree / "outputs" / "one")
    run.create()
    run.update_record(snapshot={name: value for name, value in asdict(code).items() if name != "content"})
    check_copy(run)
    found = frozen_code(run)
    assert found is not None and found.snapshot == code.snapshot
    assert not check_owner(deciding_files(run), run.path)


def test_a_copy_is_removed_with_the_last_run_that_names_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = taken(tree)
    run = run_with(tree, first, "group/deep/sweep/0")
    copies = Path(first.snapshot).parent
    (tree / "outputs" / "linked").symlink_to(tree / "outputs" / "group")  # and a loop
    (tree / "outputs" / "group" / "loop").symlink_to(tree / "outputs")
    (tree / "untracked.py").write_text("value = 4\n")
    age(copies)
    second = taken(tree)
    assert Path(first.snapshot).is_dir(), "a run names it"
    moved = tree / "outputs" / "moved"
    run.path.rename(moved)
    age(copies)
    remove_unnamed(copies)
    assert Path(first.snapshot).is_dir() and not Path(second.snapshot).exists()
    (moved / "run.json").write_text("{")
    (moved / "run.copy.json").unlink()
    age(copies)
    remove_unnamed(copies)
    assert Path(first.snapshot).is_dir(), "a record cannot be read"
    shutil.rmtree(moved)
    remove_unnamed(copies)
    assert Path(first.snapshot).is_dir(), "once a day"
    age(copies)
    monkeypatch.setattr(snapshot, "_named", lambda root: os.utime(first.snapshot) or set())
    remove_unnamed(copies)
    assert Path(first.snapshot).is_dir(), "a submission has used it meanwhile"
    monkeypatch.undo()
    age(copies)
    remove_unnamed(copies)
    assert {path.name for path in copies.iterdir()} == {".locks", ".removal"}


def test_tests_and_docs_of_hpc_train_are_in_no_copy(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tests/test_it.py", "docs/index.md", "notebooks/one.ipynb", "package/tests/test_it.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    config = config_of(f"run.root={tree}/outputs")
    everything = taken(tree)
    assert {"tests/test_it.py", "docs/index.md"} <= files(everything.snapshot), "of another project they are"
    monkeypatch.setattr(snapshot, "__file__", str(tree / "hpc_train" / "run" / "snapshot.py"))
    code = taken(tree)
    assert {name.partition("/")[0] for name in files(code.snapshot)} & {
        "tests",
        "docs",
        "notebooks",
        "benchmarks",
        "gpu_checks",
    } == set()
    assert "package/tests/test_it.py" in files(code.snapshot)
    assert capsys.readouterr().err == "", "they hold no secrets"
    assert not has_changed(code, config) and not has_changed(everything, config)
    used = taken(tree, "model=custom", "model._target_=tests.test_it.Model")
    assert "tests/test_it.py" in files(used.snapshot)
    called = taken(tree, "run.command=[python,tests/test_it.py]")
    assert "tests/test_it.py" in files(called.snapshot)


@needs_root
def test_a_directory_of_copies_that_another_user_made_is_not_used(common: Path) -> None:
    root = common / "root"
    root.mkdir(mode=0o777)
    root.chmod(0o1777)
    made = root / ".code"

    def use() -> None:
        assert shared_copies(root) is None, "of another user, who could replace what is in it"

    made.mkdir(mode=0o777)
    os.chown(made, 4242, 4242)
    as_other(use)
    made.rmdir()
    made.symlink_to(common)
    as_other(use)
    made.unlink()
    found = shared_copies(root)
    assert found == made / "0" and stat.S_IMODE(made.stat().st_mode) == 0o1777

    def use_beside() -> None:
        beside = shared_copies(root)
        assert beside == made / str(OTHER) and stat.S_IMODE(beside.stat().st_mode) == 0o700

    as_other(use_beside)
    shutil.rmtree(made / str(OTHER))
    (made / str(OTHER)).mkdir()
    os.chown(made / str(OTHER), 4242, 4242)
    as_other(use)
    made.chmod(0o777)
    as_other(use)


@needs_root
def test_a_copy_of_another_user_is_set_aside(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = taken(tree)
    os.chown(code.snapshot, OTHER, OTHER)
    run = run_with(tree, code, "one")
    with pytest.raises(UserError, match="belongs to nobody"):
        check_owner(deciding_files(run), run.path)
    assert taken(tree) == code and Path(code.snapshot).stat().st_uid == 0
    assert "was changed; it is now" in capsys.readouterr().err
    os.chown(Path(code.snapshot).parent, OTHER, OTHER)
    with pytest.raises(UserError, match="belongs to nobody"):
        check_owner(deciding_files(run), run.path)


def test_a_work_tree_with_another_commit_has_its_own_diff(tree: Path) -> None:
    first = taken(tree)
    git(tree, "commit", "-q", "--allow-empty", "-m", "second")
    second = taken(tree)
    assert first.snapshot == second.snapshot and first.diff != second.diff
