"""Memory that was not there, read in the text of an error and placed in a step.

The texts are torch's (`c10/cuda/CUDACachingAllocator.cpp`, `c10/core/impl/alloc_cpu.cpp`), in the
forms of releases 1.2 to 2.9, NCCL's, and messages of launchers about a rank that the kernel has
killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

# Patterns of texts -> what lacks memory, in the order in which they decide: a launcher ends ranks
# after the first.
_KINDS: Final = {
    "device": re.compile(
        r"(CUDA|HIP|NPU) (error: )?out of memory"
        r"|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
        r"|Failed to CUDA calloc"
        r"|Cuda failure \d* ?'out of memory'"
    ),
    "shared": re.compile(
        r"out of shared memory"
        r"|creating shared memory segment"
        r"|/dev/shm.*No space left on device"
    ),
    "host": re.compile(
        r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
        r"|Cannot allocate memory"
        r"|std::bad_alloc"
        r"|MemoryError"
        r"|Unable to allocate [\d.]+ \w+ for an array"
        r"|Killed process \d+|OOMKilled|oom-kill|Out of memory: "
        r"|memory allocation of \d+ bytes failed"
    ),
    "killed": re.compile(
        r"(return code|exit ?code)\W+(-9|137)\b"
        r"|Signal 9 \(SIGKILL\)"
        r"|killed by SIGKILL"
        r"|signal: Killed"
        r"|code 137"
    ),
}
# With bounds: a search for more digits begins anew at each of them.
_SIZE: Final = r"([\d.]{1,32} ?(?:bytes|[KMGT]iB))"
_NUMBERS: Final = {
    "asked": rf"[Tt]ried to allocate {_SIZE}"
    rf"|Unable to allocate {_SIZE} for"
    rf"|calloc(?: async)? {_SIZE}",
    "capacity": rf"total capaci?ty ?of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|{_SIZE} free",
    "allocated": rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "unused": rf"{_SIZE} is reserved by PyTorch but",
    "reserved": rf"{_SIZE} reserved in total",
    "own": rf"this process has {_SIZE} memory in use",
}
_OF_PROCESS: Final = re.compile(rf"[^s] [Pp]rocess \d{{1,20}} has {_SIZE} memory in use")
_UNITS: Final = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_FRAME: Final = re.compile(
    r'File "([^"]+)", line \d+, in (\S+)|(\S{1,300}?\.py):\d+,? in\s+(?:\w+\.)?(\w+)'
)

# Moment -> pattern of a frame, "FILE FUNCTION". The outermost frame decides: an optimizer steps
# within `initialize` as well.
_MOMENTS: Final = {
    "start": r"deepspeed/__init__\.py initialize$"
    r"|engine/(initialize|model_build|stage3_build)\.py "
    r"|engine/base_engine\.py __init__$"
    r"|(deepspeed_light|runtime/engine)\.py (__init__|_configure\w+)$"
    r"|(partition_parameters|parameter_offload)\.py "
    r"(__init__|_post_init\w*|_zero_init\w*|_convert\w*)$"
    r"|modeling_utils\.py from_pretrained$"
    r"|_move_model_to_device$"
    r"|stage(3|_1_and_2)\.py __init__$"
    r"|nn/modules/module\.py (_apply|to|cuda|half|bfloat16)$",
    "save": r"(runtime/engine|serialization|checkpoint_bytes)\.py "
    r"(save\w*|_save\w*|_zero3_consolidated\w+)$"
    r"| _save_checkpoint$",
    "load": r"runtime/engine\.py _?load\w*checkpoint\w*$"
    r"|serialization\.py load$",
    "evaluation": r"_engine\.py evaluate$"
    r"|trainer\w*\.py (evaluat\w+|predict\w*|prediction_step)$",
    "step": r"runtime/(engine|\w+_optimizer|fp16/\w+|zero/\w+)\.py "
    r"(step|_take_model_step|_optimizer_step)$"
    r"|(optim|optimizers|adam|lion|lamb|muon)/\w+\.py (step|_use_grad)$",
    "backward": r"(runtime/engine|zero/\w+|_tensor|loss_scaler)\.py backward$"
    r"|autograd/\w+\.py (backward|_engine_run\w+)$"
    r"|pipe/engine\.py _exec_backward\w*$",
    "forward": r"runtime/engine\.py forward$"
    r"|engine/step_batches\.py (__call__|weighted|mean|scales|_agree|_number)$"
    r"|nn/modules/module\.py (_call_impl|_wrapped_call_impl)$"
    r"|functional\.py "
    r"|pipe/engine\.py _exec_forward\w*$",
}
IN_WORDS: Final = {
    "start": "before the first step (deepspeed.initialize)",
    "save": "while a checkpoint was saved",
    "load": "while a checkpoint was loaded",
    "evaluation": "in an evaluation",
    "step": "in the optimizer's step",
    "backward": "in the backward pass",
    "forward": "in the forward pass",
}
_LIBRARIES: Final = re.compile(r"(^|/)(torch|deepspeed)/|^<")
# Component of the estimate -> pattern of a frame that allocates it; the innermost frame decides.
_COMPONENTS: Final = {
    "fp32 weights": r"_create_fp32_partitions$",
    "optimizer state": r"initialize_optimizer_states$|_init_group$|_init_state$",
    "gathered weights": r"zero/\w+\.py \w*(all_?gather|fetch_sub_module)\w*$",
    "reduce bucket": r"zero/\w+\.py \w*(bucket|ipg)\w*$",
    "gradients": r"zero/\w+\.py "
    r"(\w*fp32_grad\w*|get_flat_partition|average_tensor|partition_grads|\w+_sub_group)$",
    "optimizer copies": r"_(multi|single)_tensor_\w+$"
    r"|(optim|optimizers|adam|lion|lamb)/\w+\.py step$",
    "logits and loss": r"(cross_entropy|nll_loss|log_softmax|compute_loss_func|ForCausalLMLoss)$",
}
# Pattern of a line of source that Python quotes before a message -> moment and component, for logs
# that hold no frames.
_QUOTED: Final = {
    r"state\[.\w+.\] = torch\.(zeros|empty|full)_like\(": ("step", "optimizer state"),
    r"\b(denom|(max_)?exp_avg(_sq)?s?(_sqrt)?|square_avgs?|momentum_buffer)\b": (
        "step",
        "optimizer copies",
    ),
    r"\b(run_)?backward\(": ("backward", ""),
    r"\b(cross_entropy|nll_loss|log_softmax|lm_head)\w*\(|\blogits\b": (
        "forward",
        "logits and loss",
    ),
    r"\bF\.(linear|conv\d?d|silu|gelu|softmax|dropout|scaled_dot_product_attention)\(": (
        "forward",
        "activations",
    ),
}
# Less is the driver's, or of texts that round.
_SIZABLE: Final = 2**28
_BEYOND_ALL: Final = 2**60
Frames = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Shortage:
    """Memory that was not there.

    Attributes:
        kind: what lacked it: ``device``, ``pinned`` (host memory that a device reads), ``shared``
            (/dev/shm), ``host``, or ``killed``: a process was killed, as the kernel does for lack
            of host memory.
        stated: the line with the message.
        moment: a key of `IN_WORDS`, or empty.
        place: file and function in that moment: the innermost outside torch and deepspeed, or the
            first one; without frames the line of source that is quoted.
        component: of the estimate, if the function that allocates shows it.
        is_stage_3: whether ZeRO's stage 3 is in the traceback.
        sizes: name -> bytes as the text has them: ``asked``, ``capacity``, ``free``, ``allocated``,
            ``unused`` (held by torch, in pieces), ``others`` (of other processes on the device).
    """

    kind: str
    stated: str
    moment: str = ""
    place: str = ""
    component: str = ""
    is_stage_3: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_fragmented(self) -> bool:
        """Whether what torch holds unused would have been enough, or is a tenth of the device."""
        unused = self.sizes.get("unused", 0)
        if not unused:
            return False
        if unused >= self.sizes.get("asked", unused + 1):
            return True
        capacity = self.sizes.get("capacity", 0)
        return capacity > 0 and unused >= capacity / 10


def read_shortage(text: str) -> Shortage | None:
    """Find the first message of memory that is not there, and the traceback before it; None if the
    text has no such message.
    """
    lines = _without_box(text).splitlines()
    for kind, pattern in _KINDS.items():
        for number, line in enumerate(lines):
            if pattern.search(line):
                message = _message_at(lines, number, kind)
                shortage = shortage_of(kind, message, _frames_before(lines, number))
                if kind == "device" and not shortage.moment:
                    shortage = _placed_by_source(shortage, lines[:number])
                return shortage
    return None


def _placed_by_source(shortage: Shortage, before: Sequence[str]) -> Shortage:
    """Return a shortage of unknown moment, placed by the line of source that Python quotes last
    before its message.
    """
    for line in reversed(before[-2:]):
        for pattern, (moment, component) in _QUOTED.items():
            if re.search(pattern, line):
                component = shortage.component or component
                place = f"`{line.strip(' `')}`"
                return replace(shortage, moment=moment, component=component, place=place)
    return shortage


def _without_box(text: str) -> str:
    """Return a text without the box that rich draws around a traceback."""
    if "│" not in text:
        return text
    return re.sub(r"\s*│\s*\n\s*│\s*|[│❱╭╮╰╯]", " ", text)


def _message_at(lines: Sequence[str], number: int, kind: str) -> str:
    """Return the message that begins in a line; one about a device may go on for two more."""
    if kind == "device":
        return " ".join(lines[number : number + 3])
    return lines[number]


def kind_of(message: str) -> str:
    """Return what lacks memory by a message; empty if it is about something else."""
    for kind, pattern in _KINDS.items():
        if pattern.search(message):
            return kind
    return ""


def shortage_of(kind: str, message: str, frames: Frames) -> Shortage:
    """Return a message as a shortage, placed by the frames that led to it, outermost first.

    `kind` is one of `_KINDS`; frames that pin memory make it ``pinned``.
    """
    moment, place = _moment_of(frames)
    component = _component_of(frames, moment)
    is_pinned = any(function == "pin_memory" for _, function in frames)
    if is_pinned and kind in ("device", "host"):
        kind = "pinned"
        component = ""
    elif _is_of_nccl(message):
        component = "buffers of NCCL"
    is_stage_3 = any(file.endswith("zero/stage3.py") for file, _ in frames)
    return Shortage(kind, message.strip(), moment, place, component, is_stage_3, _sizes(message))


def _component_of(frames: Frames, moment: str) -> str:
    """Return the component that the innermost frames allocate; empty if the frames do not show
    it.
    """
    for frame in reversed(frames):
        component = _matching(_COMPONENTS, frame)
        if component:
            return component
    if moment == "forward":
        return "activations"
    return ""


def _is_of_nccl(message: str) -> bool:
    return any(word in message for word in ("NCCL", "calloc", "Cuda failure"))


def _moment_of(frames: Frames) -> tuple[str, str]:
    """Return a key of `IN_WORDS` and the place in it (`Shortage.place`); both empty if the frames
    show no moment.
    """
    for number, frame in enumerate(frames):
        moment = _matching(_MOMENTS, frame)
        if moment:
            return moment, _place_in(frames[number:])
    return "", ""


def _place_in(frames: Frames) -> str:
    """Return the innermost place in the model's own code, or the outermost frame if all are of
    libraries.
    """
    file, function = frames[0]
    for frame in reversed(frames):
        if not _LIBRARIES.search(frame[0]):
            file, function = frame
            break
    short = "/".join(file.rsplit("/", 3)[-3:])
    return f"{short}: {function}"


def _matching(patterns: Mapping[str, str], frame: tuple[str, str]) -> str:
    """Return the name of the first pattern that a frame matches, or an empty one."""
    file, function = frame
    for name, pattern in patterns.items():
        if re.search(pattern, f"{file} {function}"):
            return name
    return ""


def _frames_before(lines: Sequence[str], at: int) -> Frames:
    """Return the frames of the last traceback before a line, of the same rank if the launcher marks
    ranks.
    """
    prefix = _prefix(lines[at])
    rank_lines = [line for line in lines[: at + 1] if _prefix(line) == prefix]
    matches = _FRAME.findall("\n".join(_last_traceback(rank_lines)))
    return [(file or other, function or name) for file, function, other, name in matches]


def _last_traceback(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines from the last traceback on; all of them without a traceback."""
    start = 0
    for number, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            start = number
    return lines[start:]


def _prefix(line: str) -> str:
    """Return what a launcher puts before the lines of a rank, such as ``[rank0]:`` or
    ``192.168.1.51:``.
    """
    match = re.match(r"\s*((?:[\w.-]+: ?)?\[[\w-]+\]:|(?:\d+\.){3}\d+:)", line)
    return match[1] if match else ""


def _sizes(message: str) -> dict[str, int]:
    """Return the sizes in a message (`Shortage.sizes`)."""
    sizes = _numbers(message)
    if "reserved" in sizes:
        sizes["unused"] = max(sizes.pop("reserved") - sizes.get("allocated", 0), 0)
    own = sizes.pop("own", None)
    held = sizes.get("allocated", 0) + sizes.get("unused", 0)
    if own is not None and own < held:  # the driver does not know the process, and has 0 of it
        own = None
    others = _bytes_of_others(sizes, own, _process_sizes(message))
    if others >= _SIZABLE:
        sizes["others"] = others
    return sizes


def _process_sizes(message: str) -> list[int]:
    """Return the bytes that processes hold by a message, the smallest first."""
    sizes = [_bytes(number) for number in _OF_PROCESS.findall(message)]
    return sorted(size for size in sizes if size is not None)


def _bytes_of_others(sizes: Mapping[str, int], own: int | None, processes: list[int]) -> int:
    """Return the bytes of a device that other processes hold.

    Args:
        sizes: in the message (`Shortage.sizes`).
        own: bytes of the process itself, if torch states them.
        processes: bytes of each process that the message lists.
    """
    if own is None:  # in a container torch does not know its own process number
        own = _own_process(sizes, processes)
        processes = [size for size in processes if size != own]
    if processes or own is None:
        return sum(processes)
    if "free" in sizes and "capacity" in sizes:
        return sizes["capacity"] - sizes["free"] - own
    return 0


def _own_process(sizes: Mapping[str, int], processes: list[int]) -> int | None:
    """Return the bytes of the smallest process that can hold what torch holds; None if none can."""
    held = sizes.get("allocated", 0) + sizes.get("unused", 0)
    for size in processes:
        if size >= held:
            return size
    return None


def _numbers(message: str) -> dict[str, int]:
    """Return what `_NUMBERS` finds in a message, in bytes."""
    sizes = {}
    for name, pattern in _NUMBERS.items():
        match = re.search(pattern, message)
        if match is None:
            continue
        number = next(filter(None, match.groups()))
        size = _bytes(number)
        if size is not None:
            sizes[name] = size
    return sizes


def _bytes(text: str) -> int | None:
    """Return a size in bytes; None where it is no number, or beyond all memory."""
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", text).groups()  # type: ignore[union-attr]
    with suppress(ValueError):
        size = float(number) * _UNITS[unit]
        if size < _BEYOND_ALL:
            return int(size)
    return None
