"""Prints the test files of one room, for ``make test ROOM=NAME``: those of its folder and those whose imports reach it.

A test that starts processes or ranks reaches most of the package, so it counts only for the room of its folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp

REPOSITORY = Path(__file__).parents[2]
STARTS_PROCESSES = {"tests.ranks", "subprocess", "multiprocessing"}


def rooms() -> list[str]:
    return sorted(path.parent.name for path in (REPOSITORY / "hpc_train").glob("*/__init__.py"))


def files_of(room: str) -> list[str]:
    """Returns the test files of ``room``, relative to the repository.

    Raises:
        ValueError: hpc_train has no such room.
    """
    if room not in rooms():
        raise ValueError(f"there is no room {room}; one of {', '.join(rooms())}")
    graph = grimp.build_graph("hpc_train", "tests", include_external_packages=True, cache_dir=None)
    target = {f"hpc_train.{room}", *graph.find_descendants(f"hpc_train.{room}")}
    found = []
    for module in sorted(graph.find_descendants("tests")):
        folder, _, name = module.rpartition(".")
        if not name.startswith("test_"):
            continue
        own = folder == f"tests.{room}" or folder.startswith(f"tests.{room}.")
        helpers = _test_modules(graph, module)
        starts = any(graph.find_modules_directly_imported_by(each) & STARTS_PROCESSES for each in helpers)
        if own or (not starts and graph.find_upstream_modules(module) & target):
            found.append(f"{module.replace('.', '/')}.py")
    return found


def _test_modules(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Returns ``module`` and the modules of tests that it imports, also through each other."""
    found = {module}
    pending = [module]
    while pending:
        imported = graph.find_modules_directly_imported_by(pending.pop())
        new = {each for each in imported if each.startswith("tests.")} - found
        found |= new
        pending += new
    return found


if __name__ == "__main__":
    try:
        print(*files_of(sys.argv[1]), sep="\n")
    except ValueError as error:
        sys.exit(str(error))
