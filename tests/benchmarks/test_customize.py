"""The comparison of customized training counts what a user writes, and the page about it is up to date."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.customize.lines import FRAMEWORKS, ROOT, TASKS, code_lines, user_lines
from examples.own_optimizer import Lion

PAGE = (ROOT / "docs" / "customize.md").read_text()
SOURCE = '''"""A docstring
of two lines."""

import os  # counted


# not counted
def loss(a):
    """Not counted."""
    text = """
    counted, since it is a value
    """

    return a, text
'''


def test_lines_of_code_are_counted() -> None:
    assert code_lines(SOURCE) == {4, 8, 10, 11, 12, 14}
    assert code_lines(SOURCE, "loss") == {8, 10, 11, 12, 14}


@pytest.mark.parametrize("task", TASKS)
def test_the_page_has_the_lines_of_each_task(task: str) -> None:
    rows = {
        name: int(lines) for name, lines in re.findall(rf"^\| {task} \| (\w+) \| (\d+) \|", PAGE, flags=re.MULTILINE)
    }
    assert rows == {framework: user_lines(framework, task) for framework in FRAMEWORKS}


def test_the_losses_of_hpc_train_are_part_of_its_lines() -> None:
    alone = len(code_lines((ROOT / "benchmarks/customize/with_hpc_train/own_loss.py").read_text()))
    assert user_lines("hpc_train", "own_loss") == alone + 5


def test_every_example_stands_on_the_page_and_exists() -> None:
    named = set(re.findall(r"`((?:examples|notebooks)/[\w.]+)`", PAGE))
    assert all((ROOT / path).is_file() for path in named)
    assert {path for path in named if path.startswith("examples/")} == {
        f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")
    }


def test_the_optimizer_of_the_examples_calls_the_closure_of_lightning() -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def closure() -> float:
        loss = weight.square().sum()
        loss.backward()
        return float(loss.detach())

    assert Lion([weight], lr=0.5).step(closure) == 2.0
    assert weight.tolist() == [0.5, 0.5]
