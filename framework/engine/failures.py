"""Failures of batches and torch that can be explained, and code that exits in mid-run: one line of
our own.

The traceback goes to the rank's log. Where many ranks meet the same failure, one of them reports
it.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final

import torch
from torch import Tensor, nn

from framework.data.failures import death_of_worker
from framework.engine.distributed import claims_error_report
from framework.engine.extensions import failure_of_compiler, failure_of_torch_compile
from framework.engine.process_group_errors import is_lost_peer, lost_peer
from framework.engine.spread_weights import written_while_spread
from framework.errors import ConfigError, TrainingError, explaining, in_one_line, printable
from framework.plan.plan import Plan
from framework.system.exits import refusing_exits

_NOT_DETERMINISTIC: Final = re.compile(r"([\w.:]+) does not have a deterministic implementation")
_ANOMALY: Final = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")
_SPARSE: Final = re.compile(r"\bSparse(CPU|CUDA)\b|between dense and sparse Tensors")
_NOT_OF_ZERO: Final = re.compile(
    r"'Parameter' object has no attribute '(ds_\w+|all_gather|partition)'"
)
_SMALLER_STEPS: Final = (
    "set a smaller batch.micro_size (batch.global_size may stay), training.recompute_every, a "
    "higher zero.stage or zero.offload_optimizer"
)
_SMALLER_ON_HOST: Final = (
    "set a smaller batch.micro_size, data.num_workers or data.prefetch_batches, fewer ranks on "
    "this host, no zero.offload_*, or raise the memory limit of the job (ulimit -v, Slurm --mem, "
    "resources of the pod)"
)
_SMALLER_EVALUATION: Final = "set a smaller evaluation.batch_size"

_ENGINES: Final = (
    "framework.engine.plain_engine",
    "framework.engine.pipeline_engine",
    "framework.engine.step_batches",
)
_CALLS: Final = {
    "forward": "the model",
    "loss": "the loss",
    "count": "count()",
    "measure": "the metrics",
}
_EXPLAINED: Final = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
_FOREIGN: Final = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
_OWN: Final = str(Path(__file__).parents[1])
_LONGEST: Final = 300
# Names of types in torch's messages: of ATen (Float), of C++ (float, c10::Half), of Python
# (torch.float32).
_HALF_TYPE: Final = re.compile(r"\b(BFloat16|Half|bfloat16|float16)\b")
_SINGLE_TYPE: Final = re.compile(r"\b([Ff]loat|float32)\b")
_WHOLE_TYPE: Final = re.compile(
    r"\b(Long|Int|Short|Char|Byte|Bool|long int|int|short|signed char|unsigned char|bool|u?int(8|16|32|64))\b"
)
_MOST_SHOWN: Final = 8


@contextmanager
def explaining_failures(logs: Path, plan: Plan | None = None) -> Iterator[None]:
    """Turn failures of training that can be explained into our errors: known messages, failed
    batches, lost peers.
    """
    with (
        explaining(partial(_known, plan=plan), partial(_of_batch, logs=logs), lost_peer),
        refusing_exits(speaks=claims_error_report),
    ):
        yield


def _known(error: Exception, *, plan: Plan | None) -> TrainingError | None:
    line = known_failure(error, plan)
    if not line:
        return None
    is_of_one_rank = claims_error_report(line.rpartition("[")[2])
    return TrainingError(
        f"rank {os.environ.get('RANK', '0')}: {line}", is_of_one_rank=is_of_one_rank
    )


def known_failure(error: BaseException, plan: Plan | None = None) -> str:
    """Return one line with the event, the way out and the kind of a known failure; empty where it
    is not known. A plan adds what the memory was taken by.
    """
    from framework.plan.out_of_memory import kind_of  # the planner is loaded when a run has failed

    stated = str(error)
    is_torchs = isinstance(error, RuntimeError)
    lacks = "device" if isinstance(error, torch.OutOfMemoryError) else is_torchs and kind_of(stated)
    if lacks == "device":
        if _is_from_evaluation(error):
            way_out = _SMALLER_EVALUATION
        else:
            way_out = _SMALLER_STEPS
        return (
            f"the device has no memory left{_explained(lacks, error, plan)}; {way_out} "
            "[out-of-memory]"
        )
    refused = (
        failure_of_compiler(error) or failure_of_torch_compile(error) or weight_made_late(error)
    )
    if refused is not None:
        return str(refused)
    written = written_while_spread(error, place=_place(error))
    if written:
        return written
    if is_torchs and (operation := _NOT_DETERMINISTIC.search(stated)):
        return (
            f"{printable(operation[1])} gives other bits in every run on this device; set "
            "training.deterministic: false, or use another operation [not-deterministic]"
        )
    if is_torchs and (operation := _ANOMALY.search(stated)):
        place = "the warning above has the line of the forward pass, the last one that is yours"
        return f"the gradient of {operation[1]} is NaN; {place} [gradient-not-finite]"
    if is_torchs and _SPARSE.search(stated):
        return (
            "a gradient is sparse, which DeepSpeed takes at zero.stage 0 alone; build the "
            "embedding, or call embedding(), with sparse=False (the numbers are the same) "
            "[sparse-gradient]"
        )
    if (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or lacks == "host"
    ):
        where = _explained("host", error, plan)
        return (
            f"the host has no memory left for this process{where}; {_SMALLER_ON_HOST} "
            "[out-of-host-memory]"
        )
    if is_torchs:
        return death_of_worker(error)
    return ""


def weight_made_late(error: BaseException) -> ConfigError | None:
    """A refusal (kind ``weight-made-late``) where ZeRO stage 3 meets a weight that the model made
    in its forward.
    """
    if not isinstance(error, AttributeError) or not _NOT_OF_ZERO.search(str(error)):
        return None
    # DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: both names are arguments
    # there.
    names = ("sub_module", "current_submodule", "submodule", "module")
    frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
    modules = [
        frame[name]
        for frame in reversed(frames)
        for name in names
        if isinstance(frame.get(name), nn.Module)
    ]
    late = (
        f"{name} of its {type(module).__name__}"
        for module in modules
        for name, weight in module.named_parameters()
        if not hasattr(weight, "ds_id")
    )
    reason = (
        f"the model made a weight ({next(late, 'of a module')}) after it was spread over the "
        "ranks: in its forward"
    )
    fix = (
        "make it in the constructor, run one batch through the model where it is built, or set "
        "zero.stage: 2"
    )
    return ConfigError.of("weight-made-late", reason, fix, "model")


def _explained(lacks: str, error: BaseException, plan: Plan | None) -> str:
    from framework.plan.out_of_memory import in_one_sentence, shortage_of

    frames = [
        (frame.f_code.co_filename, frame.f_code.co_name)
        for frame, _ in walk_tb(error.__traceback__)
    ]
    return in_one_sentence(shortage_of(lacks, str(error), frames), plan)


def _is_from_evaluation(error: BaseException) -> bool:
    calls = (
        (frame.f_code.co_name, frame.f_globals.get("__name__", ""))
        for frame, _ in walk_tb(error.__traceback__)
    )
    return any(name == "evaluate" and module.startswith("framework.") for name, module in calls)


def _of_batch(error: Exception, *, logs: Path) -> TrainingError | None:
    line = explain_failed_batch(error)
    if not line or is_lost_peer(error):
        return None
    rank = os.environ.get("RANK", "0")
    text = f"rank {rank}: {line} (traceback: {logs}/rank{rank}.log) [batch-failed]"
    return TrainingError(text, is_of_one_rank=claims_error_report("batch-failed"))


def explain_failed_batch(error: BaseException) -> str:
    """Explain a failure of the model or the loss: the error, the batch and the way out; empty for
    other errors.

    The batch is found in the frames of the error, so that a step costs nothing more.
    """
    if not isinstance(error, _EXPLAINED):
        return ""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    calls = (
        inner for outer, inner in pairwise(frames) if outer.f_globals.get("__name__") in _ENGINES
    )
    call = next((inner for inner in calls if inner.f_code.co_name in _CALLS), None)
    if call is None:
        return ""
    name = call.f_code.co_name
    first, second = (call.f_locals.get(argument) for argument in call.f_code.co_varnames[1:3])
    if name == "forward":
        given = describe(second)
        hint = _hint_of_model(error, second)
    elif name == "count":
        given = f"targets {describe(first)}"
        hint = ""
    else:
        given = f"outputs {describe(first)} and targets {describe(second)}"
        is_cross_entropy = any(frame.f_code.co_name == "cross_entropy" for frame in frames)
        if is_cross_entropy:
            hint = _hint_of_classes(first, second)
        else:
            hint = ""
    stated = printable(in_one_line(error, longest=_LONGEST))
    text = f"{_CALLS[name]} fails on a batch{_place(error)}: {stated}; it was given {given}"
    if hint:
        return f"{text}; {hint}"
    return text


def describe(value: Any) -> str:
    """Types and shapes of what is in a batch."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(
                f"{name}: {describe(item)}" for name, item in list(value.items())[:_MOST_SHOWN]
            )
            + "}"
        )
    if isinstance(value, (list, tuple)):
        inside = {describe(item) for item in value}
        if len(inside) == 1 and len(value) > 2:
            return f"a {type(value).__name__} of {len(value)} x {inside.pop()}"
        return (
            f"a {type(value).__name__} of "
            f"({', '.join(describe(item) for item in value[:_MOST_SHOWN])})"
        )
    return type(value).__name__


def _hint_of_model(error: BaseException, inputs: Any) -> str:
    if isinstance(error, TypeError) and isinstance(inputs, list):
        return (
            "samples ((a, b), target) hand it one list: write samples (a, b, target), and "
            "forward(a, b) gets both"
        )
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    parts = parts if isinstance(inputs, (Mapping, list, tuple)) else (inputs,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if isinstance(error, IndexError) and (
        numbers := [part for part in tensors if _is_whole(part) and part.numel()]
    ):
        if any(part.device.type != "cpu" for part in numbers):
            return ""
        low = min(int(part.min()) for part in numbers)
        high = max(int(part.max()) for part in numbers)
        needs = "an embedding needs more rows than the largest, and none is negative"
        return f"its whole numbers go from {low} to {high}: {needs}"
    # a graph's, of torch.compile
    if type(error).__name__ == "TorchRuntimeError" and "size=(0,)" in str(error):
        return (
            "ZeRO stage 3 and training.compile: the model reads a weight of another module that "
            "its first forward pass has not read, and no graph gathers it: set zero.stage: 2, or "
            "training.compile: false"
        )
    if isinstance(error, (RuntimeError, ValueError)) and "type" in str(error).lower():
        return _hint_of_types(str(error), tensors)
    return ""


def _hint_of_types(text: str, inputs: Sequence[Tensor]) -> str:
    """Return the way out where a product met two types of numbers; torch names them in many
    ways.
    """
    is_half = _HALF_TYPE.search(text) is not None
    is_single = _SINGLE_TYPE.search(text) is not None
    if (is_half and is_single) or "mixed dtype" in text:
        return (
            "this line computes with fp32 and with weights in half precision: cast the one to the "
            "type of the other (h.to(weight.dtype)), or set precision.dtype: autocast, which "
            "casts by itself"
        )
    if _WHOLE_TYPE.search(text) and any(_is_whole(part) for part in inputs):
        return (
            "return floating-point inputs from the dataset: x.float(), for images x.float() / 255"
        )
    if any(part.dtype == torch.float64 for part in inputs):
        return "return float32 inputs from the dataset: x.float()"
    return ""


def _hint_of_classes(outputs: Any, targets: Any) -> str:
    if not isinstance(targets, Tensor):
        return "number the classes from 0 in the dataset"
    if not isinstance(outputs, Tensor):
        return (
            "return the logits alone from the model, or write a task that takes them out "
            "(task.target)"
        )
    if targets.ndim == outputs.ndim and targets.ndim > 1 and targets.shape[1] == 1:
        return "class numbers have the shape (batch,): target.squeeze(-1) in the dataset"
    if targets.ndim < outputs.ndim and targets.dtype != torch.int64:
        numbers = "class numbers are int64: int(target) or target.long() in the dataset"
        other = "; to predict values, task: {target: 'torch.nn:MSELoss'}"
        return f"{numbers}{other if targets.is_floating_point() else ''}"
    classes = outputs.shape[1] if outputs.ndim > 1 else 0
    if (
        classes
        and targets.ndim == outputs.ndim - 1
        and targets.device.type == "cpu"
        and targets.numel()
    ):
        low = int(targets.min())
        high = int(targets.max())
        if low < 0 or high >= classes:
            numbers = (
                f"labels go from {low} to {high}, and {classes} classes have the numbers 0 "
                f"to {classes - 1}"
            )
            return f"{numbers}: change the labels, or the model's number of classes"
    return (
        "the model returns one row of logits per sample, (batch, num_classes), and targets are "
        "class numbers, (batch,)"
    )


def _is_whole(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to the error."""
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    engines = (
        at
        for at, (file, _) in enumerate(places)
        if file.startswith(_OWN) and file.endswith("_engine.py")
    )
    after = [
        place
        for place in places[next(engines, 0) :]
        if not place[0].startswith((*_FOREIGN, _OWN, "<"))
    ]
    if after:
        return f" at {after[-1][0]}:{after[-1][1]}"
    return ""
