"""TensorBoard event files: records by the tensorboard package alone (torch's SummaryWriter is a
wrapper around it), in a file of our own.
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
    """Values by bucket: the upper end of each that holds any -> how many."""

    tag: str
    least: float
    largest: float
    num: int
    total: float
    sum_of_squares: float
    buckets: Mapping[float, int]

    def plus(self, other: Histogram) -> Histogram:
        """Both together."""
        limits = sorted({*self.buckets, *other.buckets})
        return Histogram(
            self.tag,
            min(self.least, other.least),
            max(self.largest, other.largest),
            self.num + other.num,
            self.total + other.total,
            self.sum_of_squares + other.sum_of_squares,
            {limit: self.buckets.get(limit, 0) + other.buckets.get(limit, 0) for limit in limits},
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
        # As the package's EventFileWriter names and begins a file. Its own thread ends at the first
        # failure of the disk, and keeps what is written for up to two minutes.
        host = socket.gethostname()
        name = f"events.out.tfevents.{time.time():010.0f}.{host}.{os.getpid()}.{next(_numbers)}"
        self._file = KeptFile(folder / name, name=self.name)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if from_step:
            # Tells TensorBoard to forget what the run before the resume logged after this step.
            restart = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=from_step + 1, session_log=restart))
        elif config is not None:
            self._describe(config)

    def _describe(self, config: Mapping[str, Any]) -> None:
        """What the HParams and the Text plugin read; without an experiment of its own the former
        gathers all runs'.
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
        shown = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        fenced = "".join(f"    {line}\n" for line in shown.splitlines())  # Markdown
        values = [
            Summary.Value(
                tag=metadata.SESSION_START_INFO_TAG, metadata=session, tensor=metadata.NULL_TENSOR
            ),
            Summary.Value(tag="config/text_summary", metadata=text, tensor=_text_tensor(fenced)),
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
        """Write what is no number, each under its tag."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata

        values = []
        for one in shown:
            if isinstance(one, Text):
                about = create_summary_metadata(one.tag, "")
                value = Summary.Value(tag=one.tag, metadata=about, tensor=_text_tensor(one.text))
            elif isinstance(one, Image):
                image = Summary.Image(
                    height=one.height, width=one.width, encoded_image_string=one.png
                )
                value = Summary.Value(tag=one.tag, image=image)
            else:
                counts = HistogramProto(
                    min=one.least,
                    max=one.largest,
                    num=one.num,
                    sum=one.total,
                    sum_squares=one.sum_of_squares,
                    bucket_limit=list(one.buckets),
                    bucket=list(one.buckets.values()),
                )
                value = Summary.Value(tag=one.tag, histo=counts)
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
