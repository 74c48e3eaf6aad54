"""Search for a strategy: which ZeRO stage, offload, recomputation, micro-batch and pipeline serve a
run best.

Every candidate is a run config that validation and rules accept on its cluster; there is no second
set of rules. A candidate costs about two milliseconds, so that few are left out: micro-batches
beyond the first that does not fit, because memory grows with them, and all micro-batches of a
strategy that a rule refuses for every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
# Estimates this close are equal: of such candidates the plainest comes first.
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
        name: of the device, such as ``h100-80gb``; empty if no device is named.
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
        """The devices, and where their rates come from."""
        return ", ".join(text for text in (self.name, self.rates) if text)

    def usable_bytes(self, memory: Memory) -> int | None:
        """Return the memory that is left to tensors, beside what else a run takes of a GPU."""
        if self.memory_bytes is None:
            return None
        return max(self.memory_bytes - sum(memory.beside.values()), 0)

    def with_beside(self, memory: Memory, plan: Plan) -> Memory:
        """Add to a plan's memory what it takes of these devices beside its tensors."""
        return replace(memory, beside=beside_tensors(memory, plan, self.name))

    def lacking(self, memory: Memory) -> str:
        """Return the reason why a run does not fit; empty if it does, or if the memory of the
        devices is not known.
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
        config: of the run; keys that are not `free` stay as they are.
        cluster: where it is to run.
        target: its devices; left out: not known.
        free: dotted keys that may be chosen. `batch.global_size` stays if it is set; else
            micro-batches grow as long as doubling them gains 2 %.
        num_train_samples: size of the training data, if it is known.
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
        """Every key of a strategy and its batch, with its value in the plan."""
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
        """Return the part of the choice that differs from a planned candidate's."""
        before = planned.choice
        return {key: value for key, value in self.choice.items() if value != before[key]}

    @property
    def samples_per_second(self) -> float | None:
        """Samples of all devices together; None where the device's speed is not known."""
        if self.time is None:
            return None
        return self.time.samples_per_second

    @cached_property
    def traffic_bytes(self) -> float:
        """Bytes that a rank sends for each sample of the run.

        DeepSpeed 0.19.8 runs at stage 0 an all-reduce in a step, at 1 the gathering of weights as
        well, at 2 an all-reduce for each micro-batch, at 3 two gatherings and a reduction for each
        micro-batch, and a third gathering with recomputation.
        """
        config = self.plan.config
        layout = self.plan.layout
        if layout.num_replicas == 1:
            return 0.0
        steps = layout.accumulation_steps
        width = 2 if config.precision.dtype in ("bf16", "fp16") else 4
        passes_at_stage_3 = 4 if config.training.recompute_every else 3
        passes = (2, 3, 2 * steps + 1, passes_at_stage_3 * steps)[config.zero.stage]
        return width * passes * self.memory.num_params / layout.global_size


@dataclass(frozen=True)
class Loser:
    """Strategies that lost, all for the same reason.

    Attributes:
        settings: dotted keys and values that all of them share.
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
        ranked: the best candidate of each strategy, the best one first; empty if nothing fits.
        losers: why other strategies are not ranked.
        smallest: the candidate that takes least, if nothing fits.
    """

    target: Hardware
    ranked: tuple[Candidate, ...]
    losers: tuple[Loser, ...]
    smallest: Candidate | None = None

    @property
    def block(self) -> str:
        """The one constraint that blocks, in words; empty if something fits."""
        if self.ranked:
            return ""
        if self.smallest is None:
            if self.losers:
                return self.losers[0].why
            return "there is nothing to choose from"
        smallest = self.smallest
        memory = smallest.memory
        limit = self.target.usable_bytes(memory)
        if limit is None or smallest.peak_bytes <= limit:
            ranks = smallest.plan.cluster.devices_per_host
            on_host = sum(memory.host.values())
            return (
                f"{counted(ranks, 'rank')} take {size_text(ranks * on_host)} of a host that "
                f"has {size_text(self.target.host_bytes or 0)}"
            )
        least = settings_text(_strategy_of(smallest))
        takes = f"the least is {size_text(smallest.peak_bytes)}, with {least}: {fullest(memory)}"
        return f"{takes}; {size_text(limit)} are usable"


def _strategy_of(candidate: Candidate) -> dict[str, Any]:
    return {key: candidate.settings[key] for key in STRATEGY}


def search(request: Request, *, is_quick: bool = False) -> SearchResult:
    """Rank the strategies of a run on a cluster: by samples per second, or by costs if speed is not
    known.

    Args:
        request: what to search for.
        is_quick: drop what cannot fit without an estimate; what takes least is not known then.

    Raises:
        NotEstimatedError: the model's memory is not known.
    """
    judges = _Judge(request, is_quick=is_quick)
    candidates = []
    for strategy in _strategies(request):
        best = judges.best(strategy)
        if best is not None:
            candidates.append(best)
    smallest = None
    if not candidates:
        smallest = min(judges.too_large, key=lambda large: large.peak_bytes, default=None)
    is_empty = not candidates and smallest is None
    if is_empty and not is_quick and judges.unknown is not None:
        raise judges.unknown
    return SearchResult(
        request.target, tuple(_ranked(candidates)), tuple(judges.losers()), smallest
    )


def search_fewest_devices(request: Request) -> SearchResult:
    """Search on the smallest part of a cluster on which something fits.

    Parts are whole hosts, or devices of one host in powers of two. If nothing fits, this is the
    search on the whole cluster.

    Raises:
        UsageError: the device's memory is not known.
    """
    cluster = request.cluster
    if request.target.memory_bytes is None:
        raise UsageError("the fewest devices take the device, as --gpu names it")
    for num_hosts, devices_per_host in _smaller_sizes(cluster):
        part = replace(cluster, num_hosts=num_hosts, devices_per_host=devices_per_host)
        smaller = replace(request, cluster=part)
        if search(smaller, is_quick=True).ranked:
            return search(smaller)
    return search(request)


def _smaller_sizes(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield hosts and devices per host of the smaller parts of a cluster, the smallest first."""
    for count in _powers(cluster.devices_per_host):
        if count < cluster.devices_per_host:
            yield 1, count
    for count in _powers(cluster.num_hosts):
        if count < cluster.num_hosts:
            yield count, cluster.devices_per_host


def search_longest_sequence(request: Request) -> SearchResult:
    """Search with the longest sequence on which something fits, to an eighth of its length.

    Raises:
        UsageError: the length is no key of the data, or the device's memory is not known.
    """
    config = request.config
    length = getattr(config.data, "sequence_length", None)
    positions = getattr(config.model, "max_positions", None)
    if request.target.memory_bytes is None:
        raise UsageError("the longest sequence takes the device, as --gpu names it")
    if length is None or positions is None:
        raise UsageError("the longest sequence takes data and a model with a length")

    def at(tokens: int) -> SearchResult:
        lengths = {LENGTH: tokens, POSITIONS: max(tokens, positions)}
        result = search(replace(request, config=with_settings(config, lengths)))
        ranked = [
            replace(candidate, settings={LENGTH: tokens, **candidate.settings})
            for candidate in result.ranked
        ]
        return replace(result, ranked=tuple(ranked))

    best = at(length)
    if not best.ranked:
        return best
    while length < _LONGEST_SEQUENCE:
        longer = at(2 * length)
        if not longer.ranked:
            break
        best = longer
        length *= 2
    step = length
    while step > max(length // 8, 1):
        step //= 2
        longer = at(length + step)
        if longer.ranked:
            best = longer
            length += step
    return best


def judge(
    plan: Plan,
    target: Hardware | None = None,
    *,
    settings: Settings | None = None,
    work: ModelWork | None = None,
) -> Candidate:
    """Estimate what a plan takes.

    Args:
        plan: of the run.
        target: its devices.
        settings: that the plan has and the run's config has not.
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
    if target is not None:
        memory = target.with_beside(memory, plan)
        if target.machine and work:
            with suppress(NotEstimatedError):  # a figure of the device is not published
                time = estimate_time(plan, work, target.machine)
    return Candidate(settings or {}, plan, memory, time)


@dataclass
class _Trials:
    """Candidates of one strategy with different micro-batches.

    Attributes:
        best: the best one that fits.
        smallest: the smallest one that does not fit.
        reasons: why others are no candidates.
    """

    best: Candidate | None = None
    smallest: Candidate | None = None
    reasons: list[str] = field(default_factory=list)


def _depends_on_batch(reason: str) -> bool:
    """Check whether another micro-batch may be a candidate."""
    return reason.startswith(("batch.", _UNKNOWN))


class _Judge:
    """Candidates of one request on one cluster, and the reasons why they lost."""

    def __init__(self, request: Request, *, is_quick: bool) -> None:
        self.request = request
        self.is_quick = is_quick
        self.too_large: list[Candidate] = []
        self.unknown: NotEstimatedError | None = None
        self._refused: dict[str, list[Settings]] = {}
        # Strategies do not change the model, but that stage 3 has linear layers of its own.
        self._works: dict[tuple[int, bool], ModelWork | None] = {}

    def best(self, strategy: Settings) -> Candidate | None:
        """Return the best candidate of one strategy that fits; micro-batches are tried from the
        smallest on.
        """
        if self.request.config.batch.global_size is None:
            trials = self._grow(strategy)
        else:
            trials = self._divide(strategy)
        if trials.best is None and trials.smallest is not None:
            self.too_large.append(trials.smallest)
        elif trials.best is None and trials.reasons:
            self._refused.setdefault(trials.reasons[0], []).append(strategy)
        return trials.best

    def _grow(self, strategy: Settings) -> _Trials:
        """Try larger micro-batches, as long as they fit and gain speed."""
        trials = _Trials()
        batch = self.request.config.batch
        plain = batch.micro_size or DEFAULT_MICRO_SIZE
        has_limit = self.request.target.memory_bytes is not None
        for sizes in _batches(self.request, strategy, grows=has_limit):
            candidate = self.candidate({**strategy, **sizes})
            if isinstance(candidate, str):
                trials.reasons.append(candidate)
                if _depends_on_batch(candidate):
                    continue
                break
            if not self.fits(candidate):
                trials.smallest = candidate
                break  # no larger one will
            if trials.best is None or _is_better(candidate, trials.best, by=_LEAST_GAIN):
                trials.best = candidate
            elif candidate.time is not None:
                break
            if candidate.time is None and candidate.plan.layout.micro_size >= plain:
                break  # what more would gain is not known
        return trials

    def _divide(self, strategy: Settings) -> _Trials:
        """Try all divisions of a fixed global size into micro-batches: more of them may take more
        memory.
        """
        trials = _Trials()
        most_steps = 1 if self.is_quick else strategy[PIPE]
        has_limit = self.request.target.memory_bytes is not None
        for sizes in _batches(self.request, strategy, grows=has_limit):
            smallest = trials.smallest
            if smallest is not None and sizes.get(ACCUMULATION, 1) > most_steps:
                # larger micro-batches, as many of them in flight, and gradients are kept as well
                continue
            candidate = self.candidate({**strategy, **sizes})
            if isinstance(candidate, str):
                trials.reasons.append(candidate)
                if _depends_on_batch(candidate):
                    continue
                break
            if not self.fits(candidate):
                if smallest is None or candidate.peak_bytes < smallest.peak_bytes:
                    trials.smallest = candidate
            elif trials.best is None or _is_better(candidate, trials.best, by=1.0):
                trials.best = candidate
        return trials

    def candidate(self, settings: Settings) -> Candidate | str:
        """Return the candidate, or the reason why there is none."""
        request = self.request
        try:
            config = with_settings(request.config, settings)
            plan = make_plan(config, request.cluster, num_train_samples=request.num_train_samples)
            work = self._work(plan)
            if self.is_quick and work:
                memory_bytes = request.target.memory_bytes or inf
                if least_bytes(plan, work) > memory_bytes:
                    return "too large, whatever the batch"
            return judge(plan, request.target, settings=settings, work=work)
        except ConfigError as error:
            problem = error.problems[0]
            return f"{problem.key}: {problem.reason} [{problem.kind}]"
        except NotEstimatedError as error:
            self.unknown = self.unknown or error
            return f"{_UNKNOWN}: {error}"

    def _work(self, plan: Plan) -> ModelWork | None:
        micro_size = plan.layout.micro_size
        key = (micro_size, plan.config.zero.stage == 3)
        if key not in self._works:
            if self.request.work is None:
                self._works[key] = work_of(plan)
            else:
                self._works[key] = self.request.work.of_samples(micro_size)
        return self._works[key]

    def fits(self, candidate: Candidate) -> bool:
        """Check whether the device, and the host with its other ranks, hold it."""
        target = self.request.target
        limit = target.usable_bytes(candidate.memory)
        if limit is not None and candidate.peak_bytes > limit:
            return False
        on_host = sum(candidate.memory.host.values()) * self.request.cluster.devices_per_host
        return target.host_bytes is None or on_host <= target.host_bytes

    def losers(self) -> Iterator[Loser]:
        """Yield the strategies that fit on no device, the smallest first, then the refused ones;
        those with the same reason are one loser.
        """
        too_large: dict[str, list[Settings]] = {}
        for candidate in sorted(self.too_large, key=lambda large: large.peak_bytes):
            size = size_text(candidate.peak_bytes)
            micro_size = candidate.plan.layout.micro_size
            why = f"{size} with micro-batches of {micro_size}: {fullest(candidate.memory)}"
            too_large.setdefault(why, []).append(_strategy_of(candidate))
        for why, strategies in too_large.items():
            yield Loser(_common(strategies), why, "too-large", len(strategies))
        for why, strategies in self._refused.items():
            yield Loser(_common(strategies), why, "refused", len(strategies))


def _is_better(candidate: Candidate, best: Candidate, *, by: float) -> bool:
    """Check whether a candidate is faster than the best one, by a factor if speeds are known."""
    if candidate.samples_per_second is None or best.samples_per_second is None:
        return _rank(candidate) < _rank(best)
    return candidate.samples_per_second > by * best.samples_per_second


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


def search_more_devices(request: Request, *, most: int = 16_384) -> SearchResult | None:
    """Search on the smallest cluster of 2, 4, 8 ... times as many hosts on which something fits;
    None if nothing fits on `most` devices.
    """
    num_hosts = 2 * request.cluster.num_hosts
    while num_hosts * request.cluster.devices_per_host <= most:
        larger = replace(request.cluster, num_hosts=num_hosts)
        result = search(replace(request, cluster=larger), is_quick=True)
        if result.ranked:
            return result
        num_hosts *= 2
    return None


def nearest_plan(
    config: RunConfig, cluster: Cluster, *, num_train_samples: int | None = None
) -> tuple[str, Plan] | None:
    """Return the plan that is nearest to one that cannot be, and what it changes, in words; None if
    no plan is near.

    Tried in this order: another micro-batch, another global size, fewer pipeline stages, fewer
    devices.
    """
    for settings, tried_cluster in _near(config, cluster):
        with suppress(ConfigError):
            changed = with_settings(config, settings)
            plan = make_plan(changed, tried_cluster, num_train_samples=num_train_samples)
            return _changes_text(config, cluster, settings, plan), plan
    return None


def _near(config: RunConfig, cluster: Cluster) -> Iterator[tuple[Settings, Cluster]]:
    """Yield settings and clusters that are near to what a config has, the nearest first."""
    global_size = config.batch.global_size
    pipe = config.parallel.pipe
    fewer_stages = [stages for stages in range(pipe - 1, 0, -1) if cluster.world_size % stages == 0]
    for stages in [pipe, *fewer_stages]:
        settings: dict[str, Any] = {}
        if stages != pipe:
            settings[PIPE] = stages
        variants = [settings]
        if global_size is not None:
            ranks = max(cluster.world_size // stages, 1)
            below = global_size // ranks * ranks
            variants.append(settings | {GLOBAL: below or ranks})
            variants.append(settings | {GLOBAL: below + ranks})
        for variant in variants:
            yield variant, cluster
            yield variant | {MICRO: None, ACCUMULATION: None}, cluster
    for count in range(cluster.devices_per_host - 1, 0, -1):
        yield {}, replace(cluster, devices_per_host=count)


def _changes_text(config: RunConfig, cluster: Cluster, settings: Settings, plan: Plan) -> str:
    """Return what a plan changes: settings, else the cluster, else the layout."""
    changes = {key: value for key, value in settings.items() if value}
    micro_size = plan.layout.micro_size
    if MICRO in settings and config.batch.micro_size not in (None, micro_size):
        changes[MICRO] = micro_size
    if changes:
        return settings_text(changes)
    if plan.cluster != cluster:
        return str(plan.cluster)
    return str(plan.layout)


def _ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates, the best one first; of those that are as fast as the fastest, within the
    estimate's error, the plainest.
    """
    speeds = [candidate.samples_per_second or 0.0 for candidate in candidates]
    fastest = max(speeds, default=0.0)

    def order(candidate: Candidate) -> tuple[float, ...]:
        negative_speed, *costs = _rank(candidate)
        is_tied = fastest > 0 and -negative_speed * _TIE >= fastest
        return (-fastest if is_tied else negative_speed, *costs, negative_speed)

    return sorted(candidates, key=order)


def _rank(candidate: Candidate) -> tuple[float, ...]:
    """Return a candidate's sort key, the least for the best one: by speed, else by what costs time,
    traffic and memory.
    """
    config = candidate.plan.config
    layout = candidate.plan.layout
    speed = candidate.samples_per_second
    return (
        inf if speed is None else -speed,
        config.zero.offload_optimizer.device != "none",
        bool(config.training.recompute_every),
        layout.world_size // layout.data_parallel_size,
        candidate.traffic_bytes,
        layout.accumulation_steps,
        candidate.peak_bytes,
    )


def _strategies(request: Request) -> Iterator[Settings]:
    """Yield every combination of what is free beside the batch."""
    config = request.config
    offload = config.zero.offload_optimizer.device
    recompute = config.training.recompute_every
    stages: Sequence[int] = [config.zero.stage]
    if STAGE in request.free:
        stages = range(4)
    offloads = [offload]
    if OFFLOAD in request.free and offload != "nvme":
        offloads = ["none", "cpu"]
    recomputes = [recompute]
    if RECOMPUTE in request.free:
        recomputes = sorted({0, 1, recompute})
    for stage, device, every, sizes in product(stages, offloads, recomputes, _sizes(request)):
        yield {STAGE: stage, OFFLOAD: device, RECOMPUTE: every} | sizes


def _sizes(request: Request) -> Iterator[dict[str, int]]:
    """Yield parallel sizes: as in the config, and then with one of them changed at a time.

    Tensor and sequence groups stay on a host: what they send between is on the way of every block.
    """
    config = request.config
    devices = request.cluster.devices_per_host
    sizes = {key: getattr(config.parallel, key.rpartition(".")[2]) for key in SIZES}
    yield sizes
    plain = {key: 1 if key in request.free else size for key, size in sizes.items()}
    heads = int(getattr(config.model, "num_kv_heads", 0) or getattr(config.model, "num_heads", 1))
    if PIPE in request.free:
        for size in _pipes(config, request.cluster):
            if plain | {PIPE: size} != sizes:
                yield plain | {PIPE: size}
    for key in (TENSOR, SEQUENCE):
        if key not in request.free:
            continue
        for size in _powers(devices):
            divides = devices % size == 0 and heads % size == 0
            if size > 1 and divides and plain | {key: size} != sizes:
                yield plain | {key: size}


def _pipes(config: RunConfig, cluster: Cluster) -> list[int]:
    """List the numbers of stages that divide the ranks and that the model has layers for; the
    config's own if the layers are not known.
    """
    most = min(num_layers(config.model) or 1, cluster.world_size)
    divisors = {pipe for pipe in range(1, most + 1) if cluster.world_size % pipe == 0}
    return sorted(divisors | {config.parallel.pipe})


def _batches(request: Request, strategy: Settings, *, grows: bool) -> Iterator[Settings]:
    """Yield micro-batches and their number in a step, the smallest first; whether they divide is
    checked by the layout.
    """
    batch = request.config.batch
    if MICRO not in request.free:
        yield {}
        return
    steps = None if ACCUMULATION in request.free else batch.accumulation_steps
    if batch.global_size is not None:
        ranks_per_sample = prod(strategy[key] for key in SIZES)
        share = max(batch.global_size * ranks_per_sample // request.cluster.world_size, 1)
        yield from _batches_of(share, steps, batch.micro_size)
        return
    pipe = strategy[PIPE]
    if steps is None:
        steps = batch.accumulation_steps or (1 if pipe == 1 else _PER_STAGE * pipe)
    most = _LARGEST_MICRO if grows else batch.micro_size or DEFAULT_MICRO_SIZE
    sizes = set(_powers(most))
    if batch.micro_size:
        sizes.add(batch.micro_size)
    for size in sorted(sizes):
        yield {MICRO: size, ACCUMULATION: steps}


def _batches_of(share: int, steps: int | None, micro_size: int | None) -> Iterator[Settings]:
    """Yield the divisions of a rank's share of a fixed global size."""
    if steps is not None:
        yield {MICRO: max(share // steps, 1), ACCUMULATION: steps}
        return
    sizes = set(_powers(share))
    sizes.add(share)
    if micro_size:
        sizes.add(micro_size)
    for size in sorted(sizes):
        if share % size == 0:
            yield {MICRO: size, ACCUMULATION: share // size}


def _powers(most: int) -> Iterator[int]:
    """Yield the powers of two up to a size."""
    size = 1
    while size <= most:
        yield size
        size *= 2


def find_knob(
    plan: Plan, target: Hardware | None = None, *, work: ModelWork | None = None
) -> Knob | None:
    """Find the setting beside the strategy that frees most on the fullest rank; None if each frees
    less than one part in a hundred.
    """
    planned = judge(plan, work=work).peak_bytes
    machine = target.machine if target else None
    half = "bf16"
    if machine is not None and "bf16" not in machine.device.flops_per_second:
        half = "fp16"
    lowered = []
    for key, before, after in knobs(plan, half=half):
        for alternative in alternatives(plan, [{key: after}], work=work):
            lowered.append(Knob(key, before, after, planned - alternative.peak_bytes))
    best = max(lowered, key=lambda knob: knob.freed_bytes, default=None)
    if best is not None and best.freed_bytes >= planned / 100:
        return best
    return None


def _number(value: Any) -> str:
    if isinstance(value, int) and value > 9999:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)


def fullest(memory: Memory) -> str:
    """Return the largest component at the fullest moment, in words."""
    name, size = max(memory.moments[memory.peak].items(), key=lambda item: item[1])
    return f"{name} {size_text(size)}"


def _common(strategies: Sequence[Settings]) -> Settings:
    """Return the settings that all strategies share."""
    common = dict(strategies[0])
    for strategy in strategies:
        common = {key: value for key, value in common.items() if strategy.get(key) == value}
    return common
