"""The place of a process among those that `srun`, `mpirun` or another MPI launcher started: a task
for each device.

torchrun, DeepSpeed's launcher and ours say it by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. Of these launchers each has variables of its own, and a process that reads only torch's
takes itself for the only one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final

from framework.errors import ConfigError, Problem

KIND: Final = "rendezvous-environment"
# The launchers, in the order in which they are believed: Open MPI and Hydra start their daemons
# with srun, one on each node, and what those start inherits the variables of that step. Of each
# value the first variable that is set counts.
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
# By which the ranks of one job know it, alike on all of them.
_JOBS: Final = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PALS_APID",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
)
_FIRST_PORT: Final = 20_000
_NUM_PORTS: Final = 12_000  # below those that Linux hands out by itself
_LARGEST: Final = 1 << 20
# launchers of which this process was asked to train alone: it may train again
_alone: set[str] = set()
_TASKS: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class LauncherRank:
    """What a launcher gave a process.

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


def take_rank(environment: MutableMapping[str, str]) -> None:
    """Set what torch calls the place of this process, where a launcher has other names for it. A
    process that is alone, or has its place from torchrun or the like, keeps what it has.

    Raises:
        ConfigError: kind ``rendezvous-environment``: variables contradict each other, or do not say
            where ranks meet.
    """
    found = launched_rank(environment)
    if found is None:
        return
    if "RANK" in environment and any(name in environment for name in _BELOW):
        # DeepSpeed compares it with LOCAL_RANK (runtime/engine.py, _do_args_sanity_check): it is of
        # the one process on this node that started the launcher of the ranks.
        environment.pop(_OPEN_MPI_LOCAL_RANK, None)
        return
    # each task is to train alone
    if "RANK" not in environment and environment.get("WORLD_SIZE") == "1":
        _alone.add(found.launcher)
    if found.launcher in _alone:
        environment.pop(_OPEN_MPI_LOCAL_RANK, None)
    elif found.size > 1:
        problems = [*_contradictions(environment, found), *_missing(environment, found)]
        if problems:
            raise ConfigError(problems)
        environment.update({name: str(value) for name, value in found.values.items()})
        environment.setdefault("MASTER_ADDR", found.address)
        environment.setdefault("MASTER_PORT", str(_port(found.job)))


def launched_rank(environment: Mapping[str, str]) -> LauncherRank | None:
    """Return the place that a launcher of single processes gave this one; None where there was no
    such launcher.

    Raises:
        ConfigError: kind ``rendezvous-environment``: the values are none.
    """
    for launcher, names in _LAUNCHERS.items():
        sources = {name: _first_set(environment, variables) for name, variables in names.items()}
        if sources["RANK"] and _is_of_step(environment, launcher):
            # With --mpi=pmi2 srun sets both.
            if launcher == "mpiexec (PMI)" and _is_same(environment, "srun", sources):
                continue
            return _rank_of(
                environment, launcher, {name: text for name, text in sources.items() if text}
            )
    return None


def first_of_nodelist(text: str) -> str:
    """Return the first host of Slurm's short form: ``gpu[03-07,12],login1`` -> ``gpu03``."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", text)
    assert match  # every part may be empty
    return match[1] + (match[2] or "") + (match[3] or "")


def _first_set(environment: Mapping[str, str], variables: tuple[str, ...]) -> str:
    return next((name for name in variables if environment.get(name)), "")


def _is_of_step(environment: Mapping[str, str], launcher: str) -> bool:
    """Check whether Slurm started this as a task: the script of a job, and a shell in an
    allocation, are none.
    """
    return launcher != "srun" or {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environment.keys()


def _is_same(environment: Mapping[str, str], launcher: str, sources: Mapping[str, str]) -> bool:
    other = {
        name: _first_set(environment, variables) for name, variables in _LAUNCHERS[launcher].items()
    }
    if not _is_of_step(environment, launcher):
        return False
    names = ("RANK", "WORLD_SIZE")
    return all(
        other[name] and environment[other[name]] == environment.get(sources[name]) for name in names
    )


def _rank_of(
    environment: Mapping[str, str], launcher: str, sources: Mapping[str, str]
) -> LauncherRank:
    values: dict[str, int] = {}
    for name, variable in sources.items():
        text = environment[variable]
        if name.endswith("SIZE"):
            least = 1
        else:
            least = 0
        if not (text.isascii() and text.isdecimal() and least <= int(text) < _LARGEST):
            raise ConfigError.of(
                KIND, f"no number that can be {name}", "leave it to the launcher", variable, text
            )
        values[name] = int(text)
    if "WORLD_SIZE" not in values:
        reason = f"{launcher} started this process, and nothing says how many there are"
        raise ConfigError.of(KIND, reason, "set WORLD_SIZE to their number", "WORLD_SIZE")
    num_nodes = 0
    address = ""
    job = next((environment[name] for name in _JOBS if environment.get(name)), "")
    if launcher == "srun":
        values |= _slurm_local_size(environment, values["WORLD_SIZE"])
        counts = [environment.get(name, "") for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")]
        num_nodes = next((int(count) for count in counts if count.isdecimal()), 0)
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        address = first_of_nodelist(nodes)
        parts = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        job = ".".join(environment.get(name, "") for name in parts)
    elif values.get("LOCAL_WORLD_SIZE") == values["WORLD_SIZE"]:
        num_nodes = 1
    return LauncherRank(
        launcher, values, sources, num_nodes, "127.0.0.1" if num_nodes == 1 else address, job
    )


def _slurm_local_size(environment: Mapping[str, str], size: int) -> dict[str, int]:
    """``2(x3),1`` tasks on four nodes: one number where all nodes have as many."""
    counts = {
        int(tasks) for tasks, _ in _TASKS.findall(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    }
    if len(counts) == 1:
        return {"LOCAL_WORLD_SIZE": counts.pop()}
    if counts or environment.get("SLURM_STEP_NUM_NODES") != "1":
        return {}
    return {"LOCAL_WORLD_SIZE": size}


def _contradictions(environment: Mapping[str, str], found: LauncherRank) -> Iterator[Problem]:
    for name, value in found.values.items():
        text = environment.get(name, "")
        if text and text != str(value):
            source = found.sources.get(name, found.launcher)
            reason = f"{found.launcher} gave this process {value} ({source})"
            fix = f"unset {name}, or start the ranks by torchrun or `launch` alone"
            stated = int(text) if text.isdecimal() else text
            yield Problem(KIND, reason, fix, key=name, value=stated, file="environment")


def _missing(environment: Mapping[str, str], found: LauncherRank) -> Iterator[Problem]:
    def problem(key: str, reason: str, fix: str) -> Problem:
        return Problem(
            KIND, f"{found.launcher} started {found.size} processes, and {reason}", fix, key=key
        )

    rank = found.values["RANK"]
    local_rank = found.values.get("LOCAL_RANK", environment.get("LOCAL_RANK"))
    local_size = found.values.get("LOCAL_WORLD_SIZE")
    if rank >= found.size:
        yield problem(
            "RANK", f"this one is number {rank}", "start the ranks by torchrun or `launch`"
        )
    if local_rank is None:
        yield problem(
            "LOCAL_RANK",
            "nothing says which of its node this is",
            "set LOCAL_RANK, or use torchrun",
        )
    if local_size is None:
        if found.launcher == "srun":
            fix = "give every node as many: srun --ntasks-per-node=N"
            yield problem("SLURM_STEP_TASKS_PER_NODE", "not every node has as many of them", fix)
        elif "LOCAL_WORLD_SIZE" not in environment:
            fix = "set LOCAL_WORLD_SIZE to the number on each node, or use torchrun"
            yield problem("LOCAL_WORLD_SIZE", "nothing says how many run on a node", fix)
    elif local_rank is not None and str(rank % local_size) != str(local_rank):
        reason = f"number {rank} is number {local_rank} of its node: they are dealt out in turn"
        fix = "place those of a node together: srun --distribution=block, mpirun --map-by slot"
        yield problem("LOCAL_RANK", reason, fix)
    if not found.address and not environment.get("MASTER_ADDR"):
        fix = (
            "set MASTER_ADDR to the host of rank 0, as the others know it (mpirun -x "
            "MASTER_ADDR=HOST)"
        )
        yield problem("MASTER_ADDR", "nothing says on which host the first one is", fix)


def _port(job: str) -> int:
    """Return a port that all ranks of a job choose alike, and other jobs of its hosts mostly do
    not.
    """
    digest = hashlib.sha256(job.encode("utf-8", "surrogatepass")).digest()
    return _FIRST_PORT + int.from_bytes(digest[:4], "big") % _NUM_PORTS
