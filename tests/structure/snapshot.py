"""Writes what commands print and write, so that two versions can be compared.

``python -m tests.structure.snapshot DIR [WORD...]`` writes a file per case; ``diff -r`` of two such directories shows
what a change of the code has changed for users. With words, only cases run whose names contain one of them.

A case is one call of a command in this process, in a working directory of its own. Paths of that directory and of the
repository, times and ids are replaced.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from hpc_train import cli
from hpc_train.commands import COMMANDS
from tests.bad_input.test_refused import MISTAKES
from tests.doors.command import REPOSITORY, environment

MODELS = (
    "gpt_tiny", "gpt_124m", "gpt_175b", "llama_1b", "llama_7b", "llama_70b", "mistral_7b", "qwen3_8b", "gemma2_9b",
    "vit_base", "vit_large", "vit_huge",
)  # fmt: skip
FILES = ("config.yaml", "plan.json", "job.sbatch")  # of a run directory


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (REPOSITORY / "conf" / group).glob("*.yaml"))


def cases() -> Iterator[tuple[str, list[str]]]:
    """Yields a name and the arguments of each case."""
    for command in COMMANDS:
        if command != "help":
            yield f"help/{command}", ["help", command]
    yield "help/help", ["help"]
    for strategy, experiment in itertools.product(names("strategy"), ["", *names("experiment")]):
        overrides = [f"+strategy={strategy}", *([f"+experiment={experiment}"] if experiment else []), "run.name=a"]
        name = f"{strategy}-{experiment or 'default'}"
        yield f"config/{name}", [*overrides, "--cfg", "job"]
        yield f"dry_run/{name}", [*overrides, "launch.dry_run=true", "-m"]
        yield f"script/{name}", ["script", *overrides]
        yield f"freeze/{name}", ["freeze", *overrides]
    for model in MODELS:
        data = ["data=synthetic", "data.task=images"] if model.startswith("vit") else []
        yield f"plan/{model}", ["plan", f"model={model}", *data, "cluster.nodes=2", "cluster.machine=h100"]
    for number, (arguments, _) in enumerate(MISTAKES):
        if not arguments[0].startswith("run.name="):  # in an empty directory this is no mistake
            yield f"refused/{number:03}", arguments


def show(arguments: list[str], place: Path) -> str:
    """Runs a command in ``place`` and returns its exit code, its output and the files of the runs that it writes."""
    output = io.StringIO()
    os.chdir(place)
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code: object = cli.run(arguments)
        except SystemExit as end:
            code = end.code
    text = f"$ {' '.join(arguments)}\nexit code {code}\n{output.getvalue()}"
    for path in sorted(place.rglob("*")):
        if path.name in FILES:
            text += f"--- {path.relative_to(place)}\n{path.read_text()}"
    for location, word in ((str(place), "PLACE"), (sys.executable, "PYTHON"), (str(REPOSITORY), "REPOSITORY")):
        text = text.replace(location, word)
    text = re.sub(r"\d{4}-\d\d-\d\d[/_ T]\d\d[:-]\d\d[:-]\d\d(\.\d+)?", "TIME", text)
    return re.sub(r"\b[0-9a-f]{12,64}\b", "HASH", text)


def main(target: Path, words: list[str]) -> None:
    os.environ.update(environment())
    for name, arguments in cases():
        if words and not any(word in name for word in words):
            continue
        place = Path(tempfile.mkdtemp(prefix="snapshot-"))
        try:
            text = show(arguments, place)
        finally:
            os.chdir(REPOSITORY)
            shutil.rmtree(place)
        file = target / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
