"""Weights of types that DeepSpeed cannot train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from framework.config.load import config_from_values
from framework.engine.initialize import _refuse_number_types
from framework.errors import ConfigError
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan, make_plan


def planned(**values: Any) -> Plan:
    return make_plan(config_from_values(values), Cluster(devices_per_host=2, device="cpu"))


@pytest.mark.parametrize("stage", range(4))
def test_complex_weights_are_refused(stage: int) -> None:
    """At stages 1 to 3 they trained as if they were real, and the imaginary parts became zero."""
    model = torch.nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"weight weight is complex64.*\[weight-type\]"):
        _refuse_number_types(planned(zero={"stage": stage}), model)
    model.requires_grad_(False)
    _refuse_number_types(planned(zero={"stage": stage}), model)


def test_doubles_are_refused_at_stage_0() -> None:
    model = torch.nn.Linear(2, 2).double()
    with pytest.raises(
        ConfigError, match=r"float64, which DeepSpeed cannot train at zero.stage 0; use .float\(\)"
    ):
        _refuse_number_types(planned(), model)
    _refuse_number_types(planned(zero={"stage": 1}), model)
    _refuse_number_types(planned(precision={"dtype": "bf16"}), model)
