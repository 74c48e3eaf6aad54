"""Metrics of torchmetrics over all ranks (`evaluation.metrics`).

Every rank updates its own copy with its samples. At the end of a pass the states of all ranks go to
rank 0, are joined there by torchmetrics' own reductions, and rank 0 computes. Its synchronisation
over process groups is not used: it would count ranks twice that share samples, and wait for ranks
of other stages.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from framework.engine.distributed import gather, rank
from framework.engine.gathered import pickled, to_rank0, too_large, too_large_here
from framework.errors import TrainingError, in_one_line
from framework.system.limits import ranks_on_host

_State = dict[str, Any]


class MetricSums:
    """The metrics of one pass."""

    def __init__(
        self,
        metrics: Mapping[str, Metric | MetricCollection],
        device: torch.device,
        *,
        most_bytes: int,
    ) -> None:
        """Reset the metrics, on the device where outputs are; states that grow with the samples are
        kept on the host, and rank 0 may take `most_bytes` of its host's memory.
        """
        self._metrics = metrics
        self._most_bytes = most_bytes
        self._most_here = most_bytes // ranks_on_host()
        self._num_counted: dict[int, int] = {}  # items of each list, by its first one's id
        self._num_bytes = 0
        self._is_full = False
        for metric in metrics.values():
            metric.to(device)
            metric.reset()
        for metric in self._all():
            metric.compute_on_cpu = True
            # they are joined here
            metric.distributed_available_fn = _is_alone

    def _all(self) -> list[Metric]:
        """List every metric with states of its own, also those within others."""
        found: list[Metric] = []
        for metric in self._metrics.values():
            found += [part for part in metric.modules() if isinstance(part, Metric)]
        return found

    def update(self, predictions: Any, targets: Any) -> None:
        """Take a batch; none once the states have grown too large, which `bring_to_rank0` reports
        on all ranks.

        Raises:
            TrainingError: kind ``metric-failed``: a metric does not take these predictions.
        """
        if self._is_full:
            return
        for name, metric in self._metrics.items():
            try:
                metric.update(predictions, targets)
            except Exception as error:
                failed = TrainingError(
                    f"{key_of(name)}: update({_shown(predictions)}, {_shown(targets)}) raised "
                    f"{in_one_line(error, longest=300)}; the task's predicted(outputs, targets) "
                    "gives what it takes [metric-failed]"
                )
                failed.is_of_one_rank = True
                raise failed from error
        self._count_bytes()
        self._is_full = self._num_bytes > self._most_here

    def _count_bytes(self) -> None:
        """Count what the states that are lists have grown by; metrics of one group share them."""
        for metric in self._all():
            for name in metric._reductions:
                state = getattr(metric, name)
                if not isinstance(state, list) or not state:
                    continue
                counted = self._num_counted.get(id(state[0]), 0)
                self._num_bytes += sum(_bytes_of(item) for item in state[counted:])
                self._num_counted[id(state[0])] = len(state)

    def bring_to_rank0(self, is_source: bool, *, num_batches: int = 1) -> None:
        """Join the states of all ranks on rank 0. Collective.

        Args:
            is_source: whether this rank's outputs count.
            num_batches: of a whole pass of a rank, if this is one of its first batch alone.

        Raises:
            ConfigError: kind ``collected-too-large``.
        """
        has_samples = is_source and any(metric.update_count for metric in self._all())
        num_bytes = self._num_bytes if has_samples else 0
        self._refuse_too_large(num_bytes, num_batches)
        payload: Tensor | None = None
        if has_samples:
            payload = self.packed()
        sizes = gather(None if payload is None else len(payload))
        senders = [(sender, size) for sender, size in enumerate(sizes) if size is not None]
        payloads = to_rank0(payload, senders)
        if rank() == 0:
            self.join(payloads)
        else:
            deque(payloads, maxlen=0)  # sends

    def _refuse_too_large(self, num_bytes: int, num_batches: int) -> None:
        """Refuse states that are too large for a rank, or all together for rank 0. Collective."""
        ranks = gather((num_bytes, self._most_bytes, self._most_here, self._is_full))
        names = ", ".join(map(key_of, self._metrics))
        for of_rank, _, most_here, is_full in ranks:
            if is_full:
                raise too_large_here("the metrics have kept", of_rank, most_here, names)
        of_a_pass = sum(of_rank for of_rank, *_ in ranks) * num_batches
        limit = ranks[0][1]
        if of_a_pass > limit:
            raise too_large("the metrics bring", of_a_pass, limit, names)

    def packed(self) -> Tensor:
        """Return the bytes of this rank's states, (bytes,) uint8 on the host."""
        shared: dict[int, Any] = {}
        return pickled([(_state(metric, shared), metric.update_count) for metric in self._all()])

    def join(self, payloads: Iterable[Tensor]) -> None:
        """Take the states of all ranks with samples, as `packed` returned them, in place of this
        rank's own.
        """
        states = [pickle.loads(payload.numpy().data) for payload in payloads]
        if not states:
            return
        for number, metric in enumerate(self._all()):
            _set_joined(metric, [of_rank[number] for of_rank in states])

    def computations(self) -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
        """Yield each metric's key and the function that computes its figures from all states."""
        for name, metric in self._metrics.items():
            yield key_of(name), partial(_figures, name, metric)


def key_of(name: str) -> str:
    """Return the name of a metric in messages."""
    return f"evaluation.metrics.{name}".removesuffix(".")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _is_alone() -> bool:
    return False


def _state(metric: Metric, shared: dict[int, Any]) -> _State:
    """Return the states of a metric on the host; those that are lists in one piece, if they are
    joined so. `shared` has what is returned for a state by its id: metrics of one group share them.
    """
    states: _State = {}
    for name, reduction in metric._reductions.items():
        state = getattr(metric, name)
        if id(state) not in shared:
            packed = state
            if isinstance(state, list) and state and reduction is dim_zero_cat:
                packed = [dim_zero_cat(state)]
            shared[id(state)] = _on_host(packed)
        states[name] = shared[id(state)]
    return states


def _set_joined(metric: Metric, of_ranks: list[tuple[_State, int]]) -> None:
    """Set the states of all ranks that have updated a metric, joined as torchmetrics does
    (`Metric._sync_dist`): stacked or listed, then reduced.
    """
    used = [state for state, count in of_ranks if count]
    metric.to("cpu")
    for name, reduction in metric._reductions.items():
        if used:
            setattr(metric, name, _joined([state[name] for state in used], reduction))
    metric._update_count = sum(count for _, count in of_ranks)
    metric._computed = None


def _joined(values: list[Any], reduction: Any) -> Any:
    """Join one state of several ranks: tensors are stacked, lists are joined; then reduced."""
    if isinstance(values[0], Tensor):
        if len(values) == 1:
            return values[0]
        joined: Any = torch.stack(values)
    else:
        joined = [item for value in values for item in value]
        if reduction is dim_zero_cat:
            return joined  # as a single process has it: a list of batches
    if callable(reduction):
        return reduction(joined)
    return joined


def _bytes_of(item: Any) -> int:
    if isinstance(item, Tensor):
        return int(item.nbytes)
    if isinstance(item, list | tuple):
        return sum(map(_bytes_of, item))
    return len(pickle.dumps(item))


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, list | tuple):
        return type(value)(map(_on_host, value))
    return value


def _figures(name: str, metric: Metric | MetricCollection) -> dict[str, Any]:
    """Compute a metric. Results by name get its name before theirs, unless that begins with it."""
    computed = metric.compute()
    if not isinstance(computed, Mapping):
        if isinstance(computed, tuple):
            return {f"{name}_{number}": value for number, value in enumerate(computed)}
        return {name: computed}
    figures = {}
    for key, value in computed.items():
        public = str(key)
        if not public.startswith(name):
            public = f"{name}_{public}"
        figures[public] = value
    return figures
