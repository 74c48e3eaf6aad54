"""Memory that was not there, explained by a plan's estimate: what was held at that moment, and
which settings take less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from framework.plan.alternatives import Alternative, alternatives, knobs, size_text
from framework.plan.memory import Memory, NotEstimatedError, estimate
from framework.plan.plan import Plan
from framework.plan.shortage import IN_WORDS, Shortage
from framework.plan.work import ModelWork


@dataclass(frozen=True)
class Explanation:
    """Shortage beside a plan's estimate.

    Attributes:
        memory: the estimate, or None.
        at: the moment of the estimate that is nearest to the moment of the shortage.
        fixes: settings that take less then, the largest gain first.
        unknown: why there is no estimate.
        on_host: whether it is the memory of offloading that counts; on CPUs the host is the device.
    """

    shortage: Shortage
    memory: Memory | None
    at: str = ""
    fixes: tuple[Alternative, ...] = ()
    unknown: str = ""
    on_host: bool = False

    def gain(self, other: Alternative) -> int:
        """Return the bytes that an alternative takes less at that moment, on the device or, if the
        host lacks memory, there.
        """
        return self.total - sum(self._components_in(other.memory).values())

    def is_enough(self, other: Alternative) -> bool:
        """Check whether the requested bytes would have been there with an alternative, and all fits
        by estimate; False if the message has no requested bytes.
        """
        sizes = self.shortage.sizes
        if "asked" not in sizes:
            return False
        total = sum(self._components_in(other.memory).values())
        if total > sizes.get("capacity", total) - sizes.get("others", 0):
            return False
        return self.gain(other) >= sizes["asked"] - sizes.get("free", 0)

    def _components_in(self, memory: Memory) -> Mapping[str, int]:
        """Return the bytes of an estimate that count here, by component."""
        if self.on_host:
            return memory.host
        return memory.moments[self.at]

    @property
    def total(self) -> int:
        """Bytes by estimate at that moment."""
        return sum(size for _, size in self.components)

    @property
    def beyond_bytes(self) -> int:
        """Bytes that torch held beyond the estimate; 0 if these are less than a tenth of it."""
        held = self.shortage.sizes.get("allocated", 0)
        more = held - self.total
        if self.memory is not None and not self.on_host and 10 * more >= self.total:
            return more
        return 0

    @property
    def components(self) -> list[tuple[str, int]]:
        """Component and bytes at that moment, the largest first."""
        if self.memory is None:
            return []
        return sorted(self._components_in(self.memory).items(), key=lambda item: -item[1])


def explain(shortage: Shortage, plan: Plan, *, work: ModelWork | None = None) -> Explanation:
    """Find the components of the moment of a shortage, and the settings that would have taken less.

    `work`: of a model of the user's own.
    """
    try:
        memory = estimate(plan, work=work and work.of_samples(plan.layout.micro_size))
    except NotEstimatedError as error:
        return Explanation(shortage, None, unknown=str(error))
    near = {"save": "between", "load": "between", "evaluation": "between", "": memory.peak}
    on_host = shortage.kind != "device" and plan.cluster.device != "cpu"
    moment = near.get(shortage.moment, shortage.moment)
    explanation = Explanation(shortage, memory, moment, on_host=on_host)
    return replace(explanation, fixes=_fixes(explanation, plan, work))


def _fixes(explanation: Explanation, plan: Plan, work: ModelWork | None) -> tuple[Alternative, ...]:
    """Return the settings that take at least 1 % less memory, the largest gain first."""
    fixes = []
    for alternative in alternatives(plan, _choices(plan, work), work=work):
        if explanation.gain(alternative) * 100 >= max(explanation.total, 1):
            fixes.append(alternative)
    fixes.sort(key=explanation.gain, reverse=True)
    return tuple(fixes)


def _choices(plan: Plan, work: ModelWork | None) -> Iterator[dict[str, Any]]:
    """Yield settings that may take less memory: each changes one key, the last one two."""
    if plan.layout.micro_size > 1:
        yield _smaller_micro_batch(plan)
    if work is None or work.can_recompute:
        yield {"training.recompute_every": 1}
    for stage in range(plan.config.zero.stage + 1, 4):
        yield {"zero.stage": stage}
    yield {"zero.offload_optimizer.device": "cpu"}
    yield {"zero.offload_optimizer.device": "none"}
    for key, _, after in knobs(plan):
        yield {key: after}
    yield {"zero.stage": 3, "zero.offload_optimizer.device": "cpu"}


def _smaller_micro_batch(plan: Plan) -> dict[str, int]:
    """Return the settings of half a micro-batch, of one sample if it is odd, and the same global
    size.
    """
    batch = plan.config.batch
    layout = plan.layout
    divisor = layout.micro_size
    if layout.micro_size % 2 == 0:
        divisor = 2
    settings = {"batch.micro_size": layout.micro_size // divisor}
    if batch.accumulation_steps is not None or batch.global_size is None:
        settings["batch.accumulation_steps"] = layout.accumulation_steps * divisor
    return settings


def _sizes_text(shortage: Shortage) -> str:
    """Return the sizes of a message in parentheses; empty without sizes."""
    sizes = {name: size_text(size) for name, size in shortage.sizes.items()}
    parts = []
    if "asked" in sizes:
        parts.append(f"{sizes['asked']} were asked for")
    if "free" in sizes and "capacity" in sizes:
        parts.append(f"{sizes['free']} of {sizes['capacity']} are free")
    if parts:
        return f" ({', '.join(parts)})"
    return ""


def in_one_sentence(shortage: Shortage, plan: Plan | None, *, most: int = 3) -> str:
    """Describe sizes, moment, components and settings, to follow "no memory left" in an error
    message.

    `plan`: None: of an unknown run, without an estimate; `most`: components and settings at most.
    """
    text = _sizes_text(shortage)
    if shortage.moment:
        text += f" {IN_WORDS[shortage.moment]}"
    if plan is not None:
        text += _estimate_text(explain(shortage, plan), most)
    if shortage.is_fragmented:
        text += f"; {next(_advice_of_sizes(shortage))}"
    return text


def _estimate_text(explanation: Explanation, most: int) -> str:
    components = explanation.components
    if not components:
        return ""
    largest = ", ".join(f"{name} {size_text(size)}" for name, size in components[:most])
    text = f"; by estimate {size_text(explanation.total)} then: {largest}"
    fixes = []
    for fix in explanation.fixes[:most]:
        fixes.append(f"{fix} ({size_text(explanation.gain(fix))} less)")
    if fixes:
        text += f"; set {' or '.join(fixes)}"
    return text


_ADVICE_OF_KIND: Final[Mapping[str, str]] = {
    "pinned": "memory of the host that a device reads (pinned) is limited by ulimit -l, the "
    "container and the kernel: raise them, or set zero.offload_optimizer.pin_memory: false",
    "shared": "/dev/shm is full: docker --shm-size or an emptyDir of medium Memory; fewer "
    "data.num_workers take less",
    "killed": "SIGKILL without a message is mostly the kernel's, for lack of host memory: dmesg "
    "names the process",
}


def _advice_of_host(plan: Plan) -> Iterator[str]:
    """Yield advice on what a plan has in the host's memory."""
    if plan.config.zero.offload_optimizer.device == "cpu":
        yield "each rank of a host holds there what is offloaded: fewer of them take less"
    if plan.config.checkpoint.mode == "async":
        yield "checkpoint.mode: async copies what is saved to the host; sync does not"


def _advice_of_sizes(shortage: Shortage) -> Iterator[str]:
    """Yield advice on what a message counts: pieces, and other processes."""
    sizes = shortage.sizes
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


def advice(shortage: Shortage, plan: Plan | None = None) -> Iterable[str]:
    """Yield advice that the estimated fixes do not give: on device memory in unused pieces, other
    processes on the device, NCCL, the batch of an evaluation, and what fills the host's memory.
    """
    yield from _advice_of_sizes(shortage)
    if shortage.component == "buffers of NCCL":
        yield (
            "NCCL allocates beside torch: leave it 1 to 2 GiB, by one of the fixes or a smaller "
            "batch"
        )
    if shortage.moment == "evaluation":
        yield "an evaluation has a batch of its own: set a smaller evaluation.batch_size"
    if shortage.kind in _ADVICE_OF_KIND:
        yield _ADVICE_OF_KIND[shortage.kind]
    if plan and shortage.kind in ("host", "killed", "pinned"):
        yield from _advice_of_host(plan)
    if shortage.kind in ("host", "killed"):
        yield (
            "on the host: every rank reads the weights of a checkpoint, fills "
            "data.prefetch_batches in each of its data.num_workers and holds what zero.offload_* "
            "puts there; fewer of them, or a larger limit of the job (ulimit -v, Slurm --mem, "
            "resources of the pod)"
        )
