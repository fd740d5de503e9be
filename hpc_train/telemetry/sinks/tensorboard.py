"""Writes TensorBoard event files to ``<run>/tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.sink import HEAD, Line
from hpc_train.telemetry.sinks.tracker import Position, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Tracker):
    """Writes the numbers of each line as scalars. Lines of steps that are done again hide the earlier ones.

    Raises:
        UserError: the extra ``hpc_train[tensorboard]`` is not installed.
    """

    name = "tensorboard"
    label = "TensorBoard"
    replaces = True
    _writer: SummaryWriter

    def __init__(self, run: RunDirectory, first_step: int = 0, **more: Any) -> None:
        super().__init__(run, first_step, **more)
        if find_spec("tensorboard") is None:
            raise UserError(
                "TensorBoard needs the package tensorboard, which is not installed",
                where="telemetry.tensorboard",
                fix="pip install 'hpc_train[tensorboard]', or telemetry.tensorboard=false",
            )

    @property
    def where(self) -> str:
        return "tensorboard"

    def connect(self, position: Position) -> Position:
        self._writer = self._opened(position.step + 1)
        return position

    def send(self, lines: Sequence[Line]) -> None:
        if lines[0]["step"] <= self.position.step:
            self._writer.close()
            self._writer = self._opened(lines[0]["step"])
        for line in lines:
            for key, value in line.items():
                if key not in HEAD and isinstance(value, int | float):
                    self._writer.add_scalar(key, value, global_step=line["step"], walltime=line["time"])
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", global_step=step)

    def disconnect(self) -> None:
        self._writer.close()

    def _opened(self, step: int) -> SummaryWriter:
        """Returns a writer that hides what was written of ``step`` and later ones."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.directory.path / "tensorboard"), purge_step=step)
