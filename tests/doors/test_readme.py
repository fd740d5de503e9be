"""Runs the commands of README.md and docs/.

In the short form README's runs are trained, with fewer and smaller steps. The trainings of the other pages are checked
by a dry run, or composed where they need what an earlier command makes, and commands that only read a run read a
recorded one. The long form (``HPC_TRAIN_LONG=1``) runs all commands of a page in their order: those of README.md at
full length, the others with a few steps.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from examples.vit_images import draw
from hpc_train import cli
from hpc_train.commands.exec import parse
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.command_line import CommandLine
from tests.config.composing import compose
from tests.data.chats import chats, write_chat_model, write_jsonl
from tests.doors.command import REPOSITORY, TINY_GPT, environment, hpc_train, lines_of_pages
from tests.doors.recorded import recorded_run
from tests.warm_parents import HUGGING_FACE, with_server

README = "README.md"
NO_WANDB = "telemetry.wandb.mode=disabled"
FEW = {
    "synthetic": ["data.validation_samples=8"],
    "stream": ["data.validation_samples=8"],
}  # others: data.pattern of the text
READ = ("status", "logs", "why", "compare", "plot", "report", "sync")  # they need nothing but the run
TAKEN_AS_THEY_ARE = ("exec", "prepare", "checkpoint", "evaluate", "generate", "doctor", *READ)
SECONDS = {  # of the long form of each page on two cores
    README: 150,
    "docs/extend.md": 20,
    "docs/howto/corruption.md": 30,
    "docs/howto/data.md": 60,
    "docs/howto/exec.md": 60,
    "docs/howto/failures.md": 40,
    "docs/howto/hooks.md": 30,
    "docs/howto/huggingface.md": 140,
    "docs/howto/measure.md": 90,
    "docs/howto/memory.md": 60,
    "docs/howto/model.md": 90,
    "docs/howto/moe.md": 40,
    "docs/howto/monitoring.md": 20,
    "docs/howto/network.md": 20,
    "docs/howto/optimizer.md": 60,
    "docs/howto/own_loop.md": 30,
    "docs/howto/precision.md": 30,
    "docs/howto/reproducible.md": 20,
    "docs/howto/resume.md": 90,
    "docs/howto/roles.md": 30,
    "docs/howto/sweeps.md": 30,
    "docs/howto/tracking.md": 20,
    "docs/measurements/one_card_to_a_hundred.md": 40,
    "docs/path.md": 30,
    "docs/quickstart.md": 30,
    "docs/strategies.md": 60,
}
COMPOSED = (  # their trainings need what earlier commands make, or import torch for a dry run
    "docs/howto/hooks.md",
    "docs/howto/huggingface.md",
    "docs/howto/model.md",
    "docs/howto/moe.md",
    "docs/howto/optimizer.md",
    "docs/howto/own_loop.md",
)
REPLICATED = ("+strategy=dp", "+strategy=zero1", "+strategy=zero2", "+strategy=zero3")  # with two of the four workers
BENCH = {
    "batch": ["--steps", "2", "--pairs", "2", "--most", "2", "--noise", "2"],
    "checkpoint": ["--pairs", "2"],
    "step": ["--steps", "2", "--pairs", "2"],
}


def commands() -> dict[str, list[list[str]]]:
    """Returns the arguments of each command by its page."""
    pages: dict[str, list[list[str]]] = {}
    for page, line in lines_of_pages("bash"):
        if line.startswith("python -m hpc_train "):
            pages.setdefault(page, []).append(shlex.split(line, comments=True)[3:])
    return pages


COMMANDS = commands()


def run_name(arguments: Sequence[str]) -> str | None:
    return next((part.removeprefix("run.name=") for part in arguments if part.startswith("run.name=")), None)


def shortened(arguments: Sequence[str], earlier: Sequence[Sequence[str]] = ()) -> list[str]:
    """Returns ``arguments`` with overrides that make a run short at their end.

    Args:
        earlier: the commands before it on the page: a run that is trained again goes on for two more steps.
    """
    if any(part.startswith(("run.command=", "+run.roles=")) for part in arguments):
        return [*arguments, NO_WANDB]
    if arguments[0] in TAKEN_AS_THEY_ARE or "--cfg" in arguments or list(arguments[:2]) == ["bench", "collectives"]:
        return [*arguments]
    given = {part.partition("=")[0] for part in arguments} - {"train.steps", "batch.global_size"}
    data = next((part.partition("=")[2] for part in arguments if part.startswith("data=")), "text")
    own_model = any(part.startswith(("model=", "experiment", "+experiment")) for part in arguments)
    small = ["batch.global_size=8", *FEW.get(data, []), *(["data.pattern=json/*.py"] if data == "text" else [])]
    small += [] if own_model else TINY_GPT
    if arguments[0] == "bench":
        return [*arguments, *small, *BENCH.get(arguments[1], [])]
    name = run_name(arguments)
    again = sum(name is not None and name == run_name(other) for other in earlier)
    steps = [] if "telemetry.profile.steps" in given else [f"train.steps={2 * (1 + again)}"]
    costly = "train.compile=true" in arguments or data == "sft"  # each worker compiles, or reads the chats, for itself
    two = costly or (arguments[0] in REPLICATED and "cluster=local" in arguments and "-m" not in arguments)
    workers = ["cluster.cpu_workers=2"] if two else []
    return [*arguments, *(part for part in [NO_WANDB, *steps, *small, *workers] if part.partition("=")[0] not in given)]


def test_the_pages_have_commands() -> None:
    assert sum(map(len, COMMANDS.values())) >= 10


def test_a_run_that_is_trained_again_goes_on() -> None:
    second = ["+strategy=pp", "run.name=a"]
    assert "train.steps=4" in shortened(second, [["+strategy=dp", "run.name=a"]])
    assert "train.steps=2" in shortened(second, [["+strategy=dp", "run.name=b"]])


def furnish(path: Path, page: str) -> Path:
    """Writes the files that the commands of ``page`` name into their working directory."""
    for name in ("README.md", "CONTRIBUTING.md"):
        (path / name).write_text((REPOSITORY / name).read_text())
    (path / "examples").symlink_to(REPOSITORY / "examples")
    if page == "docs/howto/data.md":
        draw(path / "pictures", {"train": 8, "validation": 2})
    return path


def run_here(folder: Path, arguments: Sequence[str]) -> None:
    """Runs a command that trains nothing in this process, which saves the start of another one."""
    output = io.StringIO()
    with (
        chdir(folder),
        mock.patch.dict(os.environ, environment(), clear=True),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        assert not cli.run([*arguments]), f"{shlex.join(arguments)}\n{output.getvalue()}"


def compose_here(folder: Path, arguments: Sequence[str]) -> None:
    with chdir(folder), mock.patch.dict(os.environ, environment(), clear=True):
        compose(CommandLine.parse(with_right_plus(arguments)).overrides)


def run_command(folder: Path, arguments: Sequence[str], env: dict[str, str]) -> None:
    done = hpc_train(*arguments, cwd=folder, timeout=1200, env=env)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}{done.stderr}"
    trains = arguments[0].startswith("+strategy") and "cluster=local" in arguments
    if trains and not {"-m", "--cfg", "launch.dry_run=true"}.intersection(arguments):
        assert re.search(r"^done(: |$)", done.stdout, re.MULTILINE), "the summary of a run"


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    furnish(tmp_path, README)
    for number, arguments in enumerate(COMMANDS[README]):
        short = shortened(arguments, COMMANDS[README][:number])
        if short[0].startswith("+strategy") and "launch.dry_run=true" not in short:
            run_command(tmp_path, short, environment())
        else:
            run_here(tmp_path, short)


@pytest.mark.parametrize("page", [page for page in COMMANDS if page != README])
def test_the_commands_of_a_page_without_training(page: str, tmp_path: Path) -> None:
    """Except those that need more than a recorded run: tests/bench, tests/checkpoint and tests/tasks have the like."""
    furnish(tmp_path, page)
    sweeps = {run_name(arguments) for arguments in COMMANDS[page] if "-m" in arguments}
    for arguments in COMMANDS[page]:
        if arguments[0] in READ or arguments[:2] in (["checkpoint", "list"], ["checkpoint", "verify"]):
            name = next(word for word in arguments if word not in ("checkpoint", "list", "verify", *READ))
            run = tmp_path / "recorded" / "outputs" / name
            if "--role" in arguments:
                run = run / "roles" / arguments[-1]
            if not run.exists():
                for path in [run / "0", run / "1"] if name in sweeps else [run]:
                    recorded_run(path)
            run_here(tmp_path / "recorded", arguments)
        elif arguments[0] == "exec":
            parse(arguments[1:])
        elif arguments[0] in ("prepare", "doctor") or "--cfg" in arguments:
            run_here(tmp_path, arguments)
        elif page in COMPOSED or any(part.startswith("run.fork=") for part in arguments):
            if arguments[0].startswith("+"):
                compose_here(tmp_path, arguments)
        elif arguments[0].startswith("+"):
            run_here(tmp_path, [*arguments, "launch.dry_run=true", "-m"])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.long_form(s)) for page, s in SECONDS.items()])
def test_the_commands_of_a_page(tmp_path: Path, page: str) -> None:
    furnish(tmp_path, page)
    env = environment()
    if page == "docs/howto/huggingface.md":
        env = with_server(env, HUGGING_FACE)
        write_chat_model(tmp_path / "chat-model")
        write_jsonl(tmp_path / "chats.jsonl", chats(800))
    for number, arguments in enumerate(COMMANDS[page]):
        full = [*arguments, *([NO_WANDB] if arguments[0].startswith("+") else [])]
        run_command(tmp_path, full if page == README else shortened(arguments, COMMANDS[page][:number]), env)


@pytest.mark.long_form(90)  # tests/checkpoint/test_standalone.py
def test_the_lines_of_the_page_about_parts(tmp_path: Path) -> None:
    page = "docs/howto/parts.md"
    furnish(tmp_path, page)
    env = environment()
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    lines = [line for of_page, line in lines_of_pages("bash") if of_page == page]
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after step 20 and 1920 samples on 3 ranks" in done.stdout
    assert (tmp_path / "model.pt").exists()
    assert len([*(tmp_path / "loop").glob("step-*")]) == 2


def test_every_page_that_trains_has_a_long_form() -> None:
    training = [page for page, lines in COMMANDS.items() if any("cluster=local" in line for line in lines)]
    assert {*training} <= {*SECONDS}
