"""Search for a strategy: which ZeRO stage, offload, recomputation, micro-batch and pipeline serve a
run best.

Every candidate is a run config that validation and rules accept on its cluster; there is no second
set of rules. A candidate costs about two milliseconds, so that few are left out: micro-batches
beyond the first that does not fit, because memory grows with them, and all micro-batches of a
strategy that a rule refuses for every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, Literal

from framework.errors import ConfigError
from framework.plan.alternatives import settings_text, size_text, with_settings
from framework.plan.candidate import Candidate, fullest, judge, least_bytes, strategy_of
from framework.plan.hardware import Hardware
from framework.plan.layout import DEFAULT_MICRO_SIZE
from framework.plan.memory import NotEstimatedError
from framework.plan.plan import Plan, make_plan
from framework.plan.search_space import (
    ACCUMULATION,
    EXPERT,
    OFFLOAD,
    PARAMS,
    PIPE,
    SIZES,
    STAGE,
    Request,
    Settings,
    all_batches,
    all_strategies,
    is_combined,
    unusual,
)
from framework.plan.work import work_of

# Factor of speed that a larger micro-batch has to gain, where its size is free: less makes no
# difference, as estimates are not that exact.
_LEAST_GAIN: Final = 1.02
# Estimates this close are equal: of such candidates the one with most free memory comes first.
_TIE: Final = 1.02
# Share of a device by which memory has to differ to count where speeds are equal.
_LEAST_MEMORY: Final = 0.05


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
        if self.smallest is not None:
            return self._lack(self.smallest)
        if self.losers:
            return self.losers[0].why
        return "there is nothing to choose from"

    def _lack(self, smallest: Candidate) -> str:
        """Describe what the smallest candidate lacks: memory of the device, or of the host."""
        memory = smallest.memory
        limit = self.target.usable_bytes(memory)
        if limit is None or smallest.peak_bytes <= limit:
            return smallest.lacking(self.target)
        least = settings_text(unusual(strategy_of(smallest)))
        takes = f"the least is {size_text(smallest.peak_bytes)}, with {least}: {fullest(memory)}"
        return f"{takes}; {self.target.usable_text(memory)}"


def search(request: Request, *, is_quick: bool = False) -> SearchResult:
    """Rank the strategies of a run on a cluster: by samples per second, or by costs if speed is not
    known.

    Args:
        request: what to search for.
        is_quick: drop what cannot fit without an estimate; what takes least is not known then.

    Raises:
        NotEstimatedError: the model's memory is not known.
    """
    evaluator = _Evaluator(request, is_quick=is_quick)
    candidates: list[Candidate] = []
    for for_length in (False, True):
        if candidates:
            break
        for strategy in all_strategies(request, for_length=for_length):
            if evaluator.is_idle(strategy):
                continue
            best = evaluator.best(strategy)
            if best is not None:
                candidates.append(best)
    smallest = None
    if not candidates:
        smallest = evaluator.smallest()
    return SearchResult(
        request.target,
        tuple(_ranked(candidates, request.target)),
        tuple(evaluator.losers()),
        smallest,
    )


_TOO_LARGE: Final = "too large with any batch"


def _states_of(strategy: Settings) -> tuple[Any, ...]:
    """Return what decides the bytes of a strategy's weights, gradients and optimizer state."""
    return tuple(strategy.get(key) for key in (OFFLOAD, PARAMS, *_PLACES))


# Keys that decide which ranks hold what.
_PLACES: Final = (STAGE, *SIZES, EXPERT)


def _place_of(strategy: Settings) -> tuple[Any, ...]:
    return tuple(strategy.get(key) for key in _PLACES)


@dataclass(frozen=True)
class _Refusal:
    """The reason why settings are no candidate.

    Attributes:
        why: the reason, in words.
        is_of_batch: whether another micro-batch may be a candidate.
        is_of_place: whether it is one of the stage or of sizes, however much is offloaded or
            computed again.
    """

    why: str
    is_of_batch: bool = False
    is_of_place: bool = False


@dataclass
class _Trials:
    """Candidates of one strategy with different micro-batches.

    Attributes:
        best: the best one that fits.
        smallest: the smallest one that does not fit.
        refusals: why others are no candidates.
    """

    best: Candidate | None = None
    smallest: Candidate | None = None
    refusals: list[_Refusal] = field(default_factory=list)

    def take(self, candidate: Candidate, *, gain: float) -> bool:
        """Take a candidate that fits as the best one if it is faster by the factor `gain`; return
        whether it is.
        """
        if self.best is None or _is_better(candidate, self.best, by=gain):
            self.best = candidate
            return True
        return False


class _Evaluator:
    """Candidates of one request on one cluster, and, collected meanwhile, the reasons why others
    lost.

    Attributes:
        too_large: of each strategy that fits with no batch, the smallest candidate.
        unknown: the first reason why the memory of a plan is not known.
    """

    def __init__(self, request: Request, *, is_quick: bool) -> None:
        self.request = request
        self.is_quick = is_quick
        self.too_large: list[Candidate] = []
        self.unknown: NotEstimatedError | None = None
        self._refused: dict[str, list[Settings]] = {}
        self._refused_places: dict[tuple[Any, ...], str] = {}
        self._fitting: set[tuple[Any, ...]] = set()  # `_place_of` strategies that fit
        self._beyond: set[tuple[Any, ...]] = set()  # `_states_of` strategies that are `_TOO_LARGE`

    def best(self, strategy: Settings) -> Candidate | None:
        """Return the best candidate of one strategy that fits; None if none does, and the reason is
        kept for `losers`.
        """
        place = _place_of(strategy)
        if _states_of(strategy) in self._beyond:
            self._refuse(strategy, _TOO_LARGE)
            return None
        if place in self._refused_places:
            self._refuse(strategy, self._refused_places[place])
            return None
        if self.request.config.batch.global_size is None:
            trials = self._grow(strategy)
        else:
            trials = self._divide(strategy)
        if trials.best is not None:
            self._fitting.add(place)
        elif trials.smallest is not None:
            self.too_large.append(trials.smallest)
        elif trials.refusals:
            self._take_refusal(strategy, trials.refusals[0])
        return trials.best

    def is_idle(self, strategy: Settings) -> bool:
        """Check whether a strategy takes time alone, since a plainer one of the same stage and
        sizes fits: weights on the host, and, where ranks share the model in several ways, all that
        is offloaded or computed again.
        """
        if strategy.get(PARAMS) != "cpu" and not is_combined(strategy):
            return False
        return _place_of(strategy) in self._fitting

    def _take_refusal(self, strategy: Settings, refusal: _Refusal) -> None:
        """Keep the reason why a strategy is refused with any batch, for others as well that share
        it.
        """
        self._refuse(strategy, refusal.why)
        if refusal.why == _TOO_LARGE:
            self._beyond.add(_states_of(strategy))
        elif refusal.is_of_place and strategy.get(PARAMS) != "cpu":  # it may refuse these alone
            self._refused_places[_place_of(strategy)] = refusal.why

    def _refuse(self, strategy: Settings, why: str) -> None:
        self._refused.setdefault(why, []).append(strategy)

    def _grow(self, strategy: Settings) -> _Trials:
        """Try larger micro-batches, as long as they fit and gain speed."""
        trials = _Trials()
        has_limit = self.request.target.memory_bytes is not None
        for sizes in all_batches(self.request, strategy, grows=has_limit):
            candidate = self.candidate({**strategy, **sizes})
            if isinstance(candidate, _Refusal):
                trials.refusals.append(candidate)
                if candidate.is_of_batch:
                    continue
                break
            if not self.fits(candidate):
                trials.smallest = candidate
                break  # no larger micro-batch will fit
            is_better = trials.take(candidate, gain=_LEAST_GAIN)
            if not self._grows_on(candidate, is_better=is_better):
                break
        return trials

    def _grows_on(self, candidate: Candidate, *, is_better: bool) -> bool:
        """Check whether a larger micro-batch may be better still."""
        if candidate.time is not None:
            return is_better
        # Without speeds the gain is not known: the usual micro-batch is enough.
        plain = self.request.config.batch.fixed_micro_size or DEFAULT_MICRO_SIZE
        return candidate.plan.layout.micro_size < plain

    def _divide(self, strategy: Settings) -> _Trials:
        """Try all divisions of a fixed global size into micro-batches: more of them may take more
        memory.
        """
        trials = _Trials()
        fitting: list[Candidate] = []
        most_steps = 1 if self.is_quick else strategy[PIPE]
        has_limit = self.request.target.memory_bytes is not None
        for sizes in all_batches(self.request, strategy, grows=has_limit):
            smallest = trials.smallest
            if smallest is not None and sizes.get(ACCUMULATION, 1) > most_steps:
                # It takes more than `smallest`: its micro-batches are larger, as many are in
                # flight, and gradients are kept as well.
                continue
            candidate = self.candidate({**strategy, **sizes})
            if isinstance(candidate, _Refusal):
                trials.refusals.append(candidate)
                if candidate.is_of_batch:
                    continue
                break
            if self.fits(candidate):
                fitting.append(candidate)
            elif smallest is None or candidate.peak_bytes < smallest.peak_bytes:
                trials.smallest = candidate
        if fitting:
            trials.best = _ranked(fitting, self.request.target)[0]
        return trials

    def candidate(self, settings: Settings) -> Candidate | _Refusal:
        """Return the candidate with these settings, or the reason why there is none."""
        request = self.request
        try:
            config = with_settings(request.config, settings)
            plan = make_plan(config, request.cluster, num_train_samples=request.num_train_samples)
            is_rough = self.is_quick or is_combined(settings)
            if is_rough and self._is_beyond(plan):
                return _Refusal(_TOO_LARGE)
            return judge(plan, request.target, settings=settings, work=request.work)
        except ConfigError as error:
            problem = error.problems[0]
            why = f"{problem.key}: {problem.reason} [{problem.kind}]"
            return _Refusal(
                why,
                is_of_batch=problem.key.startswith("batch."),
                is_of_place=problem.key in _PLACES,
            )
        except NotEstimatedError as error:
            self.unknown = self.unknown or error
            return _Refusal(f"its memory is not known: {error}", is_of_batch=True)

    def _is_beyond(self, plan: Plan) -> bool:
        """Check whether a plan is known to take more than a device has, with any batch."""
        work = self.request.work or work_of(plan)
        if not work:
            return False
        memory_bytes = self.request.target.memory_bytes or inf
        return least_bytes(plan, work) > memory_bytes * (1 - plan.config.run.memory_margin)

    def smallest(self) -> Candidate | None:
        """Return the smallest candidate of those that do not fit; None if none is known.

        Raises:
            NotEstimatedError: the search is not quick, and no memory is known.
        """
        smallest = min(self.too_large, key=lambda large: large.peak_bytes, default=None)
        if smallest is None and self.unknown is not None and not self.is_quick:
            raise self.unknown
        return smallest

    def fits(self, candidate: Candidate) -> bool:
        """Check whether the device holds a candidate, and the host holds all its ranks' parts."""
        return not candidate.lacking(self.request.target)

    def losers(self) -> Iterator[Loser]:
        """Yield the strategies that fit on no device, the smallest first, then the refused ones;
        those with the same reason are one loser.
        """
        for why, strategies in self._too_large_by_reason().items():
            yield Loser(_common(strategies), why, "too-large", len(strategies))
        for why, strategies in self._refused.items():
            kind: Literal["refused", "too-large"] = "refused"
            if why == _TOO_LARGE:
                kind = "too-large"
            yield Loser(_common(strategies), why, kind, len(strategies))

    def _too_large_by_reason(self) -> dict[str, list[Settings]]:
        """Map reasons, in words, to the strategies that fit on no device, the smallest first."""
        too_large: dict[str, list[Settings]] = {}
        for candidate in sorted(self.too_large, key=lambda large: large.peak_bytes):
            why = self._why_too_large(candidate)
            too_large.setdefault(why, []).append(strategy_of(candidate))
        return too_large

    def _why_too_large(self, candidate: Candidate) -> str:
        """Describe what a candidate that does not fit takes of a device, or of a host."""
        target = self.request.target
        limit = target.usable_bytes(candidate.memory)
        if limit is None or candidate.peak_bytes <= limit:
            return candidate.lacking(target)
        size = size_text(candidate.peak_bytes)
        micro_size = candidate.plan.layout.micro_size
        return f"{size} with micro-batches of {micro_size}: {fullest(candidate.memory)}"


def _is_better(candidate: Candidate, best: Candidate, *, by: float) -> bool:
    """Check whether a candidate is faster than the best one, by a factor if speeds are known."""
    if candidate.time is None or best.time is None:
        return candidate.speed_to_rank > best.speed_to_rank
    return candidate.speed_to_rank > by * best.speed_to_rank


def _ranked(candidates: Sequence[Candidate], target: Hardware) -> list[Candidate]:
    """Sort candidates, the best one first: the fastest ones, and of those that are as fast within
    the estimate's error the one with most free memory. Ones without a speed come last.
    """
    fastest = max((candidate.speed_to_rank for candidate in candidates), default=0.0)
    device_bytes = target.memory_bytes
    if device_bytes is None:
        device_bytes = max((candidate.peak_bytes for candidate in candidates), default=1)

    def order(candidate: Candidate) -> tuple[float, ...]:
        speed = candidate.speed_to_rank
        is_tied = speed * _TIE >= fastest
        return (-fastest if is_tied else -speed, *_costs(candidate, device_bytes), -speed)

    return sorted(candidates, key=order)


def _costs(candidate: Candidate, device_bytes: int) -> tuple[float, ...]:
    """Return what decides between candidates of equal speed: what the host has to do, the memory in
    steps of a twentieth of a device, and how plain a candidate is.
    """
    config = candidate.plan.config
    layout = candidate.plan.layout
    return (
        config.zero.offload_param.device != "none",
        config.zero.offload_optimizer.device != "none",
        round(candidate.peak_bytes / (_LEAST_MEMORY * device_bytes)),
        bool(config.training.recompute_every),
        layout.world_size // layout.data_parallel_size,
        config.zero.stage,
        layout.accumulation_steps,
        candidate.peak_bytes,
    )


def _common(strategies: Sequence[Settings]) -> Settings:
    """Return the settings that all strategies share."""
    common = dict(strategies[0])
    for strategy in strategies:
        common = {key: value for key, value in common.items() if strategy.get(key) == value}
    return common
