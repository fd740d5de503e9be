"""Executes the code cells of notebooks in this process, one notebook after the other, each in a fresh namespace.

    python -m tests.notebooks.execute NOTEBOOK...

One process imports torch, transformers and matplotlib once, and no kernel is started. ``NOTEBOOK_PARAMETERS`` maps the
stem of a notebook to values, as JSON, that replace those of its cell with the tag ``parameters``.
"""

from __future__ import annotations

import gc
import json
import linecache
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


def execute(notebook: Path) -> None:
    """Executes the cells in the folder of the notebook, as a kernel does; a traceback names the cell and its line."""
    os.chdir(notebook.parent)
    names: dict[str, Any] = {"__name__": "__main__"}
    parameters = json.loads(os.environ["NOTEBOOK_PARAMETERS"])[notebook.stem]
    for number, cell in enumerate(code_cells(notebook)):
        source, label = "".join(cell["source"]), f"{notebook.name}, code cell {number}"
        linecache.cache[label] = (len(source), None, source.splitlines(keepends=True), label)
        try:
            exec(compile(source, label, "exec"), names)
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)  # the traceback shows only its exit code
            raise
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= {name: type(names[name])(value) for name, value in parameters.items()}


if __name__ == "__main__":
    gc.disable()  # half of the time goes into imports, in which it finds nothing
    for path in [Path(argument).resolve() for argument in sys.argv[1:]]:
        began = time.monotonic()
        execute(path)
        print(f"{path.name}: {time.monotonic() - began:.1f} s", flush=True)
