"""Where the step counter of an optimizer is put when it is told how far a moved run has come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from framework.checkpoint.state.optimizer_shards import OptimizerViews

META, CPU = torch.device("meta"), torch.device("cpu")


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
