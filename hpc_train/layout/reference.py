"""Generates the config reference in Markdown: every key with its type, default, accepted values and meaning.

python -m hpc_train.layout.reference > docs/config.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator
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
            parts += [_section(f"model.kind={kind}", load_family(kind).schema, "model") for kind in FAMILIES]
        elif group.name == "data":
            parts += [_section(f"data.kind={kind}", load_source(kind).schema, "data") for kind in SOURCES]
        elif known is not None:
            parts.append(f"{known.meaning}\n")
        else:
            assert callable(group.default_factory)
            parts.append(_table(type(group.default_factory()), group.name))
    return "\n".join(parts)


def _section(title: str, schema: type, path: str) -> str:
    return f"### {title}\n\n{_table(schema, path)}"


def _table(schema: type, path: str) -> str:
    rows = ["| key | type | default | values | meaning |", "|---|---|---|---|---|", *_rows(schema, path)]
    return f"{(schema.__doc__ or '').strip()}\n\n" + "\n".join(rows) + "\n"


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
