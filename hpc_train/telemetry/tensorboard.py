"""TensorBoard: event files in ``<run>/tensorboard``. Needs the extra ``hpc_train[tensorboard]``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hpc_train.config.errors import ConfigError
from hpc_train.run.directory import RunDirectory

HEAD = ("step", "time", "attempt")  # places of a line, not curves


class TensorBoard:
    """A ``metrics.Sink``; on rank 0 only.

    Args:
        first_step: steps after this one that an earlier attempt wrote are hidden.

    Raises:
        ConfigError: the package is missing.
    """

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "the package tensorboard is not installed",
                where="telemetry.tensorboard",
                mend="pip install 'hpc_train[tensorboard]', or telemetry.tensorboard=false",
            )
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=first_step + 1)

    def log(self, line: dict[str, Any]) -> None:
        for key, value in line.items():
            if key not in HEAD and isinstance(value, int | float):
                self._writer.add_scalar(key, value, global_step=line["step"], walltime=line["time"])

    def close(self) -> None:
        self._writer.close()
