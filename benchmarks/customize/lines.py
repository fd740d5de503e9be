"""Counts lines of user code: those with code, so neither blank lines nor comments nor docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
TASKS = ("own_model", "own_loss", "contrastive", "optimizer", "metric", "gan", "fine_tuning")
FRAMEWORKS = ("hpc_train", "lightning", "accelerate", "torch")
IN_EXAMPLES = {  # the losses of hpc_train are methods of the models, which the others share without their losses
    "own_loss": ("examples/own_model.py", "loss"),
    "contrastive": ("examples/contrastive.py", "loss"),
}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def user_lines(framework: str, task: str) -> int:
    """Returns the lines that a user of ``framework`` writes for ``task``; an override of hpc_train is a line."""
    count = len(code_lines((FOLDER / f"with_{framework}" / f"{task}.py").read_text()))
    if framework == "hpc_train" and task in IN_EXAMPLES:
        path, function = IN_EXAMPLES[task]
        count += len(code_lines((ROOT / path).read_text(), function))
    return count


def code_lines(source: str, function: str | None = None) -> set[int]:
    """Returns the numbers of the lines with code, of the whole source or of one function in it."""
    tree = ast.parse(source)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= _span(node)
    if function is None:
        return lines
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
    return lines & _span(found)


def _span(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
