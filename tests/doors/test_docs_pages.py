"""The pages of docs/ agree with the code: every command, exit code and class of failure is there, and links resolve."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpc_train.commands import COMMANDS
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.owner import ACCESS
from tests.doors.command import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


def test_every_command_has_a_section() -> None:
    sections = set(re.findall(r"^## (\w+)$", page("commands.md"), flags=re.MULTILINE))
    assert sections == set(COMMANDS)


def test_the_commands_of_the_docs_are_described_as_in_the_help() -> None:
    table = page("commands.md").partition("\n## ")[0]
    assert {name for name in COMMANDS if f"[`{name}`](#{name})" in table} == set(COMMANDS)


def test_the_docs_show_the_table_of_access() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \|$", page("howto/shared-runs.md"), flags=re.MULTILINE)
    assert rows == [(name, str(access)) for name, access in ACCESS.items()]


def test_every_exit_code_and_class_of_failure_is_explained() -> None:
    rows = set(re.findall(r"^\| `?(\w+)`? \|", page("troubleshooting.md"), flags=re.MULTILINE))
    assert rows >= {str(int(code)) for code in Exit}
    assert rows >= {str(failure) for failure in Failure}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_page_has_no_broken_link_and_its_python_compiles(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or (path.parent / target).is_file(), target
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        compile(block, str(path), "exec")


def test_the_pictures_are_those_that_the_code_draws() -> None:
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "pictures.py"))["pictures"]()
    kept = {path.name: path.read_text() for path in (REPOSITORY / "docs" / "pictures").glob("*.svg")}
    assert kept == drawn, "python docs/pictures.py"


def test_the_page_of_thirty_keys_has_keys_of_the_reference_with_their_defaults() -> None:
    documented = set(re.findall(r"^\| (`[\w.]+`) \| .+? \| (\S.*?) \|", page("config.md"), flags=re.MULTILINE))
    rows = re.findall(r"^\| (`[\w.]+`) \| (.+?) \|", page("keys.md"), flags=re.MULTILINE)
    assert len(rows) == 30
    assert set(rows) <= documented


def test_the_readme_is_short() -> None:
    assert (REPOSITORY / "README.md").stat().st_size <= 7_000


@pytest.mark.long_form(6, every_share=True)  # the links and the code of the pages are checked above
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs the extra docs")
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    index = (tmp_path / "site" / "llms.txt").read_text()
    pages = {str(path.relative_to(REPOSITORY / "docs").with_suffix(".html")) for path in PAGES if "docs" in path.parts}
    assert set(re.findall(r"^- \[.+?\]\((.+?)\): .+$", index, flags=re.MULTILINE)) == pages
