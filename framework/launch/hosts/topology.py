"""Identity of this node, number of nodes, and the address where they meet: every value with the
place it came from.

A flag wins over the environment. Within the environment the first of `_READERS` that knows a value
gives it; two that know different values are an error that names both, because either could be the
stale one. What a platform only lets us infer (the first name of a host list, a number of devices)
is taken when nobody says it, and contradicts nobody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from framework.errors import ConfigError, Problem, UsageError
from framework.launch.hosts.devices import LocalDevices
from framework.launch.hosts.hostfile import Host, bare, cluster_of, is_host
from framework.plan.cluster import RANKS_ON_CPU
from framework.system.launcher_rank import first_of_nodelist

DEFAULT_PORT: Final = 29500
_VALUE: Final = "topology-value"
_LARGEST: Final = {"nnodes": 9999, "node_rank": 9998, "slots": 1024, "master_port": 65534}
_NAMES: Final = ("nnodes", "node_rank", "slots", "master_addr", "master_port")
_FLAGS: Final = {name: f"--{name}" for name in _NAMES} | {"slots": "--num_gpus"}
_VARIABLES: Final = {name: name.upper() for name in _NAMES} | {"slots": "NPROC_PER_NODE"}
_MEANING: Final = {
    "nnodes": "how many nodes there are",
    "node_rank": "which node this is",
    "slots": "how many ranks run on a node",
    "master_addr": "the address of node 0",
}


@dataclass(frozen=True)
class HostTopology:
    """A place for every rank: `nnodes` members with `slots` ranks each; ranks node_rank * slots
    onwards run here.

    Attributes:
        master_addr, master_port: where the ranks meet, on node 0; port 0: a single host elsewhere
            finds one.
        sources: where each value came from.
    """

    nnodes: int
    slots: int
    node_rank: int
    master_addr: str
    master_port: int
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nnodes * self.slots


@dataclass(frozen=True)
class Setting:
    """One value that somebody gives; a guess is inferred, and gives way without a word."""

    name: str
    value: str
    source: str
    is_guess: bool = False


def resolve_topology(
    flags: Mapping[str, str | int | None],
    environment: Mapping[str, str],
    *,
    hosts: Sequence[Host] = (),
    default_slots: Setting | None = None,
    spelled: Mapping[str, str] | None = None,
) -> HostTopology:
    """This node's place.

    Args:
        flags: what the command line gives, by the names of `Topology`; None where it gives nothing.
        default_slots: number of ranks where nobody gives one.
        spelled: flags that the command line has under another name than ours, by the names of
            `Topology`.

    Raises:
        UsageError: the process is one of many that a launcher such as torchrun has already started.
        ConfigError: values are missing, contradict each other or mean nothing; all of them.
    """
    if "LOCAL_RANK" in environment:
        raise UsageError(
            "launch node: LOCAL_RANK is set, so a launcher has already started one process per "
            "device (torchrun, srun); let it start train.py: python train.py --config CONFIG "
            "[per-process-environment]"
        )
    words = _FLAGS | dict(spelled or {})
    stated = [
        Setting(name, bare(str(value)), words[name])
        for name, value in flags.items()
        if value is not None
    ]
    given = {item.name for item in stated}
    offered = [*_from_hosts(hosts), *described(environment)]
    problems = list(
        _contradictions([item for item in offered if item.name not in given and not item.is_guess])
    )
    if not {"nnodes", "node_rank"} <= given:
        problems += _slurm_problems(environment)
    stated += sorted(offered, key=lambda item: item.is_guess)
    stated += [default_slots] if default_slots else []
    chosen: dict[str, Setting] = {}
    for item in stated:
        chosen.setdefault(item.name, item)
    problems += [problem for item in chosen.values() if (problem := _wrong(item))]
    if problems:
        raise ConfigError(problems)
    return _complete(chosen)


def slots_here(devices: LocalDevices) -> Setting | None:
    """Ranks that this machine is good for, one to a device; None where devices are of a kind that
    nobody counts.
    """
    if devices.count:
        among = "" if devices.chosen is None else ", of those that are visible"
        return Setting(
            "slots", str(devices.count), f"{devices.kind} devices here{among}", is_guess=True
        )
    if devices.kind == "cpu":
        return Setting("slots", str(RANKS_ON_CPU), "default on CPU", is_guess=True)
    return None


def described(environment: Mapping[str, str]) -> list[Setting]:
    """Read what the environment defines about nodes, the most explicit first."""
    stated = (item for read in _READERS for item in read(environment) if item.value)
    return [
        replace(item, value=bare(item.value)) if item.name == "master_addr" else item
        for item in stated
    ]


def _complete(chosen: dict[str, Setting]) -> HostTopology:
    """Fill in what may be left out: all of it for a single node, nothing but the port for
    several.
    """
    nnodes = chosen.get("nnodes")
    single = nnodes is not None and int(nnodes.value) == 1
    defaults = {"master_port": str(DEFAULT_PORT)} | (
        {"node_rank": "0", "master_addr": "127.0.0.1"} if single else {}
    )
    for name, value in defaults.items():
        chosen.setdefault(name, Setting(name, value, "default"))
    missing = [name for name in _FLAGS if name not in chosen]
    if missing:
        reasons = {name: f"nothing says {_MEANING[name]}" for name in missing}
        fixes = {name: f"give {_FLAGS[name]}, or set {_VARIABLES[name]}" for name in missing}
        raise ConfigError(
            Problem("topology-unknown", reasons[name], fixes[name], _FLAGS[name])
            for name in missing
        )
    numbers = {name: int(chosen[name].value) for name in _LARGEST}
    if numbers["node_rank"] >= numbers["nnodes"]:
        rank = chosen["node_rank"]
        nodes = chosen["nnodes"]
        reason = f"{nodes.value} nodes ({nodes.source}) have ranks 0 to {numbers['nnodes'] - 1}"
        raise ConfigError(
            _problem("node-rank", rank, reason, "number the nodes from 0", value=int(rank.value))
        )
    sources = {name: item.source for name, item in chosen.items()}
    return HostTopology(**numbers, master_addr=chosen["master_addr"].value, sources=sources)


def _wrong(item: Setting) -> Problem | None:
    if item.name == "master_addr":
        fix = (
            "write a name, or an address such as 10.0.0.2 or fd00::2; the port has a flag of "
            "its own"
        )
        if is_host(item.value):
            return None
        return _problem(_VALUE, item, "no host has this name or address", fix)
    if item.name == "nnodes" and ":" in item.value:
        reason = "a range of nodes is elastic training, which DeepSpeed 0.19.8 does not have"
        return _problem(_VALUE, item, reason, "write one number")
    least = 1 if item.name in ("nnodes", "slots", "master_port") else 0
    most = _LARGEST[item.name]
    if not (
        item.value.isascii()
        and item.value.isdigit()
        and len(item.value) < 9
        and least <= int(item.value) <= most
    ):
        fix = f"write a whole number from {least} to {most}"
        return _problem(_VALUE, item, "it is not a number that can be meant here", fix)
    return None


def _contradictions(stated: Sequence[Setting]) -> Iterator[Problem]:
    for name in _FLAGS:
        values = [item for item in stated if item.name == name]
        other = next((item for item in values if item.value != values[0].value), None)
        if other:
            reason = f"{other.source} says {other.value}"
            fix = f"unset the one that is wrong, or give {_FLAGS[name]}"
            yield _problem("topology-conflict", values[0], reason, fix)


def _problem(kind: str, item: Setting, reason: str, fix: str, *, value: object = None) -> Problem:
    source = item.source
    in_file = "/" in source or source == "hostfile"
    if source.startswith("--"):
        file = "command line"
    elif in_file:
        file = ""
    else:
        file = "environment"
    return Problem(
        kind, reason, fix, key=source, value=item.value if value is None else value, file=file
    )


# Who says what, in this order.


def _from_hosts(hosts: Sequence[Host]) -> Iterator[Setting]:
    if hosts:
        yield Setting("nnodes", str(len(hosts)), "hostfile")
        yield Setting("slots", str(cluster_of(hosts).devices_per_host), "hostfile")
        yield Setting("master_addr", hosts[0].name.rpartition("@")[2], "hostfile", is_guess=True)


def _plain(
    prefix: str, names: Mapping[str, str], guesses: Mapping[str, str] | None = None
) -> Callable[[Mapping[str, str]], Iterator[Setting]]:
    """A reader of variables that hold one value each; of a guess the first word counts."""

    def read(environment: Mapping[str, str]) -> Iterator[Setting]:
        for name, variable in names.items():
            value = environment.get(prefix + variable, "").strip()
            # as torchrun: count the devices
            if not (name == "slots" and value in ("auto", "gpu", "cpu")):
                yield Setting(name, value, prefix + variable)
        for name, variable in (guesses or {}).items():
            words = environment.get(prefix + variable, "").split()
            yield Setting(name, words[0] if words else "", prefix + variable, is_guess=True)

    return read


def _slurm(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Only inside a step of `srun`: in an interactive allocation the same variables describe nodes
    that run nothing.
    """
    if not {"SLURM_STEP_ID", "SLURM_NODEID"} <= environment.keys():
        return
    for variable in [
        name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if name in environment
    ][:1]:
        yield Setting("nnodes", environment[variable], variable)
    yield Setting("node_rank", environment["SLURM_NODEID"], "SLURM_NODEID")
    for variable in [
        name for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST") if name in environment
    ][:1]:
        yield Setting(
            "master_addr", first_of_nodelist(environment[variable]), variable, is_guess=True
        )
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        yield Setting(
            "slots", environment.get(variable, "").rpartition(":")[2], variable, is_guess=True
        )


def _slurm_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    in_step = {"SLURM_STEP_ID", "SLURM_NODEID"} <= environment.keys()
    if in_step and any(int(count) > 1 for count in re.findall(r"(?:^|,)(\d+)", tasks)):
        stated = Setting("slots", tasks, "SLURM_STEP_TASKS_PER_NODE")
        reason = "one launcher per node starts all ranks of it"
        yield _problem("slurm-tasks", stated, reason, "srun --ntasks-per-node=1")


def _volcano(environment: Mapping[str, str]) -> Iterator[Setting]:
    """A job of one task kind; with several, which of them trains is not written anywhere."""
    lists = [name for name in environment if re.fullmatch(r"VC_[A-Z0-9_]+_HOSTS", name)]
    if len(lists) == 1:
        hosts = [host for host in re.split(r"[,\s]+", environment[lists[0]]) if host]
        counted = lists[0].replace("_HOSTS", "_NUM")
        number = environment.get(counted)
        yield (
            Setting("nnodes", number, counted)
            if number
            else Setting("nnodes", str(len(hosts)), lists[0])
        )
        yield Setting("node_rank", environment.get("VC_TASK_INDEX", ""), "VC_TASK_INDEX")
        yield Setting("master_addr", hosts[0] if hosts else "", lists[0], is_guess=True)


def _pytorchjob(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Kubeflow's operator before 1.7 counts pods, later ones ranks, and then PET_NNODES counts the
    pods.

    A launcher's processes have LOCAL_RANK, and never come here.
    """
    if not environment.get("PET_NNODES"):
        yield Setting("nnodes", environment.get("WORLD_SIZE", ""), "WORLD_SIZE")
    yield Setting("node_rank", environment.get("RANK", ""), "RANK")


_RANK: Final = {"node_rank": "NODE_RANK"}
_READERS: Final[Sequence[Callable[[Mapping[str, str]], Iterator[Setting]]]] = (
    _plain("", _VARIABLES),
    _plain("PET_", _VARIABLES),  # Kubeflow Trainer
    _plain("", {"node_rank": "JOB_COMPLETION_INDEX"}),  # Kubernetes Indexed Job
    _slurm,
    _plain(
        "SKYPILOT_",
        {"nnodes": "NUM_NODES"} | _RANK,
        {"master_addr": "NODE_IPS", "slots": "NUM_GPUS_PER_NODE"},
    ),
    _plain(
        "DSTACK_",
        {"nnodes": "NODES_NUM"} | _RANK,
        {"master_addr": "MASTER_NODE_IP", "slots": "GPUS_PER_NODE"},
    ),
    # LeaderWorkerSet
    _plain(
        "LWS_",
        {"nnodes": "GROUP_SIZE", "node_rank": "WORKER_INDEX", "master_addr": "LEADER_ADDRESS"},
    ),
    _volcano,
    _pytorchjob,
)
