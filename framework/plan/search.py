"""Search for a strategy: which ZeRO stage, offload, recomputation, micro-batch and pipeline serve a
run best.

Every candidate is a run config that the house's own validation and rules accept, on its cluster;
there is no second set of rules. One costs about two milliseconds, so that few are left out:
micro-batches beyond the first that does not fit, because memory grows with them, and those of a
strategy that a rule refuses, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, prod
from typing import Any, Final, Literal

from framework.config.run_config import RunConfig
from framework.errors import ConfigError, UsageError, counted
from framework.plan.alternatives import alternatives, knobs, settings_text, size_text, with_settings
from framework.plan.cluster import Cluster
from framework.plan.device_overhead import beside_tensors
from framework.plan.devices import Machine
from framework.plan.layout import DEFAULT_MICRO_SIZE
from framework.plan.memory import Memory, NotEstimatedError, estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.shipped_models import num_layers
from framework.plan.time import Parallelism, StepTime, estimate_time
from framework.plan.work import ModelWork, work_of

Settings = Mapping[str, Any]
# What may be chosen: dotted keys of a run config.
STAGE: Final = "zero.stage"
OFFLOAD: Final = "zero.offload_optimizer.device"
RECOMPUTE: Final = "training.recompute_every"
PIPE: Final = "parallel.pipe"
TENSOR: Final = "parallel.tensor"
SEQUENCE: Final = "parallel.sequence"
MICRO: Final = "batch.micro_size"
ACCUMULATION: Final = "batch.accumulation_steps"
GLOBAL: Final = "batch.global_size"
LENGTH: Final = "data.sequence_length"
POSITIONS: Final = "model.max_positions"
SIZES: Final = (PIPE, TENSOR, SEQUENCE)
STRATEGY: Final = (STAGE, OFFLOAD, RECOMPUTE, *SIZES)
USUAL: Final[Settings] = {OFFLOAD: "none", RECOMPUTE: 0, **dict.fromkeys(SIZES, 1)}
"""The plainest value of each key of a strategy but the stage."""
EVERYTHING: Final = frozenset({*STRATEGY, MICRO, ACCUMULATION})
_LARGEST_MICRO: Final = 4096
# What makes a difference: estimates are not that exact. Twice the micro-batch has to gain it, where
# that is free.
_LEAST_GAIN: Final = 1.02
# What the estimate cannot tell apart: the plainest of those comes first.
_TIE: Final = 1.03
_LONGEST_SEQUENCE: Final = 1 << 24
_UNKNOWN: Final = "its memory is not known"
# Micro-batches of a step for each stage of a pipeline, where nothing fixes them: it then waits a
# fifth of the time.
_PER_STAGE: Final = 4


@dataclass(frozen=True)
class Hardware:
    """Devices that a strategy is searched for.

    Attributes:
        name: of the device, such as ``h100-80gb``; empty where none is named.
        memory_bytes: of one device; None: not known, so that everything fits.
        host_bytes: memory of a host, which the ranks on it share; None: not known.
        machine: rates of devices and network; None: how fast they are is not known.
        rates: how they were measured, in words; empty: they are listed.
    """

    name: str = ""
    memory_bytes: int | None = None
    host_bytes: int | None = None
    machine: Machine | None = None
    rates: str = ""

    @property
    def text(self) -> str:
        """The devices, and whence their rates."""
        return ", ".join(filter(None, (self.name, self.rates)))

    def usable_bytes(self, memory: Memory) -> int | None:
        """Memory that is left to tensors, beside what else a run takes of a GPU."""
        if self.memory_bytes is None:
            return None
        return max(self.memory_bytes - sum(memory.beside.values()), 0)

    def with_beside(self, memory: Memory, plan: Plan) -> Memory:
        """A plan's memory with what it takes of these devices beside its tensors."""
        return replace(memory, beside=beside_tensors(memory, plan, self.name))

    def lacking(self, memory: Memory) -> str:
        """Reason why a run does not fit; empty where it does, or where the memory of the devices is
        not known.
        """
        limit = self.usable_bytes(memory)
        peak_bytes = memory.total(memory.peak)
        if limit is None or peak_bytes <= limit:
            return ""
        return (
            f"each rank takes {size_text(peak_bytes)}, and {self.name} has {size_text(limit)} "
            "usable"
        )


@dataclass(frozen=True)
class Request:
    """Question to a search.

    Attributes:
        config: what was asked; keys that are not `free` stay as they are.
        cluster: where it is to run.
        target: its devices; left out: not known.
        free: dotted keys that may be chosen. `batch.global_size` stays where it is given; else
            micro-batches grow as long as doubling them gains 2 %.
        num_train_samples: size of the training data, where it is known.
        work: of a model of the user's own, on any micro-batch.
    """

    config: RunConfig
    cluster: Cluster
    target: Hardware = Hardware()
    free: Set[str] = EVERYTHING
    num_train_samples: int | None = None
    work: ModelWork | None = None


@dataclass(frozen=True)
class Candidate:
    """A strategy that the rules accept, with what it is estimated to take.

    Attributes:
        settings: dotted keys of the run config and their values.
        plan: of the config with these settings.
        memory: of its fullest rank.
        time: of its optimizer step; None where the device's speed is not known.
    """

    settings: Settings
    plan: Plan
    memory: Memory
    time: StepTime | None = None

    @cached_property
    def peak_bytes(self) -> int:
        """The most on a device at any moment."""
        return self.memory.total(self.memory.peak)

    @property
    def choice(self) -> dict[str, Any]:
        """What was chosen, or would be: every key of a strategy and its batch, with its value in
        the plan.
        """
        config = self.plan.config
        layout = self.plan.layout
        return {
            STAGE: config.zero.stage,
            OFFLOAD: config.zero.offload_optimizer.device,
            RECOMPUTE: config.training.recompute_every,
            PIPE: layout.pipe_size,
            TENSOR: layout.tensor_size,
            SEQUENCE: layout.sequence_size,
            MICRO: layout.micro_size,
            ACCUMULATION: layout.accumulation_steps,
        }

    def changes(self, planned: Candidate) -> dict[str, Any]:
        """The part of the choice in which this one differs."""
        before = planned.choice
        return {key: value for key, value in self.choice.items() if value != before[key]}

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all devices together; None where the device's speed is not known."""
        return None if self.time is None else self.time.samples_per_second

    @cached_property
    def traffic_bytes(self) -> float:
        """Bytes that a rank sends for each sample of the run, as DeepSpeed 0.19.8 does it: at stage
        0 an all-reduce in a step, at 1 the gathering of weights as well, at 2 an all-reduce for
        each micro-batch, at 3 two gatherings and a reduction for each.
        """
        config = self.plan.config
        layout = self.plan.layout
        if layout.num_replicas == 1:
            return 0.0
        steps = layout.accumulation_steps
        width = 2 if config.precision.dtype in ("bf16", "fp16") else 4
        again = bool(config.training.recompute_every)
        passes = (2, 3, 2 * steps + 1, (3 + again) * steps)[config.zero.stage]
        return width * passes * self.memory.num_params / layout.global_size


@dataclass(frozen=True)
class Loser:
    """Strategies that lost, all for the same reason.

    Attributes:
        settings: what they have in common.
        why: the reason, in words.
        kind: ``refused`` or ``too-large``.
        count: how many strategies.
    """

    settings: Settings
    why: str
    kind: Literal["refused", "too-large"]
    count: int = 1


@dataclass(frozen=True)
class Knob:
    """A setting beside the strategy, and the bytes that changing it frees on a device."""

    key: str
    before: Any
    after: Any
    freed_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.key} {_number(self.before)} -> {_number(self.after)} frees "
            f"{size_text(self.freed_bytes)}"
        )


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        target: devices.
        ranked: the best candidate of each strategy, the best one first; empty where nothing fits.
        losers: why others are not among them.
        smallest: the candidate that takes least, where nothing fits.
    """

    target: Hardware
    ranked: tuple[Candidate, ...]
    losers: tuple[Loser, ...]
    smallest: Candidate | None = None

    @property
    def block(self) -> str:
        """The one constraint that blocks, in words; empty where something fits."""
        if self.ranked:
            return ""
        if self.smallest is None:
            if self.losers:
                return self.losers[0].why
            return "there is nothing to choose from"
        found = self.smallest
        memory = self.smallest.memory
        limit = self.target.usable_bytes(memory)
        host = self.target.host_bytes
        if limit is None or found.peak_bytes <= limit:
            ranks = found.plan.cluster.devices_per_host
            on_host = sum(memory.host.values())
            return (
                f"{counted(ranks, 'rank')} take {size_text(ranks * on_host)} of a host that "
                f"has {size_text(host or 0)}"
            )
        least = settings_text({key: found.settings[key] for key in STRATEGY})
        takes = f"the least is {size_text(found.peak_bytes)}, with {least}: {fullest(memory)}"
        return f"{takes}; {size_text(limit)} are usable"


def search(asked: Request, *, is_quick: bool = False) -> SearchResult:
    """Rank the strategies of a run on a cluster: by samples per second, or by costs where speed is
    not known. A quick search drops what cannot fit, and so does not know what takes least. A
    NotEstimatedError where the model's memory is not known.
    """
    judges = _Judge(asked, is_quick=is_quick)
    found = [best for strategy in _strategies(asked) if (best := judges.best(strategy))]
    smallest = min(judges.too_large, key=lambda each: each.peak_bytes, default=None)
    if not (found or smallest or is_quick) and judges.unknown is not None:
        raise judges.unknown
    return SearchResult(
        asked.target, tuple(_ranked(found)), tuple(judges.losers()), None if found else smallest
    )


def search_fewest_devices(asked: Request) -> SearchResult:
    """The search on the smallest part of a cluster on which something fits: whole hosts, or devices
    of one host in powers of two; on the whole cluster where nothing does. A UsageError where the
    device's memory is not known.
    """
    cluster = asked.cluster
    if asked.target.memory_bytes is None:
        raise UsageError("the fewest devices take the device, as --gpu names it")
    hosts = sorted({*_powers(cluster.num_hosts), cluster.num_hosts})
    devices = sorted({*_powers(cluster.devices_per_host), cluster.devices_per_host})
    sizes = [
        *((1, count) for count in devices),
        *((count, cluster.devices_per_host) for count in hosts[1:]),
    ]
    parts = [
        replace(asked, cluster=replace(cluster, num_hosts=num, devices_per_host=count))
        for num, count in sizes
    ]
    enough = (part for part in parts[:-1] if search(part, is_quick=True).ranked)
    return search(next(enough, parts[-1]))


def search_longest_sequence(asked: Request) -> SearchResult:
    """The search with the longest sequence on which something fits, to an eighth of its length; a
    UsageError where the length is no key of the data, or the device's memory is not known.
    """
    config = asked.config
    memory = asked.target.memory_bytes
    length = getattr(config.data, "sequence_length", None)
    positions = getattr(config.model, "max_positions", None)
    if length is None or positions is None or memory is None:
        if memory is None:
            missing = "the device, as --gpu names it"
        else:
            missing = "data and a model with a length"
        raise UsageError(f"the longest sequence takes {missing}")

    def at(tokens: int) -> SearchResult:
        lengths = {LENGTH: tokens, POSITIONS: max(tokens, positions)}
        found = search(replace(asked, config=with_settings(config, lengths)))
        named = (replace(each, settings={LENGTH: tokens, **each.settings}) for each in found.ranked)
        return replace(found, ranked=tuple(named))

    best = at(length)
    step = length
    while best.ranked and length < _LONGEST_SEQUENCE and (longer := at(2 * length)).ranked:
        best = longer
        length = 2 * length
        step = length
    while best.ranked and step > max(length // 8, 1):
        step //= 2
        longer = at(length + step)
        if longer.ranked:
            best = longer
            length = length + step
    return best


def judge(
    plan: Plan,
    target: Hardware | None = None,
    *,
    settings: Settings | None = None,
    work: ModelWork | None = None,
) -> Candidate:
    """Estimate what a plan takes; `work`: of its model on any micro-batch, left out: as the named
    model has it.

    Raises:
        NotEstimatedError: its memory is not known.
    """
    if work is None:
        work = work_of(plan)
    else:
        work = work.of_samples(plan.layout.micro_size)
    memory = estimate(plan, work=work)
    machine = target and target.machine
    time = None
    if target:
        memory = target.with_beside(memory, plan)
    else:
        memory = memory
    if machine and work:
        with suppress(NotEstimatedError):  # a figure of the device that nobody has published
            time = estimate_time(plan, work, machine)
    return Candidate(settings or {}, plan, memory, time)


class _Judge:
    """Tries candidates on one cluster, and remembers why they lost."""

    def __init__(self, asked: Request, *, is_quick: bool) -> None:
        self.asked = asked
        self.is_quick = is_quick
        self.too_large: list[Candidate] = []
        self.unknown: NotEstimatedError | None = None
        self._refused: dict[str, list[Settings]] = {}
        # Strategies do not change the model, but that stage 3 has linear layers of its own.
        self._works: dict[tuple[int, bool], ModelWork | None] = {}

    def best(self, strategy: Settings) -> Candidate | None:
        """The best candidate of one strategy that fits, its micro-batches tried from the smallest
        on.
        """
        best = None
        smallest = None
        reasons = []
        batch = self.asked.config.batch
        grows = self.asked.target.memory_bytes is not None
        is_free = batch.global_size is None
        plain = batch.micro_size or DEFAULT_MICRO_SIZE
        for sizes in _batches(self.asked, strategy, grows=grows):
            if smallest is not None and sizes.get(ACCUMULATION, 1) > (
                1 if self.is_quick else strategy[PIPE]
            ):
                # larger micro-batches, as many of them in flight, and gradients are kept as well
                continue
            tried = self.candidate({**strategy, **sizes})
            if isinstance(tried, str):
                reasons.append(tried)
                if tried.startswith(("batch.", _UNKNOWN)):
                    continue
                break  # whatever the batch
            if not self.fits(tried):
                if smallest is None:
                    smallest = tried
                else:
                    smallest = min(smallest, tried, key=lambda each: each.peak_bytes)
                # no larger one will; with a fixed global size more micro-batches may take more
                if is_free:
                    break
            elif best is None or _is_better(tried, best, by=_LEAST_GAIN if is_free else 1.0):
                best = tried
            elif is_free and tried.time is not None:
                break
            if is_free and tried.time is None and tried.plan.layout.micro_size >= plain:
                break  # what more would gain is not known
        if best is None and smallest is not None:
            self.too_large.append(smallest)
        elif best is None and reasons:
            self._refused.setdefault(reasons[0], []).append(strategy)
        return best

    def candidate(self, settings: Settings) -> Candidate | str:
        """The candidate, or the reason why there is none."""
        asked = self.asked
        try:
            changed = with_settings(asked.config, settings)
            plan = make_plan(changed, asked.cluster, num_train_samples=asked.num_train_samples)
            micro = plan.layout.micro_size
            work = asked.work
            key = (micro, plan.config.zero.stage == 3)
            if key not in self._works:
                self._works[key] = work_of(plan) if work is None else work.of_samples(micro)
            found = self._works[key]
            if (
                self.is_quick
                and found
                and least_bytes(plan, found) > (asked.target.memory_bytes or inf)
            ):
                return "too large, whatever the batch"
            return judge(plan, asked.target, settings=settings, work=found)
        except ConfigError as error:
            problem = error.problems[0]
            return f"{problem.key}: {problem.reason} [{problem.kind}]"
        except NotEstimatedError as error:
            self.unknown = self.unknown or error
            return f"{_UNKNOWN}: {error}"

    def fits(self, candidate: Candidate) -> bool:
        """Check whether the device, and the host with its other ranks, hold it."""
        limit = self.asked.target.usable_bytes(candidate.memory)
        host = self.asked.target.host_bytes
        on_host = sum(candidate.memory.host.values()) * self.asked.cluster.devices_per_host
        return (limit is None or candidate.peak_bytes <= limit) and (
            host is None or on_host <= host
        )

    def losers(self) -> Iterator[Loser]:
        """Those that fit on no device, the smallest first, then those that are refused, by
        reason.
        """
        large: dict[str, list[Settings]] = {}
        for found in sorted(self.too_large, key=lambda found: found.peak_bytes):
            layout = found.plan.layout
            size = size_text(found.peak_bytes)
            why = f"{size} with micro-batches of {layout.micro_size}: {fullest(found.memory)}"
            large.setdefault(why, []).append({key: found.settings[key] for key in STRATEGY})
        for why, those in large.items():
            yield Loser(_common(those), why, "too-large", len(those))
        for why, those in self._refused.items():
            yield Loser(_common(those), why, "refused", len(those))


def _is_better(one: Candidate, other: Candidate, *, by: float) -> bool:
    """Check whether one is faster, by a factor where speeds are known."""
    if one.samples_per_second is None or other.samples_per_second is None:
        return _rank(one) < _rank(other)
    return one.samples_per_second > by * other.samples_per_second


def least_bytes(plan: Plan, work: ModelWork) -> int:
    """Bytes that the fullest rank takes at least, whatever the batch: its share of weights,
    optimizer state and, at stages 0 and 1, of gradients. The fullest stage of a pipeline has no
    less than the mean.
    """
    by = Parallelism.from_plan(plan)
    ranks = by.data * by.sequence
    weights = 0 if by.weights_offloaded else by.weight_bytes / (ranks if by.zero_stage == 3 else 1)
    each = weights + (by.weight_bytes if by.zero_stage < 2 else 0)
    # that of the user's own may have none
    if not by.is_offloaded and hasattr(plan.config.optimizer, "kind"):
        each += by.state_bytes / (ranks if by.zero_stage else 1)
    return int(each * work.num_params / by.pipe / by.tensor)


def search_more_devices(asked: Request, *, most: int = 16_384) -> SearchResult | None:
    """The search on the smallest cluster of twice as many hosts, or four times and so on, on which
    something fits.
    """
    hosts = 2 * asked.cluster.num_hosts
    while hosts * asked.cluster.devices_per_host <= most:
        found = search(
            replace(asked, cluster=replace(asked.cluster, num_hosts=hosts)), is_quick=True
        )
        if found.ranked:
            return found
        hosts *= 2
    return None


def nearest_plan(
    config: RunConfig, cluster: Cluster, *, num_train_samples: int | None = None
) -> tuple[str, Plan] | None:
    """The plan that is nearest to one that cannot be, and what it changes, in words; None where
    none is near.

    Tried in this order: another micro-batch, another global size, fewer pipeline stages, fewer
    devices.
    """
    batch = config.batch
    pipe = config.parallel.pipe
    tries: list[tuple[Settings, Cluster]] = []
    for stages in (
        pipe,
        *(count for count in range(pipe - 1, 0, -1) if cluster.world_size % count == 0),
    ):
        below = (batch.global_size or 0) // (ranks := max(cluster.world_size // stages, 1)) * ranks
        if batch.global_size is None:
            sizes = []
        else:
            sizes = [{GLOBAL: below or ranks}, {GLOBAL: below + ranks}]
        own = {} if stages == pipe else {PIPE: stages}
        free = {MICRO: None, ACCUMULATION: None}
        tries += [
            ({**own, **size, **more}, cluster) for size in ({}, *sizes) for more in ({}, free)
        ]
    fewer = range(cluster.devices_per_host - 1, 0, -1)
    tries += [({}, replace(cluster, devices_per_host=count)) for count in fewer]
    for settings, where in tries:
        with suppress(ConfigError):
            changed = with_settings(config, settings)
            plan = make_plan(changed, where, num_train_samples=num_train_samples)
            shown = {key: value for key, value in settings.items() if value}
            micro = plan.layout.micro_size
            shown |= (
                {MICRO: micro}
                if MICRO in settings and batch.micro_size not in (None, micro)
                else {}
            )
            return settings_text(shown) or (
                str(where) if where != cluster else str(plan.layout)
            ), plan
    return None


def _ranked(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates, the best one first; of those that the estimate cannot tell from the fastest,
    the plainest.
    """
    most = max((each.samples_per_second or 0.0 for each in found), default=0.0)

    def order(candidate: Candidate) -> tuple[float, ...]:
        speed, *costs = _rank(candidate)
        return (-most if most and -speed * _TIE >= most else speed, *costs, speed)

    return sorted(found, key=order)


def _rank(candidate: Candidate) -> tuple[float, ...]:
    """Order of candidates, the best one first: by speed, else by what costs time, traffic and
    memory.
    """
    config = candidate.plan.config
    speed = candidate.samples_per_second
    costs = (config.zero.offload_optimizer.device != "none", bool(config.training.recompute_every))
    layout = candidate.plan.layout
    together = layout.world_size // layout.data_parallel_size
    order = (
        *costs,
        together,
        candidate.traffic_bytes,
        layout.accumulation_steps,
        candidate.peak_bytes,
    )
    return (-speed if speed is not None else inf, *order)


def _strategies(asked: Request) -> Iterator[Settings]:
    """Every combination of what is free beside the batch."""
    config = asked.config
    free = asked.free
    offload = config.zero.offload_optimizer.device
    recompute = config.training.recompute_every
    values: dict[str, Sequence[Any]] = {
        STAGE: range(4) if STAGE in free else [config.zero.stage],
        OFFLOAD: ["none", "cpu"] if OFFLOAD in free and offload != "nvme" else [offload],
        RECOMPUTE: sorted({0, 1, recompute}) if RECOMPUTE in free else [recompute],
    }
    for chosen, sizes in product(product(*values.values()), _sizes(asked)):
        yield dict(zip(values, chosen, strict=True)) | sizes


def _sizes(asked: Request) -> Iterator[dict[str, int]]:
    """Ranks that train on the same samples: in one direction at a time, or as the config has it.

    Tensor and sequence groups stay on a host: what they send between is on the way of every block.
    """
    config = asked.config
    free = asked.free
    given = {key: getattr(config.parallel, key.rpartition(".")[2]) for key in SIZES}
    yield given
    plain = {key: 1 if key in free else size for key, size in given.items()}
    heads = int(getattr(config.model, "num_kv_heads", 0) or getattr(config.model, "num_heads", 1))
    on_host = [
        size
        for size in _powers(asked.cluster.devices_per_host)
        if asked.cluster.devices_per_host % size == 0
    ]
    choices = {PIPE: _pipes(config, asked.cluster), **dict.fromkeys((TENSOR, SEQUENCE), on_host)}
    for key in SIZES:
        for size in choices[key] if key in free else []:
            if (
                plain | {key: size} != given
                and (size > 1 or key == PIPE)
                and (key == PIPE or heads % size == 0)
            ):
                yield plain | {key: size}


def _pipes(config: RunConfig, cluster: Cluster) -> list[int]:
    """Numbers of stages that divide the ranks and that the model has layers for; its own where that
    is not known.
    """
    most = min(num_layers(config.model) or 1, cluster.world_size)
    divisors = {pipe for pipe in range(1, most + 1) if cluster.world_size % pipe == 0}
    return sorted(divisors | {config.parallel.pipe})


def _batches(asked: Request, strategy: Settings, *, grows: bool) -> Iterator[Settings]:
    """Micro-batches and their number in a step, the smallest first; whether they divide is the
    layout's to judge.
    """
    batch = asked.config.batch
    pipe = strategy[PIPE]
    free = asked.free
    together = prod(strategy[key] for key in SIZES)
    if MICRO not in free:
        yield {}
        return
    fixed = None if ACCUMULATION in free else batch.accumulation_steps
    if batch.micro_size:
        given = {batch.micro_size}
    else:
        given = set[int]()
    if batch.global_size is not None:
        share = max(batch.global_size * together // asked.cluster.world_size, 1)
        if fixed:
            sizes = {max(share // fixed, 1)}
        else:
            sizes = {share, *_powers(share), *given}
        for size in sorted(size for size in sizes if fixed or share % size == 0):
            yield {MICRO: size, ACCUMULATION: fixed or share // size}
        return
    steps = fixed or batch.accumulation_steps or (1 if pipe == 1 else _PER_STAGE * pipe)
    for size in sorted(
        {*_powers(_LARGEST_MICRO if grows else batch.micro_size or DEFAULT_MICRO_SIZE), *given}
    ):
        yield {MICRO: size, ACCUMULATION: steps}


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def find_knob(
    plan: Plan, target: Hardware | None = None, *, work: ModelWork | None = None
) -> Knob | None:
    """Find the setting beside the strategy that frees most on the fullest rank; None where none
    frees one part in a hundred.
    """
    planned = judge(plan, work=work).peak_bytes
    found = []
    machine = target.machine if target else None
    if machine is None or "bf16" in machine.device.flops_per_second:
        half = "bf16"
    else:
        half = "fp16"
    for key, before, after in knobs(plan, half=half):
        freed = (
            planned - each.peak_bytes for each in alternatives(plan, [{key: after}], work=work)
        )
        found += [Knob(key, before, after, size) for size in freed]
    best = max(found, key=lambda knob: knob.freed_bytes, default=None)
    if best is not None and best.freed_bytes >= planned / 100:
        return best
    return None


def _number(value: Any) -> str:
    if isinstance(value, int) and value > 9999:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)


def fullest(memory: Memory) -> str:
    """The largest component at the fullest moment, in words."""
    name, size = max(memory.moments[memory.peak].items(), key=lambda item: item[1])
    return f"{name} {size_text(size)}"


def _common(those: Sequence[Settings]) -> Settings:
    """The settings that all of them share."""
    return {
        key: value
        for key, value in those[0].items()
        if all(other.get(key) == value for other in those)
    }
