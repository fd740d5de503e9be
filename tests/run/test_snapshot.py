"""Frozen code: what is copied, what is refused, who shares the copies, and what a process of the run then imports."""

from __future__ import annotations

import os
import py_compile
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.run import snapshot
from hpc_train.run.code import FrozenCode, check_imports, frozen_code, reexec_from_snapshot
from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import check_owner, deciding_files
from hpc_train.run.snapshot import check_copy, code_note, has_changed, remove_unnamed, shared_copies, snapshot_code
from tests.config.composing import config_of
from tests.other_user import OTHER, as_other, common, needs_root


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def made_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "project"
    (root / "package").mkdir(parents=True)
    git(root, "init", "-q")
    (root / ".gitignore").write_text("*.secret\nhidden_module.py\n")
    (root / "package" / "tracked.py").write_text("value = 1\n")
    (root / "gone.py").write_text("")
    (root / "tool.sh").write_text("#!/bin/sh\n")
    (root / "tool.sh").chmod(0o755)
    (root / "link.py").symlink_to("package/tracked.py")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "package" / "tracked.py").write_text("value = 2\n")
    (root / "untracked.py").write_text("value = 3\n")
    (root / "key.secret").write_text("hidden")
    (root / "hidden_module.py").write_text("class Model: ...\n")
    (root / "gone.py").unlink()
    return root


@pytest.fixture
def tree(made_tree: Path, tmp_path: Path) -> Path:
    """A work tree with a tracked, a changed, an untracked, an ignored and a deleted file, and a link."""
    return Path(shutil.copytree(made_tree, tmp_path / "project", symlinks=True))


def taken(tree: Path, *arguments: str, directory: Path | None = None) -> FrozenCode:
    config = config_of(f"run.root={tree}/outputs", *arguments)
    code = snapshot_code([config], tree / "outputs" / "sweep" / "code", directory or tree)
    assert code is not None
    return code


def files(directory: str | Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if not path.is_dir()}


def test_tracked_and_untracked_files_are_copied_ignored_ones_are_not(tree: Path) -> None:
    code = taken(tree)
    copy = Path(code.snapshot)
    assert files(copy) == {".gitignore", "package/tracked.py", "untracked.py", "tool.sh", "link.py"}
    assert (copy / "link.py").read_text() == "value = 2\n"
    assert (copy / "link.py").is_symlink()
    assert (copy / "tool.sh").stat().st_mode & 0o100
    assert code.commit is not None
    assert code.diff is not None
    assert "+value = 2" in Path(code.diff).read_text()


def test_commit_and_diff_make_the_copy_again(tree: Path, tmp_path: Path) -> None:
    """A module that was never added to git is often the model itself."""
    (tree / "new folder").mkdir()
    (tree / "new folder" / "picture.bin").write_bytes(bytes(range(256)))
    code = taken(tree)
    assert code.diff is not None
    with pytest.raises(subprocess.CalledProcessError):  # the index of the user is as before
        git(tree, "ls-files", "--error-unmatch", "untracked.py")
    again = tmp_path / "again"
    git(tmp_path, "clone", "-q", str(tree), str(again))
    git(again, "apply", code.diff)
    assert {name for name in files(again) if not name.startswith(".git/")} == files(code.snapshot)
    assert (again / "new folder" / "picture.bin").read_bytes() == bytes(range(256))
    assert (again / "link.py").is_symlink()


SECRETS = (
    ".env", ".netrc", "deploy/id_rsa", "credentials.json", ".aws/credentials", ".ENV.production", "tls/server.key",
)  # fmt: skip
NO_SECRETS = (".env.example", "secrets.py", "keys.txt", "conf/credentials/default.yaml")


def test_files_that_hold_secrets_are_left_out_and_named(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*SECRETS, *NO_SECRETS):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("first-secret\n" if name in SECRETS else "harmless\n")
    git(tree, "add", "-f", ".env")
    git(tree, "commit", "-qm", "a secret that git tracks")
    (tree / ".env").write_text("second-secret\n")
    code = taken(tree, directory=tree / "package")
    assert not files(code.snapshot) & set(SECRETS)
    assert files(code.snapshot) >= set(NO_SECRETS)
    assert code.diff is not None
    assert "+value = 2" in Path(code.diff).read_text()
    assert "-secret" not in Path(code.diff).read_text()
    said = capsys.readouterr().err
    assert "files whose names indicate secrets are left out" in said
    assert all(name in said for name in SECRETS)
    assert not any(name in said for name in NO_SECRETS)


def test_a_secret_that_has_just_been_removed_from_git_is_in_no_diff(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / ".env").write_text("hidden-before\n")
    (tree / "moved.pem").write_text("hidden-before\n" * 20)
    git(tree, "add", "-f", ".env", "moved.pem")
    git(tree, "commit", "-qm", "two secrets that git tracks")
    git(tree, "rm", "-q", "--cached", ".env")
    git(tree, "mv", "moved.pem", "harmless.txt")
    (tree / "harmless.txt").write_text("other\n")
    (tree / ".gitignore").write_text(".env\n")
    code = taken(tree)
    assert code.diff is not None
    assert "hidden-before" not in Path(code.diff).read_text()
    assert ".env, moved.pem" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["/dev/shm", "elsewhere"])
def test_a_tracked_directory_that_has_become_a_link_is_copied_as_the_link(tree: Path, target: str) -> None:
    """As ``mv results $SCRATCH; ln -s $SCRATCH/results results``."""
    (tree / "results").mkdir()
    (tree / "results" / ".gitkeep").write_text("")
    git(tree, "add", "-A")
    git(tree, "commit", "-qm", "results")
    (tree / "results").rename(tree.parent / "elsewhere")
    (tree / "results").symlink_to(tree.parent / target)
    code = taken(tree)
    assert (Path(code.snapshot) / "results").readlink() == tree.parent / target
    assert [path for path in Path(code.snapshot).parent.iterdir() if path.is_dir()] == [Path(code.snapshot)]


def test_nothing_is_said_where_nothing_is_left_out(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken(tree)
    assert capsys.readouterr().err == ""


def modes(directory: str | Path) -> dict[str, str]:
    found = [path for path in Path(directory).rglob("*") if not path.is_symlink()]
    return {str(path.relative_to(directory)): f"{path.stat().st_mode & 0o777:o}" for path in found}


def test_a_private_file_stays_private(tree: Path) -> None:
    (tree / "untracked.py").chmod(0o600)
    (tree / "package").chmod(0o700)
    code = taken(tree)
    kept = modes(code.snapshot)
    assert (kept["untracked.py"], kept["package"], kept["tool.sh"]) == ("600", "700", "755")
    for path in (Path(code.snapshot), Path(code.snapshot).parent):
        assert path.stat().st_mode & 0o777 == 0o700, "others cannot even list the copies"
    assert code.diff is not None
    assert Path(code.diff).stat().st_mode & 0o777 == 0o600
    (tree / "untracked.py").chmod(0o644)
    assert modes(taken(tree).snapshot)["untracked.py"] == "644", "a copy with other modes is another copy"


def test_equal_trees_share_a_copy_and_runs_are_no_part_of_it(tree: Path) -> None:
    first = taken(tree)
    assert taken(tree).snapshot == first.snapshot, "the copy lies in the work tree, in a directory that is not ignored"
    (tree / "untracked.py").write_text("value = 4\n")
    second = taken(tree)
    assert second.snapshot != first.snapshot
    assert (Path(first.snapshot) / "untracked.py").read_text() == "value = 3\n"


def bytecode_that_says(module: Path, text: str) -> None:
    """Writes bytecode for ``module`` that sets another value than its source."""
    source, original = module.stat(), module.read_text()
    module.write_text(f"value = {text!r}".ljust(source.st_size - 1) + "\n")
    os.utime(module, ns=(source.st_mtime_ns, source.st_mtime_ns))
    py_compile.compile(str(module), doraise=True)
    module.write_text(original)
    os.utime(module, ns=(source.st_mtime_ns, source.st_mtime_ns))


def test_bytecode_that_is_up_to_date_is_used_in_the_copy(tree: Path) -> None:
    for name in ("fresh.py", "stale.py"):
        (tree / name).write_text("value = 'source'\n")
        bytecode_that_says(tree / name, "cached")
    os.utime(tree / "stale.py", (0, 0))
    code = taken(tree)
    call = [sys.executable, "-c", "import fresh, stale; print(fresh.value, stale.value, fresh.__file__)"]
    environment = code.environment({}) | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(call, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cached", "source", f"{code.snapshot}/fresh.py"]
    assert [path.name for path in Path(code.snapshot).rglob("*.pyc")] == [f"fresh.{sys.implementation.cache_tag}.pyc"]


def test_the_current_directory_comes_first_on_the_path(tree: Path) -> None:
    code = taken(tree, directory=tree / "package")
    assert code.paths[0] == f"{code.snapshot}/package"
    assert code.snapshot in code.paths
    found = code.search_path(["", str(tree), "/elsewhere"])
    assert found == [*code.paths, "/elsewhere"]


def test_no_work_tree_or_not_wanted_no_copy(tree: Path, tmp_path: Path) -> None:
    assert snapshot_code([config_of()], tmp_path / "code", tmp_path) is None
    assert snapshot_code([config_of("run.snapshot=false")], tmp_path / "code", tree) is None
    assert not (tmp_path / "code").exists()


def test_too_large_a_tree_is_refused_and_the_largest_are_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LIMIT_BYTES", 2**20)
    (tree / "weights.bin").write_bytes(bytes(2**20))
    with pytest.raises(UserError, match=r"the limit is 1 MiB; the largest entries are weights\.bin \(1 MiB\)"):
        taken(tree)
    assert not (tree / "outputs").exists()


def test_a_module_that_git_ignores_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tree))
    config = config_of("model=custom", "model._target_=hidden_module.Model", f"run.root={tree}/outputs")
    with pytest.raises(UserError, match=r"hidden_module\.py is ignored by git"):
        snapshot_code([config], tree / "outputs" / "code", tree)
    assert not (tree / "outputs").exists()
    tracked = config_of("model=custom", "model._target_=untracked.Model", f"run.root={tree}/outputs")
    assert snapshot_code([tracked], tree / "outputs" / "code", tree) is not None


def recorded(tree: Path) -> RunDirectory:
    run = RunDirectory(tree / "outputs" / "run")
    run.create()
    run.update_record(snapshot=asdict(taken(tree)))
    return run


def test_what_is_imported_from_the_work_tree_is_noticed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tree)
    check_imports(run)
    reexec_from_snapshot(run)  # hpc_train is no part of this work tree
    monkeypatch.syspath_prepend(str(tree))
    __import__("untracked")
    with pytest.raises(RuntimeError, match=r"imported from the work tree.*untracked\.py"):
        check_imports(run)
    del sys.modules["untracked"]


def test_a_process_with_the_environment_imports_the_copy(tree: Path) -> None:
    code = frozen_code(recorded(tree))
    assert code is not None
    (tree / "untracked.py").write_text("raise SystemExit('edited')\n")
    call = [sys.executable, "-c", "import untracked; print(untracked.value)"]
    done = subprocess.run(call, cwd=tree, env=code.environment({}), capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


__all__ = ["common"]
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


def test_a_line_says_which_code_is_trained(tree: Path) -> None:
    config = config_of(f"run.root={tree}/outputs")
    code = taken(tree)
    commit = f"code: commit {str(code.commit)[:12]} of {tree}"
    assert code_note(code, [config]) == f"{commit} with 3 uncommitted changes; the run keeps a copy"
    git(tree, "stash", "--include-untracked", "--", ".", ":(exclude)outputs")
    assert code_note(code, [config]) == commit, "the directory of the runs is not a change"
    without = replace(code, commit=None)
    assert code_note(without, [config]) == f"code: {tree} has no commit yet; the run keeps a copy"


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
    assert {path.name for path in copies.iterdir()} == {".removal"}


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
