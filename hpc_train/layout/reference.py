"""Generates two pages of the docs: the reference of all config keys, and the table of techniques that can be combined.

python -m hpc_train.layout.reference > docs/config.md
python -m hpc_train.layout.reference compatibility > docs/compatibility.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from inspect import cleandoc
from itertools import groupby
from typing import Any

from hpc_train.config.conf_files import config_directory
from hpc_train.config.extensions import FAMILIES, SOURCES, load_family, load_source
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import MISSING, info
from hpc_train.layout.compatibility import OF_LAYOUT, OF_RUN
from hpc_train.layout.techniques import AUTO, KINDS, SCHEDULES, DataParallelKind, PipelineSchedule, Row, supports

ROWS = {"strategy.schedule": (AUTO, *SCHEDULES), "strategy.data_parallel": tuple(KINDS)}  # names of built-in rows

INTRODUCTION = """# Config reference

`python -m hpc_train.layout.reference > docs/config.md` generates this page from `hpc_train/config/schema/`.

Set a key on the command line as `GROUP.KEY=VALUE`, or choose a file of a group as `GROUP=NAME`. `null` means no
value, and a required key has no default. A file of a group, such as `conf/optim/sgd.yaml`, may replace the
default in the table below.

"Read if" states when a key has an effect. A key that the command line or one of your files sets without effect gets a
notice in the dry run and at the start of a run.
"""


def reference() -> str:
    """Returns the full page."""
    parts = [INTRODUCTION]
    for group in fields(Config):
        parts.append(f"## {group.name}\n")
        facts = info(group)
        files = sorted(path.stem for path in (config_directory() / group.name).glob("*.yaml"))
        if files and files != ["default"]:
            plus = "+" * (facts is not None)
            parts.append(f"Files: {', '.join(f'`{plus}{group.name}={file}`' for file in files)}\n")
        if group.name == "model":
            parts += _of_kinds("model", {kind: load_family(kind).schema for kind in FAMILIES})
        elif group.name == "data":
            parts += _of_kinds("data", {kind: load_source(kind).schema for kind in SOURCES})
        elif facts is not None:
            parts.append(f"{facts.meaning}\n")
        else:
            assert callable(group.default_factory)
            parts.append(_table(type(group.default_factory()), group.name))
    return "\n".join(parts)


def _of_kinds(group: str, schemas: Mapping[str, type]) -> Iterator[str]:
    """Yields sections for the keys that several kinds inherit from a common class, and then a section for each kind."""
    written: set[str] = set()
    bases = {base: None for schema in schemas.values() for base in reversed(schema.__mro__) if is_dataclass(base)}
    for base in bases:
        kinds = [kind for kind, schema in schemas.items() if issubclass(schema, base)]
        if len(kinds) > 1:
            title = f"every {group}.kind" if len(kinds) == len(schemas) else f"{group}.kind={', '.join(kinds)}"
            yield f"### {title}\n\n{_table(base, group, written)}"
            written |= set(_rows(base, group))
    for kind, schema in schemas.items():
        yield f"### {group}.kind={kind}\n\n{_table(schema, group, written)}"


def _table(schema: type, path: str, written: Collection[str] = ()) -> str:
    """Returns the description of ``schema`` and the table of its keys.

    Args:
        written: rows that earlier sections contain and this table omits. It then also omits the key ``kind``, which the
            heading states.
    """
    rows = [row for row in _rows(schema, path) if row not in written]
    if written:
        rows = [row for row in rows if not row.startswith(f"| `{path}.kind`")]
    if rows:
        rows = ["| key | type | default | values | meaning |", "|---|---|---|---|---|", *rows]
    return f"{cleandoc(schema.__doc__ or '')}\n\n" + "\n".join(rows) + "\n"


def _rows(schema: type, path: str) -> Iterator[str]:
    for field in fields(schema):
        name = f"{path}.{field.name}"
        default = field.default
        if field.default_factory is not NO_DEFAULT:
            default = field.default_factory()
        if is_dataclass(default):
            yield from _rows(type(default), name)
            continue
        facts = info(field)
        if facts is not None:
            values = [f"`{word}`" for word in ROWS.get(name, facts.choices)]
            numbers = " ".join(filter(None, [facts.range, facts.unit]))
            if numbers:
                values.append(numbers)
            meaning = f"{facts.meaning} {facts.condition}".strip()
            types = " or ".join(f"`{part}`" for part in str(field.type).replace("None", "null").split(" | "))
            cells = (f"`{name}`", types, _text(default), ", ".join(values), meaning)
            yield f"| {' | '.join(cells)} |"


def _text(default: Any) -> str:
    if default == MISSING:
        return "required"
    if isinstance(default, str):
        return f"`{default}`" if default else "empty"
    if isinstance(default, bool) or default is None:
        return f"`{json.dumps(default)}`"
    return f"`{default}`"


COMBINATIONS = """# What works with what

`python -m hpc_train.layout.reference compatibility > docs/compatibility.md` generates this page from
`hpc_train/layout/compatibility.py`.

Whatever is not excluded here can be combined: strategies, number formats, optimizers, models, data, and what saves
memory or network traffic. A config that combines what is excluded is refused before the job is submitted, with the
message below. `…` stands for a value of your config.

Custom code (`run.entry`, `run.command`) implements its techniques itself;
[Run your own loop](howto/own_loop.md) and [exec](howto/exec.md) say which keys apply to it.
"""


def compatibility() -> str:
    """Returns the page about what can be combined."""
    parts = [COMBINATIONS, "## Data-parallel kinds\n", _kinds(), "## Pipeline schedules\n", _schedules()]
    rows = sorted((*OF_LAYOUT, *OF_RUN), key=lambda row: row.technique.name.strip("`").lower())
    for technique, exclusions in groupby(rows, key=lambda row: row.technique.name):
        title = technique[0].upper() + technique[1:]
        parts.append(f"## {title}\n\n| excluded with | message | fix |\n|---|---|---|")
        for row in exclusions:
            parts.append(f"| {row.excluded.name} | {_without_values(row.message)} | {_without_values(row.fix)} |")
        parts.append("")
    return "\n".join(parts)


def _without_values(text: str) -> str:
    """Returns the text of a row with an ellipsis in place of each value of a config."""
    return re.sub(r"\{(this|it)[^}]*\}", "…", text)


def _kinds() -> str:
    columns: dict[str, Callable[[DataParallelKind], object]] = {
        "`strategy.tp`": lambda row: row.tensor_parallel,
        "`strategy.compression`": lambda row: "`bf16`" if row.shards else row.compressed_as,
        "`strategy.offload`": lambda row: ", ".join(f"`{value}`" for value in row.offloads),
        "`optim.in_backward`": lambda row: row.updated_as,
        "`train.reproducible`": lambda row: row.reproducible,
    }
    return _matrix("strategy.data_parallel", KINDS, columns)


def _schedules() -> str:
    columns: dict[str, Callable[[PipelineSchedule], object]] = {
        f"`{kind}`": lambda row, kind=kind: supports(row.name, kind)  # type: ignore[misc]
        for kind in KINDS
    }
    columns["`train.compile`"] = lambda row: row.compiles
    columns["`train.activation_checkpointing=ops`"] = lambda row: row.ops_checkpointing
    return _matrix("strategy.schedule", SCHEDULES, columns)


def _matrix(key: str, rows: Mapping[str, Row], columns: Mapping[str, Callable[[Row], object]]) -> str:
    """Returns a table of the techniques that each built-in row supports. A kind in a cell replaces the kind of the
    row."""
    lines = [f"| `{key}` | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows.values():
        cells = []
        for column in columns.values():
            value = column(row)
            if value in (True, row.name):
                cells.append("yes")
            elif value in KINDS:
                cells.append(f"as `{value}`")
            else:
                cells.append(str(value or "no"))
        lines.append(f"| `{row.name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(compatibility() if sys.argv[1:] == ["compatibility"] else reference(), end="")
