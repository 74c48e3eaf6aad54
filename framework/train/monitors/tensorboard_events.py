"""TensorBoard event files. The tensorboard package alone makes the records (torch's SummaryWriter
wraps it); they are written to a file of our own.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from framework.system.files import make_own_folder
from framework.system.kept_file import KeptFile
from framework.train.monitors.base import Point, flat

_numbers = itertools.count()


class Histogram(NamedTuple):
    """Numbers of values in buckets: upper end of each bucket that is not empty -> its number."""

    tag: str
    least: float
    largest: float
    num: int
    total: float
    sum_of_squares: float
    buckets: Mapping[float, int]

    def plus(self, other: Histogram) -> Histogram:
        """Return the histogram of both's values, under this one's tag."""
        buckets: dict[float, int] = {}
        for limit in sorted(set(self.buckets) | set(other.buckets)):
            buckets[limit] = self.buckets.get(limit, 0) + other.buckets.get(limit, 0)
        return Histogram(
            self.tag,
            min(self.least, other.least),
            max(self.largest, other.largest),
            self.num + other.num,
            self.total + other.total,
            self.sum_of_squares + other.sum_of_squares,
            buckets,
        )


class Image(NamedTuple):
    """A PNG; sizes in pixels."""

    tag: str
    height: int
    width: int
    png: bytes


class Text(NamedTuple):
    """Markdown."""

    tag: str
    text: str


Shown = Histogram | Image | Text


class TensorBoardEvents:
    """Writes every metric as a scalar with the step as x-axis; the config as text and as
    hyper-parameters.
    """

    name = "tensorboard"

    def __init__(
        self, folder: Path, *, from_step: int, config: Mapping[str, Any] | None = None
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        make_own_folder(folder)
        # The file has the name and the first record of the package's EventFileWriter. That is not
        # used: its thread ends at the first failure of the disk, and delays writes by up to two
        # minutes.
        host = socket.gethostname()
        name = f"events.out.tfevents.{time.time():010.0f}.{host}.{os.getpid()}.{next(_numbers)}"
        self._file = KeptFile(folder / name, name=self.name)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if from_step:
            # TensorBoard then drops the points after this step, logged before the resume.
            restart = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=from_step + 1, session_log=restart))
        elif config is not None:
            self._describe(config)

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Write the config for the HParams and the Text plugin.

        No experiment is written: the HParams plugin then gathers the values of all runs.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata, plugin_data_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata

        started = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
        for key, value in flat(config):
            if isinstance(value, bool):
                started.hparams[key].bool_value = value
            elif isinstance(value, int | float):
                started.hparams[key].number_value = value
            else:
                started.hparams[key].string_value = str(value)
        session = metadata.create_summary_metadata(
            plugin_data_pb2.HParamsPluginData(session_start_info=started)
        )
        text = create_summary_metadata("config", "the resolved config")
        config_yaml = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        # A code block in Markdown.
        indented = "".join(f"    {line}\n" for line in config_yaml.splitlines())
        values = [
            Summary.Value(
                tag=metadata.SESSION_START_INFO_TAG, metadata=session, tensor=metadata.NULL_TENSOR
            ),
            Summary.Value(tag="config/text_summary", metadata=text, tensor=_text_tensor(indented)),
        ]
        self._add(Event(wall_time=time.time(), step=0, summary=Summary(value=values)))

    def write(self, point: Point) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in point.metrics.items()
        ]
        self._add(
            Event(wall_time=point.time_seconds, step=point.step, summary=Summary(value=values))
        )

    def show(self, step: int, shown: Sequence[Shown]) -> None:
        """Write histograms, images and texts, each under its tag."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata

        values = []
        for item in shown:
            if isinstance(item, Text):
                metadata = create_summary_metadata(item.tag, "")
                tensor = _text_tensor(item.text)
                value = Summary.Value(tag=item.tag, metadata=metadata, tensor=tensor)
            elif isinstance(item, Image):
                image = Summary.Image(
                    height=item.height, width=item.width, encoded_image_string=item.png
                )
                value = Summary.Value(tag=item.tag, image=image)
            else:
                histogram = HistogramProto(
                    min=item.least,
                    max=item.largest,
                    num=item.num,
                    sum=item.total,
                    sum_squares=item.sum_of_squares,
                    bucket_limit=list(item.buckets),
                    bucket=list(item.buckets.values()),
                )
                value = Summary.Value(tag=item.tag, histo=histogram)
            values.append(value)
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue(), step=event.step)

    def close(self) -> None:
        self._file.close()


def _text_tensor(text: str) -> Any:
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    return TensorProto(dtype=DT_STRING, string_val=[text.encode()])
