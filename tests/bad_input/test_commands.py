"""Wrong arguments of the commands that look at runs and manage them: one message, exit code 2, no traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train import cli
from hpc_train.elastic.workers import WorkerLog
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_writer import FileWriter
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of
from tests.doors.command import environment

Called = Callable[..., subprocess.CompletedProcess[str]]

REFUSED: list[tuple[list[str], str]] = [  # arguments, and what the message must name
    *[([command, name], "is empty") for command in ("status", "why", "cancel", "resume", "wait") for name in ("", " ")],
    (["retry", "--failed", ""], "is empty"),
    (["compare", "mine", ""], "is empty"),
    (["checkpoint", "list", ""], "is empty"),
    (["logs", "mine", "--attempt", "1"], "it has only attempt 0"),
    (["logs", "mine", "--attempt", "-1"], "no attempt -1"),
    (["bench", "foo"], "bench does not accept 'foo'"),
    (["bench"], "`python -m hpc_train bench --help` lists the arguments"),
    (["help", "checkpoint", "exprot"], "did you mean export?"),
    (["status", "--jsn"], "did you mean --json?"),
    (["evaluate", "mine", "--sbatch", "--time=1"], "--sbatch='VALUE', with an equals sign"),
    (["logs", "outputs"], "logs outputs/mine"),
    (["checkpoint", "verify", "outputs"], "checkpoint verify outputs/mine"),
    (["status", "broken"], "has no config.yaml"),
    (["plot", "mine", "-o", "none/x.png"], "the directory none does not exist"),
    (["plot", "mine", "-o", "/proc/x.png"], "cannot be written"),
    (["plot", "mine", "--metric", "nope"], "compare RUN"),
    (["prepare", "a.txt", "--out", "a.txt"], "cannot be created (File exists)"),
    (["prepare", "a.txt", "--out", "/proc/x"], "cannot be created"),
    (["prepare", "a.txt", "--out", "x", "--encoding", "nope"], "unknown encoding: nope"),
    (["prepare", "", "--out", "x"], "'' matches no input file"),
    (["prepare", "--images", "pictures", "--out", "a.txt/x"], "cannot be created"),
    (["checkpoint", "export", "mine", "--to", "a.txt/x"], "no checkpoint"),
    (["checkpoint", "export", "mine", "--to", "a.txt"], "a.txt already exists"),
    (["evaluate", "outputs"], "evaluate outputs/mine"),
    (["generate", "outputs", "text"], "generate outputs/mine"),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run that has written a log, one that has not started, and one without its config."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "new", "broken"):
        run = RunDirectory((tmp_path / "outputs" / name).absolute())
        freeze(config_of(f"run.name={name}"), run)
    run.config.unlink()
    run = RunDirectory(tmp_path / "outputs" / "mine")
    run.claim_attempt()
    run.metrics_file(0).write_text('{"step": 1, "time": 1.0, "attempt": 0, "loss": 2.0}\n')
    log = WorkerLog(run.logs / "n0-000.log", FileWriter("the output"))
    log.write(0, b"hello\n")
    log.close()
    (tmp_path / "a.txt").write_text("text")
    for split in ("train", "validation"):
        (tmp_path / "pictures" / split / "cat").mkdir(parents=True)
        (tmp_path / "pictures" / split / "cat" / "a.png").touch()
    return tmp_path


def test_wrong_arguments_are_one_message_and_exit_code_2(place: Path, called: Called) -> None:
    before = set(place.rglob("*"))
    for arguments, named in REFUSED:
        done = called(*arguments)
        assert done.returncode == 2, (arguments, done)
        assert named in done.stderr, (arguments, done)
        assert done.stderr.count("set in:") == done.stderr.count("fix:") == 1, (arguments, done)
    assert set(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "text"),
    [("yaml.py", ""), ("logging.py", ""), ("hydra.py", "import hydra.core"), ("omegaconf/__init__.py", "1 1")],
)
def test_a_file_that_shadows_a_package_is_named(file: str, text: str, tmp_path: Path) -> None:
    path, top = tmp_path / file, file.partition("/")[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    command = [sys.executable, "-m", "hpc_train", "--cfg", "job"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    first, fix = done.stderr.splitlines()
    name = top.removesuffix(".py")
    assert first.startswith(f"{tmp_path}/{top} shadows the package {name}, which other modules import: ")
    assert fix == f"  fix:    rename {tmp_path}/{top}"


def test_logs_without_a_line_say_so(place: Path, called: Called) -> None:
    done = called("logs", "mine")
    assert "hello" in done.stdout and not done.stderr
    assert "attempt 0 has no output of rank 9" in called("logs", "mine", "--rank", "9").stderr
    assert "has not started yet" in called("logs", "new").stderr


def test_a_command_names_the_variable_that_torch_rejects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports_torch(arguments: list[str]) -> int:
        raise ValueError("The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL.")

    monkeypatch.setattr(cli, "_command", lambda arguments: (imports_torch, arguments))
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "LOUD")
    assert cli.run([]) == 2
    assert capsys.readouterr().err.startswith("torch cannot use TORCH_DISTRIBUTED_DEBUG=LOUD: ValueError: The value")
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")
    with pytest.raises(ValueError, match="must be OFF"):
        cli.run([])
