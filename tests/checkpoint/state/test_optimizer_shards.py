"""Where the step counter of an optimizer is put when it is told how far a moved run has come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.checkpoint.state.optimizer_shards import OptimizerViews

META, CPU = torch.device("meta"), torch.device("cpu")
SIZES = (("a", 3, 1.0), ("b", 4, 2.0), ("c", 5, 3.0))


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3, device=META))


def views(optimizer: Any) -> OptimizerViews:
    engine: Any = SimpleNamespace(optimizer=optimizer)
    return OptimizerViews(engine, {})


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, CPU), ({"foreach": True}, CPU), ({"capturable": True}, META), ({"fused": True}, META)],
)
def test_the_step_is_where_torch_keeps_it(options: dict[str, Any], device: torch.device) -> None:
    optimizer = torch.optim.AdamW([parameter(), parameter()])
    optimizer.param_groups[0].update(options)  # the constructor would want a GPU to be there
    views(optimizer).set_step(7.0)
    for state in optimizer.state.values():
        assert (state["step"].device, state["step"].dtype, state["step"].shape) == (device, torch.float32, ())
    if device == CPU:
        assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}


def test_each_group_has_its_own_place() -> None:
    optimizer = torch.optim.AdamW(
        [{"params": [parameter()], "capturable": True}, {"params": [parameter(), parameter()]}]
    )
    views(optimizer).set_step(7.0)
    assert [state["step"].device for state in optimizer.state.values()] == [META, CPU, CPU]


def test_at_stage_3_a_sub_group_has_the_place_of_its_group() -> None:
    flats = [parameter(), parameter(), parameter()]
    base = torch.optim.AdamW([{"params": [parameter()]}, {"params": [parameter()], "capturable": True}])
    wrapper = SimpleNamespace(
        optimizer=base, fp32_partitioned_groups_flat=flats, sub_group_to_group_id={0: 0, 1: 0, 2: 1}
    )
    views(wrapper).set_step(7.0)
    assert [base.state[flat]["step"].device for flat in flats] == [CPU, CPU, META]


@pytest.mark.parametrize("rank", [0, 1])
def test_at_stages_1_and_2_pieces_follow_the_order_in_which_gradients_go_round(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """DeepSpeed's own notes (`_hp_mapping`) are of the order of the group, and its numbers are not."""
    weights = {name: torch.nn.Parameter(torch.full((count,), value)) for name, count, value in SIZES}
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
    found = [(view.name, view.start, view.values.tolist()) for view in OptimizerViews(engine, names).views([])]
    expected = [("b", 0, [2.0] * 4), ("a", 0, [1.0] * 2)] if rank == 0 else [("a", 2, [1.0]), ("c", 0, [3.0] * 5)]
    assert found == expected
