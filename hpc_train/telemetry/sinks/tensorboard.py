"""Writes TensorBoard event files to ``<run>/tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.sink import HEAD, Backend, Line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Backend):
    """Writes the numbers of each line as scalars.

    Args:
        first_step: hides later steps that an earlier attempt wrote.

    Raises:
        UserError: the extra ``hpc_train[tensorboard]`` is not installed.
    """

    name = "tensorboard"
    label = "TensorBoard"
    _writer: SummaryWriter

    def __init__(self, run: RunDirectory, first_step: int) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "telemetry.tensorboard=true needs the package tensorboard, which is not installed",
                where="telemetry.tensorboard",
                fix="pip install 'hpc_train[tensorboard]', or telemetry.tensorboard=false",
            )
        self._folder = run.path / "tensorboard"
        self._first_step = first_step

    def open(self) -> bool:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step + 1)
        return True

    def write(self, lines: Sequence[Line]) -> None:
        for line in lines:
            for key, value in line.items():
                if key not in HEAD and isinstance(value, int | float):
                    self._writer.add_scalar(key, value, global_step=line["step"], walltime=line["time"])

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", global_step=step)

    def finish(self) -> None:
        self._writer.close()
