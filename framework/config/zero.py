"""`zero`: how optimizer state (stage 1), gradients (2) and weights (3) are spread over the
data-parallel ranks.

Keys bear DeepSpeed's names (`zero_optimization.*`) where they mean the same. Two defaults differ:
the buckets are 5e7 elements instead of 5e8, because a bucket is a buffer of that many elements and
5e8 costs 1-2 GB on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field

from framework.config.base import Count, EvenCount, Fraction, OneOf, PositiveCount, Section
from framework.config.paths import PathText


class NoOffload(Section):
    """Everything stays on the device."""

    device: Literal["none"] = "none"


class ZenFlow(Section):
    """The columns with the largest gradients are stepped on the device at every micro-batch; the
    others are summed over the micro-batches of a step, and stepped on the host (Lan et al. 2025).
    """

    topk_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of each matrix's columns that is stepped at every micro-batch; vectors always are."""
    select_every: PositiveCount | Literal["epoch"] = "epoch"
    """Steps after which the columns are chosen anew: their moments begin with zeros then."""
    full_warm_up_steps: Count = 0
    """Steps at the beginning in which the host steps all columns."""
    offload: bool = False
    """Keep the moments of the chosen columns on the host between micro-batches."""


class OptimizerToCPU(Section):
    """Optimizer state and step on the host."""

    device: Literal["cpu"] = "cpu"
    pin_memory: bool = True
    """Page-locked host memory: faster copies, but the memory cannot be swapped."""
    ratio: Fraction = 1.0
    """Share of the weights that the host updates (Twin-Flow, stage 3); the state of the others
    stays on the device. Weights are counted in sub-groups, see `zero.sub_group_size`.
    """
    zenflow: ZenFlow | None = None
    """Step what matters most at every micro-batch (stages 1 and 2); the micro-batches of a step,
    `batch.accumulation_steps`, are DeepSpeed's `update_interval`.
    """


class OptimizerToNVMe(Section):
    """Optimizer state in files on a local NVMe drive."""

    device: Literal["nvme"] = "nvme"
    nvme_path: PathText
    """Folder on the drive."""
    pin_memory: bool = True
    """Page-locked host buffers."""
    buffer_count: PositiveCount = 4
    """Host buffers; at least the number of optimizer states per weight plus one (Adam: 4)."""
    pipeline_read: bool = False
    """Read the next tile while the current one is updated."""
    pipeline_write: bool = False
    """Write the last tile while the current one is updated."""


class ParamToCPU(Section):
    """Weights rest on the host between uses."""

    device: Literal["cpu"] = "cpu"
    pin_memory: bool = True
    """Page-locked host memory."""


class ParamToNVMe(Section):
    """Weights rest in files on a local NVMe drive between uses."""

    device: Literal["nvme"] = "nvme"
    nvme_path: PathText
    """Folder on the drive."""
    pin_memory: bool = True
    """Page-locked host buffers."""
    buffer_count: PositiveCount = 5
    """Host buffers."""
    buffer_size: PositiveCount = 100_000_000
    """Elements per host buffer; at least the largest weight."""
    max_in_cpu: Count = 1_000_000_000
    """Elements kept in host memory all the time."""


OffloadOptimizer = Annotated[NoOffload | OptimizerToCPU | OptimizerToNVMe, OneOf("device")]
OffloadParam = Annotated[NoOffload | ParamToCPU | ParamToNVMe, OneOf("device")]


class Zero(Section):
    """Zero Redundancy Optimizer (Rajbhandari et al. 2020)."""

    stage: Annotated[int, Field(ge=0, le=3)] = 0
    """0: plain data parallel; 1: optimizer state is spread; 2: gradients too; 3: weights too;
    ``auto``: as the devices allow.
    """
    offload_optimizer: OffloadOptimizer = NoOffload()
    """Where optimizer state lives; needs stage 1 or higher (nvme: stage 3)."""
    offload_param: OffloadParam = NoOffload()
    """Where weights live between uses; needs stage 3."""
    reduce_bucket_size: PositiveCount = 50_000_000
    """Elements of gradient reduced at once."""
    allgather_bucket_size: EvenCount = 50_000_000
    """Elements of weights gathered at once after the step (stages 1 and 2); DeepSpeed refuses odd
    numbers.
    """
    overlap_comm: bool | None = None
    """Reduce gradients while the backward pass runs; left out: only at stage 3, as in DeepSpeed."""
    contiguous_gradients: bool = True
    """Copy gradients into one buffer as they appear: less fragmentation."""
    reduce_scatter: bool = True
    """Reduce each rank's share only, instead of an all-reduce."""
    coalesce: bool = False
    """Stage 2 with several micro-batches in a step: sum gradients over the ranks once in a step,
    and not after each micro-batch; whole gradients stay in between, as at stage 1.
    """
    round_robin_gradients: bool = False
    """Spread the gradient copies to the host over the ranks (stages 1 and 2 with CPU offload)."""
    sub_group_size: Count = 1_000_000_000
    """Stage 3: elements that are updated at once; smaller lowers peak memory, 0 is one weight at a
    time.
    """
    stage3_prefetch_bucket_size: Count = 50_000_000
    """Stage 3: elements of weights fetched ahead of their use."""
    stage3_param_persistence_threshold: Count = 100_000
    """Stage 3: weights smaller than this are never spread."""
    stage3_max_live_parameters: Count = 1_000_000_000
    """Stage 3: elements of weights that may be whole on a device at one time."""
    stage3_max_reuse_distance: Count | None = None
    """Stage 3: a weight used again within this many elements is kept; left out: 1e9, with
    weights on NVMe 0, as each that is kept takes one of `zero.offload_param.buffer_count` buffers.
    """
    stage3_gather_16bit_weights_on_model_save: bool = True
    """Stage 3: let `save_16bit_model` write whole weights; DeepSpeed's own default writes
    nothing.
    """

    @property
    def zenflow(self) -> ZenFlow | None:
        """The section of ZenFlow, if the optimizer is on the host and has one."""
        if isinstance(self.offload_optimizer, OptimizerToCPU):
            return self.offload_optimizer.zenflow
        return None

    @property
    def is_stepped_in_parts(self) -> bool:
        """Whether a part of the optimizer's state stays on the device (Twin-Flow)."""
        place = self.offload_optimizer
        return isinstance(place, OptimizerToCPU) and place.ratio < 1

    @property
    def reuse_distance(self) -> int:
        """`stage3_max_reuse_distance`, as written or as it follows. A weight on NVMe has a buffer
        from its reading to its release (DeepSpeed 0.19.8, runtime/swap_tensor/
        partitioned_param_swapper.py), and a run ends where none is left.
        """
        if self.stage3_max_reuse_distance is not None:
            return self.stage3_max_reuse_distance
        return 0 if self.offload_param.device == "nvme" else 1_000_000_000

    @property
    def sums_overlap(self) -> bool:
        """Whether sums of gradients run beside the backward pass, which DeepSpeed demands where
        ZenFlow's moments are on the host.
        """
        if self.overlap_comm is not None:
            return self.overlap_comm
        return self.stage == 3 or (self.zenflow is not None and self.zenflow.offload)


# Settings of stage 3 alone.
STAGE3_KEYS: Final = (
    "sub_group_size",
    *(name for name in Zero.model_fields if name.startswith("stage3_")),
)
# Settings that DeepSpeed's JSON has no key for.
OF_THE_ENGINE: Final = ("coalesce",)
# Section -> device -> its keys, and the lowest stage at which DeepSpeed looks at it.
OFFLOADS: Final[Mapping[str, Mapping[str, type[Section]]]] = {
    "offload_optimizer": {"cpu": OptimizerToCPU, "nvme": OptimizerToNVMe},
    "offload_param": {"cpu": ParamToCPU, "nvme": ParamToNVMe},
}
NEEDED_STAGE: Final[Mapping[str, Mapping[str, int]]] = {
    "offload_optimizer": {"cpu": 1, "nvme": 3},
    "offload_param": {"cpu": 3, "nvme": 3},
}
