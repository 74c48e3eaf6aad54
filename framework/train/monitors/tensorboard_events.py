"""TensorBoard event files, written with the tensorboard package alone (torch's SummaryWriter is a wrapper around
it).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from framework.system.files import make_own_folder
from framework.train.monitors.base import Point

# The package's own 120 would lose two minutes of a run that is killed.
_FLUSH_SECONDS: Final = 10


class TensorBoardEvents:
    """Writes every metric as a scalar with the step as x-axis."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, from_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        make_own_folder(folder)
        self._writer = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)
        if from_step:
            # Tells TensorBoard to forget what the run before the resume logged after this step.
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=from_step + 1, session_log=restart))

    def write(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.metrics.items()]
        self._writer.add_event(Event(wall_time=point.time_seconds, step=point.step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()
