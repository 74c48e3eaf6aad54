"""Identity of this node, number of nodes, and the address where they meet, each with its source.

A flag wins over the environment. Within the environment the first of `_READERS` that has a value
gives it. Two that have different values are an error that names both, because either could be the
stale one. A guess (the first name of a host list, a number of devices) counts only where no other
source has the value, and contradicts none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from framework.errors import ConfigError, Problem, UsageError
from framework.hosts.devices import LocalDevices
from framework.hosts.hostfile import Host, bare, cluster_of, is_host
from framework.plan.cluster import RANKS_ON_CPU
from framework.system.mpi_launchers import first_of_nodelist

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
    """Nodes and ranks of a job, as one of its nodes sees them.

    There are `nnodes` nodes with `slots` ranks each. Ranks `node_rank * slots` onwards run here.

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
    """One value with its source; a guess is inferred, and gives way to any other source."""

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
    """Return the topology that flags, hosts and environment describe.

    Args:
        flags: values of the command line, by the names of `HostTopology`; None: not given.
        environment: variables of this process.
        hosts: of the hostfile, if there is one.
        default_slots: number of ranks if no other source has one.
        spelled: flags that the command line has under another name than ours, by the names of
            `HostTopology`.

    Raises:
        UsageError: the process is one of many that a launcher such as torchrun has already started.
        ConfigError: values are missing, contradict each other or mean nothing; all of them.
    """
    _refuse_process_of_a_launcher(environment)
    settings = _from_flags(flags, _FLAGS | dict(spelled or {}))
    decided = {item.name for item in settings}
    offered = [*_from_hosts(hosts), *read_settings(environment)]
    explicit = [item for item in offered if item.name not in decided and not item.is_guess]
    problems = list(_contradictions(explicit))
    if not {"nnodes", "node_rank"} <= decided:
        problems += _slurm_problems(environment)
    settings += sorted(offered, key=lambda item: item.is_guess)
    if default_slots:
        settings.append(default_slots)
    chosen = _first_of_each(settings)
    for item in chosen.values():
        problems += _value_problems(item)
    if problems:
        raise ConfigError(problems)
    return _complete(chosen)


def _refuse_process_of_a_launcher(environment: Mapping[str, str]) -> None:
    if "LOCAL_RANK" in environment:
        raise UsageError(
            "launch node: LOCAL_RANK is set, so a launcher has already started one process per "
            "device (torchrun, srun); let it start train.py: python train.py --config CONFIG "
            "[per-process-environment]"
        )


def _from_flags(
    flags: Mapping[str, str | int | None], names_of_flags: Mapping[str, str]
) -> list[Setting]:
    """Return the settings of flags that are given."""
    settings = []
    for name, value in flags.items():
        if value is not None:
            settings.append(Setting(name, bare(str(value)), names_of_flags[name]))
    return settings


def _first_of_each(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the first setting of each name."""
    chosen: dict[str, Setting] = {}
    for item in settings:
        chosen.setdefault(item.name, item)
    return chosen


def slots_here(devices: LocalDevices) -> Setting | None:
    """Return the number of ranks for this machine, one to a device.

    It is None for devices that are not counted.
    """
    if devices.count:
        source = f"{devices.kind} devices here"
        if devices.chosen is not None:
            source += ", of those that are visible"
        return Setting("slots", str(devices.count), source, is_guess=True)
    if devices.kind == "cpu":
        return Setting("slots", str(RANKS_ON_CPU), "default on CPU", is_guess=True)
    return None


def read_settings(environment: Mapping[str, str]) -> list[Setting]:
    """Read what the environment defines about nodes, the most explicit first."""
    settings = []
    for read in _READERS:
        for item in read(environment):
            if item.value and item.name == "master_addr":
                settings.append(replace(item, value=bare(item.value)))
            elif item.value:
                settings.append(item)
    return settings


def _complete(chosen: dict[str, Setting]) -> HostTopology:
    """Fill in the defaults: the port, and for a single node also its rank and address.

    Raises:
        ConfigError: a value is missing, or the rank is too large.
    """
    nnodes = chosen.get("nnodes")
    defaults = {"master_port": str(DEFAULT_PORT)}
    if nnodes is not None and int(nnodes.value) == 1:
        defaults |= {"node_rank": "0", "master_addr": "127.0.0.1"}
    for name, value in defaults.items():
        chosen.setdefault(name, Setting(name, value, "default"))
    _refuse_missing(chosen)
    numbers = {name: int(chosen[name].value) for name in _LARGEST}
    _refuse_large_rank(chosen["node_rank"], chosen["nnodes"])
    sources = {name: item.source for name, item in chosen.items()}
    return HostTopology(**numbers, master_addr=chosen["master_addr"].value, sources=sources)


def _refuse_large_rank(rank: Setting, nodes: Setting) -> None:
    if int(rank.value) >= int(nodes.value):
        reason = f"{nodes.value} nodes ({nodes.source}) have ranks 0 to {int(nodes.value) - 1}"
        raise ConfigError(
            _problem("node-rank", rank, reason, "number the nodes from 0", value=int(rank.value))
        )


def _refuse_missing(chosen: Mapping[str, Setting]) -> None:
    """Refuse a job with a number or an address that is not known."""
    problems = []
    for name, flag in _FLAGS.items():
        if name not in chosen:
            reason = f"nothing says {_MEANING[name]}"
            fix = f"give {flag}, or set {_VARIABLES[name]}"
            problems.append(Problem("topology-unknown", reason, fix, flag))
    if problems:
        raise ConfigError(problems)


def _value_problems(item: Setting) -> Iterator[Problem]:
    """Yield the problem of a value that no job can have."""
    if item.name == "master_addr":
        yield from _address_problems(item)
    elif item.name == "nnodes" and ":" in item.value:
        reason = "a range of nodes is elastic training, which DeepSpeed 0.19.8 does not have"
        yield _problem(_VALUE, item, reason, "write one number")
    else:
        yield from _number_problems(item)


def _address_problems(item: Setting) -> Iterator[Problem]:
    if not is_host(item.value):
        fix = (
            "write a name, or an address such as 10.0.0.2 or fd00::2; the port has a flag of "
            "its own"
        )
        yield _problem(_VALUE, item, "no host has this name or address", fix)


def _number_problems(item: Setting) -> Iterator[Problem]:
    """Yield the problem of a number that is none, too small or too large."""
    least = 1 if item.name in ("nnodes", "slots", "master_port") else 0
    most = _LARGEST[item.name]
    # `int` refuses a number of thousands of digits
    is_number = item.value.isascii() and item.value.isdigit() and len(item.value) < 9
    if not is_number or not least <= int(item.value) <= most:
        fix = f"write a whole number from {least} to {most}"
        yield _problem(_VALUE, item, "it is not a number that can be meant here", fix)


def _contradictions(settings: Sequence[Setting]) -> Iterator[Problem]:
    """Yield a problem for each name that has different values."""
    for name, flag in _FLAGS.items():
        items = [item for item in settings if item.name == name]
        for other in items:
            if other.value != items[0].value:
                reason = f"{other.source} says {other.value}"
                fix = f"unset the one that is wrong, or give {flag}"
                yield _problem("topology-conflict", items[0], reason, fix)
                break


def _problem(kind: str, item: Setting, reason: str, fix: str, *, value: object = None) -> Problem:
    """Return a problem of a value, at the place that its source names."""
    if value is None:
        value = item.value
    file = _file_of(item.source)
    return Problem(kind, reason, fix, key=item.source, value=value, file=file)


def _file_of(source: str) -> str:
    """Return the place of a source in messages; empty for a file, which is the source."""
    if source.startswith("--"):
        return "command line"
    if "/" in source or source == "hostfile":
        return ""
    return "environment"


# Sources of values, in the order of `_READERS`.


def _from_hosts(hosts: Sequence[Host]) -> Iterator[Setting]:
    """Read the hosts of a hostfile; that the first one is node 0 is a guess."""
    if hosts:
        yield Setting("nnodes", str(len(hosts)), "hostfile")
        yield Setting("slots", str(cluster_of(hosts).devices_per_host), "hostfile")
        yield Setting("master_addr", hosts[0].name.rpartition("@")[2], "hostfile", is_guess=True)


def _plain(
    prefix: str, names: Mapping[str, str], guesses: Mapping[str, str] | None = None
) -> Callable[[Mapping[str, str]], Iterator[Setting]]:
    """Return a reader of variables that hold one value each.

    Args:
        prefix: of all the variables.
        names: variables without their prefix, by the names of `HostTopology`.
        guesses: the same for variables whose values are guesses; their first words count.
    """

    def read(environment: Mapping[str, str]) -> Iterator[Setting]:
        for name, variable in names.items():
            value = environment.get(prefix + variable, "").strip()
            # these values mean a count of the devices, as for torchrun
            if not (name == "slots" and value in ("auto", "gpu", "cpu")):
                yield Setting(name, value, prefix + variable)
        for name, variable in (guesses or {}).items():
            words = environment.get(prefix + variable, "").split()
            yield Setting(name, words[0] if words else "", prefix + variable, is_guess=True)

    return read


def _slurm(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Read Slurm's variables, inside a step of `srun` only.

    In an interactive allocation the same variables describe nodes that run nothing.
    """
    if not {"SLURM_STEP_ID", "SLURM_NODEID"} <= environment.keys():
        return
    variable = _first_in(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if variable:
        yield Setting("nnodes", environment[variable], variable)
    yield Setting("node_rank", environment["SLURM_NODEID"], "SLURM_NODEID")
    variable = _first_in(environment, "SLURM_STEP_NODELIST", "SLURM_NODELIST")
    if variable:
        host = first_of_nodelist(environment[variable])
        yield Setting("master_addr", host, variable, is_guess=True)
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        count = environment.get(variable, "").rpartition(":")[2]
        yield Setting("slots", count, variable, is_guess=True)


def _first_in(environment: Mapping[str, str], *variables: str) -> str:
    """Return the first of the variables that is set; empty if none is."""
    return next((variable for variable in variables if variable in environment), "")


def _slurm_problems(environment: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if `srun` starts more than one launcher on a node."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    in_step = {"SLURM_STEP_ID", "SLURM_NODEID"} <= environment.keys()
    if in_step and any(int(count) > 1 for count in re.findall(r"(?:^|,)(\d+)", tasks)):
        setting = Setting("slots", tasks, "SLURM_STEP_TASKS_PER_NODE")
        reason = "one launcher per node starts all ranks of it"
        yield _problem("slurm-tasks", setting, reason, "srun --ntasks-per-node=1")


def _volcano(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Read Volcano's variables of a job with one kind of tasks.

    With several kinds, no variable shows which of them trains.
    """
    lists = [name for name in environment if re.fullmatch(r"VC_[A-Z0-9_]+_HOSTS", name)]
    if len(lists) != 1:
        return
    list_variable = lists[0]
    hosts = re.findall(r"[^,\s]+", environment[list_variable])
    count_variable = list_variable.replace("_HOSTS", "_NUM")
    if environment.get(count_variable):
        yield Setting("nnodes", environment[count_variable], count_variable)
    else:
        yield Setting("nnodes", str(len(hosts)), list_variable)
    yield Setting("node_rank", environment.get("VC_TASK_INDEX", ""), "VC_TASK_INDEX")
    yield Setting("master_addr", hosts[0] if hosts else "", list_variable, is_guess=True)


def _pytorchjob(environment: Mapping[str, str]) -> Iterator[Setting]:
    """Read the variables of Kubeflow's PyTorchJob.

    WORLD_SIZE is the number of pods before operator 1.7. Later it is the number of ranks, and
    PET_NNODES that of the pods. Processes of a launcher have LOCAL_RANK, and never come here.
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
