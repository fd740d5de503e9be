"""The table of results, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.gpu.check import Verdict


def table(lines: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Returns a table with a row per check and one per finding, of the last run of each check.

    Args:
        lines: the lines of ``results.jsonl``.
        names: the checks in their order; others in ``lines`` follow.
    """
    machine: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "machine"), {})
    devices = machine.get("devices") or []
    rows = [f"{len(devices)} x {devices[0]}" if devices else "no GPU", f"torch {machine.get('torch')}"]
    heading = ", ".join([*rows, f"Python {machine.get('python')}"])
    seen = dict.fromkeys([*names, *(line["check"] for line in lines if "check" in line)])
    body = [row for name in seen for row in _rows(name, [line for line in lines if line.get("check") == name])]
    return "\n".join([heading, "", "| check | verdict | s | measured | expected |", "|" + " --- |" * 5, *body, ""])


def _rows(name: str, lines: Sequence[dict[str, Any]]) -> list[str]:
    findings, verdict = last_run(lines)
    if verdict is None:
        return [_row(name, "no verdict", "", "", ""), *map(_finding, findings)]
    ran = verdict["verdict"] != Verdict.NOT_RUN
    first = _row(f"**{name}**", verdict["verdict"], f"{verdict['seconds']:.1f}" * ran, verdict["reason"], "")
    return [first, *map(_finding, findings)]


def last_run(lines: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Returns the findings and the verdict of the last run of one check; of one that was killed no verdict."""
    findings: list[dict[str, Any]] = []
    verdict = None
    for line in lines:
        match line["kind"]:
            case "begin":
                findings, verdict = [], None
            case "finding":
                findings.append(line)
            case "verdict":
                verdict = line
    return findings, verdict


def _finding(line: dict[str, Any]) -> str:
    mark = {True: "yes", False: "**NO**", None: ""}[line["ok"]]
    return _row(line["what"], mark, "", line["measured"], line["expected"])


def _row(*cells: str) -> str:
    return f"| {' | '.join(_escaped(cells))} |"


def _escaped(cells: Iterable[str]) -> list[str]:
    return [" ".join(str(cell).split()).replace("|", "\\|")[:400] for cell in cells]
