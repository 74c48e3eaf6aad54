"""Cut of a model of layers into pipeline stages, and the weight of each stage. Pure arithmetic on a
list of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from framework.config.groups import pattern_error
from framework.config.precision import FP16
from framework.config.run_config import RunConfig
from framework.config.training import Parallel
from framework.errors import Problem, counted

Bounds = tuple[int, ...]
# Check of a stage: the layers from the first number up to, but without, the second may be one.
MayBe = Callable[[int, int], bool]
Number = TypeVar("Number", int, float)
# End of the last part -> largest sum, sum of squares and bounds of the best cut up to there.
_BestCuts = dict[int, tuple[float, float, Bounds]]


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
        untied = _without_ties(layers)
        return Stage(
            start,
            stop,
            num_params=sum(layer.num_params for layer in untied),
            param_bytes=sum(layer.param_bytes for layer in untied),
            output_bytes=self._sent_bytes(stop),
            seconds=_total([layer.seconds for layer in layers]),
            flops=_total([layer.flops for layer in layers]),
        )

    def _sent_bytes(self, stop: int) -> int | None:
        """Return the bytes that a stage sends to the next one; the last stage sends none."""
        if stop == len(self.layers):
            return None
        return self.layers[stop - 1].output_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values, as written to ``plan.json``."""
        first_of = self._first_of_ties()
        return {
            "layers": [layer.name for layer in self.layers],
            "tied": self._tied_names(first_of),
            "tied_keys": first_of,
            "bounds": list(self.bounds),
            "stages": [asdict(stage) for stage in self.stages()],
        }

    def _first_of_ties(self) -> dict[str, str]:
        """Map the key of each tie to the name of the first layer that has it."""
        return {layer.tied: layer.name for layer in reversed(self.layers) if layer.tied}

    def _tied_names(self, first_of: Mapping[str, str]) -> dict[str, str]:
        """Map each tied layer but the first of its tie to that first one, by name."""
        tied = {}
        for layer in self.layers:
            if layer.tied and first_of[layer.tied] != layer.name:
                tied[layer.name] = first_of[layer.tied]
        return tied

    def lines(self) -> Iterator[str]:
        """Yield one line per stage for a person; a stage that was not timed has its share of the
        FLOPs.
        """
        total = sum(layer.flops or 0 for layer in self.layers)
        for number, stage in enumerate(self.stages()):
            parts = [
                self._span(stage),
                f"{stage.num_params:,} parameters",
                f"{stage.param_bytes / 1e6:,.1f} MB",
                *_costs_text(stage, total),
            ]
            yield f"stage {number}: {', '.join(parts)}"

    def _span(self, stage: Stage) -> str:
        """Return how many layers a stage has, and the names of its first and last one."""
        first = self.layers[stage.start].name
        last = self.layers[stage.stop - 1].name
        count = stage.stop - stage.start
        names = first if count == 1 else f"{first} .. {last}"
        return f"{counted(count, 'layer')} ({names})"


def _costs_text(stage: Stage, total_flops: int) -> Iterator[str]:
    """Yield the time of a stage, or its share of the FLOPs, and what it sends."""
    if stage.seconds is not None:
        yield f"{1000 * stage.seconds:,.2f} ms per micro-batch"
    elif stage.flops is not None and total_flops:
        yield f"{stage.flops / total_flops:.0%} of the computation by its FLOPs"
    if stage.output_bytes is not None:
        yield f"sends {stage.output_bytes / 1e6:,.2f} MB per micro-batch"


def _without_ties(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    """Return the layers without those that share the weights of an earlier one."""
    untied = []
    ties = set[str]()
    for layer in layers:
        if layer.tied not in ties:
            untied.append(layer)
        if layer.tied:
            ties.add(layer.tied)
    return untied


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
    may_be = _has_all_groups(layers) if same_groups else None
    if parallel.stages is not None:
        bounds = _listed_bounds(layers, parallel)
    else:
        bounds = _balanced_bounds(layers, parallel, may_be=may_be)
    if isinstance(bounds, Problem):
        return bounds
    table = StageTable(tuple(layers), bounds)
    return _problem_of_stages(table, parallel, may_be) or table


def _problem_of_stages(
    table: StageTable, parallel: Parallel, may_be: MayBe | None
) -> Problem | None:
    """Return the problem of the first stage that cannot train; None if all can."""
    for number, stage in enumerate(table.stages()):
        stage_layers = table.layers[stage.start : stage.stop]
        if not stage.num_params:
            return _problem_without_parameters(number, stage_layers, parallel)
        if may_be is not None and not may_be(stage.start, stage.stop):
            return _problem_with_one_group(number, stage_layers)
    return None


def _problem_without_parameters(
    number: int, stage_layers: Sequence[LayerFacts], parallel: Parallel
) -> Problem:
    key = "parallel.partition"
    value: Any = parallel.partition
    if parallel.stages:
        key = "parallel.stages"
        value = parallel.stages
    stage_names = ", ".join(layer.name for layer in stage_layers)
    reason = f"stage {number} ({stage_names}) would have nothing to train"
    fix = "set fewer stages, or list others in parallel.stages"
    if parallel.stages or parallel.partition != "parameters":
        fix = "set parallel.partition: parameters, or fewer stages"
    return Problem("stage-without-parameters", reason, fix, key, value)


def _problem_with_one_group(number: int, stage_layers: Sequence[LayerFacts]) -> Problem:
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
    """Find what is wrong with the cut that a config sets; `num_layers` None: not known yet.

    `names`: of the layers, for the reason of a problem.
    """
    stages = parallel.stages
    if num_layers is not None and num_layers < parallel.pipe:
        yield _more_stages_than(num_layers, parallel.pipe)
    if stages is None:
        fix = "write for example type:Linear"
        method = parallel.partition
        yield from pattern_problem(
            method.removeprefix("type:"), key="parallel.partition", value=method, fix=fix
        )
    else:
        yield from _problems_of_list(stages, parallel.pipe, num_layers, names)


def _more_stages_than(num_layers: int, pipe: int) -> Problem:
    reason = f"the model has only {counted(num_layers, 'layer')}"
    fix = f"set parallel.pipe: {num_layers}"
    if num_layers > 1:
        fix += " or less"
    return Problem("pipe-exceeds-layers", reason, fix, "parallel.pipe", pipe)


def _problems_of_list(
    stages: list[int], pipe: int, num_layers: int | None, names: Sequence[str]
) -> Iterator[Problem]:
    """Find what is wrong with a list of the stage of each layer."""
    key = "parallel.stages"
    if num_layers is not None and len(stages) != num_layers:
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
    """Yield the problem of a text that is no regular expression; nothing if it is one."""
    error = pattern_error(pattern)
    if error:
        yield Problem("bad-pattern", f"it is no regular expression: {error}", fix, key, value)


def _listed_bounds(layers: Sequence[LayerFacts], parallel: Parallel) -> Bounds | Problem:
    """Return the bounds of the stages that `parallel.stages` lists, or the problem."""
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
    """Return a check whether a stage has weights of all groups that the model has."""
    counts = []  # for each group: how many layers before each layer have it
    for group in _all_groups(layers):
        has_group = [group in layer.groups for layer in layers]
        counts.append(list(accumulate(has_group, initial=0)))

    def may_be(start: int, stop: int) -> bool:
        return all(count[start] < count[stop] for count in counts)

    return may_be


def _balanced_bounds(
    layers: Sequence[LayerFacts], parallel: Parallel, *, may_be: MayBe | None
) -> Bounds | Problem:
    """Return the bounds of stages with even costs, or the problem."""
    pipe = parallel.pipe
    costs = _costs(layers, parallel)
    if isinstance(costs, Problem):
        return costs
    may_start = [layer.may_start_stage for layer in layers]
    bounds = balanced(costs, pipe, may_start=may_start, may_be=may_be)
    if bounds is None and may_be is not None:
        # no cut will do: `cut` reports the problem of this one
        bounds = balanced(costs, pipe, may_start=may_start)
    if bounds is None:
        reason = "there are not enough places where a stage may begin"
        return Problem("pipe-exceeds-layers", reason, "set fewer stages", "parallel.pipe", pipe)
    return bounds


def _costs(layers: Sequence[LayerFacts], parallel: Parallel) -> list[float] | Problem:
    """Return what each layer counts for in the cut, by the method of the config."""
    method = parallel.partition
    if method.startswith("type:"):
        return _costs_by_type(layers, method, parallel.pipe)
    if method == "uniform":
        return [1.0 for _ in layers]
    seconds = [layer.seconds for layer in layers if layer.seconds is not None]
    if method == "measured" and len(seconds) == len(layers):
        return seconds
    # also `measured` before the measurement
    return [float(layer.num_params) for layer in layers]


def _costs_by_type(layers: Sequence[LayerFacts], method: str, pipe: int) -> list[float] | Problem:
    """Count the layers of a type, ``type:PATTERN``, as one and the others as nothing."""
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    costs = [float(bool(pattern.search(layer.kind))) for layer in layers]
    if sum(costs) < pipe:
        kinds = ", ".join(sorted({layer.kind for layer in layers}))
        reason = f"it matches {int(sum(costs))} layers, fewer than stages"
        fix = f"the layers are of {kinds}"
        return Problem("type-matches-too-few", reason, fix, "parallel.partition", method)
    return costs


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

    Args:
        costs: one for each item.
        parts: how many.
        may_start: for each item whether a part may start with it; None: all may.
        may_be: whether a part may have its items; None: any may.

    Returns:
        ``parts + 1`` bounds; None if no cut has only parts that may be.
    """

    @cache
    def fits(start: int, stop: int) -> bool:
        if start > 0 and may_start and not may_start[start]:
            return False
        return may_be is None or may_be(start, stop)

    sums = list(accumulate(costs, initial=0.0))
    ends = range(1, len(sums))
    best: _BestCuts
    best = {stop: (sums[stop], sums[stop] ** 2, (0, stop)) for stop in ends if fits(0, stop)}
    for _ in range(1, parts):
        best = _with_one_more_part(best, sums, fits)
    if len(costs) in best:
        return best[len(costs)][2]
    return None


def _with_one_more_part(best: _BestCuts, sums: Sequence[float], fits: MayBe) -> _BestCuts:
    """Return the best cuts with one part more.

    Args:
        best: cuts without that part.
        sums: costs of all items before each item, and of all items.
        fits: whether a part may have its items.
    """
    longer: _BestCuts = {}
    for stop in range(1, len(sums)):
        candidates = []
        for start, (largest, squares, bounds) in best.items():
            if start < stop and fits(start, stop):
                cost = sums[stop] - sums[start]
                candidates.append((max(largest, cost), squares + cost**2, (*bounds, stop)))
        if candidates:
            longer[stop] = min(candidates)
    return longer


def with_seconds(layers: Sequence[LayerFacts], seconds: Sequence[float]) -> list[LayerFacts]:
    """Return the layers with their measured times."""
    return [replace(layer, seconds=time) for layer, time in zip(layers, seconds, strict=True)]
