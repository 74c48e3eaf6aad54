"""Failures of data, batches and torch that can be explained, as one line of our own errors.

Failures of training that have a known way out, which torch raises as any RuntimeError, and code that exits in
mid-run: one line.

The traceback goes to the rank's log. Where many ranks meet the same failure, one of them tells it.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from framework.engine.distributed import claims_error_report
from framework.engine.extensions import failure_of_compiler
from framework.engine.lost_peers import explaining_lost_peers, is_lost_peer
from framework.errors import FrameworkError, TrainingError, in_one_line, printable
from framework.system.exits import refusing_exits

_NO_DEVICE_MEMORY: Final = re.compile(r"(CUDA|HIP) (error: )?out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED")
_NO_HOST_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory|std::bad_alloc"
)
_NOT_DETERMINISTIC: Final = re.compile(r"([\w.:]+) does not have a deterministic implementation")
_ASKED: Final = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_FREE: Final = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_SMALLER_STEPS: Final = (
    "set a smaller batch.micro_size (batch.global_size may stay), training.recompute_every, a higher zero.stage or "
    "zero.offload_optimizer"
)
_SMALLER_ON_HOST: Final = (
    "set a smaller batch.micro_size, data.num_workers or data.prefetch_batches, fewer ranks on this host, no "
    "zero.offload_*, or raise the memory limit of the job (ulimit -v, Slurm --mem, resources of the pod)"
)
_SMALLER_EVALUATION: Final = "set a smaller evaluation.batch_size"

_DEAD_WORKER: Final = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: ([\w ]+)|exited unexpectedly)"
)
# The kernel's name of the signal -> what that mostly means.
_WAYS_OUT: Final = {
    "Killed": "the host, or the memory limit of this job, has no room for it: set data.num_workers or "
    "data.prefetch_batches lower",
    "Bus error": "/dev/shm is full: give the container a larger one (docker --shm-size, an emptyDir of medium "
    "Memory), or set data.num_workers or data.prefetch_batches lower",
}
_NO_WAY_OUT_KNOWN: Final = "the code that reads the data has ended its process: data.num_workers=0 shows where"


@contextmanager
def explaining_failures(logs: Path) -> Iterator[None]:
    """Turn failures of training that can be explained into our errors: lost peers, failed batches, known messages."""
    with explaining_lost_peers(), explaining_failed_batches(logs), explaining_known_failures():
        yield


@contextmanager
def explaining_known_failures() -> Iterator[None]:
    """Re-raise failures with a known way out as a TrainingError, with the torch error as its cause."""
    try:
        with refusing_exits(speaks=claims_error_report):
            yield
    except (RuntimeError, MemoryError, OSError) as error:
        line = known_failure(error)
        if not line:
            raise
        reported = TrainingError(f"rank {os.environ.get('RANK', '0')}: {line}")
        reported.is_of_one_rank = claims_error_report(line.rpartition("[")[2])
        raise reported from error


def known_failure(error: BaseException) -> str:
    """Return one line with the event, the way out and the kind of a known failure; empty where it is not known."""
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _NO_DEVICE_MEMORY.search(str(error))
    ):
        way_out = _SMALLER_EVALUATION if _is_from_evaluation(error) else _SMALLER_STEPS
        return f"the device has no memory left{_numbers(str(error))}; {way_out} [out-of-memory]"
    if problem := failure_of_compiler(error):
        return str(problem)
    if isinstance(error, RuntimeError) and (operation := _NOT_DETERMINISTIC.search(str(error))):
        return (
            f"{printable(operation[1])} gives other bits in every run on this device; set "
            "training.deterministic: false, or use another operation [not-deterministic]"
        )
    if _is_out_of_host_memory(error):
        return f"the host has no memory left for this process; {_SMALLER_ON_HOST} [out-of-host-memory]"
    if isinstance(error, RuntimeError) and (dead := _death_of_worker(error)):
        way_out = _WAYS_OUT.get((dead[2] or "").strip(), _NO_WAY_OUT_KNOWN)
        return f"a worker that reads the data {printable(dead[1].strip())}: {way_out} [data-worker-ended]"
    return ""


def _is_out_of_host_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and _NO_HOST_MEMORY.search(str(error)) is not None
    )


def _numbers(stated: str) -> str:
    asked, free = _ASKED.search(stated), _FREE.search(stated)
    parts = [f"{asked[1]} were asked for"] if asked else []
    parts += [f"{free[2]} of {free[1]} are free"] if free else []
    return f" ({', '.join(parts)})" if parts else ""


def _is_from_evaluation(error: BaseException) -> bool:
    calls = ((frame.f_code.co_name, frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__))
    return any(name == "evaluate" and module.startswith("framework.") for name, module in calls)


def _death_of_worker(error: BaseException) -> re.Match[str] | None:
    """The signal, where one error of torch's names it and the one that it became does not any more."""
    dead = _DEAD_WORKER.search(str(error))
    before = error.__cause__ or error.__context__
    return (dead and not dead[2] and before and _DEAD_WORKER.search(str(before))) or dead


# Data that a rank cannot read: told in one line, by one rank, whichever it is, and whether a worker read it or the
# rank itself.


# How torch hands over a worker's error: one of the same class, whose text is the worker's whole traceback.
_FROM_WORKER: Final = re.compile(r"Caught \w+ in ")


class ExplainedData:
    """A loader, for training or for evaluation, whose errors are told."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """As the evaluation loader's."""
        with explaining_data_errors():
            yield from self._loader

    def stream(self, start_step: int) -> Generator[Any, None, None]:
        """As the training loader's."""
        with explaining_data_errors():
            yield from self._loader.stream(start_step)


@contextmanager
def explaining_data_errors() -> Iterator[None]:
    """The ranks read different samples: what one of them meets, it has to tell. What all meet, rank 0 tells."""
    try:
        yield
    except FrameworkError as error:
        reported = _without_traceback(error)
        reported.is_of_one_rank = claims_error_report(str(reported))
        if reported is error:
            raise
        raise reported from error


def _without_traceback(error: FrameworkError) -> FrameworkError:
    """Return the error with a worker's message alone, without the traceback before it."""
    stated = str(error)
    if not _FROM_WORKER.match(stated):
        return error
    of_error = re.compile(rf"^(?:[\w.]+\.)?{type(error).__name__}: ", re.MULTILINE)
    return type(error)(of_error.split(stated)[-1].strip())


# Errors that the model or the loss raises about a batch: one line with what they were given, instead of torch's
# traceback. The batch is found in the frames of the error, so that a step costs nothing more. The traceback goes to
# the rank's log.


_ENGINES: Final = tuple(f"framework.engine.{name}" for name in ("plain_engine", "pipeline_engine", "step_loss"))
_CALLS: Final = {"forward": "the model", "loss": "the loss", "count": "count()", "measure": "the metrics"}
_EXPLAINED: Final = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
_FOREIGN: Final = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
_OWN: Final = str(Path(__file__).parents[1])
_LONGEST: Final = 300
_MOST_SHOWN: Final = 8


@contextmanager
def explaining_failed_batches(logs: Path) -> Iterator[None]:
    """Raise a TrainingError that shows the batch where the model or the loss fails on it; other errors pass."""
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
    """Explain a failure of the model or the loss: the error, the batch and the way out; empty for other errors."""
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
    elif name == "count":
        given = f"it was given targets {describe(first)}"
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
    """Suggest how to give cross-entropy the outputs and class numbers that it expects."""
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
