"""Writes TensorBoard event files to ``<run>/tensorboard``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpc_train.config.import_path import install_extra
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.telemetry.sinks.tracker import HEAD, Line, Position, Session, Tracker

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard(Tracker):
    """Writes the numbers of each line as scalars. The lines of repeated steps hide the earlier ones.

    It writes the files with the package tensorboard alone, because ``torch.utils.tensorboard`` imports torch. Raises
    UserError if the extra ``hpc_train[tensorboard]`` is not installed."""

    name = "tensorboard"
    label = "TensorBoard"
    replaces = True
    where = "tensorboard"  # type: ignore[assignment]
    _writer: EventFileWriter

    def __init__(self, session: Session) -> None:
        super().__init__(RunDirectory(session.identity.directory), session.live)
        if find_spec("tensorboard") is None:
            raise UserError(
                "TensorBoard needs the package tensorboard, which is not installed",
                where="telemetry.tensorboard",
                fix=f"{install_extra('tensorboard')}, or telemetry.tensorboard=false",
            )

    def connect(self, position: Position) -> Position:
        self._writer = self._opened(position.step + 1)
        return position

    def send(self, lines: Sequence[Line]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if lines[0]["step"] <= self.position.step:
            self._writer.close()
            self._writer = self._opened(lines[0]["step"])
        for line in lines:
            numbers = {key: value for key, value in line.items() if key not in HEAD and isinstance(value, int | float)}
            values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
            self._writer.add_event(Event(wall_time=line["time"], step=line["step"], summary=Summary(value=values)))
        self._writer.flush()

    def text(self, step: int, name: str, text: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        shown = text_pb(name, f"```\n{text}\n```")
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=shown))
        self._writer.flush()

    def disconnect(self) -> None:
        self._writer.close()

    def _opened(self, step: int) -> EventFileWriter:
        """Returns a writer that hides the earlier values of ``step`` and later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self.directory.path / "tensorboard"))
        begin = SessionLog(status=SessionLog.START)
        writer.add_event(Event(wall_time=time.time(), step=step, session_log=begin))
        return writer
