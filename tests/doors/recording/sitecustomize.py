"""Put on PYTHONPATH by a test: every process of a run records which config keys its code reads, and in which module.

Generic readers (OmegaConf, dataclasses, the modules that compose, check or print a whole config) do not count as use.
"""

import os
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

GENERIC = ("omegaconf", "dataclasses", "hpc_train.config.")

folder = os.environ.get("HPC_TRAIN_RECORD_KEYS")


def _counts(module: str) -> bool:
    return module == "hpc_train.config.values" or not module.startswith(GENERIC)


def _record(cls: type) -> None:
    names = {f.name for f in fields(cls)}
    plain = cls.__getattribute__
    seen: set[tuple[str, str]] = set()

    def recording(self: object, name: str) -> object:
        if name in names:
            reader = sys._getframe(1).f_globals.get("__name__", "")
            if (name, reader) not in seen and _counts(reader):
                seen.add((name, reader))
                with Path(folder, str(os.getpid())).open("a") as file:
                    file.write(f"{cls.__name__}.{name} {reader}\n")
        return plain(self, name)

    cls.__getattribute__ = recording


if folder:
    from hpc_train.config import schema

    for value in list(vars(schema).values()):
        if isinstance(value, type) and is_dataclass(value) and value.__module__.startswith(schema.__name__):
            _record(value)

if "TESTS_WARM_PARENTS" in os.environ:
    from tests.warm_parents.sitecustomize import of_agents, omit_head_start, redirect

    redirect(of_agents)
    omit_head_start()
