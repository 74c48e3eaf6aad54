"""Memory that was not there: read in the text of an error, placed in a step, and explained by a
plan's estimate.

The texts are torch's (`c10/cuda/CUDACachingAllocator.cpp`, `c10/core/impl/alloc_cpu.cpp`), in the
forms of releases 1.2 to 2.9, NCCL's, and those of launchers whose rank the kernel has killed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.plan.alternatives import Alternative, alternatives, knobs, size_text
from framework.plan.memory import Memory, NotEstimatedError, estimate
from framework.plan.plan import Plan
from framework.plan.work import ModelWork

# Patterns of texts -> what lacks memory, in the order in which they decide: a launcher ends ranks
# after the first.
_KINDS: Final = {
    "device": re.compile(
        r"(CUDA|HIP|NPU) (error: )?out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Failed to CUDA calloc"
        r"|Cuda failure \d* ?'out of memory'"
    ),
    "shared": re.compile(
        r"out of shared memory|creating shared memory segment|/dev/shm.*No space left on device"
    ),
    "host": re.compile(
        r"DefaultCPUAllocator: (can't allocate memory|not enough memory)|Cannot allocate memory|std::bad_alloc"
        r"|MemoryError|Unable to allocate [\d.]+ \w+ for an array|Killed process \d+|OOMKilled|oom-kill|Out of memory: "
        r"|memory allocation of \d+ bytes failed"
    ),
    "killed": re.compile(
        r"(return code|exit ?code)\W+(-9|137)\b|Signal 9 \(SIGKILL\)|killed by SIGKILL|signal: Killed|code 137"
    ),
}
# With bounds: a search for more digits begins anew at each of them.
_SIZE: Final = r"([\d.]{1,32} ?(?:bytes|[KMGT]iB))"
_NUMBERS: Final = {
    "asked": rf"[Tt]ried to allocate {_SIZE}|Unable to allocate {_SIZE} for|calloc(?: async)? {_SIZE}",
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

# Moment -> files and functions of which the outermost decides: an optimizer steps within
# `initialize` as well.
_MOMENTS: Final = {
    "start": r"deepspeed/__init__\.py initialize$|engine/(initialize|base_engine|step|model_build)\.py "
    r"|(deepspeed_light|runtime/engine)"
    r"\.py (__init__|_configure\w+)$"
    r"|(partition_parameters|parameter_offload)\.py (__init__|_post_init\w*|_zero_init\w*|_convert\w*)$"
    r"|modeling_utils\.py from_pretrained$|_move_model_to_device$|stage(3|_1_and_2)\.py __init__$"
    r"|nn/modules/module\.py (_apply|to|cuda|half|bfloat16)$",
    "save": r"(runtime/engine|serialization|checkpoint_bytes)\.py (save\w*|_save\w*|_zero3_consolidated\w+)$"
    r"| _save_checkpoint$",
    "load": r"runtime/engine\.py _?load\w*checkpoint\w*$|serialization\.py load$",
    "evaluation": r"_engine\.py evaluate$|trainer\w*\.py (evaluat\w+|predict\w*|prediction_step)$",
    "step": r"runtime/(engine|\w+_optimizer|fp16/\w+|zero/\w+)\.py (step|_take_model_step|_optimizer_step)$"
    r"|(optim|optimizers|adam|lion|lamb|muon)/\w+\.py (step|_use_grad)$",
    "backward": r"(runtime/engine|zero/\w+|_tensor|loss_scaler)\.py backward$"
    r"|autograd/\w+\.py (backward|_engine_run\w+)$|pipe/engine\.py _exec_backward\w*$",
    "forward": r"runtime/engine\.py forward$|engine/step_batches\.py (__call__|weighted|mean|scales|_agree|_number)$"
    r"|nn/modules/module\.py (_call_impl|_wrapped_call_impl)$|functional\.py |pipe/engine\.py _exec_forward\w*$",
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
# Components, by names of the estimate, of the function that asked; the innermost decides.
_COMPONENTS: Final = {
    "fp32 weights": r"_create_fp32_partitions$",
    "optimizer state": r"initialize_optimizer_states$|_init_group$|_init_state$",
    "gathered weights": r"zero/\w+\.py \w*(all_?gather|fetch_sub_module)\w*$",
    "reduce bucket": r"zero/\w+\.py \w*(bucket|ipg)\w*$",
    "gradients": r"zero/\w+\.py (\w*fp32_grad\w*|get_flat_partition|average_tensor|partition_grads|\w+_sub_group)$",
    "optimizer copies": r"_(multi|single)_tensor_\w+$|(optim|optimizers|adam|lion|lamb)/\w+\.py step$",
    "logits and loss": r"(cross_entropy|nll_loss|log_softmax|compute_loss_func|ForCausalLMLoss)$",
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
        stated: the line that says so.
        moment: a key of `IN_WORDS`, or empty.
        place: file and function in it: the innermost outside torch and deepspeed, or where it
            begins.
        component: of the estimate, where the function that asked shows it.
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
    sizes: Mapping[str, int] | None = None

    @property
    def is_fragmented(self) -> bool:
        """Whether what torch holds unused would have been enough, or is a tenth of the device."""
        sizes = self.sizes or {}
        unused = sizes.get("unused", 0)
        return bool(unused) and (
            unused >= sizes.get("asked", unused + 1) or unused >= sizes.get("capacity", 0) / 10 > 0
        )


def read_shortage(text: str) -> Shortage | None:
    """Find the first message of memory that is not there, and the traceback before it; None where
    there is none.
    """
    if "│" in text:
        plain = re.sub(r"\s*│\s*\n\s*│\s*|[│❱╭╮╰╯]", " ", text)
    else:
        plain = text
    lines = plain.splitlines()
    for kind, pattern in _KINDS.items():
        at = next((number for number, line in enumerate(lines) if pattern.search(line)), None)
        if at is not None:
            if kind == "device":
                message = " ".join(lines[at : at + 3])
            else:
                message = lines[at]
            return shortage_of(kind, message, _frames_before(lines, at))
    return None


def kind_of(message: str) -> str:
    """Return what lacks memory by a message; empty where it is of something else."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(message)), "")


def shortage_of(kind: str, message: str, frames: Frames) -> Shortage:
    """Place a message by the frames that led to it, outermost first."""
    moment, own = next(
        (
            (name, frames[number:])
            for number, (file, function) in enumerate(frames)
            for name, pattern in _MOMENTS.items()
            if re.search(pattern, f"{file} {function}")
        ),
        ("", [("", "")]),
    )
    # The model's own code, where it is there, and else what shows the moment.
    place = next((frame for frame in reversed(own) if not _LIBRARIES.search(frame[0])), own[0])
    component = next(
        (
            name
            for file, function in reversed(frames)
            for name, pattern in _COMPONENTS.items()
            if re.search(pattern, f"{file} {function}")
        ),
        "activations" if moment == "forward" else "",
    )
    if any(function == "pin_memory" for _, function in frames) and kind in ("device", "host"):
        kind = "pinned"
        component = ""
    elif "NCCL" in message or "calloc" in message or "Cuda failure" in message:
        component = "buffers of NCCL"
    if moment:
        short = f"{'/'.join(place[0].rsplit('/', 3)[-3:])}: {place[1]}"
    else:
        short = ""
    is_stage_3 = any(file.endswith("zero/stage3.py") for file, _ in frames)
    return Shortage(kind, message.strip(), moment, short, component, is_stage_3, _sizes(message))


def _frames_before(lines: Sequence[str], at: int) -> Frames:
    """Frames of the last traceback before a line, of the same rank where the launcher marks
    them.
    """
    prefix = _prefix(lines[at])
    own = [line for line in lines[: at + 1] if _prefix(line) == prefix]
    begins = [
        number for number, line in enumerate(own) if "Traceback (most recent call last)" in line
    ]
    found = _FRAME.findall("\n".join(own[begins[-1] if begins else 0 :]))
    return [(file or other, function or name) for file, function, other, name in found]


def _prefix(line: str) -> str:
    """Return what a launcher puts before the lines of a rank, such as ``[rank0]:`` or
    ``192.168.1.51:``.
    """
    match = re.match(r"\s*((?:[\w.-]+: ?)?\[[\w-]+\]:|(?:\d+\.){3}\d+:)", line)
    return match[1] if match else ""


def _sizes(message: str) -> dict[str, int]:
    found = {}
    for name, pattern in _NUMBERS.items():
        match = re.search(pattern, message)
        if match:
            size = _bytes(next(filter(None, match.groups())))
            if size is not None:
                found[name] = size
    if "reserved" in found:
        found["unused"] = max(found.pop("reserved") - found.get("allocated", 0), 0)
    held = found.get("allocated", 0) + found.get("unused", 0)
    sizes = map(_bytes, _OF_PROCESS.findall(message))
    processes = sorted(size for size in sizes if size is not None)
    own = found.pop("own", None)
    if own is None and processes:  # in a container torch does not know its own number again
        own = next((size for size in processes if size >= held), None)
        processes = [size for size in processes if size != own]
    others = sum(processes)
    if own is not None and not processes and {"free", "capacity"} <= found.keys():
        others = found["capacity"] - found["free"] - own
    return found | ({"others": others} if others >= _SIZABLE else {})


def _bytes(text: str) -> int | None:
    """Return a size in bytes; None where it is no number, or beyond all memory."""
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", text).groups()  # type: ignore[union-attr]
    with suppress(ValueError):
        size = float(number) * _UNITS[unit]
        if size < _BEYOND_ALL:
            return int(size)
    return None


@dataclass(frozen=True)
class Explanation:
    """Shortage beside a plan's estimate.

    Attributes:
        memory: the estimate, or None; `unknown` says why.
        at: the moment of the estimate that is nearest to that of the shortage.
        fixes: settings that take less then, the largest gain first.
        on_host: whether it is the memory of offloading that counts; on processors the host is the
            device.
    """

    shortage: Shortage
    memory: Memory | None
    at: str = ""
    fixes: tuple[Alternative, ...] = ()
    unknown: str = ""
    on_host: bool = False

    def gain(self, other: Alternative) -> int:
        """Bytes that an alternative takes less at that moment, on the device or, where that is what
        lacks, the host.
        """
        return self.total - sum(self._of(other.memory).values())

    def is_enough(self, other: Alternative) -> bool:
        """Check whether what was asked for would have been there with an alternative, and all fits
        by estimate.
        """
        sizes = self.shortage.sizes or {}
        left = sum(self._of(other.memory).values())
        fits = left <= sizes.get("capacity", left) - sizes.get("others", 0)
        return (
            "asked" in sizes and fits and self.gain(other) >= sizes["asked"] - sizes.get("free", 0)
        )

    def _of(self, memory: Memory) -> Mapping[str, int]:
        return memory.host if self.on_host else memory.moments[self.at]

    @property
    def total(self) -> int:
        """Bytes by estimate at that moment."""
        return sum(size for _, size in self.components)

    @property
    def beyond_bytes(self) -> int:
        """Bytes that torch held beyond the estimate, where these are a tenth of it or more; else
        0.
        """
        held = (self.shortage.sizes or {}).get("allocated", 0)
        more = held - self.total
        if self.memory is not None and not self.on_host and 10 * more >= self.total:
            return more
        return 0

    @property
    def components(self) -> list[tuple[str, int]]:
        """Component and bytes at that moment, the largest first."""
        if self.memory is None:
            return []
        return sorted(self._of(self.memory).items(), key=lambda item: -item[1])


def explain(shortage: Shortage, plan: Plan, *, work: ModelWork | None = None) -> Explanation:
    """Find the components of that moment, and the settings that would have taken less; `work`: of a
    model of the user's own.
    """
    try:
        memory = estimate(plan, work=work and work.of_samples(plan.layout.micro_size))
    except NotEstimatedError as error:
        return Explanation(shortage, None, unknown=str(error))
    near = {"save": "between", "load": "between", "evaluation": "between", "": memory.peak}
    on_host = shortage.kind != "device" and plan.cluster.device != "cpu"
    found = Explanation(
        shortage, memory, near.get(shortage.moment, shortage.moment), on_host=on_host
    )
    tried = alternatives(plan, _choices(plan), work=work)
    others = [other for other in tried if found.gain(other) * 100 >= max(found.total, 1)]
    return replace(found, fixes=tuple(sorted(others, key=found.gain, reverse=True)))


def _choices(plan: Plan) -> Iterator[dict[str, Any]]:
    """Settings that may take less, one knob at a time but for the last."""
    batch = plan.config.batch
    zero = plan.config.zero
    layout = plan.layout
    if layout.micro_size > 1:
        part = 2 if layout.micro_size % 2 == 0 else layout.micro_size
        accumulates = batch.accumulation_steps is not None or batch.global_size is None
        if accumulates:
            further = {"batch.accumulation_steps": layout.accumulation_steps * part}
        else:
            further = {}
        yield {"batch.micro_size": layout.micro_size // part} | further
    yield {"training.recompute_every": 1}
    yield from ({"zero.stage": stage} for stage in range(zero.stage + 1, 4))
    yield {"zero.offload_optimizer.device": "cpu"}
    yield {"zero.offload_optimizer.device": "none"}
    yield from ({key: after} for key, _, after in knobs(plan))
    yield {"zero.stage": 3, "zero.offload_optimizer.device": "cpu"}


def in_one_sentence(shortage: Shortage, plan: Plan | None, *, most: int = 3) -> str:
    """Sizes, moment, components and settings, to follow "no memory left" in an error message."""
    sizes = {name: size_text(size) for name, size in (shortage.sizes or {}).items()}
    if "asked" in sizes:
        parts = [f"{sizes['asked']} were asked for"]
    else:
        parts = []
    parts += (
        [f"{sizes['free']} of {sizes['capacity']} are free"]
        if {"free", "capacity"} <= sizes.keys()
        else []
    )
    if parts:
        text = f" ({', '.join(parts)})"
    else:
        text = ""
    text += f" {IN_WORDS[shortage.moment]}" if shortage.moment else ""
    if plan is not None:
        found = explain(shortage, plan)
    else:
        found = None
    if found is not None and (components := found.components):
        named = ", ".join(f"{name} {size_text(size)}" for name, size in components[:most])
        text += f"; by estimate {size_text(found.total)} then: {named}"
        fixes = " or ".join(
            f"{each} ({size_text(found.gain(each))} less)" for each in found.fixes[:most]
        )
        text += f"; set {fixes}" if fixes else ""
    if shortage.is_fragmented:
        pieces = next(iter(advice(shortage)), "")
    else:
        pieces = ""
    if pieces:
        return f"{text}; {pieces}"
    return text


def advice(shortage: Shortage, plan: Plan | None = None) -> Iterable[str]:
    """Explain what lies beside the config: pieces, other processes, and where the host's memory
    goes.
    """
    sizes = shortage.sizes or {}
    if shortage.is_fragmented:
        if sizes["unused"] >= sizes.get("asked", 2**63):
            enough = "more than was asked for"
        else:
            enough = "a tenth of the device"
        yield (
            f"torch holds {size_text(sizes['unused'])} in unused pieces, {enough}: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF in later "
            "releases; `launch` sets it)"
        )
    if "others" in sizes:
        yield (
            f"other processes hold {size_text(sizes['others'])} of this device: look with "
            "nvidia-smi, and start one rank per device (each rank sets its device before it uses "
            "CUDA)"
        )
    if shortage.component == "buffers of NCCL":
        yield (
            "NCCL allocates beside torch: leave it 1 to 2 GiB, by the settings above or a "
            "smaller batch"
        )
    if shortage.moment == "evaluation":
        yield "an evaluation has a batch of its own: set a smaller evaluation.batch_size"
    if shortage.kind == "pinned":
        yield (
            "memory of the host that a device reads (pinned) is limited by ulimit -l, the "
            "container and the kernel: raise them, or set zero.offload_optimizer.pin_memory: false"
        )
    if shortage.kind == "shared":
        yield (
            "/dev/shm is full: docker --shm-size or an emptyDir of medium Memory; fewer "
            "data.num_workers take less"
        )
    if shortage.kind == "killed":
        yield (
            "SIGKILL without a message is mostly the kernel's, for lack of host memory: dmesg "
            "names the process"
        )
    on_host = shortage.kind in ("host", "killed", "pinned")
    if plan and on_host and plan.config.zero.offload_optimizer.device == "cpu":
        yield (
            "each rank of a host holds there what is offloaded: fewer of them take less, and so "
            "does a zero.offload_optimizer.ratio below 1 at zero.stage: 3"
        )
    if plan and on_host and plan.config.checkpoint.mode == "async":
        yield "checkpoint.mode: async copies what is saved to the host; sync does not"
    if shortage.kind in ("host", "killed"):
        yield (
            "on the host: every rank reads the weights of a checkpoint, fills "
            "data.prefetch_batches in each of its data.num_workers and holds what zero.offload_* "
            "puts there; fewer of them, or a larger limit of the job (ulimit -v, Slurm --mem, "
            "resources of the pod)"
        )
