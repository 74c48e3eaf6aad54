"""The place of a rank that srun, mpirun or another MPI launcher started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework.errors import ConfigError
from framework.launch.local import refuse_lone_start
from framework.launch.options import LaunchOptions
from framework.system import mpi_launchers
from framework.system.launcher_rank import RANK_VARIABLES, take_rank
from tests.deploy.one_machine_slurm import OneMachineSlurm, why_not
from tests.launched import TIMEOUT_SECONDS, job_environment, run_ranks
from tests.places import ROOT

QUICKSTART = ROOT / "ds_configs/quickstart.yaml"
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def step(rank: int, *, tasks: int = 2, nodes: int = 1, **other: str) -> dict[str, str]:
    """Return the variables of a task, as Slurm 22 to 24 sets them."""
    local = tasks // nodes
    return {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{local}(x{nodes})" if nodes > 1 else str(local),
        "SLURM_STEP_NODELIST": "gpu[03-04]" if nodes > 1 else "gpu03",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % local),
        "SLURM_NODEID": str(rank // local),
        **other,
    }


def open_mpi(rank: int, *, size: int = 2, local_size: int = 2, **other: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": "prterun-1@1",
        **other,
    }


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PALS_RANKID": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_APID": "x",
}
# An allocation's script or shell, and steps of one task: they describe tasks that do not run.
ALONE = [
    {},
    {
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
    },
    {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"},
    step(0, tasks=1),
    step(0, tasks=1, SLURM_STEP_ID="4294967290", SLURM_NTASKS="8"),
    open_mpi(0, size=1, local_size=1),
    step(0, WORLD_SIZE="1"),
]
TAKEN = [
    (step(1), "1 2 1 2 127.0.0.1"),
    (step(5, tasks=8, nodes=2), "5 8 1 4 gpu03"),
    (step(1, MASTER_ADDR="a", MASTER_PORT="7777"), "1 2 1 2 a"),
    (step(1, RANK="1", WORLD_SIZE="2"), "1 2 1 2 127.0.0.1"),
    (step(1) | {"PMI_RANK": "1", "PMI_SIZE": "2"}, "1 2 1 2 127.0.0.1"),
    (open_mpi(1), "1 2 1 2 127.0.0.1"),
    (open_mpi(3, size=4, MASTER_ADDR="a"), "3 4 1 2 a"),
    (step(1, tasks=2, nodes=2) | open_mpi(6, size=8, local_size=4, MASTER_ADDR="a"), "6 8 2 4 a"),
    (HYDRA, "1 2 1 2 127.0.0.1"),
    (step(0, tasks=2, nodes=2) | HYDRA, "1 2 1 2 127.0.0.1"),
    (PALS, "1 2 1 2 127.0.0.1"),
]
# By torchrun, `launch` or DeepSpeed's launcher, which one task on each node started.
BELOW = [
    step(1, tasks=2, nodes=2, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="x"),
    step(1, tasks=2, nodes=2, RANK="3", WORLD_SIZE="4", LOCAL_RANK="1", DSF_AGENT="7:8"),
    open_mpi(1, local_size=1, RANK="2", WORLD_SIZE="4", LOCAL_RANK="1", TORCHELASTIC_RUN_ID="x"),
]
REFUSED = [
    (step(1, RANK="0"), r"RANK = 0: srun gave this process 1 \(SLURM_PROCID\)"),
    (step(1, RANK="0", WORLD_SIZE="1"), r"WORLD_SIZE = 1: srun gave this process 2"),
    (step(1, WORLD_SIZE="4"), "WORLD_SIZE = 4: srun gave this process 2"),
    (
        open_mpi(1, RANK="1", WORLD_SIZE="2", LOCAL_RANK="0"),
        "LOCAL_RANK = 0: mpirun gave this process 1",
    ),
    (open_mpi(1, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"), "RANK = 0: mpirun gave this process 1"),
    (open_mpi(3, size=4), "MASTER_ADDR: .*nothing says on which host.*set MASTER_ADDR"),
    (
        step(1, tasks=3, nodes=2, SLURM_STEP_TASKS_PER_NODE="2,1"),
        "not every node has as many of them",
    ),
    (step(1, tasks=4, nodes=2, SLURM_LOCALID="0"), "dealt out in turn; .*--distribution=block"),
    (step(1, SLURM_PROCID="one"), "SLURM_PROCID = one: no number that can be RANK"),
    ({"PALS_RANKID": "1"}, "nothing says how many there are"),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "LOCAL_RANK: .*nothing says which of its node"),
]


@pytest.fixture(autouse=True)
def none_was_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launchers, "_alone", set())


def test_each_launcher_is_known_by_its_rank() -> None:
    of_launchers = [names["RANK"] for names in mpi_launchers._LAUNCHERS.values()]
    assert sorted(of_launchers) == sorted((name,) for name in RANK_VARIABLES)


@pytest.mark.parametrize("environment", ALONE, ids=str)
def test_a_process_that_is_alone_stays_so(environment: dict[str, str]) -> None:
    given = {**environment}
    take_rank(environment)
    assert environment == given


@pytest.mark.parametrize(("environment", "expected"), TAKEN, ids=lambda value: str(value)[:60])
def test_a_task_has_its_place(environment: dict[str, str], expected: str) -> None:
    environment = {**environment}
    take_rank(environment)
    assert " ".join(environment[name] for name in PLACE) == expected
    assert (
        20_000 <= int(environment["MASTER_PORT"]) < 32_000 or environment["MASTER_PORT"] == "7777"
    )
    before = {**environment}
    take_rank(environment)  # as a second fit() in one process does
    assert environment == before


@pytest.mark.parametrize("environment", BELOW, ids=str)
def test_the_place_that_a_launcher_below_gives_is_kept(environment: dict[str, str]) -> None:
    environment = {**environment}
    kept = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    take_rank(environment)
    assert kept.items() <= environment.items()
    assert "MASTER_ADDR" not in environment
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in environment  # DeepSpeed holds it against LOCAL_RANK


@pytest.mark.parametrize(("environment", "reported"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_contradicts_itself_is_refused(environment: dict[str, str], reported: str) -> None:
    with pytest.raises(ConfigError, match=rf"{reported}.*\[rendezvous-environment\]"):
        take_rank({**environment})


def test_a_process_that_trained_alone_does_so_again() -> None:
    environment = step(1, WORLD_SIZE="1")
    take_rank(environment)
    environment.update(RANK="0", LOCAL_RANK="0")  # as a run that is alone sets them
    take_rank(environment)
    assert environment["RANK"] == "0"


def test_all_ranks_of_a_step_meet_at_one_port_and_the_next_step_at_another() -> None:
    ports = set()
    for rank in (0, 7):
        environment = step(rank, tasks=8, nodes=2)
        take_rank(environment)
        ports.add(environment["MASTER_PORT"])
    assert len(ports) == 1
    other = step(0, SLURM_STEP_ID="1")
    take_rank(other)
    assert other["MASTER_PORT"] not in ports


@pytest.mark.parametrize("environment", [step(1), open_mpi(1)], ids=["srun", "mpirun"])
def test_launch_starts_no_job_in_each_task(environment: dict[str, str]) -> None:
    options = LaunchOptions(config="x.yaml")
    with pytest.raises(
        ConfigError, match=r"one of 2 processes .* each would start all ranks.*\[several-nodes\]"
    ):
        refuse_lone_start(environment, options)
    refuse_lone_start(step(0, tasks=1), options)


# ----------------------------------------------------------------------------------- real launchers


def settings(folder: Path, name: str) -> list[str]:
    return [
        f"run.output_dir={folder}",
        f"run.name={name}",
        "training.max_epochs=1",
        "monitors.progress=off",
    ]


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [each["train/loss"] for each in map(json.loads, lines) if "train/loss" in each]


def fitted(folder: Path, name: str) -> list[str]:
    """Return a script that calls `fit`, for two ranks."""
    script = folder / f"{name}.py"
    script.write_text(
        "import framework\n"
        f"config = framework.load_config({str(QUICKSTART)!r}, {settings(folder, name)!r})\n"
        "framework.fit(config)\n"
    )
    return [sys.executable, str(script)]


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the results of two ranks that have torchrun's variables."""
    folder = tmp_path_factory.mktemp("torchrun")
    words = ["--config", str(QUICKSTART), *settings(folder, "run")]
    run_ranks(ROOT / "train.py", *words, num_ranks=2, cwd=folder)
    return losses(folder, "run")


def train_py(folder: Path, name: str) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        str(QUICKSTART),
        *settings(folder, name),
    ]


TASK = f"""
import os, runpy
tasks = {[step(0), step(1)]!r}
task = tasks[int(os.environ["RANK"])]
for name in {(*PLACE, "MASTER_PORT")!r}:
    del os.environ[name]
os.environ.update(task)
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_two_tasks_of_a_step_are_one_job(tmp_path: Path, by_torchrun: list[float]) -> None:
    """The test needs no Slurm: it sets Slurm's variables, and nothing else."""
    script = tmp_path / "task.py"
    script.write_text(TASK)
    words = train_py(tmp_path, "run")[2:]
    stated = run_ranks(script, *words, num_ranks=2, cwd=tmp_path)
    assert re.search(r"on 2 (cpu )?devices|2 data-parallel", stated)
    assert losses(tmp_path, "run") == by_torchrun


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_srun_with_a_task_for_each_device(tmp_path: Path, by_torchrun: list[float]) -> None:
    """Two nodes run a script that calls `fit`."""
    environment = job_environment()
    with OneMachineSlurm(tmp_path / "slurm") as cluster:
        environment |= {"SLURM_CONF": cluster.environment["SLURM_CONF"]}
        command = ["srun", "-N2", "-n2", *fitted(tmp_path, "run")]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(tmp_path, "run") == by_torchrun


@pytest.mark.exhaustive  # Open MPI's variables are in the cases above
@pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun here (Debian: apt install openmpi-bin)"
)
def test_mpirun_with_a_process_for_each_device(tmp_path: Path, by_torchrun: list[float]) -> None:
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        *train_py(tmp_path, "run"),
    ]
    done = subprocess.run(
        command,
        env=job_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path, "run") == by_torchrun
