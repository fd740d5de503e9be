"""Runs the commands of README.md and docs/ with fewer and smaller steps.

In the short form only the README's runs are trained. On the other pages a training is checked by a dry run, or composed
where it needs what an earlier command makes, and commands that only read a run read a recorded one. The long form
(``HPC_TRAIN_LONG=1``) runs all commands of a page in their order, with a few steps, and most of them at full length.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from examples.vit_images import draw
from hpc_train import cli
from tests.checkpoint.progress import LONG
from tests.data.chats import chats, write_chat_model, write_jsonl
from tests.doors.command import REPOSITORY, TINY_GPT, environment, hpc_train, lines_of_pages
from tests.doors.recorded import recorded_run
from tests.warm_parents import HUGGING_FACE, with_server

NO_WANDB = "telemetry.wandb.mode=disabled"
FEW = {
    "synthetic": ["data.validation_samples=8"],
    "stream": ["data.validation_samples=8"],
}  # others: data.pattern of the text
TAKEN_AS_THEY_ARE = (
    "prepare",
    "checkpoint",
    "evaluate",
    "generate",
    "status",
    "logs",
    "why",
    "compare",
    "plan",
    "plot",
    "report",
    "doctor",
    "sync",
    "--help",
)
READ = ("status", "logs", "why", "compare", "plot", "report", "sync")  # they need nothing but the run
LONG_PAGES = {  # seconds of each on two cores
    "docs/howto/data.md": 60,
    "docs/howto/failures.md": 40,
    "docs/howto/hooks.md": 30,
    "docs/howto/huggingface.md": 120,
    "docs/howto/measure.md": 90,
    "docs/howto/model.md": 90,
    "docs/howto/optimizer.md": 60,
    "docs/howto/own_loop.md": 60,
    "docs/howto/resume.md": 90,
    "docs/howto/sweeps.md": 30,
    "docs/howto/tracking.md": 20,
    "docs/quickstart.md": 30,
}
COMPOSED = (  # their trainings need what earlier commands make, or import torch for a dry run
    "docs/howto/hooks.md",
    "docs/howto/huggingface.md",
    "docs/howto/model.md",
    "docs/howto/optimizer.md",
    "docs/howto/own_loop.md",
)
REPLICATED = ("+strategy=dp", "+strategy=zero1", "+strategy=zero2", "+strategy=zero3")  # with two of the four workers
NEEDS = {"lightning_script": "lightning", "accelerate_script": "accelerate"}
BENCH = {
    "batch": ["--steps", "2", "--pairs", "2", "--most", "2", "--noise", "2"],
    "checkpoint": ["--pairs", "2"],
    "step": ["--steps", "2", "--pairs", "2"],
}


def commands() -> list[tuple[str, str]]:
    """Page and line of each command."""
    return [found for found in lines_of_pages("bash") if found[1].startswith("python -m hpc_train ")]


def shortened(line: str, before: Sequence[str] = (), full: bool = LONG) -> list[str]:
    """The arguments of ``line``, with overrides that make a run short at their end.

    Args:
        before: the lines before it on the page: a run that is trained again goes on for two more steps.
        full: whether runs keep their length.
    """
    arguments = shlex.split(line, comments=True)[3:]
    name = next((part for part in arguments if part.startswith("run.name=")), None)
    if any(part.startswith("run.command=") for part in arguments):
        return [*arguments, NO_WANDB]
    if arguments[0] in TAKEN_AS_THEY_ARE or "--cfg" in arguments or arguments[:2] == ["bench", "collectives"]:
        return arguments
    given = {part.partition("=")[0] for part in arguments} - {"train.steps", "batch.global_size"}
    data = next((part.partition("=")[2] for part in arguments if part.startswith("data=")), "text")
    own_model = any(part.startswith(("model=", "experiment", "+experiment")) for part in arguments)
    small = ["batch.global_size=8", *FEW.get(data, []), *(["data.pattern=json/*.py"] if data == "text" else [])]
    small += [] if own_model else TINY_GPT
    if arguments[0] == "bench":
        return [*arguments, *([] if full else [*small, *BENCH.get(arguments[1], [])])]
    again = sum(name is not None and name in shlex.split(one, comments=True) for one in before)
    steps = [] if "telemetry.profile.steps" in given else [f"train.steps={2 * (1 + again)}"]
    costly = "train.compile=true" in arguments or data == "sft"  # each worker compiles, or reads the chats, for itself
    two = costly or (arguments[0] in REPLICATED and "cluster=local" in arguments and "-m" not in arguments)
    workers = ["cluster.cpu_workers=2"] if two else []
    own = [NO_WANDB] if full else [NO_WANDB, *steps, *small, *workers]
    return [*arguments, *(part for part in own if part.partition("=")[0] not in given)]


def test_the_pages_have_commands() -> None:
    assert len(commands()) >= 10


def test_a_run_that_is_trained_again_goes_on() -> None:
    first, second = "python -m hpc_train +strategy=dp run.name=a", "python -m hpc_train +strategy=pp run.name=a"
    assert "train.steps=4" in shortened(second, [first])
    assert "train.steps=2" in shortened(second, [first.replace("=a", "=b")])


def furnish(path: Path, page: str) -> Path:
    """Writes the files that the commands of ``page`` name into their working directory."""
    for name in ("README.md", "CONTRIBUTING.md"):
        (path / name).write_text((REPOSITORY / name).read_text())
    (path / "examples").symlink_to(REPOSITORY / "examples")
    if page == "docs/howto/huggingface.md":
        write_chat_model(path / "chat-model")
        write_jsonl(path / "chats.jsonl", chats(800))
    if page == "docs/howto/data.md":
        draw(path / "pictures", {"train": 8, "validation": 2})
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The working directory of each page."""
    return {page: furnish(tmp_path_factory.mktemp(re.sub(r"\W", "-", page)), page) for page in dict(commands())}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a recorded run for each run and sweep that a command of ``LONG_PAGES`` trains."""
    folder = tmp_path_factory.mktemp("recorded")
    for page, line in commands():
        arguments = shlex.split(line, comments=True)[3:]
        names = [part.removeprefix("run.name=") for part in arguments if part.startswith("run.name=")]
        for name in names if page in LONG_PAGES else ():
            run = folder / page / "outputs" / name
            for path in [run / "0", run / "1"] if "-m" in arguments else [run]:
                if not path.exists():
                    recorded_run(path)
    return folder


def compose_here(folder: Path, arguments: Sequence[str]) -> None:
    """Runs a command that trains nothing in this process, which saves the start of another one."""
    output = io.StringIO()
    with (
        chdir(folder),
        mock.patch.dict(os.environ, environment(), clear=True),
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        assert not cli.run([*arguments]), output.getvalue()


def run_command(folder: Path, page: str, arguments: Sequence[str]) -> None:
    if not LONG and ("--cfg" in arguments or "launch.dry_run=true" in arguments):
        compose_here(folder, arguments)
        return
    env = with_server(environment(), HUGGING_FACE) if page == "docs/howto/huggingface.md" else environment()
    done = hpc_train(*arguments, cwd=folder, timeout=3500 if LONG else 240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    trains = arguments[0].startswith("+strategy") and "cluster=local" in arguments
    if trains and not {"-m", "--cfg"}.intersection(arguments):
        assert re.search(r"^done(: |$)", done.stdout, re.MULTILINE), "the summary of a run"


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("number", range(len(commands())), ids=[f"{page}: {line}" for page, line in commands()])
def test_a_command_of_the_pages(folders: dict[str, Path], recorded: Path, number: int) -> None:
    page, line = commands()[number]
    if is_without_package(line):
        pytest.skip("its package is not installed")
    folder = folders[page]
    arguments = shortened(line, [earlier for other, earlier in commands()[:number] if other == page])
    if arguments[0].startswith("+strategy"):
        if page in COMPOSED:
            arguments += ["--cfg", "job"]
        elif page != "README.md" and "cluster=local" in arguments and not LONG:
            forks = any(part.startswith("run.fork=") for part in arguments)
            arguments += ["--cfg", "job"] if forks else ["launch.dry_run=true", "-m"]
    elif arguments[0] == "bench" and not LONG:
        pytest.skip("tests/bench runs each benchmark; this one: HPC_TRAIN_LONG=1")
    elif page in COMPOSED or (page in LONG_PAGES and not LONG):
        if arguments[0] in READ:
            folder = recorded / page
        elif arguments[0] not in ("prepare", "doctor"):
            pytest.skip("with the other commands of its page: HPC_TRAIN_LONG=1")
    run_command(folder, page, arguments)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.long_form(s)) for page, s in LONG_PAGES.items()])
def test_the_commands_of_a_long_page(tmp_path: Path, page: str) -> None:
    furnish(tmp_path, page)
    lines = [line for other, line in commands() if other == page]
    for number, line in enumerate(lines):
        if not is_without_package(line):
            run_command(tmp_path, page, shortened(line, lines[:number], full=False))


def is_without_package(line: str) -> bool:
    return any(script in line and find_spec(package) is None for script, package in NEEDS.items())
