"""``python -m hpc_train init NAME`` makes a project: a model, data, a config and a test, in a git work tree.

``init --site`` describes the cluster of a login node (``init_site.py``).
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from pathlib import Path

from hpc_train.commands.init_site import add_options, init_site
from hpc_train.config.options import OptionParser
from hpc_train.errors import UserError
from hpc_train.run.code import git
from hpc_train.run.exits import Exit
from hpc_train.run.snapshot import work_tree

TEMPLATE = Path(__file__).parent / "project"
FILES = {  # name in the project -> name in the template
    "README.md": "README.md",
    "model.py": "model.py",
    "data.py": "data.py",
    "conf/experiment/baseline.yaml": "conf/experiment/baseline.yaml",
    "test_project.py": "test_project.py",
    "AGENTS.md": "AGENTS.md",
    ".gitignore": "gitignore",  # named .gitignore, it would apply to the template itself
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
PLACEHOLDER = "PROJECT_NAME"
TRAIN = "python -m hpc_train -cd conf experiment=baseline run.name=first"


def main(arguments: list[str]) -> int:
    """Makes the directory and prints the commands that train in it. Raises UserError if the name is not valid, the
    directory exists and is not empty, or it cannot be written."""
    parser = OptionParser(
        prog="python -m hpc_train init",
        description="Makes a directory with a project that trains at once: model.py, data.py, a config, a test, "
        "README.md, and AGENTS.md for coding assistants. It becomes a git work tree without a commit, unless it is "
        "inside another one. Existing files are never overwritten. With --site it describes a cluster instead.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the directory to make; it may exist if it is empty")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.site is not None and options.name is None:
        return init_site(options.site, overwrite=options.overwrite, internet=options.internet, as_json=options.json)
    if options.name is None or options.site or options.overwrite or options.internet:
        what = "init takes either NAME, or --site with its options"
        raise UserError(
            what, where="the command line", fix="init NAME makes a project; init --site describes a cluster"
        )
    path = Path(options.name)
    name = path.absolute().name
    if not options.name or NAME.fullmatch(name) is None:
        proposal = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name).strip("_.-") or "shapes"
        raise UserError(
            f"{path.name!r} is not a name for a project: use letters, digits, '_', '-' and '.'",
            where="the command line",
            fix=f"python -m hpc_train init {proposal}",
        )
    write_project(path, name)
    tree, note = _in_git(path.absolute())
    if options.json:
        print(json.dumps({"project": str(path.absolute()), "files": [*FILES], "work_tree": tree, "train": TRAIN}))
        return Exit.DONE
    print(f"{options.name}: {', '.join(FILES)}\n{note}\n")
    tests = "tests the model and the data, in seconds"
    if importlib.util.find_spec("pytest") is None:
        tests += "; needs `pip install pytest`"
    for command, effect in (
        (f"cd {options.name}", ""),
        (TRAIN, "trains on this machine"),
        (f"{TRAIN} -m", "submits the same run to Slurm"),
        ("python -m pytest", tests),
    ):
        print(f"  {command:<{len(TRAIN) + 6}}{effect}".rstrip())
    print("\nREADME.md says what to change next.")
    return Exit.DONE


def write_project(path: Path, name: str) -> None:
    """Writes the files of the template for the project ``name`` to ``path``, which may be an empty directory or git
    work tree. Raises UserError if ``path`` exists and is not an empty directory, or it cannot be written."""
    where = "the command line"
    try:
        is_new = not path.exists()
        is_empty = path.is_dir() and all(child.name == ".git" for child in path.iterdir())
        if path.is_symlink() or not (is_new or is_empty):
            raise UserError(f"{path} exists, and nothing is overwritten", where=where, fix="choose another name")
        if not path.parent.is_dir():
            what = f"the directory {path.parent} does not exist"
            raise UserError(what, where=where, fix=f"mkdir -p {shlex.quote(str(path.parent))}")
        if is_new:
            path.mkdir()
    except OSError as error:
        what = f"{path} cannot be made: {error.strerror}"
        raise UserError(what, where=where, fix="cd to a directory that you may write to") from error
    try:
        for relative, source in FILES.items():
            text = (TEMPLATE / source).read_text(encoding="utf-8").replace(PLACEHOLDER, name)
            file = path / relative
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("x", encoding="utf-8") as out:
                out.write(text)
    except OSError as error:  # such as a full disk
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        what = f"{path} cannot be written: {error.strerror}"
        raise UserError(what, where=where, fix="choose a directory on another file system") from error


def _in_git(path: Path) -> tuple[str | None, str]:
    """Makes ``path`` a git work tree unless it belongs to one. Returns the root of the work tree and a note."""
    outer = work_tree(path)
    if outer is not None and git(path, "check-ignore", "--quiet", str(path)) is None:
        return str(outer), f"It belongs to the git work tree {outer}; each run keeps a copy of this work tree."
    if git(path, "init") is None:
        note = "note: git init failed"
        if shutil.which("git") is None:
            note = "note: git is not installed"
        return None, f"{note}; without git, runs do not keep a copy of the code that they train"
    return str(path), "It is a git work tree without a commit: `git add -A && git commit` makes the first one."
