"""Cut of a model of layers into pipeline stages, and the weight of each stage. Pure arithmetic on a
list of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from framework.config.precision import FP16
from framework.config.run_config import RunConfig
from framework.config.training import Parallel
from framework.errors import Problem, counted

Bounds = tuple[int, ...]
MayBe = Callable[[int, int], bool]
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class LayerFacts:
    """Facts about one layer before it trains.

    Attributes:
        name: its name, and the prefix of its weights' names.
        kind: class name of its module.
        num_params: trainable parameters.
        param_bytes: bytes of all its parameters and buffers, as they are built.
        output_bytes: bytes of its output for one micro-batch, which cross to the next stage; None
            when not known.
        flops: floating-point operations of one micro-batch, forward; None when not known.
        seconds: forward and backward of one micro-batch; None when not measured.
        tied: key of the layers that share its weights; empty for none.
        may_start_stage: whether a stage may begin with it.
        groups: the optimizer's parameter groups that its trained weights are in.
    """

    name: str
    kind: str
    num_params: int
    param_bytes: int = 0
    output_bytes: int | None = None
    seconds: float | None = None
    flops: int | None = None
    tied: str = ""
    may_start_stage: bool = True
    groups: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: the layers from `start` up to, but without, `stop`."""

    start: int
    stop: int
    num_params: int
    param_bytes: int
    output_bytes: int | None
    seconds: float | None
    flops: int | None = None


@dataclass(frozen=True)
class StageTable:
    """The layers of a model and where they are cut.

    Attributes:
        layers: in order.
        bounds: stage s runs the layers ``bounds[s]`` up to, but without, ``bounds[s + 1]``.
    """

    layers: tuple[LayerFacts, ...]
    bounds: Bounds

    def stages(self) -> list[Stage]:
        """Return the weight of every stage; tied layers are counted once on each stage that has
        them.
        """
        return [self._stage(start, stop) for start, stop in pairwise(self.bounds)]

    def _stage(self, start: int, stop: int) -> Stage:
        layers = self.layers[start:stop]
        num_params = 0
        param_bytes = 0
        counted_ties = set()
        for layer in layers:
            if layer.tied not in counted_ties:
                num_params += layer.num_params
                param_bytes += layer.param_bytes
            if layer.tied:
                counted_ties.add(layer.tied)
        return Stage(
            start,
            stop,
            num_params=num_params,
            param_bytes=param_bytes,
            output_bytes=None if stop == len(self.layers) else layers[-1].output_bytes,
            seconds=_total([layer.seconds for layer in layers]),
            flops=_total([layer.flops for layer in layers]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values, as written to ``plan.json``."""
        first_of = {layer.tied: layer.name for layer in reversed(self.layers) if layer.tied}
        tied = {}
        for layer in self.layers:
            if layer.tied and first_of[layer.tied] != layer.name:
                tied[layer.name] = first_of[layer.tied]
        return {
            "layers": [layer.name for layer in self.layers],
            "tied": tied,
            "tied_keys": first_of,
            "bounds": list(self.bounds),
            "stages": [asdict(stage) for stage in self.stages()],
        }

    def lines(self) -> Iterator[str]:
        """Yield one line per stage for a person; a stage that was not timed has its share of the
        FLOPs.
        """
        total = sum(layer.flops or 0 for layer in self.layers)
        for number, stage in enumerate(self.stages()):
            first = self.layers[stage.start].name
            last = self.layers[stage.stop - 1].name
            count = stage.stop - stage.start
            names = first if count == 1 else f"{first} .. {last}"
            span = f"{counted(count, 'layer')} ({names})"
            parts = [span, f"{stage.num_params:,} parameters", f"{stage.param_bytes / 1e6:,.1f} MB"]
            if stage.seconds is not None:
                parts.append(f"{1000 * stage.seconds:,.2f} ms per micro-batch")
            elif stage.flops is not None and total:
                parts.append(f"{stage.flops / total:.0%} of the computation by its FLOPs")
            if stage.output_bytes is not None:
                parts.append(f"sends {stage.output_bytes / 1e6:,.2f} MB per micro-batch")
            yield f"stage {number}: {', '.join(parts)}"


def _total(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    if len(known) == len(values):
        return sum(known)
    return None


def cut(
    layers: Sequence[LayerFacts], parallel: Parallel, *, same_groups: bool = False
) -> StageTable | Problem:
    """Decide where the stages begin, or return the problem.

    Args:
        layers: of the model.
        parallel: how many stages, and how they are chosen.
        same_groups: every stage must have weights of every parameter group. ZeRO and fp16 without
            it reduce the gradient norm once per group, over all stages
            (runtime/zero/stage_1_and_2.py `scaled_global_norm`, runtime/fp16/unfused_optimizer.py
            `step`): stages with one group and stages with two would wait for each other for ever.
    """
    names = [layer.name for layer in layers]
    problem = next(stage_problems(parallel, len(layers), names), None)
    if problem:
        return problem
    all_groups = _has_all_groups(layers)
    if parallel.stages is not None:
        bounds = _explicit(layers, parallel)
    else:
        bounds = _chosen(layers, parallel, may_be=all_groups if same_groups else None)
    if isinstance(bounds, Problem):
        return bounds
    table = StageTable(tuple(layers), bounds)
    for number, stage in enumerate(table.stages()):
        stage_layers = layers[stage.start : stage.stop]
        if not stage.num_params:
            return _without_parameters(number, stage_layers, parallel)
        if same_groups and not all_groups(stage.start, stage.stop):
            return _with_one_group(number, stage_layers)
    return table


def _without_parameters(
    number: int, stage_layers: Sequence[LayerFacts], parallel: Parallel
) -> Problem:
    key = "parallel.partition"
    value: Any = parallel.partition
    if parallel.stages:
        key = "parallel.stages"
        value = parallel.stages
    stage_names = ", ".join(layer.name for layer in stage_layers)
    reason = f"stage {number} ({stage_names}) would have nothing to train"
    fix = "set parallel.partition: parameters, or fewer stages"
    return Problem("stage-without-parameters", reason, fix, key, value)


def _with_one_group(number: int, stage_layers: Sequence[LayerFacts]) -> Problem:
    only = " and ".join(sorted(_all_groups(stage_layers)))
    span = f"stage {number} ({stage_layers[0].name} .. {stage_layers[-1].name})"
    key = "optimizer.weight_decay_on"
    reason = f"{span} has only {only}, and with ZeRO or in fp16 every stage must have both"
    return Problem(
        "stage-with-one-group", reason, f"set {key}: all, or fewer stages", key, "matrices"
    )


def needs_same_groups(config: RunConfig) -> bool:
    """Check whether every stage must have weights of both groups of `parameter_groups`, matrices
    and others: with ZeRO and in fp16 DeepSpeed reduces the gradient norm once per group over all
    stages.
    """
    optimizer = config.optimizer
    if not getattr(optimizer, "weight_decay", 0.0):
        return False
    if getattr(optimizer, "weight_decay_on", "all") != "matrices":
        return False
    return config.zero.stage > 0 or isinstance(config.precision, FP16)


def stage_problems(
    parallel: Parallel, num_layers: int | None, names: Sequence[str] = ()
) -> Iterator[Problem]:
    """Find what is wrong with the cut that a config sets; `num_layers` None: not known yet."""
    stages = parallel.stages
    pipe = parallel.pipe
    key = "parallel.stages"
    if num_layers is not None and num_layers < pipe:
        reason = f"the model has only {counted(num_layers, 'layer')}"
        fix = f"set parallel.pipe: {num_layers}"
        if num_layers > 1:
            fix += " or less"
        yield Problem("pipe-exceeds-layers", reason, fix, "parallel.pipe", pipe)
    if stages is None:
        fix = "write for example type:Linear"
        method = parallel.partition
        yield from pattern_problem(
            method.removeprefix("type:"), key="parallel.partition", value=method, fix=fix
        )
    elif num_layers is not None and len(stages) != num_layers:
        reason = f"it names {len(stages)} layers and the model has {num_layers}"
        if names:
            reason += f": {', '.join(names)}"
        yield Problem("stages-differ-from-layers", reason, "write one stage for each", key, stages)
    elif sorted(stages) != stages or set(stages) != set(range(pipe)):
        wanted = ", ".join(map(str, range(pipe)))
        reason = f"the stages of {pipe} are {wanted}, each for some layers in a row"
        yield Problem(
            "stages-out-of-order",
            reason,
            "write them in ascending order, none left out",
            key,
            stages,
        )


def pattern_problem(pattern: str, *, key: str, value: str, fix: str) -> Iterator[Problem]:
    """Find a text that is no regular expression."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield Problem("bad-pattern", f"it is no regular expression: {error}", fix, key, value)


def _explicit(layers: Sequence[LayerFacts], parallel: Parallel) -> Bounds | Problem:
    stages = parallel.stages or []
    starts = [stages.index(number) for number in range(parallel.pipe)]
    for start in starts[1:]:
        if not layers[start].may_start_stage:
            reason = f"a stage cannot begin with {layers[start].name}"
            fix = f"put it on the stage of {layers[start - 1].name}"
            return Problem("stage-cannot-start", reason, fix, "parallel.stages", stages)
    return (*starts, len(layers))


def _all_groups(layers: Sequence[LayerFacts]) -> set[str]:
    groups = set[str]()
    for layer in layers:
        groups |= layer.groups
    return groups


def _has_all_groups(layers: Sequence[LayerFacts]) -> MayBe:
    """Return a check whether a stage, from its first layer up to but without another one, has
    weights of all groups that the model has.
    """
    counts = []  # for each group: how many of the first layers have it
    for group in _all_groups(layers):
        has_group = [group in layer.groups for layer in layers]
        counts.append(list(accumulate(has_group, initial=0)))

    def may_be(start: int, stop: int) -> bool:
        return all(count[start] < count[stop] for count in counts)

    return may_be


def _chosen(
    layers: Sequence[LayerFacts], parallel: Parallel, *, may_be: MayBe | None
) -> Bounds | Problem:
    pipe = parallel.pipe
    costs = _costs(layers, parallel)
    if isinstance(costs, Problem):
        return costs
    may_start = [layer.may_start_stage for layer in layers]
    bounds = balanced(costs, pipe, may_start=may_start, may_be=may_be)
    if bounds is None and may_be is not None:  # no cut will do: the caller reports one of them
        bounds = balanced(costs, pipe, may_start=may_start)
    if bounds is None:
        reason = "there are not enough places where a stage may begin"
        return Problem("pipe-exceeds-layers", reason, "set fewer stages", "parallel.pipe", pipe)
    return bounds


def _costs(layers: Sequence[LayerFacts], parallel: Parallel) -> list[float] | Problem:
    """Return what each layer counts for in the cut, by the method of the config."""
    method = parallel.partition
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        costs = [float(bool(pattern.search(layer.kind))) for layer in layers]
        if sum(costs) < parallel.pipe:
            kinds = ", ".join(sorted({layer.kind for layer in layers}))
            reason = f"it matches {int(sum(costs))} layers, fewer than stages"
            fix = f"the layers are of {kinds}"
            return Problem("type-matches-too-few", reason, fix, "parallel.partition", method)
        return costs
    if method == "uniform":
        return [1.0 for _ in layers]
    if method == "measured" and all(layer.seconds is not None for layer in layers):
        return [layer.seconds or 0.0 for layer in layers]
    # also `measured` before the measurement
    return [float(layer.num_params) for layer in layers]


def balanced(
    costs: Sequence[float],
    parts: int,
    *,
    may_start: Sequence[bool] | None = None,
    may_be: MayBe | None = None,
) -> Bounds | None:
    """Cut a row of costs into contiguous, non-empty parts so that their largest sum is as small as
    possible.

    Among the cuts with the same largest sum the one with the smallest sum of squares is taken, so
    that the other parts are even too. Dynamic programming over (items, parts), O(parts x items^2)
    (Linear partition: Skiena, "The Algorithm Design Manual", 3rd ed., section 10.7).

    Returns:
        ``parts + 1`` bounds; None if there is no cut in which each part may start with its first
        item (`may_start`) and may have its items (`may_be`, from one up to but without another).
    """

    @cache
    def fits(start: int, stop: int) -> bool:
        if start > 0 and may_start and not may_start[start]:
            return False
        return may_be is None or may_be(start, stop)

    sums = list(accumulate(costs, initial=0.0))
    ends = range(1, len(sums))
    # End of the last part -> largest sum, sum of squares and bounds of the best cut up to there.
    best: dict[int, tuple[float, float, Bounds]]
    best = {stop: (sums[stop], sums[stop] ** 2, (0, stop)) for stop in ends if fits(0, stop)}
    for _ in range(1, parts):
        cuts: dict[int, tuple[float, float, Bounds]] = {}
        for stop in ends:
            candidates = []
            for start, (largest, squares, bounds) in best.items():
                if start < stop and fits(start, stop):
                    cost = sums[stop] - sums[start]
                    cut_here = (max(largest, cost), squares + cost**2, (*bounds, stop))
                    candidates.append(cut_here)
            if candidates:
                cuts[stop] = min(candidates)
        best = cuts
    if len(costs) in best:
        return best[len(costs)][2]
    return None


def with_seconds(layers: Sequence[LayerFacts], seconds: Sequence[float]) -> list[LayerFacts]:
    """Return the layers with their measured times."""
    return [replace(layer, seconds=time) for layer, time in zip(layers, seconds, strict=True)]
