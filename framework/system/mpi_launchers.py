"""Rank of a process that `srun`, `mpirun` or another MPI launcher started, one for each device.

torchrun, DeepSpeed's launcher and ours set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. MPI launchers have variables of their own, and a process that reads only torch's takes
itself for the only one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from framework.errors import ConfigError, Problem

KIND: Final = "rendezvous-environment"
# Launchers in order of precedence: Open MPI and Hydra start their daemons with srun, one on each
# node, and the daemons' processes inherit the variables of that step. The first variable of a value
# that is set counts.
_LAUNCHERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "mpirun": {
        "RANK": ("OMPI_COMM_WORLD_RANK",),
        "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE",),
        "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    "mpirun_rsh": {
        "RANK": ("MV2_COMM_WORLD_RANK",),
        "WORLD_SIZE": ("MV2_COMM_WORLD_SIZE",),
        "LOCAL_RANK": ("MV2_COMM_WORLD_LOCAL_RANK",),
        "LOCAL_WORLD_SIZE": ("MV2_COMM_WORLD_LOCAL_SIZE",),
    },
    "mpiexec (PALS)": {
        "RANK": ("PALS_RANKID",),
        "WORLD_SIZE": ("PALS_NRANKS", "PALS_SIZE", "PMI_SIZE"),
        "LOCAL_RANK": ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "LOCAL_WORLD_SIZE": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    },
    "mpiexec (PMI)": {
        "RANK": ("PMI_RANK",),
        "WORLD_SIZE": ("PMI_SIZE",),
        "LOCAL_RANK": ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        "LOCAL_WORLD_SIZE": ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    },
    "srun": {
        "RANK": ("SLURM_PROCID",),
        "WORLD_SIZE": ("SLURM_STEP_NUM_TASKS",),
        "LOCAL_RANK": ("SLURM_LOCALID",),
    },
}
_OPEN_MPI_LOCAL_RANK: Final = "OMPI_COMM_WORLD_LOCAL_RANK"
# A launcher of ranks, below one process on each node, sets one of these: torchrun, ours,
# DeepSpeed's launch.py.
_BELOW: Final = ("TORCHELASTIC_RUN_ID", "DSF_AGENT", "CROSS_RANK")
# Variables that identify a job, with the same value on all of its ranks.
_JOBS: Final = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PALS_APID",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
)
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 12_000  # below the ports that Linux hands out by itself
_LARGEST: Final = 1 << 20  # more than the ranks of any job
# launchers under which this process was started to train alone: it may train again
_alone: set[str] = set()
_TASKS: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class LauncherRank:
    """Rank of a process, as its launcher set it.

    Attributes:
        launcher: its command.
        values: by torch's names, as far as the launcher has them.
        sources: the variable of each value.
        num_nodes: 0 where it is not known.
        address: of the first node, as its scheduler calls it; empty where it is not known.
        job: name of the job, the same on all of its ranks.
    """

    launcher: str
    values: Mapping[str, int]
    sources: Mapping[str, str]
    num_nodes: int
    address: str = ""
    job: str = ""

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.values["WORLD_SIZE"]


def take_launched_rank(environment: MutableMapping[str, str]) -> None:
    """Set torch's variables as `launcher_rank.take_rank` does; raises the same."""
    task = launched_rank(environment)
    if task is None:
        return
    if "RANK" in environment and any(name in environment for name in _BELOW):
        # DeepSpeed compares Open MPI's local rank with LOCAL_RANK (runtime/engine.py,
        # _do_args_sanity_check), although Open MPI's is that of the single process on this node
        # which started the launcher of the ranks.
        environment.pop(_OPEN_MPI_LOCAL_RANK, None)
        return
    # A user who sets WORLD_SIZE=1 for all tasks wants each of them to train alone.
    if "RANK" not in environment and environment.get("WORLD_SIZE") == "1":
        _alone.add(task.launcher)
    if task.launcher in _alone:
        environment.pop(_OPEN_MPI_LOCAL_RANK, None)
    elif task.size > 1:
        problems = list(_contradictions(environment, task))
        problems += _missing(environment, task)
        if problems:
            raise ConfigError(problems)
        for name, value in task.values.items():
            environment[name] = str(value)
        environment.setdefault("MASTER_ADDR", task.address)
        environment.setdefault("MASTER_PORT", str(_port(task.job)))


def launched_rank(environment: Mapping[str, str]) -> LauncherRank | None:
    """Return the rank that a launcher of single processes gave this one, or None.

    Raises:
        ConfigError: kind ``rendezvous-environment``: the values are not valid.
    """
    for launcher, names in _LAUNCHERS.items():
        sources = {name: _first_set(environment, variables) for name, variables in names.items()}
        if sources["RANK"] and _is_of_step(environment, launcher):
            # srun --mpi=pmi2 sets PMI's variables too: the row of srun has more of the rank.
            if launcher == "mpiexec (PMI)" and _is_same(environment, "srun", sources):
                continue
            set_sources = {name: variable for name, variable in sources.items() if variable}
            return _rank_of(environment, launcher, set_sources)
    return None


def first_of_nodelist(text: str) -> str:
    """Return the first host of Slurm's short form: ``gpu[03-07,12],login1`` -> ``gpu03``."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", text)
    assert match  # every part may be empty
    return match[1] + (match[2] or "") + (match[3] or "")


def _first_set(environment: Mapping[str, str], variables: tuple[str, ...]) -> str:
    return next((name for name in variables if environment.get(name)), "")


def _is_of_step(environment: Mapping[str, str], launcher: str) -> bool:
    """Check, for srun, whether Slurm started this process as a task of a step.

    The script of a job, and a shell in an allocation, are not tasks.
    """
    return launcher != "srun" or {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environment.keys()


def _is_same(environment: Mapping[str, str], launcher: str, sources: Mapping[str, str]) -> bool:
    """Check whether a launcher gives this process the same rank and size as these variables."""
    if not _is_of_step(environment, launcher):
        return False
    for name in ("RANK", "WORLD_SIZE"):
        variable = _first_set(environment, _LAUNCHERS[launcher][name])
        if not variable or environment[variable] != environment.get(sources[name]):
            return False
    return True


def _rank_of(
    environment: Mapping[str, str], launcher: str, sources: Mapping[str, str]
) -> LauncherRank:
    """Return the rank of this process; `sources`: the variable for each of torch's names.

    Raises:
        ConfigError: a value is no valid number, or the number of processes is missing.
    """
    values = {
        name: _number(name, environment[variable], variable) for name, variable in sources.items()
    }
    if "WORLD_SIZE" not in values:
        reason = f"{launcher} started this process, and nothing says how many there are"
        raise ConfigError.of(KIND, reason, "set WORLD_SIZE to their number", "WORLD_SIZE")
    num_nodes = 0
    address = ""
    job = next((environment[name] for name in _JOBS if environment.get(name)), "")
    if launcher == "srun":
        values |= _slurm_local_size(environment, values["WORLD_SIZE"])
        num_nodes = _slurm_num_nodes(environment)
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        address = first_of_nodelist(nodes)
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        job = ".".join(environment.get(name, "") for name in parts)
    elif values.get("LOCAL_WORLD_SIZE") == values["WORLD_SIZE"]:
        num_nodes = 1
    if num_nodes == 1:
        address = "127.0.0.1"
    return LauncherRank(launcher, values, sources, num_nodes, address, job)


def _number(name: str, text: str, variable: str) -> int:
    least = 1 if name.endswith("SIZE") else 0
    if text.isascii() and text.isdecimal() and least <= int(text) < _LARGEST:
        return int(text)
    reason = f"no number that can be {name}"
    raise ConfigError.of(KIND, reason, "leave it to the launcher", variable, text)


def _slurm_num_nodes(environment: Mapping[str, str]) -> int:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"):
        count = environment.get(name, "")
        if count.isdecimal():
            return int(count)
    return 0


def _slurm_local_size(environment: Mapping[str, str], size: int) -> dict[str, int]:
    """Return LOCAL_WORLD_SIZE; nothing if it is not the same on all nodes, or not known.

    Slurm writes it as ``2(x3),1``, for four nodes.
    """
    groups = _TASKS.findall(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = {int(tasks) for tasks, _ in groups}
    if len(counts) == 1:
        return {"LOCAL_WORLD_SIZE": counts.pop()}
    if counts or environment.get("SLURM_STEP_NUM_NODES") != "1":
        return {}
    return {"LOCAL_WORLD_SIZE": size}


def _contradictions(environment: Mapping[str, str], task: LauncherRank) -> Iterator[Problem]:
    """Yield a problem for each of torch's variables that has another value than the launcher's."""
    for name, value in task.values.items():
        text = environment.get(name, "")
        if text and text != str(value):
            source = task.sources.get(name, task.launcher)
            reason = f"{task.launcher} gave this process {value} ({source})"
            fix = f"unset {name}, or start the ranks by torchrun or `launch` alone"
            variable_value = int(text) if text.isdecimal() else text
            yield Problem(KIND, reason, fix, key=name, value=variable_value, file="environment")


def _missing(environment: Mapping[str, str], task: LauncherRank) -> Iterator[Problem]:
    """Yield a problem for each value that is missing, and for ranks not placed node by node."""

    def problem(key: str, reason: str, fix: str) -> Problem:
        reason = f"{task.launcher} started {task.size} processes, and {reason}"
        return Problem(KIND, reason, fix, key=key)

    rank = task.values["RANK"]
    local_rank = task.values.get("LOCAL_RANK", environment.get("LOCAL_RANK"))
    local_size = task.values.get("LOCAL_WORLD_SIZE")
    if rank >= task.size:
        fix = "start the ranks by torchrun or `launch`"
        yield problem("RANK", f"this one is number {rank}", fix)
    if local_rank is None:
        fix = "set LOCAL_RANK, or use torchrun"
        yield problem("LOCAL_RANK", "nothing says which of its node this is", fix)
    if local_size is None:
        if task.launcher == "srun":
            fix = "give every node as many: srun --ntasks-per-node=N"
            yield problem("SLURM_STEP_TASKS_PER_NODE", "not every node has as many of them", fix)
        elif "LOCAL_WORLD_SIZE" not in environment:
            fix = "set LOCAL_WORLD_SIZE to the number on each node, or use torchrun"
            yield problem("LOCAL_WORLD_SIZE", "nothing says how many run on a node", fix)
    elif local_rank is not None and str(rank % local_size) != str(local_rank):
        reason = f"number {rank} is number {local_rank} of its node: they are dealt out in turn"
        fix = "place those of a node together: srun --distribution=block, mpirun --map-by slot"
        yield problem("LOCAL_RANK", reason, fix)
    if not task.address and not environment.get("MASTER_ADDR"):
        fix = (
            "set MASTER_ADDR to the host of rank 0, as the others know it (mpirun -x "
            "MASTER_ADDR=HOST)"
        )
        yield problem("MASTER_ADDR", "nothing says on which host the first one is", fix)


def _port(job: str) -> int:
    """Return a port that is the same on all ranks of a job, and mostly another for other jobs."""
    digest = hashlib.sha256(job.encode("utf-8", "surrogatepass")).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS
