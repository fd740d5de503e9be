"""The commands of the README run as they stand there, but for fewer and smaller steps."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.doors.command import REPOSITORY, hpc_train

SHORT = ["train.steps=2", "telemetry.wandb.mode=disabled"]
TINY_GPT = ["model.dim=16", "model.ffn_dim=32", "data.sequence_length=64", "batch.global_size=8"]
FEW = {  # the evaluation at the end takes all of the validation part
    "text": ["data.pattern=json/*.py"],
    "synthetic": ["data.validation_samples=8", "batch.global_size=8"],
}


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("python -m hpc_train ")]


def shortened(line: str) -> list[str]:
    """The arguments of a README line, with overrides that make a run short at their end."""
    arguments = shlex.split(line)[3:]
    short = ("prepare", "checkpoint", "status", "logs", "why")
    if arguments[0] in short or "--cfg" in arguments or arguments[:2] == ["bench", "collectives"]:
        return arguments
    data = FEW.get(next((part.partition("=")[2] for part in arguments if part.startswith("data=")), "text"), [])
    if arguments[0] == "bench":
        few = {"batch": ["--steps", "2", "--pairs", "2", "--most", "2", "--noise", "2"], "checkpoint": ["--pairs", "2"]}
        return [*arguments, *TINY_GPT, *data, *few.get(arguments[1], ["--steps", "2", "--pairs", "2"])]
    own_model = any(part.startswith(("model=", "experiment", "+experiment")) for part in arguments)
    own = SHORT + data if own_model else SHORT + TINY_GPT + data
    given = {part.partition("=")[0] for part in arguments}
    return [*arguments, *(part for part in own if part.partition("=")[0] not in given - {"train.steps"})]


def test_the_readme_has_commands() -> None:
    assert len(commands()) >= 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files that the README's commands name."""
    path = tmp_path_factory.mktemp("readme")
    for name in ("README.md", "CONTRIBUTING.md"):
        (path / name).write_text((REPOSITORY / name).read_text())
    return path


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_readme(folder: Path, line: str) -> None:
    done = hpc_train(*shortened(line), cwd=folder, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
