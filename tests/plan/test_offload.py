"""What lies on a drive, by the settings of DeepSpeed's reads and writes."""

from __future__ import annotations

from typing import Any

import pytest

from framework.config.load import config_from_values
from framework.plan.cluster import Cluster
from framework.plan.memory import NotEstimatedError, estimate
from framework.plan.plan import make_plan

MIB = 1 << 20
# One matrix of 1,024 x 1,024 numbers on one rank: 4 MiB in fp32, beside small vectors.
RUN = {
    "model": {"kind": "mlp", "hidden_sizes": [1024, 1024]},
    "zero": {
        "stage": 3,
        "sub_group_size": 1 << 20,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/n"},
    },
    "optimizer": {"kind": "adamw", "implementation": "deepspeed"},
}


def drive(aio: Any) -> dict[str, int]:
    config = config_from_values(RUN | {"deepspeed": {"aio": aio}})
    memory = estimate(make_plan(config, Cluster(devices_per_host=1)))
    return memory.drive


def test_tensors_below_a_block_stay_off_the_drive() -> None:
    assert drive({"block_size": 1 * MIB}) == drive({})
    assert drive({"block_size": 2 * MIB})["gradients"] <= drive({})["gradients"]
    assert drive({"block_size": 64 * MIB}) == {}


def test_each_thread_has_a_multiple_of_1024_bytes() -> None:
    for size in drive({"intra_op_parallelism": 7}).values():
        assert size
        assert size % (7 * 1024) == 0


@pytest.mark.parametrize("aio", [3, {"block_size": "x"}, {"intra_op_parallelism": 0}])
def test_sizes_that_are_no_numbers_are_not_counted_with(aio: Any) -> None:
    with pytest.raises(NotEstimatedError, match=r"deepspeed\.aio"):
        drive(aio)
