"""Generates the config reference in Markdown: every key with its type, default, accepted values and meaning.

python -m hpc_train.layout.reference > docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from typing import Any

from hpc_train.config.extensions import FAMILIES, SOURCES, load_family, load_source
from hpc_train.config.groups import config_directory
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import MISSING, KeyInfo, info
from hpc_train.layout.techniques import AUTO, KINDS, SCHEDULES

ROWS = {"strategy.schedule": (AUTO, *SCHEDULES), "strategy.data_parallel": tuple(KINDS)}  # names of built-in rows

INTRODUCTION = """# Config reference

`python -m hpc_train.layout.reference > docs/config.md` generates this page from `hpc_train/config/schema/`.

Set a key on the command line as `GROUP.KEY=VALUE`, or choose a file of a group as `GROUP=NAME`. `null` means no
value, and a required key has no default. A file of a group, such as `conf/optim/sgd.yaml`, may replace the
default in the table below.

"Read if" states when a key has an effect. A key that the command line or a file of your own sets without effect gets a
notice in the dry run and at the start of a run.
"""


def reference() -> str:
    """Returns the whole page."""
    parts = [INTRODUCTION]
    for group in fields(Config):
        parts.append(f"## {group.name}\n")
        known = info(group)
        files = sorted(path.stem for path in (config_directory() / group.name).glob("*.yaml"))
        if files and files != ["default"]:
            plus = "+" if known is not None else ""
            parts.append(f"Files: {', '.join(f'`{plus}{group.name}={file}`' for file in files)}\n")
        if group.name == "model":
            parts += _of_kinds("model", {kind: load_family(kind).schema for kind in FAMILIES})
        elif group.name == "data":
            parts += _of_kinds("data", {kind: load_source(kind).schema for kind in SOURCES})
        elif known is not None:
            parts.append(f"{known.meaning}\n")
        else:
            assert callable(group.default_factory)
            parts.append(_table(type(group.default_factory()), group.name))
    return "\n".join(parts)


def _of_kinds(group: str, schemas: Mapping[str, type]) -> Iterator[str]:
    """Yields a section for each kind, after those with the keys that several kinds have from a common class."""
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
        written: rows that are left out, as is the kind that the heading says.
    """
    rows = [row for row in _rows(schema, path) if row not in written]
    if written:
        rows = [row for row in rows if not row.startswith(f"| `{path}.kind`")]
    head = ["| key | type | default | values | meaning |", "|---|---|---|---|---|"] if rows else []
    return f"{(schema.__doc__ or '').strip()}\n\n" + "\n".join([*head, *rows]) + "\n"


def _rows(schema: type, path: str) -> Iterator[str]:
    for each in fields(schema):
        name, default = f"{path}.{each.name}", _default(each)
        if is_dataclass(default):
            yield from _rows(type(default), name)
        elif (known := info(each)) is not None:
            cells = (
                f"`{name}`",
                f"`{each.type}`",
                _text(default),
                _values(name, known),
                f"{known.meaning} {known.condition}".strip(),
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is NO_DEFAULT else each.default_factory()


def _text(default: Any) -> str:
    if default == MISSING:
        return "required"
    if isinstance(default, str):
        return f"`{default}`"
    if isinstance(default, bool) or default is None:
        return f"`{json.dumps(default)}`"
    return f"`{default}`"


def _values(name: str, known: KeyInfo) -> str:
    numbers = f"{known.range} {known.unit}".strip() if known.range else known.unit
    return ", ".join([*(f"`{word}`" for word in ROWS.get(name, known.choices)), *([numbers] if numbers else [])])


if __name__ == "__main__":
    print(reference(), end="")
