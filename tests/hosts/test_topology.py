"""Rank and address of this node: precedence of the sources, contradictions between them, and
refusals.
"""

from __future__ import annotations

from typing import Any

import pytest

from framework.errors import ConfigError, UsageError
from framework.hosts.hostfile import Host
from framework.hosts.topology import HostTopology, Setting, read_settings, resolve_topology
from framework.system.mpi_launchers import first_of_nodelist

OWN = {
    "NNODES": "2",
    "NPROC_PER_NODE": "8",
    "NODE_RANK": "1",
    "MASTER_ADDR": "a-0.a",
    "MASTER_PORT": "29501",
}
PET = {f"PET_{name}": value for name, value in OWN.items()}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_GPUS_ON_NODE": "8",
}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
DSTACK = {
    "DSTACK_NODES_NUM": "2",
    "DSTACK_NODE_RANK": "1",
    "DSTACK_MASTER_NODE_IP": "10.0.0.1",
    "DSTACK_GPUS_PER_NODE": "8",
}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a-0.a"}
VOLCANO = {"VC_WORKER_HOSTS": "a-0.a,a-1.a", "VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1"}
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a-0.a", "MASTER_PORT": "29501"}


def resolve(
    environment: dict[str, str], *, hosts: tuple[Host, ...] = (), **flags: Any
) -> HostTopology:
    return resolve_topology(
        flags,
        environment,
        hosts=hosts,
        default_slots=Setting("slots", "4", "devices", is_guess=True),
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (OWN, (2, 8, 1, "a-0.a", 29501)),
        (PET, (2, 8, 1, "a-0.a", 29501)),
        (PET | {"PET_NPROC_PER_NODE": "auto"}, (2, 4, 1, "a-0.a", 29501)),
        (
            {"NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a-0.a"},
            (2, 4, 1, "a-0.a", 29500),
        ),
        (SLURM, (2, 8, 1, "gpu03", 29500)),
        (SKYPILOT, (2, 8, 1, "10.0.0.1", 29500)),
        (DSTACK, (2, 8, 1, "10.0.0.1", 29500)),
        (LWS, (2, 4, 1, "a-0.a", 29500)),
        (VOLCANO, (2, 4, 1, "a-0.a", 29500)),
        (POD, (2, 4, 1, "a-0.a", 29501)),
        ({"NNODES": "1"}, (1, 4, 0, "127.0.0.1", 29500)),
        # Equal values from two places are no contradiction, and a guess contradicts no source.
        (OWN | PET | SKYPILOT | {"JOB_COMPLETION_INDEX": "1"}, (2, 8, 1, "a-0.a", 29501)),
        (SLURM | {"MASTER_ADDR": "10.0.0.9", "NPROC_PER_NODE": "2"}, (2, 2, 1, "10.0.0.9", 29500)),
    ],
    ids=lambda value: ",".join(value)[:40] if isinstance(value, dict) else "",
)
def test_platforms(environment: dict[str, str], expected: tuple[Any, ...]) -> None:
    got = resolve(environment)
    assert (got.nnodes, got.slots, got.node_rank, got.master_addr, got.master_port) == expected


@pytest.mark.parametrize(
    "processes", [{"WORLD_SIZE": "8"}, {"WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "auto"}], ids=str
)
def test_a_pytorchjob_of_todays_operator_counts_ranks_in_world_size(
    processes: dict[str, str],
) -> None:
    """Kubeflow's operator does so since release 1.7; PET_NNODES counts the pods, as WORLD_SIZE did
    before.
    """
    newer = POD | {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"} | processes
    got = resolve(newer)
    assert (got.nnodes, got.slots, got.node_rank, got.sources["nnodes"]) == (2, 4, 1, "PET_NNODES")
    alone = {"PET_NNODES": "1", "WORLD_SIZE": "2", "RANK": "0"}
    assert resolve(alone).nnodes == 1
    assert [item.value for item in read_settings(alone) if item.name == "nnodes"] == ["1"]


@pytest.mark.parametrize(
    ("environment", "source"),
    [
        (SLURM | {"SLURM_GPUS_ON_NODE": "2"}, {"slots": "SLURM_GPUS_ON_NODE"}),
        (
            SLURM | {"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "a100:2"},
            {"slots": "SLURM_GPUS_PER_NODE"},
        ),
        (VOLCANO | {"NPROC_PER_NODE": "2"}, {"nnodes": "VC_WORKER_NUM"}),
        (VOLCANO | {"NPROC_PER_NODE": "2", "VC_WORKER_NUM": ""}, {"nnodes": "VC_WORKER_HOSTS"}),
    ],
    ids=lambda value: str(value) if len(value) == 1 else "",
)
def test_the_variable_that_gave_a_value_is_reported(
    environment: dict[str, str], source: dict[str, str]
) -> None:
    got = resolve(environment)
    assert (got.nnodes, got.slots) == (2, 2)
    assert got.sources.items() >= source.items()


def test_a_flag_wins_and_sources_are_reported() -> None:
    got = resolve(OWN, node_rank="0", slots=2)
    assert (got.node_rank, got.slots, got.world_size) == (0, 2, 4)
    assert got.sources == {
        "node_rank": "--node_rank",
        "slots": "--num_gpus",
        "nnodes": "NNODES",
        "master_addr": "MASTER_ADDR",
        "master_port": "MASTER_PORT",
    }


@pytest.mark.parametrize("spelled", ["fd00::1", "[fd00::1]"])
def test_an_ipv6_address_loses_its_brackets(spelled: str) -> None:
    """torch and sockets take an address without brackets; from two places it is one address."""
    assert resolve(OWN, master_addr=spelled).master_addr == "fd00::1"
    assert (
        resolve(OWN | {"MASTER_ADDR": spelled, "PET_MASTER_ADDR": "[fd00::1]"}).master_addr
        == "fd00::1"
    )
    assert resolve(SKYPILOT | {"SKYPILOT_NODE_IPS": f"{spelled}\nfd00::2"}).master_addr == "fd00::1"


def test_a_hostfile_counts_the_nodes() -> None:
    got = resolve({"NODE_RANK": "1"}, hosts=(Host("me@a", 2), Host("b", 2)))
    assert (got.nnodes, got.slots, got.node_rank, got.master_addr) == (2, 2, 1, "a")
    assert got.sources["nnodes"] == "hostfile"


@pytest.mark.parametrize(
    ("environment", "reported"),
    [
        (OWN | PET | {"PET_NODE_RANK": "0"}, "environment: NODE_RANK = 1: PET_NODE_RANK says 0"),
        (
            OWN | {"JOB_COMPLETION_INDEX": "0"},
            "environment: NODE_RANK = 1: JOB_COMPLETION_INDEX says 0",
        ),
        (
            PET | SLURM | {"SLURM_STEP_NUM_NODES": "4"},
            "environment: PET_NNODES = 2: SLURM_STEP_NUM_NODES says 4",
        ),
        (
            OWN | {"PET_MASTER_ADDR": "b"},
            "environment: MASTER_ADDR = a-0.a: PET_MASTER_ADDR says b",
        ),
    ],
)
def test_sources_that_contradict_each_other_are_both_named(
    environment: dict[str, str], reported: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environment)
    (problem,) = caught.value.problems
    assert reported in str(problem).replace('"', "")
    assert problem.kind == "topology-conflict"


def test_a_flag_settles_a_contradiction() -> None:
    assert resolve(OWN | {"JOB_COMPLETION_INDEX": "0"}, node_rank="0").node_rank == 0


@pytest.mark.parametrize(
    ("environment", "kinds"),
    [
        ({}, ["topology-unknown"] * 3),
        ({"NNODES": "2", "NODE_RANK": "0"}, ["topology-unknown"]),
        (OWN | {"NODE_RANK": "2"}, ["node-rank"]),
        (OWN | {"NNODES": "1:4"}, ["topology-value"]),
        (
            OWN
            | {
                "NNODES": "two",
                "MASTER_PORT": "tcp://10.0.0.1:1",
                "MASTER_ADDR": "-oProxyCommand=x",
            },
            ["topology-value"] * 3,
        ),
        (OWN | {"NPROC_PER_NODE": "2000"}, ["topology-value"]),
        (OWN | {"MASTER_ADDR": "worker-0:29500"}, ["topology-value"]),
        (OWN | {"MASTER_ADDR": "[worker-0]"}, ["topology-value"]),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, ["slurm-tasks"]),
        # An interactive allocation describes nodes on which nothing of ours runs.
        (
            {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"},
            ["topology-unknown"] * 3,
        ),
        # Which of two kinds of task trains is not written anywhere.
        (VOLCANO | {"VC_OTHER_HOSTS": "x", "VC_OTHER_NUM": "1"}, ["topology-unknown"] * 3),
    ],
    ids=lambda value: ",".join(value)[:40] if isinstance(value, (dict, list)) else "",
)
def test_what_is_refused(environment: dict[str, str], kinds: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(environment)
    assert [problem.kind for problem in caught.value.problems] == kinds


def test_a_process_of_torchrun_is_sent_to_train_py() -> None:
    with pytest.raises(UsageError, match=r"LOCAL_RANK is set.*python train.py --config"):
        resolve(POD | {"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("gpu[03-07,12],login1", "gpu03"),
        ("a,b", "a"),
        ("n[1,3]x", "n1x"),
        ("single", "single"),
        ("r1-n[001-100]", "r1-n001"),
    ],
)
def test_the_first_of_slurms_list(text: str, first: str) -> None:
    assert first_of_nodelist(text) == first
