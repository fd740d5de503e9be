"""What the pages about versions list is what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import hpc_train
from hpc_train.commands import COMMANDS
from hpc_train.config.removed import REMOVED, REMOVED_VALUES, RENAMED
from hpc_train.run.exits import Exit
from hpc_train.version import __version__

REPOSITORY = Path(__file__).parents[2]
PROMISE = (REPOSITORY / "docs" / "promise.md").read_text()


def frozen(row: str) -> list[str]:
    """Returns the names in code font in the second column of a row of the table of what is frozen."""
    (line,) = re.findall(rf"^\| \[?{row}.*?\| (.*) \|$", PROMISE, re.MULTILINE)
    return re.findall(r"`([^`]+)`", line.split("; their")[0].split("; the keys")[0])


def test_the_promise_lists_all_commands_exit_codes_and_public_names() -> None:
    assert frozen("Commands") == list(COMMANDS)
    assert sorted(map(int, frozen("Exit codes"))) == sorted(Exit)
    names = frozen("Python")
    assert {f"hpc_train.{name}" for name in hpc_train.__all__} <= set(names)
    for name in names:
        *folders, module, attribute = name.split(".")
        source = REPOSITORY.joinpath(*folders, f"{module}.py")  # not imported, because some import torch
        if not source.exists():
            source = REPOSITORY.joinpath(*folders, module, "__init__.py")
        assert re.search(rf"\b{attribute}\b", source.read_text()), name


def test_the_files_that_the_promise_lists_are_those_of_the_page_about_the_run_directory() -> None:
    text = (REPOSITORY / "docs" / "how-it-works.md").read_text()
    table = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    assert [file for file in frozen("Files") if f"`{file}" not in table] == []


def test_the_changes_begin_with_this_version_and_list_what_it_renames_and_removes() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == __version__
    values = {f"{key}={value}" for key, value in REMOVED_VALUES}
    assert [name for name in {*REMOVED, *RENAMED, *RENAMED.values(), *values} if f"`{name}`" not in text] == []


def test_the_quickstart_lists_all_extras() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (REPOSITORY / "docs" / "quickstart.md").read_text()
    _, _, rows = text.partition("| Extra | For |\n|---|---|\n")
    cells = [row.split("|")[1] for row in rows.partition("\n\n")[0].splitlines()]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(extras)
