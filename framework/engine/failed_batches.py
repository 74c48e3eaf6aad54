"""Errors that the model or the loss raises about a batch: one line with what they were given, instead of torch's
traceback.

The batch is found in the frames of the error, so that a step costs nothing more. The traceback goes to the rank's log.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from framework.engine.distributed import claims_error_report
from framework.engine.lost_peers import is_lost_peer
from framework.errors import FrameworkError, TrainingError, in_one_line, printable

_ENGINES: Final = ("framework.engine.plain_engine", "framework.engine.pipeline_engine")
_CALLS: Final = {"forward": "the model", "loss": "the loss", "measure": "the metrics"}
_EXPLAINED: Final = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
_FOREIGN: Final = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
_OWN: Final = str(Path(__file__).parents[1])
_LONGEST: Final = 300
_MOST_SHOWN: Final = 8


@contextmanager
def explaining_failed_batches(logs: Path) -> Iterator[None]:
    """Where the model or the loss fails on a batch, raise a TrainingError that shows the batch; other errors pass."""
    try:
        yield
    except _EXPLAINED as error:
        if isinstance(error, (FrameworkError, torch.OutOfMemoryError)) or is_lost_peer(error):
            raise
        rank = os.environ.get("RANK", "0")
        line = explain_failed_batch(error)
        if not line:
            raise
        reported = TrainingError(f"rank {rank}: {line} (traceback: {logs}/rank{rank}.log) [batch-failed]")
        reported.is_of_one_rank = claims_error_report("batch-failed")
        raise reported from error


def explain_failed_batch(error: BaseException) -> str:
    """What failed, on what, and the way out; empty where it is not an error of the model or the loss."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    number = next(
        (
            at
            for at, frame in enumerate(frames)
            if _module(frame) in _ENGINES and at + 1 < len(frames) and frames[at + 1].f_code.co_name in _CALLS
        ),
        None,
    )
    if number is None:
        return ""
    call = frames[number + 1]
    name = call.f_code.co_name
    first, second = (call.f_locals.get(argument) for argument in call.f_code.co_varnames[1:3])
    inputs, given = (second, f"it was given {describe(second)}")
    hint = ""
    if name == "forward":
        hint = _hint_of_model(error, inputs)
    else:
        given = f"it was given outputs {describe(first)} and targets {describe(second)}"
        if any(frame.f_code.co_name == "cross_entropy" for frame in frames):
            hint = _hint_of_classes(first, second)
    text = f"{_CALLS[name]} fails on a batch{_place(error)}: {printable(in_one_line(error, longest=_LONGEST))}; {given}"
    return f"{text}; {hint}" if hint else text


def describe(value: Any) -> str:
    """Types and shapes of what is in a batch."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {describe(item)}" for name, item in list(value.items())[:_MOST_SHOWN]) + "}"
    if isinstance(value, (list, tuple)):
        inside = {describe(item) for item in value}
        if len(inside) == 1 and len(value) > 2:
            return f"a {type(value).__name__} of {len(value)} x {inside.pop()}"
        return f"a {type(value).__name__} of ({', '.join(describe(item) for item in value[:_MOST_SHOWN])})"
    return type(value).__name__


def _hint_of_model(error: BaseException, inputs: Any) -> str:
    if isinstance(error, TypeError) and isinstance(inputs, list):
        return "samples ((a, b), target) hand it one list: write samples (a, b, target), and forward(a, b) gets both"
    parts = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    )
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if isinstance(error, IndexError) and (numbers := [part for part in tensors if _is_whole(part) and part.numel()]):
        if all(part.device.type == "cpu" for part in numbers):
            low, high = (min(int(part.min()) for part in numbers), max(int(part.max()) for part in numbers))
            return (
                f"its whole numbers go from {low} to {high}: "
                "an embedding needs more rows than the largest, and none is negative"
            )
        return ""
    if isinstance(error, RuntimeError) and "type" in str(error):
        if any(_is_whole(part) for part in tensors):
            return "return floating-point inputs from the dataset: x.float(), for images x.float() / 255"
        if any(part.dtype == torch.float64 for part in tensors):
            return "return float32 inputs from the dataset: x.float()"
    return ""


def _hint_of_classes(outputs: Any, targets: Any) -> str:
    """What cross-entropy asks for and was not given."""
    if not isinstance(targets, Tensor):
        return "number the classes from 0 in the dataset"
    if not isinstance(outputs, Tensor):
        return "return the logits alone from the model, or write a task that takes them out (task.target)"
    if targets.ndim == outputs.ndim and targets.ndim > 1 and targets.shape[1] == 1:
        return "class numbers have the shape (batch,): target.squeeze(-1) in the dataset"
    if targets.ndim < outputs.ndim and targets.dtype != torch.int64:
        numbers = "class numbers are int64: int(target) or target.long() in the dataset"
        return (
            f"{numbers}; to predict values, task: {{target: 'torch.nn:MSELoss'}}"
            if targets.is_floating_point()
            else numbers
        )
    classes = outputs.shape[1] if outputs.ndim > 1 else 0
    if classes and targets.ndim == outputs.ndim - 1 and targets.device.type == "cpu" and targets.numel():
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            numbers = f"labels go from {low} to {high}, and {classes} classes have the numbers 0 to {classes - 1}"
            return f"{numbers}: change the labels, or the model's number of classes"
    return (
        "the model returns one row of logits per sample, (batch, num_classes), and targets are class numbers, (batch,)"
    )


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to the error."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [place for place in places if not place[0].startswith((*_FOREIGN, _OWN, "<"))]
    engines = [at for at, (file, _) in enumerate(places) if file.startswith(_OWN) and file.endswith("_engine.py")]
    after = [place for place in places[engines[0] if engines else 0 :] if place in own]
    return f" at {after[-1][0]}:{after[-1][1]}" if after else ""
