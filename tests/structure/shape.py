"""Prints the shape of the code: ``python -m tests.structure.shape [DIRECTORY]``.

``test_shape.py`` holds the figures that may only fall.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = "hpc_train"
REPOSITORY = Path(__file__).parents[2]
# Words that name no thing of the field; a name is of the dialect if one of its parts is such a word.
DIALECT = frozenset(
    ["found", "own", "asked", "kept", "beside", "told", "wanted", "known", "there", "whole", "one", "each"]
)


def sources(root: Path, folder: str) -> dict[Path, str]:
    """Returns the text of each Python file below ``folder``."""
    return {path: path.read_text() for path in sorted((root / folder).rglob("*.py"))}


@cache
def nodes_of(root: Path) -> dict[Path, list[ast.AST]]:
    """Returns all nodes of the syntax tree of each file of the package; without the garbage collector, which would take
    three quarters of the time."""
    gc.disable()
    try:
        return {path: list(ast.walk(ast.parse(text))) for path, text in sources(root, PACKAGE).items()}
    finally:
        gc.enable()


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the variables and parameters that a module binds, once per place."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def dialect_share(nodes: Iterable[Iterable[ast.AST]]) -> float:
    """Returns the share of bound names that are of the dialect; ``nodes`` has those of each file."""
    names = [name for of_file in nodes for name in bound_names(of_file)]
    return sum(not DIALECT.isdisjoint(name.lower().strip("_").split("_")) for name in names) / len(names)


def conditional_density(files: dict[Path, str], nodes: Iterable[Iterable[ast.AST]]) -> float:
    """Returns the number of conditional expressions per 1,000 lines that are not blank."""
    expressions = sum(isinstance(node, ast.IfExp) for of_file in nodes for node in of_file)
    lines = sum(bool(line.strip()) for text in files.values() for line in text.splitlines())
    return 1000 * expressions / lines


def module_name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports(root: Path, nodes: dict[Path, list[ast.AST]]) -> dict[str, set[str]]:
    """Returns the modules of the package that each module imports, lazily and for typing included."""
    modules = {module_name(root, path) for path in nodes}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for path, of_file in nodes.items():
        importer = module_name(root, path)
        for node in of_file:
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                members = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [member if member in modules else node.module for member in members]
            edges[importer] |= {target for target in targets if target in modules and target != importer}
    return edges


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one module (Tarjan 1972), the largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            at = stack.index(module)
            components.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return sorted((component for component in components if len(component) > 1), key=len, reverse=True)


def count_keys(root: Path) -> int:
    """Returns the number of config keys that docs/config.md describes, those of each family and source counted."""
    return sum(line.startswith("| `") for line in (root / "docs" / "config.md").read_text().splitlines())


def rows(root: Path) -> dict[str, str]:
    """Returns the figures by name."""
    product = sources(root, PACKAGE)
    tests = sources(root, "tests")
    nodes = nodes_of(root)
    components = cycles(imports(root, nodes))
    lines = sum(text.count("\n") for text in product.values())
    packages = [path for path in (root / PACKAGE).iterdir() if (path / "__init__.py").exists()]
    return {
        "lines; files": f"{lines:,}; {len(product)}",
        "statements": f"{sum(isinstance(node, ast.stmt) for of_file in nodes.values() for node in of_file):,}",
        "packages": str(len(packages)),
        "cycles, lazy and typing imports included": f"{len(components)} ({sum(map(len, components))} files)",
        "config keys": str(count_keys(root)),
        "names of the dialect": f"{dialect_share(nodes.values()):.1%}",
        "conditional expressions per 1,000 lines": f"{conditional_density(product, nodes.values()):.1f}",
        "lines of tests; files": f"{sum(text.count(chr(10)) for text in tests.values()):,}; {len(tests)}",
    }


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    for name, figure in rows(where).items():
        print(f"{name:45} {figure}")
    for component in cycles(imports(where, nodes_of(where))):
        print("cycle:", *component)
