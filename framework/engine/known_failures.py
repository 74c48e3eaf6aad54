"""Explanations of failures of batches and torch, in one line.

The traceback goes to the rank's log. If many ranks meet the same failure, one of them reports it.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from framework.data.workers import death_of_worker
from framework.engine.compiler_errors import failure_of_compiler, failure_of_torch_compile
from framework.engine.distributed import claims_error_report
from framework.engine.process_group_errors import is_lost_peer, lost_peer
from framework.engine.spread_weights import written_while_spread
from framework.errors import (
    ConfigError,
    FrameworkError,
    Problem,
    TrainingError,
    in_one_line,
    printable,
)
from framework.plan.plan import Plan

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
    "framework.engine.metrics",
    "framework.engine.evaluation",
)
_CALLS: Final = {
    "forward": "the model",
    "loss": "the loss",
    "count": "count()",
    "measure": "the metrics",
    "collect": "collect()",
    "predicted": "predicted()",
}
_EXPLAINED: Final = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError)
_LIBRARIES: Final = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib"))
_PACKAGE: Final = str(Path(__file__).parents[1])
_LONGEST: Final = 300
_NUMBER_CLASSES: Final = "number the classes from 0 in the dataset"
# Names of types in torch's messages: of ATen (Float), of C++ (float, c10::Half), of Python
# (torch.float32).
_HALF_TYPE: Final = re.compile(r"\b(BFloat16|Half|bfloat16|float16)\b")
_SINGLE_TYPE: Final = re.compile(r"\b([Ff]loat|float32)\b")
_INTEGER_TYPE: Final = re.compile(
    r"\b(Long|Int|Short|Char|Byte|Bool"
    r"|long int|int|short|signed char|unsigned char|bool|u?int(8|16|32|64))\b"
)
_MOST_SHOWN: Final = 8


def explain(error: Exception, *, logs: Path, plan: Plan | None) -> FrameworkError | None:
    """Return the error of a known message, a failed batch or a lost peer; None for other errors. It
    may block for seconds, until it is known which rank reports.
    """
    return _known_error(error, plan=plan) or _batch_error(error, logs=logs) or lost_peer(error)


def _known_error(error: Exception, *, plan: Plan | None) -> TrainingError | None:
    problem = known_failure(error, plan)
    if problem is None:
        return None
    is_of_one_rank = claims_error_report(problem.kind)
    return TrainingError(
        f"rank {os.environ.get('RANK', '0')}: {problem}", is_of_one_rank=is_of_one_rank
    )


def known_failure(error: BaseException, plan: Plan | None = None) -> Problem | None:
    """Return the event, the fix and the kind of a known failure; None for other errors. A plan adds
    the largest parts of the memory in use.
    """
    lack = lack_of_memory(error)
    if lack == "device":
        fix = _SMALLER_STEPS
        if _is_from_evaluation(error):
            fix = _SMALLER_EVALUATION
        shortage = _described_shortage(lack, error, plan)
        return Problem("out-of-memory", f"the device has no memory left{shortage}", fix)
    refusal = failure_of_compiler(error) or failure_of_torch_compile(error)
    refusal = refusal or weight_made_late(error)
    if refusal is not None:
        return refusal.problems[0]
    written = written_while_spread(error, place=_place(error))
    if written is not None:
        return written
    if isinstance(error, RuntimeError):
        failure = _torch_failure(str(error))
        if failure is not None:
            return failure
    if lack == "host":
        shortage = _described_shortage(lack, error, plan)
        reason = f"the host has no memory left for this process{shortage}"
        return Problem("out-of-host-memory", reason, _SMALLER_ON_HOST)
    if isinstance(error, RuntimeError):
        return death_of_worker(error)
    return None


def lack_of_memory(error: BaseException) -> str:
    """Return ``device`` or ``host`` if memory lacks there, another kind of memory of
    `plan/shortage.py`, or an empty string.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError):
        return "host"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    if isinstance(error, RuntimeError):
        from framework.plan.shortage import kind_of  # the planner is loaded after a failure

        return kind_of(str(error))
    return ""


def _torch_failure(message: str) -> Problem | None:
    """Explain the message of a RuntimeError of torch; None for other messages."""
    operation = _NOT_DETERMINISTIC.search(message)
    if operation:
        reason = f"{operation[1]} gives other bits in every run on this device"
        fix = "set training.deterministic: false, or use another operation"
        return Problem("not-deterministic", reason, fix)
    operation = _ANOMALY.search(message)
    if operation:
        reason = f"the gradient of {operation[1]} is NaN"
        place = "the warning above has the line of the forward pass, the last one that is yours"
        return Problem("gradient-not-finite", reason, place)
    if _SPARSE.search(message):
        reason = "a gradient is sparse, which DeepSpeed takes at zero.stage 0 alone"
        fix = (
            "build the embedding, or call embedding(), with sparse=False (the numbers are the same)"
        )
        return Problem("sparse-gradient", reason, fix)
    return None


def weight_made_late(error: BaseException) -> ConfigError | None:
    """Return a refusal (kind ``weight-made-late``) if ZeRO stage 3 has met a weight that the model
    made in its forward, else None.
    """
    if not isinstance(error, AttributeError) or not _NOT_OF_ZERO.search(str(error)):
        return None
    weight = _late_weight(error) or "of a module"
    reason = (
        f"the model made a weight ({weight}) after it was spread over the ranks: in its forward"
    )
    fix = (
        "make it in the constructor, run one batch through the model where it is built, or set "
        "zero.stage: 2"
    )
    return ConfigError.of("weight-made-late", reason, fix, "model")


def _late_weight(error: BaseException) -> str:
    """Return the name of a weight that DeepSpeed did not spread, from the modules in the innermost
    frames; empty if there is none.
    """
    # DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py: these are arguments there.
    names = ("sub_module", "current_submodule", "submodule", "module")
    frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
    for frame_locals in reversed(frames):
        for argument in names:
            module = frame_locals.get(argument)
            if not isinstance(module, nn.Module):
                continue
            for name, weight in module.named_parameters():
                if not hasattr(weight, "ds_id"):
                    return f"{name} of its {type(module).__name__}"
    return ""


def _described_shortage(lack: str, error: BaseException, plan: Plan | None) -> str:
    """Return how much memory lacks, and what a plan shows of it, as the end of a sentence."""
    from framework.plan.out_of_memory import in_one_sentence
    from framework.plan.shortage import shortage_of

    frames: list[tuple[str, str]] = []
    for frame, _ in walk_tb(error.__traceback__):
        frames.append((frame.f_code.co_filename, frame.f_code.co_name))
    return in_one_sentence(shortage_of(lack, str(error), frames), plan)


def _is_from_evaluation(error: BaseException) -> bool:
    for frame, _ in walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "evaluate" and module.startswith("framework."):
            return True
    return False


def _batch_error(error: Exception, *, logs: Path) -> TrainingError | None:
    """Return the error of a batch that fails in the model or the loss; None for other errors."""
    line = explain_failed_batch(error)
    if not line or is_lost_peer(error):
        return None
    rank = os.environ.get("RANK", "0")
    text = f"rank {rank}: {line} (traceback: {logs}/rank{rank}.log) [batch-failed]"
    return TrainingError(text, is_of_one_rank=claims_error_report("batch-failed"))


def explain_failed_batch(error: BaseException) -> str:
    """Explain a failure of the model or the loss: the error, the batch and the fix; empty for other
    errors.

    The batch is found in the frames of the error, so that a step costs nothing more.
    """
    if not isinstance(error, _EXPLAINED):
        return ""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    call = _failed_call(frames)
    if call is None:
        return ""
    name = call.f_code.co_name
    # after self: forward(model, inputs), loss(outputs, targets), count(targets)
    first, second = (call.f_locals.get(argument) for argument in call.f_code.co_varnames[1:3])
    hint = ""
    if name == "forward":
        batch = describe(second)
        hint = _hint_of_model(error, second)
    elif name == "count":
        batch = f"targets {describe(first)}"
        if not isinstance(first, Tensor):
            hint = _NUMBER_CLASSES
    else:
        batch = f"outputs {describe(first)} and targets {describe(second)}"
        if any(frame.f_code.co_name == "cross_entropy" for frame in frames):
            hint = _hint_of_classes(first, second)
    message = printable(in_one_line(error, longest=_LONGEST))
    text = f"{_CALLS[name]} fails on a batch{_place(error)}: {message}; it was given {batch}"
    if hint:
        return f"{text}; {hint}"
    return text


def _failed_call(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the frame of the task's method that an engine called, or None."""
    for caller, frame in pairwise(frames):
        is_of_engine = caller.f_globals.get("__name__") in _ENGINES
        if is_of_engine and frame.f_code.co_name in _CALLS:
            return frame
    return None


def describe(value: Any) -> str:
    """Return types and shapes of the tensors in a batch."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Mapping):
        shown = list(value.items())[:_MOST_SHOWN]
        entries = ", ".join(f"{name}: {describe(item)}" for name, item in shown)
        return f"{{{entries}}}"
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        descriptions = {describe(item) for item in value}
        if len(descriptions) == 1 and len(value) > 2:
            return f"a {kind} of {len(value)} x {descriptions.pop()}"
        entries = ", ".join(describe(item) for item in value[:_MOST_SHOWN])
        return f"a {kind} of ({entries})"
    return kind


def _hint_of_model(error: BaseException, inputs: Any) -> str:
    """Return the fix for inputs that a model fails on, or an empty string."""
    if isinstance(error, TypeError) and isinstance(inputs, list):
        return (
            "samples ((a, b), target) hand it one list: write samples (a, b, target), and "
            "forward(a, b) gets both"
        )
    tensors = _tensors_of(inputs)
    integers = [tensor for tensor in tensors if _is_integer(tensor) and tensor.numel()]
    if isinstance(error, IndexError) and integers:
        return _hint_of_rows(integers)
    if _lacks_gathered_weight(error):
        return (
            "ZeRO stage 3 and training.compile: the model reads a weight of another module that "
            "its first forward pass has not read, and no graph gathers it: set zero.stage: 2, or "
            "training.compile: false"
        )
    if isinstance(error, (RuntimeError, ValueError)) and "type" in str(error).lower():
        return _hint_of_types(str(error), tensors)
    return ""


def _tensors_of(inputs: Any) -> list[Tensor]:
    """Return the tensors that a model gets, those in lists and mappings inside left out."""
    if isinstance(inputs, Mapping):
        parts: Iterable[Any] = inputs.values()
    elif isinstance(inputs, (list, tuple)):
        parts = inputs
    else:
        parts = (inputs,)
    return [part for part in parts if isinstance(part, Tensor)]


def _lacks_gathered_weight(error: BaseException) -> bool:
    """Check whether a graph of torch.compile has met a weight that is not there."""
    return type(error).__name__ == "TorchRuntimeError" and "size=(0,)" in str(error)


def _hint_of_rows(integers: Sequence[Tensor]) -> str:
    """Return the range of a model's integer inputs, in which an embedding may lack rows; nothing on
    a GPU, which is not read after an error.
    """
    if any(tensor.device.type != "cpu" for tensor in integers):
        return ""
    low = min(int(tensor.min()) for tensor in integers)
    high = max(int(tensor.max()) for tensor in integers)
    needs = "an embedding needs more rows than the largest, and none is negative"
    return f"its whole numbers go from {low} to {high}: {needs}"


def _hint_of_types(text: str, inputs: Sequence[Tensor]) -> str:
    """Return the fix for a product of two types of numbers; torch names them in many ways."""
    is_half = _HALF_TYPE.search(text) is not None
    is_single = _SINGLE_TYPE.search(text) is not None
    if (is_half and is_single) or "mixed dtype" in text:
        return (
            "this line computes with fp32 and with weights in half precision: cast the one to the "
            "type of the other (h.to(weight.dtype)), or set precision.dtype: autocast, which "
            "casts by itself"
        )
    if _INTEGER_TYPE.search(text) and any(_is_integer(part) for part in inputs):
        return (
            "return floating-point inputs from the dataset: x.float(), for images x.float() / 255"
        )
    if any(part.dtype == torch.float64 for part in inputs):
        return "return float32 inputs from the dataset: x.float()"
    return ""


def _hint_of_classes(outputs: Any, targets: Any) -> str:
    """Return the fix for outputs and targets that `cross_entropy` fails on."""
    if not isinstance(targets, Tensor):
        return _NUMBER_CLASSES
    if not isinstance(outputs, Tensor):
        return (
            "return the logits alone from the model, or write a task that takes them out "
            "(task.target)"
        )
    if targets.ndim == outputs.ndim and targets.ndim > 1 and targets.shape[1] == 1:
        return "class numbers have the shape (batch,): target.squeeze(-1) in the dataset"
    if targets.ndim < outputs.ndim and targets.dtype != torch.int64:
        return _hint_of_label_type(targets)
    return _hint_of_labels(outputs, targets) or (
        "the model returns one row of logits per sample, (batch, num_classes), and targets are "
        "class numbers, (batch,)"
    )


def _hint_of_label_type(targets: Tensor) -> str:
    hint = "class numbers are int64: int(target) or target.long() in the dataset"
    if targets.is_floating_point():
        hint += "; to predict values, task: {target: 'torch.nn:MSELoss'}"
    return hint


def _hint_of_labels(outputs: Tensor, targets: Tensor) -> str:
    """Return the range of labels on the host, if there are not as many classes; else nothing."""
    if outputs.ndim < 2 or targets.ndim != outputs.ndim - 1:
        return ""
    classes = outputs.shape[1]
    if not classes or targets.device.type != "cpu" or not targets.numel():
        return ""
    low = int(targets.min())
    high = int(targets.max())
    if low >= 0 and high < classes:
        return ""
    return (
        f"labels go from {low} to {high}, and {classes} classes have the numbers 0 to "
        f"{classes - 1}: change the labels, or the model's number of classes"
    )


def _is_integer(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _place(error: BaseException) -> str:
    """Return the last line of the user's own code on the way to the error, `` at FILE:LINE``, or
    an empty string.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    first = 0  # the frame of an engine, if there is one
    for number, (file, _) in enumerate(places):
        if _is_engine(file):
            first = number
            break
    for file, line in reversed(places[first:]):
        if not file.startswith((*_LIBRARIES, _PACKAGE, "<")):
            return f" at {file}:{line}"
    return ""


def _is_engine(file: str) -> bool:
    name = Path(file).name
    return file.startswith(_PACKAGE) and name.endswith("_engine.py") and name != "base_engine.py"
