"""Where the step counters of an optimizer are put when a moved run has come some way."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.checkpoint.state.optimizer_shards import OptimizerViews

META, CPU = torch.device("meta"), torch.device("cpu")
SIZES = (("a", 3, 1.0), ("b", 4, 2.0), ("c", 5, 3.0))


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3, device=META))


def views(optimizer: Any, weights: Sequence[torch.nn.Parameter]) -> OptimizerViews:
    """Views of an optimizer of these weights; their names are their numbers."""
    engine: Any = SimpleNamespace(optimizer=optimizer)
    return OptimizerViews(engine, {weight: str(number) for number, weight in enumerate(weights)})


def seven(name: str) -> float:
    return 7.0


def in_thirds(
    monkeypatch: pytest.MonkeyPatch, weights: Sequence[torch.nn.Parameter], rank: int
) -> None:
    """Make weights look as DeepSpeed cuts them at stage 3, of three ranks, with this one's
    place.
    """
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
    for weight in weights:
        vars(weight).update(ds_numel=3, partition_numel=lambda: 1, ds_process_group=None)


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, CPU), ({"foreach": True}, CPU), ({"capturable": True}, META), ({"fused": True}, META)],
)
def test_the_step_is_where_torch_keeps_it(options: dict[str, Any], device: torch.device) -> None:
    weights = [parameter(), parameter()]
    optimizer = torch.optim.AdamW(weights)
    optimizer.param_groups[0].update(options)  # the constructor would want a GPU to be there
    views(optimizer, weights).set_steps(seven)
    assert list(optimizer.state) == weights
    for state in optimizer.state.values():
        assert (state["step"].device, state["step"].dtype, state["step"].shape) == (
            device,
            torch.float32,
            (),
        )
    if device == CPU:
        assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


def test_each_group_has_its_own_place() -> None:
    weights = [parameter(), parameter(), parameter()]
    optimizer = torch.optim.AdamW(
        [{"params": weights[:1], "capturable": True}, {"params": weights[1:]}]
    )
    views(optimizer, weights).set_steps(seven)
    assert [optimizer.state[weight]["step"].device for weight in weights] == [META, CPU, CPU]


def test_each_weight_has_its_own_number_of_steps() -> None:
    """A weight that was frozen for some steps has taken fewer, and one that never took a step has
    no state.
    """
    weights = [parameter(), parameter(), parameter()]
    optimizer = torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:]}])
    optimizer.state[weights[1]]["exp_avg"] = torch.zeros(3)
    views(optimizer, weights).set_steps({"0": 7.0, "1": None, "2": 2.0}.get)
    assert {weight: float(state["step"]) for weight, state in optimizer.state.items()} == {
        weights[0]: 7.0,
        weights[2]: 2.0,
    }


def test_at_stage_3_a_sub_group_has_the_place_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [parameter(), parameter(), parameter()]
    flats = [parameter(), parameter(), parameter()]
    base = torch.optim.AdamW(
        [{"params": [parameter()]}, {"params": [parameter()], "capturable": True}]
    )
    in_thirds(monkeypatch, weights, rank=0)
    views(of_stage_3(base, weights, flats), weights).set_steps(seven)
    assert [base.state[flat]["step"].device for flat in flats] == [CPU, CPU, META]


@pytest.mark.parametrize("rank", [0, 3])
def test_at_stage_3_a_sub_group_has_the_steps_of_its_weights(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Also on a rank that has nothing of them but padding: by its group, of which all have the same
    number.
    """
    weights = [parameter(), parameter(), parameter()]
    flats = [parameter(), parameter(), parameter()]
    base = torch.optim.AdamW([{"params": [parameter()]}, {"params": [parameter()]}])
    in_thirds(monkeypatch, weights, rank)
    views(of_stage_3(base, weights, flats), weights).set_steps({"0": 7.0, "1": 7.0, "2": 2.0}.get)
    assert [float(base.state[flat]["step"]) for flat in flats] == [7.0, 7.0, 2.0]


def of_stage_3(
    base: Any, weights: Sequence[torch.nn.Parameter], flats: Sequence[torch.nn.Parameter]
) -> Any:
    """DeepSpeed's wrapper: three sub-groups of one weight, two of them in the first group."""
    return SimpleNamespace(
        optimizer=base,
        fp16_groups=[[weight] for weight in weights],
        fp32_partitioned_groups_flat=flats,
        sub_group_to_group_id={0: 0, 1: 0, 2: 1},
        dp_process_group=None,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_at_stages_1_and_2_pieces_follow_the_order_in_which_gradients_go_round(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """DeepSpeed's own notes (`_hp_mapping`) are of the order of the group, and its numbers are
    not.
    """
    weights = {
        name: torch.nn.Parameter(torch.full((count,), value)) for name, count, value in SIZES
    }
    order = ["b", "a", "c"]
    row = torch.cat([weights[name].detach() for name in order]).split(6)
    flats = [torch.nn.Parameter(row[rank].clone())]
    optimizer = SimpleNamespace(
        optimizer=torch.optim.SGD(flats, lr=1.0),
        round_robin_bit16_groups=[[weights[name] for name in order]],
        single_partition_of_fp32_groups=flats,
        real_dp_process_group=[None],
    )
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: rank)
    engine: Any = SimpleNamespace(optimizer=optimizer)
    names: Any = {weight: name for name, weight in weights.items()}
    found = [
        (view.name, view.start, view.values.tolist())
        for view in OptimizerViews(engine, names).views([])
    ]
    expected = (
        [("b", 0, [2.0] * 4), ("a", 0, [1.0] * 2)]
        if rank == 0
        else [("a", 2, [1.0]), ("c", 0, [3.0] * 5)]
    )
    assert found == expected
