"""Runs the commands of README.md and docs/ with fewer and smaller steps.

Outside ``TRAINED``, a training that no other command reads is only checked, by a dry run, and on the pages of
``LONG_PAGES`` all trainings are only composed. The long form (``HPC_TRAIN_LONG=1``) trains the former at full length,
and the latter with a few steps.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.vit_images import draw
from tests.checkpoint.progress import LONG
from tests.data.chats import chats, write_chat_model, write_jsonl
from tests.doors.command import REPOSITORY, TINY_GPT, environment, hpc_train, lines_of_pages
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
TRAINED = ("README.md", "docs/quickstart.md", "docs/howto/resume.md", "docs/howto/data.md")
LONG_PAGES = {  # seconds of each on two cores
    "docs/howto/hooks.md": 30,
    "docs/howto/huggingface.md": 120,
    "docs/howto/model.md": 90,
    "docs/howto/optimizer.md": 60,
    "docs/howto/own_loop.md": 60,
}
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


def only_checked(page: str, arguments: Sequence[str]) -> bool:
    """Whether ``arguments`` train a run that no other command of the page names, on a page outside ``TRAINED``."""
    trains = arguments[0].startswith("+strategy") and "cluster=local" in arguments
    return trains and not LONG and page not in TRAINED and not any(part.startswith("run.name=") for part in arguments)


def test_the_pages_have_commands() -> None:
    assert len(commands()) >= 10


def test_a_run_that_is_trained_again_goes_on() -> None:
    first, second = "python -m hpc_train +strategy=dp run.name=a", "python -m hpc_train +strategy=pp run.name=a"
    assert "train.steps=4" in shortened(second, [first])
    assert "train.steps=2" in shortened(second, [first.replace("=a", "=b")])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each page a working directory with the files that commands name."""
    found = {page: tmp_path_factory.mktemp(re.sub(r"\W", "-", page)) for page in dict(commands())}
    for path in found.values():
        for name in ("README.md", "CONTRIBUTING.md"):
            (path / name).write_text((REPOSITORY / name).read_text())
        (path / "examples").symlink_to(REPOSITORY / "examples")
    hugging_face = found["docs/howto/huggingface.md"]
    write_chat_model(hugging_face / "chat-model")
    write_jsonl(hugging_face / "chats.jsonl", chats(800))
    draw(found["docs/howto/data.md"] / "pictures", {"train": 8, "validation": 2})
    return found


def run_command(folder: Path, page: str, arguments: Sequence[str]) -> None:
    env = with_server(environment(), HUGGING_FACE) if page == "docs/howto/huggingface.md" else environment()
    done = hpc_train(*arguments, cwd=folder, timeout=3500 if LONG else 240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    trains = arguments[0].startswith("+strategy") and "cluster=local" in arguments
    if trains and not {"-m", "--cfg"}.intersection(arguments):
        assert re.search(r"^done(: |$)", done.stdout, re.MULTILINE), "the summary of a run"


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("number", range(len(commands())), ids=[f"{page}: {line}" for page, line in commands()])
def test_a_command_of_the_pages(folders: dict[str, Path], number: int) -> None:
    page, line = commands()[number]
    if is_without_package(line):
        pytest.skip("its package is not installed")
    arguments = shortened(line, [earlier for other, earlier in commands()[:number] if other == page])
    if page in LONG_PAGES:
        if not arguments[0].startswith("+strategy"):
            pytest.skip("with the other commands of its page: HPC_TRAIN_LONG=1")
        arguments += ["--cfg", "job"]
    elif arguments[0] == "bench" and page not in TRAINED and not LONG:
        pytest.skip("tests/train/watch runs each benchmark; this one: HPC_TRAIN_LONG=1")
    elif only_checked(page, arguments):
        arguments += ["launch.dry_run=true", "-m"]
    run_command(folders[page], page, arguments)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.long_form(s)) for page, s in LONG_PAGES.items()])
def test_the_commands_of_a_long_page(folders: dict[str, Path], page: str) -> None:
    lines = [line for other, line in commands() if other == page]
    for number, line in enumerate(lines):
        if not is_without_package(line):
            run_command(folders[page], page, shortened(line, lines[:number], full=False))


def is_without_package(line: str) -> bool:
    return any(script in line and find_spec(package) is None for script, package in NEEDS.items())
