"""Clusters from numbers and from what launchers put into the environment."""

from __future__ import annotations

import pytest

from framework.errors import ConfigError, UsageError
from framework.plan.cluster import Cluster


@pytest.mark.parametrize(
    ("environment", "cluster"),
    [
        ({}, Cluster(1, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Cluster(1, 1)),
        # torchrun --nproc-per-node 4, one host and two
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, Cluster(1, 4)),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, Cluster(2, 4)),
        # deepspeed --num_gpus 2, and two hosts
        ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_SIZE": "1"}, Cluster(1, 2)),
        ({"WORLD_SIZE": "16", "LOCAL_SIZE": "8"}, Cluster(2, 8)),
        # torchrun's word counts where both are there
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "2"}, Cluster(1, 8)),
        # a launcher that does not say how many ranks a host has
        ({"WORLD_SIZE": "6"}, Cluster(1, 6)),
    ],
    ids=str,
)
def test_from_environment(environment: dict[str, str], cluster: Cluster) -> None:
    assert Cluster.from_environment(environment) == cluster
    assert Cluster.from_environment(environment, device="cpu").device == "cpu"


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE=two: not a positive whole number"),
        ({"WORLD_SIZE": ""}, "environment variable WORLD_SIZE=: not a positive whole number"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE=0: not a positive whole number"),
        ({"WORLD_SIZE": "²"}, "environment variable WORLD_SIZE=²: not a positive whole number"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "-1"},
            "environment variable LOCAL_WORLD_SIZE=-1: not a positive whole number",
        ),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "3"},
            "WORLD_SIZE=4 is not a multiple of 3 ranks per host",
        ),
        (
            {"WORLD_SIZE": "1", "LOCAL_SIZE": "2"},
            "WORLD_SIZE=1 is not a multiple of 2 ranks per host",
        ),
    ],
    ids=str,
)
def test_nonsense_in_the_environment(environment: dict[str, str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        Cluster.from_environment(environment)
    assert str(caught.value) == line


@pytest.mark.parametrize(("hosts", "devices"), [(0, 1), (1, 0), (-1, 2)])
def test_a_cluster_has_something(hosts: int, devices: int) -> None:
    with pytest.raises(UsageError):
        Cluster(hosts, devices)


def test_in_words() -> None:
    assert str(Cluster()) == "1 device"
    assert str(Cluster(1, 8, "cuda")) == "8 cuda devices"
    assert str(Cluster(2, 8)) == "2 hosts x 8 devices"
    assert Cluster(2, 8).world_size == 16


def test_a_world_that_is_not_the_planned_one_is_refused() -> None:
    planned = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "DSF_WORLD_SIZE": "4"}
    with pytest.raises(ConfigError) as refused:
        Cluster.from_environment(planned)
    line = str(refused.value)
    assert line.startswith(
        "WORLD_SIZE = 2: the job was planned for 4 ranks (DSF_WORLD_SIZE), and the launcher started 2; "
    )
    assert "hostfile" in line
    assert line.endswith("[world-size-differs]")
    assert Cluster.from_environment(planned | {"DSF_WORLD_SIZE": "2"}) == Cluster(1, 2)
    with pytest.raises(UsageError, match="DSF_WORLD_SIZE=many"):
        Cluster.from_environment(planned | {"DSF_WORLD_SIZE": "many"})
