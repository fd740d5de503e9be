"""A project that ``init`` makes passes its tests and trains by the commands of docs/project.md."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from hpc_train.commands.init import FILES, TEMPLATE, TRAIN
from hpc_train.report.page.settings import training_again
from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY, environment, lines_of_pages

Called = Callable[..., subprocess.CompletedProcess[str]]
PAGE = [line for page, line in lines_of_pages("sh") if page == "docs/project.md"]
README = [line for block in re.findall(r"```sh\n(.*?)```", (TEMPLATE / "README.md").read_text(), re.DOTALL)
          for line in block.splitlines()]  # fmt: skip
FEW = "train.steps=2 train.eval_every=2 cluster.cpu_workers=2"


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_a_project_passes_its_tests_and_can_be_submitted(
    called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = called("init", ".")
    assert done.returncode == 0, done.stderr
    assert f"  {TRAIN} " in done.stdout
    assert set(git(tmp_path, "status", "--porcelain", "-uall").splitlines()) == {f"?? {name}" for name in FILES}
    assert not any("PROJECT_NAME" in (tmp_path / name).read_text() for name in FILES)

    monkeypatch.syspath_prepend(tmp_path)
    for name in ("data", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    tests = runpy.run_path(str(tmp_path / "test_project.py"))
    for name in [name for name in tests if name.startswith("test_")]:
        tests[name]()

    assert {*README} <= {*PAGE}
    forgotten = called("experiment=baseline", "launch.dry_run=true")
    assert "fix:    -cd conf experiment=baseline, which reads conf/experiment/baseline.yaml" in forgotten.stderr
    submissions = [shlex.split(line)[3:] for line in PAGE if "experiment=baseline" in line and line.endswith(" -m")]
    assert len(submissions) == 3
    for arguments in submissions[:2]:  # a sweep, and a dry run
        planned = called(*arguments, "launch.dry_run=true")
        assert "verdict: can be submitted" in planned.stdout, planned.stdout + planned.stderr

    frozen = called("freeze", "-cd", "conf", "experiment=baseline", "run.name=first")
    assert f"code: {tmp_path} has no commit yet; the run keeps a copy" in frozen.stderr
    assert training_again(RunDirectory(tmp_path / "outputs" / "first").record()) == [
        f"cd {tmp_path}",
        "python -m hpc_train -cd conf run.name=NEW experiment=baseline",
    ]


def test_a_project_belongs_to_the_work_tree_around_it_unless_that_ignores_it(called: Called, tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("scratch/\n")
    (tmp_path / "scratch").mkdir()
    assert json.loads(called("init", "inner", "--json").stdout)["work_tree"] == str(tmp_path)
    assert not (tmp_path / "inner" / ".git").exists()
    ignored = tmp_path / "scratch" / "inner"
    assert json.loads(called("init", str(ignored), "--json").stdout)["work_tree"] == str(ignored)
    assert (ignored / ".git").is_dir()


def test_a_project_is_made_without_git(called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = called("init", "shapes")
    assert done.returncode == 0
    assert "note: git is not installed; without git, runs do not keep a copy of the code" in done.stdout
    assert sorted(path.name for path in (tmp_path / "shapes").iterdir()) == sorted(
        {name.split("/")[0] for name in FILES}
    )


def test_nothing_is_overwritten(called: Called, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.py").write_text("mine\n")
    (tmp_path / "file").write_text("mine\n")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        done = called("init", name)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{name} exists, and nothing is overwritten\n")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["model.py"]
    assert (tmp_path / "folder" / "model.py").read_text() == (tmp_path / "file").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my project", "fix:    python -m hpc_train init my-project"),
        ("", "'' is not a name for a project"),
        ("..", "'..' is not a name for a project"),
        ("missing/shapes", "fix:    mkdir -p missing"),
        ("/proc/shapes", "/proc/shapes cannot be made: "),  # root may write to other directories without permission
    ],
)
def test_a_directory_that_cannot_be_made_is_refused(name: str, message: str, called: Called, tmp_path: Path) -> None:
    done = called("init", name)
    assert done.returncode == 2
    assert message in done.stderr
    assert not [*tmp_path.iterdir()]


def test_a_wheel_has_all_files_of_the_template() -> None:
    found = {str(path.relative_to(TEMPLATE)) for path in TEMPLATE.rglob("*") if path.is_file()}
    assert {name for name in found if "__pycache__" not in name} == set(FILES.values())
    patterns = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for name in FILES.values():
        assert any(fnmatch(name, pattern) for pattern in patterns["hpc_train.commands.project"]), name


@pytest.mark.long_form(300)
@pytest.mark.timeout(1200)
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """In a shell, with two steps in two workers."""
    lines = [re.sub(r"(experiment=baseline)", rf"\1 {FEW}", line) for line in PAGE]
    script = "\n".join(["set -ex", f'python() {{ {shlex.quote(sys.executable)} "$@"; }}', *lines])
    env = environment(
        GIT_AUTHOR_NAME="Student",
        GIT_AUTHOR_EMAIL="student@example.org",
        GIT_COMMITTER_NAME="Student",
        GIT_COMMITTER_EMAIL="student@example.org",
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    project = tmp_path / "shapes"
    commit = git(project, "rev-parse", "HEAD").strip()
    assert f"code: {project} has no commit yet; the run keeps a copy" in done.stderr
    assert f"code: commit {commit[:12]} of {project}" in done.stdout + done.stderr
    assert json.loads((project / "outputs" / "wide" / "run.json").read_text())["snapshot"]["commit"] == commit
    assert (project / "outputs" / "lr" / "1" / "config.yaml").is_file()
    assert git(project, "status", "--porcelain") == ""
