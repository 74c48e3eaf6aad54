"""A strategy that the rules accept, with what it is estimated to take."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from framework.plan.alternatives import size_text
from framework.plan.hardware import Hardware
from framework.plan.memory import Memory, NotEstimatedError, estimate
from framework.plan.parallelism import Parallelism
from framework.plan.plan import Plan
from framework.plan.search_space import (
    ACCUMULATION,
    EXPERT,
    FOR_LENGTH,
    KERNEL,
    MICRO,
    OFFLOAD,
    PARAMS,
    PIPE,
    RECOMPUTE,
    SELDOM_SET,
    SEQUENCE,
    STAGE,
    STRATEGY,
    TENSOR,
    Settings,
)
from framework.plan.time import StepTime, estimate_time
from framework.plan.work import ModelWork, work_of


@dataclass(frozen=True)
class Candidate:
    """A strategy that the rules accept, with what it is estimated to take.

    Attributes:
        settings: dotted keys of the run config and their values.
        plan: of the config with these settings.
        memory: of its fullest rank.
        time: of its optimizer step; None where the device's speed is not known.
        time_to_rank: the same, with the rates that are not known taken from a usual card on PCIe;
            None where the work is not known.
        no_time: why there is no time where a device is named, in words; empty otherwise.
    """

    settings: Settings
    plan: Plan
    memory: Memory
    time: StepTime | None = None
    time_to_rank: StepTime | None = None
    no_time: str = ""

    @cached_property
    def peak_bytes(self) -> int:
        """The most on a device at any moment."""
        return self.memory.total(self.memory.peak)

    @property
    def choice(self) -> dict[str, Any]:
        """Every key of a strategy and its batch, with its value in the plan."""
        config = self.plan.config
        layout = self.plan.layout
        choice: dict[str, Any] = {
            STAGE: config.zero.stage,
            OFFLOAD: config.zero.offload_optimizer.device,
            RECOMPUTE: config.training.recompute_every,
            PIPE: layout.pipe_size,
            TENSOR: layout.tensor_size,
            SEQUENCE: layout.sequence_size,
            MICRO: layout.micro_size,
            ACCUMULATION: layout.accumulation_steps,
        }
        for key, value in self._seldom_set.items():
            if value != SELDOM_SET[key]:
                choice[key] = value
        return choice

    @property
    def _seldom_set(self) -> dict[str, Any]:
        """Values of the keys that most strategies leave at their defaults; `choice` has those that
        differ.
        """
        config = self.plan.config
        values = {
            PARAMS: config.zero.offload_param.device,
            KERNEL: getattr(config.optimizer, "implementation", SELDOM_SET[KERNEL]),
            EXPERT: self.plan.layout.expert_size,
        }
        for key in FOR_LENGTH:
            values[key] = getattr(config.training, key.rpartition(".")[2])
        return values

    def changes(self, planned: Candidate) -> dict[str, Any]:
        """Return the part of the choice that differs from a planned candidate's."""
        before = dict(SELDOM_SET) | planned.choice
        choice = dict(SELDOM_SET) | self.choice
        return {key: value for key, value in choice.items() if value != before[key]}

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all devices together; None where the device's speed is not known."""
        if self.time is None:
            return None
        return self.time.samples_per_second

    @property
    def speed_to_rank(self) -> float:
        """Samples per second by which candidates are ranked; 0 where none is known."""
        if self.time_to_rank is None:
            return 0.0
        return self.time_to_rank.samples_per_second

    def lacking(self, target: Hardware) -> str:
        """Return the reason why it does not fit, in words; empty if it does, or if that is not
        known. Every command judges a plan by `Hardware.lacking`.
        """
        return target.lacking(self.memory, self.plan.cluster.devices_per_host)


def strategy_of(candidate: Candidate) -> dict[str, Any]:
    settings = candidate.settings
    return {key: settings[key] for key in STRATEGY if key in settings}


def judge(
    plan: Plan,
    target: Hardware | None = None,
    *,
    settings: Settings | None = None,
    work: ModelWork | None = None,
) -> Candidate:
    """Estimate memory and, with a target of known speed, time of a plan.

    Args:
        plan: of the run.
        target: its devices.
        settings: in which the plan differs from the run's config.
        work: of the model on any micro-batch; left out: as the named model has it.

    Raises:
        NotEstimatedError: the memory is not known.
    """
    if work is None:
        work = work_of(plan)
    else:
        work = work.of_samples(plan.layout.micro_size)
    memory = estimate(plan, work=work)
    time = None
    time_to_rank = None
    no_time = ""
    if target is not None:
        memory = target.with_beside(memory, plan)
        if target.machine and work:
            try:
                time = estimate_time(plan, work, target.machine)
            except NotEstimatedError as error:  # a figure of the device is not known
                no_time = str(error)
        time_to_rank = time
        if work and time is None:
            machine = target.machine_to_rank(plan.cluster.devices_per_host)
            with suppress(NotEstimatedError):  # no device of this kind has the number format
                time_to_rank = estimate_time(plan, work, machine)
    return Candidate(settings or {}, plan, memory, time, time_to_rank, no_time)


def least_bytes(plan: Plan, work: ModelWork) -> int:
    """Return the least bytes that the fullest rank takes with any batch.

    They are its share of weights, optimizer state and, at stages 0 and 1, of gradients. The fullest
    stage of a pipeline has no less than the mean.
    """
    by = Parallelism.from_plan(plan)
    ranks = by.data * by.sequence
    bytes_per_param = 0.0
    if not by.weights_offloaded:
        bytes_per_param += by.weight_bytes / (ranks if by.zero_stage == 3 else 1)
    if by.zero_stage < 2:
        bytes_per_param += by.weight_bytes
    # an optimizer of the user's own may have no state
    if not by.is_offloaded and hasattr(plan.config.optimizer, "kind"):
        bytes_per_param += by.state_bytes / (ranks if by.zero_stage else 1)
    return int(bytes_per_param * work.num_params / by.pipe / by.tensor)


def fullest(memory: Memory) -> str:
    """Return the largest component at the fullest moment, in words."""
    name, size = max(memory.moments[memory.peak].items(), key=lambda item: item[1])
    return f"{name} {size_text(size)}"
