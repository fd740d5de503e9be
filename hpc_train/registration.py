"""Names the functions of ``planner`` and ``report`` that rooms below them call.

A room imports only from rooms below its own. These functions are in rooms above their callers, which therefore load
them on demand; a command or an agent that does not need them does not import their modules.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

CHOOSE_LAYOUT = "hpc_train.planner.auto:choice_of_job"
FASTER_SETTINGS = "hpc_train.planner.faster:faster_settings"
MACHINE_OF_JOB = "hpc_train.planner.machine:machine_of_job"
MONITOR = "hpc_train.report.monitoring.exporter:monitored"
RUN_ENDED = "hpc_train.report.page.build:write_at_end"
RUN_WAITED_FOR = "hpc_train.report.page.build:write_after"
SWEEP_WAITED_FOR = "hpc_train.report.page.build:write_sweep_at_end"


def registered(name: str) -> Callable[..., Any]:
    """Imports the module of ``name`` (``module:function``) and returns the function."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded
