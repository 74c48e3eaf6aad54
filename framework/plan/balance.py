"""Cut of a model of layers into pipeline stages, and the weight of each stage. Pure arithmetic on a list of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Final

from framework.config.training import Parallel
from framework.errors import Problem, counted

Bounds = tuple[int, ...]
MayBe = Callable[[int, int], bool]
_MEASURED: Final = "measured"


@dataclass(frozen=True)
class LayerFacts:
    """Facts about one layer before it trains.

    Attributes:
        name: its name, and the prefix of its weights' names.
        kind: class name of its module.
        num_params: trainable parameters.
        param_bytes: bytes of all its parameters and buffers, as they are built.
        output_bytes: bytes of its output for one micro-batch, which cross to the next stage; None when not known.
        flops: floating-point operations of one micro-batch, forward; None when not known.
        seconds: forward and backward of one micro-batch; None when not measured.
        tied: key of the layers that share its weights; empty for none.
        may_start_stage: whether a stage may begin with it.
        groups: the parameter groups of the optimizer that it has trained weights of.
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
        """Return the weight of every stage. Tied layers on one stage are counted once, on several stages once on
        each.
        """
        return [self._stage(start, stop) for start, stop in pairwise(self.bounds)]

    def _stage(self, start: int, stop: int) -> Stage:
        own = self.layers[start:stop]
        firsts = [layer for n, layer in enumerate(own) if not layer.tied or layer.tied not in {o.tied for o in own[:n]}]
        seconds = [layer.seconds for layer in own if layer.seconds is not None]
        flops = [layer.flops for layer in own if layer.flops is not None]
        is_last = stop == len(self.layers)
        return Stage(
            start,
            stop,
            num_params=sum(layer.num_params for layer in firsts),
            param_bytes=sum(layer.param_bytes for layer in firsts),
            output_bytes=None if is_last else own[-1].output_bytes,
            seconds=sum(seconds) if len(seconds) == len(own) else None,
            flops=sum(flops) if len(flops) == len(own) else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The table as plain values, as written to ``plan.json``."""
        return {
            "layers": [layer.name for layer in self.layers],
            "tied": dict(self._ties()),
            "tied_keys": {layer.tied: layer.name for layer in reversed(self.layers) if layer.tied},
            "bounds": list(self.bounds),
            "stages": [asdict(stage) for stage in self.stages()],
        }

    def _ties(self) -> Iterator[tuple[str, str]]:
        """(name of a layer, name of the earlier layer whose weights it uses)."""
        firsts: dict[str, str] = {}
        for layer in self.layers:
            if layer.tied and firsts.setdefault(layer.tied, layer.name) != layer.name:
                yield layer.name, firsts[layer.tied]

    def lines(self) -> Iterator[str]:
        """One line per stage for a person. What was not timed is estimated by its share of the floating-point
        operations.
        """
        total = sum(layer.flops or 0 for layer in self.layers)
        for number, stage in enumerate(self.stages()):
            first, last = self.layers[stage.start].name, self.layers[stage.stop - 1].name
            span = first if stage.stop - stage.start == 1 else f"{first} .. {last}"
            count = stage.stop - stage.start
            parts = [
                f"{counted(count, 'layer')} ({span})",
                f"{stage.num_params:,} parameters",
                f"{stage.param_bytes / 1e6:,.1f} MB",
            ]
            if stage.seconds is not None:
                parts.append(f"{1000 * stage.seconds:,.2f} ms per micro-batch")
            elif stage.flops is not None and total:
                parts.append(f"{stage.flops / total:.0%} of the computation by its FLOPs")
            if stage.output_bytes is not None:
                parts.append(f"sends {stage.output_bytes / 1e6:,.2f} MB per micro-batch")
            yield f"stage {number}: {', '.join(parts)}"


def cut(layers: Sequence[LayerFacts], parallel: Parallel, *, same_groups: bool = False) -> StageTable | Problem:
    """Decide where the stages begin, or say why it cannot be done.

    Args:
        layers: what is known of them.
        parallel: how many stages, and how they are chosen.
        same_groups: every stage must have weights of every parameter group. ZeRO reduces the gradient norm once per
            group, over all stages (runtime/zero/stage_1_and_2.py `scaled_global_norm`): stages with one group and
            stages with two would wait for each other for ever.
    """
    if len(layers) < parallel.pipe:
        return too_few_layers(parallel, len(layers))
    all_groups = _has_all_groups(layers)
    if parallel.stages is not None:
        bounds = _explicit(layers, parallel)
    else:
        bounds = _chosen(layers, parallel, may_be=all_groups if same_groups else None)
    if isinstance(bounds, Problem):
        return bounds
    table = StageTable(tuple(layers), bounds)
    for number, stage in enumerate(table.stages()):
        if same_groups and stage.num_params and not all_groups(stage.start, stage.stop):
            only = " and ".join(
                sorted(frozenset().union(*(layer.groups for layer in layers[stage.start : stage.stop])))
            )
            return _refused(
                "stage-with-one-group",
                "optimizer.weight_decay_on",
                "matrices",
                f"stage {number} ({layers[stage.start].name} .. {layers[stage.stop - 1].name}) has only {only}, and "
                "with ZeRO every stage must have both",
                "set optimizer.weight_decay_on: all, or fewer stages",
            )
        if not stage.num_params:
            key = "parallel.stages" if parallel.stages is not None else "parallel.partition"
            names = ", ".join(layer.name for layer in layers[stage.start : stage.stop])
            return _refused(
                "stage-without-parameters",
                key,
                parallel.stages or parallel.partition,
                f"stage {number} ({names}) would have nothing to train",
                "set parallel.partition: parameters, or fewer stages",
            )
    return table


def _explicit(layers: Sequence[LayerFacts], parallel: Parallel) -> Bounds | Problem:
    stages, key = list(parallel.stages or ()), "parallel.stages"
    complaint = stages_complaint(parallel, num_layers=len(layers), names=[layer.name for layer in layers])
    if complaint is not None:
        return complaint
    bounds = (*(stages.index(number) for number in range(parallel.pipe)), len(layers))
    for start in bounds[1:-1]:
        if not layers[start].may_start_stage:
            return _refused(
                "stage-cannot-start",
                key,
                stages,
                f"a stage cannot begin with {layers[start].name}",
                f"put it on the stage of {layers[start - 1].name}",
            )
    return bounds


def too_few_layers(parallel: Parallel, num_layers: int) -> Problem:
    """There would be a stage without a layer."""
    return _refused(
        "pipe-exceeds-layers",
        "parallel.pipe",
        parallel.pipe,
        f"the model has only {counted(num_layers, 'layer')}",
        f"set parallel.pipe: {num_layers}{' or less' if num_layers > 1 else ''}",
    )


def stages_complaint(parallel: Parallel, *, num_layers: int | None, names: Sequence[str] = ()) -> Problem | None:
    """Why the stages that were written down cannot be; `num_layers` None: not known yet."""
    if parallel.stages is None:
        return None
    stages, key = list(parallel.stages), "parallel.stages"
    if num_layers is not None and len(stages) != num_layers:
        reported = f": {', '.join(names)}" if names else ""
        return _refused(
            "stages-differ-from-layers",
            key,
            stages,
            f"it names {len(stages)} layers and the model has {num_layers}{reported}",
            "write one stage for each",
        )
    if sorted(stages) != stages or set(stages) != set(range(parallel.pipe)):
        wanted = ", ".join(map(str, range(parallel.pipe)))
        return _refused(
            "stages-out-of-order",
            key,
            stages,
            f"the stages of {parallel.pipe} are {wanted}, each for some layers in a row",
            "write them in ascending order, none left out",
        )
    return None


def pattern_complaint(parallel: Parallel) -> Problem | None:
    """Why ``type:<regex>`` is no regular expression."""
    try:
        re.compile(parallel.partition.removeprefix("type:"))
    except (re.error, OverflowError, RecursionError) as error:
        return _refused(
            "bad-pattern",
            "parallel.partition",
            parallel.partition,
            f"it is no regular expression: {error}",
            "write for example type:Linear",
        )
    return None


def _has_all_groups(layers: Sequence[LayerFacts]) -> MayBe:
    """Check whether a stage from one layer up to another has weights of all groups that the model has."""
    counts = [
        [0, *accumulate(group in layer.groups for layer in layers)]
        for group in frozenset[str]().union(*(layer.groups for layer in layers))
    ]
    return lambda start, stop: all(count[start] < count[stop] for count in counts)


def _chosen(layers: Sequence[LayerFacts], parallel: Parallel, *, may_be: MayBe | None) -> Bounds | Problem:
    method, key = parallel.partition, "parallel.partition"
    if method.startswith("type:"):
        complaint = pattern_complaint(parallel)
        if complaint is not None:
            return complaint
        pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        costs = [float(bool(pattern.search(layer.kind))) for layer in layers]
        if sum(costs) < parallel.pipe:
            kinds = ", ".join(sorted({layer.kind for layer in layers}))
            return _refused(
                "type-matches-too-few",
                key,
                method,
                f"it matches {int(sum(costs))} layers, fewer than stages",
                f"the layers are of {kinds}",
            )
    elif method == "uniform":
        costs = [1.0] * len(layers)
    elif method == _MEASURED and all(layer.seconds is not None for layer in layers):
        costs = [layer.seconds or 0.0 for layer in layers]
    else:  # `measured` before the measurement: what is known so far
        costs = [float(layer.num_params) for layer in layers]
    may_start = [layer.may_start_stage for layer in layers]
    bounds = balanced(costs, parallel.pipe, may_start=may_start, may_be=may_be)
    if bounds is None and may_be is not None:  # no cut will do, and one of them tells why
        bounds = balanced(costs, parallel.pipe, may_start=may_start)
    if bounds is None:
        return _refused(
            "pipe-exceeds-layers",
            "parallel.pipe",
            parallel.pipe,
            "there are not enough places where a stage may begin",
            "set fewer stages",
        )
    return bounds


def balanced(
    costs: Sequence[float], parts: int, *, may_start: Sequence[bool] | None = None, may_be: MayBe | None = None
) -> Bounds | None:
    """Cut a row of costs into contiguous, non-empty parts whose largest sum is as small as possible.

    Among the cuts with the same largest sum the one with the smallest sum of squares is taken, so that the other parts
    are even too. Dynamic programming over (items, parts), O(parts x items^2) (Linear partition: Skiena, "The Algorithm
    Design Manual", 3rd ed., section 10.7).

    Returns:
        ``parts + 1`` bounds; None where `may_start`, of the first item of a part, and `may_be`, of the items from one
        up to but without another, leave no cut.
    """
    allowed = may_start or [True] * len(costs)
    fits = cache(may_be or (lambda start, stop: True))
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(stop: int, count: int) -> tuple[float, float, Bounds]:
        if count == 1:
            return (sums[stop], sums[stop] ** 2, (0, stop)) if stop and fits(0, stop) else (inf, inf, ())
        found: tuple[float, float, Bounds] = (inf, inf, ())
        for start in range(count - 1, stop):
            if not allowed[start] or not fits(start, stop):
                continue
            largest, squares, bounds = best(start, count - 1)
            own = sums[stop] - sums[start]
            candidate = (max(largest, own), squares + own**2, (*bounds, stop))
            found = min(found, candidate)
        return found

    _each_stop_first(best, len(costs), parts)
    largest, _, bounds = best(len(costs), parts)
    return bounds if largest < inf else None


def _each_stop_first(best: Callable[[int, int], Any], num_items: int, parts: int) -> None:
    """Fill the table from below, so that the recursion is never deeper than one call."""
    for count in range(1, parts):
        for stop in range(count, num_items + 1):
            best(stop, count)


def with_seconds(layers: Sequence[LayerFacts], seconds: Sequence[float]) -> list[LayerFacts]:
    """The same layers with their measured times."""
    return [replace(layer, seconds=time) for layer, time in zip(layers, seconds, strict=True)]


def _refused(kind: str, key: str, value: Any, reason: str, fix: str) -> Problem:
    return Problem(kind=kind, key=key, value=value, reason=reason, fix=fix)
