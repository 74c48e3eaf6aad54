"""Metrics as total / count over batches and ranks, with a gloo group of this one process and a
pretended second rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode

from framework.engine import metrics
from framework.engine.metrics import EvalSums, memory_metrics, over_ranks
from framework.errors import ConfigError
from framework.tasks.task import Ratio, Task

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group(tmp_path: Path) -> Iterator[None]:
    assert not torch.distributed.is_initialized()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def ratio(total: float, count: int | torch.Tensor = 1) -> Ratio:
    return Ratio(torch.tensor(total, dtype=torch.float64), count)


def test_a_metric_is_total_over_count_not_a_mean_of_means() -> None:
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(8.0, 8)}, counts=True)
    sums.add({"loss": ratio(10.0, torch.tensor(1))}, counts=True)
    assert sums.over_ranks() == {"loss": 2.0}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False])
def test_padding_of_any_value_does_not_count(poison: float, first: bool) -> None:
    sums = EvalSums(CPU)
    for counts in (False, True) if first else (True, False):
        sums.add({"loss": ratio(3.0 if counts else poison, 4)}, counts=counts)
    assert sums.over_ranks() == {"loss": 0.75}


def test_a_real_nan_is_not_hidden() -> None:
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(math.nan, 4)}, counts=True)
    assert math.isnan(sums.over_ranks()["loss"])


def test_nothing_counted_is_no_number() -> None:
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(1.0, 0)}, counts=False)
    assert math.isnan(sums.over_ranks()["loss"])


def test_nothing_measured_is_no_metric() -> None:
    assert EvalSums(CPU).over_ranks() == {}


def test_float64_keeps_the_digits_of_a_million_batches() -> None:
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(1e8, 10**8)}, counts=True)
    for _ in range(100):
        sums.add({"loss": ratio(0.01, 1)}, counts=True)
    assert sums.over_ranks()["loss"] == pytest.approx((1e8 + 1) / (1e8 + 100), rel=1e-15)


class SecondRank:
    """Stands in for the collectives of a group of two; `other` holds what the second rank would
    send.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, other: dict[str, tuple[float, float]]
    ) -> None:
        names = sorted(other)
        self._other = other

        def gather(box: list[Any], mine: list[str]) -> None:
            box[:] = [mine, names]
            self._names = sorted({*mine, *names})

        def reduce(sums: torch.Tensor) -> None:
            sums += torch.tensor(
                [other.get(name, (0.0, 0.0)) for name in self._names], dtype=torch.float64
            )

        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        monkeypatch.setattr(torch.distributed, "all_reduce", reduce)


def test_ranks_with_uneven_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    SecondRank(monkeypatch, {"loss": (1.0, 1.0)})
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(9.0, 3)}, counts=True)
    assert sums.over_ranks() == {"loss": 2.5}


def test_a_metric_that_only_one_rank_has_met_is_not_added_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    SecondRank(monkeypatch, {"f1": (3.0, 4.0), "loss": (1.0, 1.0)})
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(3.0), "accuracy": ratio(0.5)}, counts=True)
    assert sums.over_ranks() == {"accuracy": 0.5, "f1": 0.75, "loss": 2.0}


def with_others(monkeypatch: pytest.MonkeyPatch, *others: dict[str, float]) -> None:
    """Pretend further ranks; each is given as it differs from this one, and -1 is a metric that it
    has not.
    """
    names = ["train/loss", *metrics._OF_RANKS]

    def gather(rows: torch.Tensor, row: torch.Tensor) -> None:
        table = rows.view(-1, len(row))
        table[:] = row
        for rank, values in enumerate(others, start=1):
            for name, value in values.items():
                table[rank, names.index(name)] = value

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1 + len(others))
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)


OWN = {
    "train/loss": 1.0,
    "time/forward_ms": 10.0,
    "time/communication_ms": 40.0,
    "memory/host_peak_bytes": 5e9,
}


def test_times_are_means_over_ranks_and_memory_is_the_most_of_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = {
        "train/loss": 2.0,
        "time/forward_ms": 30.0,
        "time/communication_ms": 20.0,
        "memory/host_peak_bytes": 6e9,
    }
    with_others(monkeypatch, second)
    expected = {"train/loss": 1.5, "time/forward_ms": 20.0, "time/communication_ms": 30.0}
    expected |= {"memory/host_peak_bytes": 6e9, "ranks/slowest": 1.0, "ranks/slowest_factor": 3.0}
    assert over_ranks(OWN) == expected


def test_a_part_that_one_stage_has_is_shared_and_the_slowest_is_held_against_the_median(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_others(
        monkeypatch, {"time/data_ms": 3.0}, {"time/forward_ms": 8.0}, {"time/forward_ms": 26.0}
    )
    found = over_ranks(OWN)
    assert found["time/data_ms"] == 0.75
    assert (found["ranks/slowest"], found["ranks/slowest_factor"]) == (3.0, 2.6)
    assert "time/bubble_ms" not in found


def test_one_loss_that_is_no_number_is_seen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with_others(monkeypatch, {"train/loss": math.nan})
    assert math.isnan(over_ranks(OWN)["train/loss"])


def test_a_rank_alone_has_no_slowest() -> None:
    assert over_ranks(OWN) == OWN


def test_memory_is_in_bytes() -> None:
    assert 10e6 < memory_metrics()["memory/host_peak_bytes"] < 1e12


class Operators(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


def test_a_count_is_not_copied_to_the_device() -> None:
    sums, ratios = EvalSums(CPU), {"loss": ratio(3.0, 4), "accuracy": ratio(2.0, 4)}
    with Operators() as operators:
        torch.tensor([1.0])
    assert operators.called == {"aten::lift_fresh"}  # so a number of the host is told
    with Operators() as operators:
        sums.add(ratios, counts=True)
    assert "aten::full" in operators.called
    assert operators.called.isdisjoint(
        {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::_to_copy"}
    )


class Derives(Task):
    def __init__(self, of_loss: Any) -> None:
        self.of_loss = of_loss

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        raise NotImplementedError

    def derive(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {"root": self.of_loss(metrics["loss"])}


@pytest.mark.parametrize(
    "of_loss",
    [
        lambda loss: torch.tensor(loss).sqrt(),
        lambda loss: np.float32(loss) ** 0.5,
        lambda loss: torch.tensor([loss]).sqrt(),
    ],
)
def test_a_derived_metric_is_a_plain_number_for_any_task(of_loss: Any) -> None:
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(8.0, 2)}, counts=True)
    metrics = sums.metrics(Derives(of_loss))
    assert metrics == {"eval/loss": 4.0, "eval/root": 2.0}
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize(
    ("value", "what"),
    [(torch.ones(2), r"a tensor of shape \(2,\)"), (None, "a NoneType"), ("x", "a str")],
)
def test_a_derived_metric_that_is_no_number_is_named(value: Any, what: str) -> None:
    sums = EvalSums(CPU)
    sums.add({"loss": ratio(8.0, 2)}, counts=True)
    with pytest.raises(
        ConfigError,
        match=rf"derive\(\) returned {what} for the metric 'root'.*\[task-metric-result\]",
    ):
        sums.metrics(Derives(lambda loss: value))
