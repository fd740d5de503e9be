"""Keeps the earlier name ``hpc_train.health.health_check`` of ``hpc_train.machine.health.health_check``."""

import sys

from hpc_train.machine.health import health_check

sys.modules[f"{__name__}.health_check"] = health_check
