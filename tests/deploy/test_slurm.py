"""`launch slurm`: what it prints, what bash makes of it, and what a Slurm of two nodes on this machine makes of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from framework import errors
from framework.cli import main
from framework.deploy import slurm as slurm_script
from tests.deploy.one_machine_slurm import OneMachineSlurm, why_not
from tests.places import ROOT

pytestmark = pytest.mark.timing

QUICKSTART = str(ROOT / "ds_configs/quickstart.yaml")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "slurm", QUICKSTART, *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "2", "--gpus", "4"],
        [
            "--gpus",
            "0",
            "--ranks_per_node",
            "2",
            "--requeue",
            "--time",
            "1-12:00:00",
            "--env",
            "A=it's $HOME; rm -rf /",
        ],
        [
            "--gpus",
            "1",
            "run.output_dir=/a b/$(id)",
            "--mem",
            "0",
            "--sbatch=--constraint=h100|a100",
            "--partition",
            "a,b",
        ],
    ],
)
def test_shellcheck_has_nothing_to_say(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck comes with the dev extra")
    file = tmp_path / "job.sbatch"
    file.write_text(printed(capsys, *words))
    done = subprocess.run([program, file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_directives_are_those_of_one_agent_to_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2", "--gpus", "4", "--time", "24:00:00", "--partition", "gpu", "--account", "ml"]
    lines = printed(capsys, *words, "--signal_seconds", "120", "--requeue", "--sbatch=--exclusive").splitlines()
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert directives == [
        "--job-name=quickstart",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--cpus-per-task=16",
        "--signal=B:USR1@120",
        "--requeue",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--time=24:00:00",
        "--partition=gpu",
        "--account=ml",
        "--exclusive",
    ]


def test_the_head_says_how_to_stop_it_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--gpus", "1").splitlines()[2].endswith("for good: scancel --batch --signal=USR2 JOB")
    assert (
        printed(capsys, "--gpus", "1", "--requeue")
        .splitlines()[2]
        .endswith("--signal=USR2 JOB   and come again: --signal=USR1")
    )


def test_dry_run_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--gpus", "1", "--dry_run", "--out", str(tmp_path / "job"))
    assert "#SBATCH --gpus-per-node=1" in shown
    assert not (tmp_path / "job").exists()


def test_a_job_that_comes_again_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "checkpoint.resume=auto" in printed(capsys, "--gpus", "1", "--requeue")
    assert "checkpoint.resume" not in printed(capsys, "--gpus", "1")
    assert "resume=auto" not in printed(capsys, "--gpus", "1", "--requeue", "checkpoint.resume=never")


def test_a_job_that_comes_again_does_not_go_back_to_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(QUICKSTART).read_text()
    assert "checkpoint: {" in text
    (tmp_path / "run.yaml").write_text(text.replace("checkpoint: {", "checkpoint: {resume: old/run, "))
    for words in ([QUICKSTART, "checkpoint.resume=old/run"], [str(tmp_path / "run.yaml")]):
        assert main(["launch", "slurm", *words, "--gpus", "1", "--requeue"]) == errors.EXIT_USAGE
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1
        assert "launch slurm --requeue: checkpoint.resume = old/run: " in err
        assert "checkpoint.resume=auto" in err
        assert main(["launch", "slurm", *words, "--gpus", "1"]) == 0
        capsys.readouterr()
    assert (
        main(["launch", "slurm", str(tmp_path / "run.yaml"), "--gpus", "1", "--requeue", "checkpoint.resume=auto"]) == 0
    )


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--nodes", "7", "--gpus", "1"], errors.EXIT_CONFIG, "[batch-not-divisible]"),
        ([], errors.EXIT_USAGE, "--gpus G"),
        (["--gpus", "2", "--ranks_per_node", "2"], errors.EXIT_USAGE, "one rank to each"),
        (["--gpus", "1", "--partition", "a\n#SBATCH --wrap=x"], errors.EXIT_USAGE, "one plain word"),
        (["--gpus", "1", "--name", "$(id)"], errors.EXIT_USAGE, "one plain word"),
        (["--gpus", "1", "--time", "soon"], errors.EXIT_USAGE, "a time such as"),
        (["--gpus", "1", "--log", "a b"], errors.EXIT_USAGE, "the path of a file"),
        (["--gpus", "1", "--sbatch=--wrap=a b"], errors.EXIT_USAGE, "an option of sbatch"),
        (["--gpus", "1", "--env", "WANDB_API_KEY=x"], errors.EXIT_USAGE, "WANDB_API_KEY"),
    ],
)
def test_what_cannot_work_prints_nothing(
    words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", QUICKSTART, *words]) == code
    out, err = capsys.readouterr()
    assert not out
    assert sentence in err


# ------------------------------------------------------------------------------------------- in bash, without Slurm

# Stands for srun: notes its words, and ends as it is told, or with 75 after USR1, when it may.
_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "cores=$SRUN_CPUS_PER_TASK" "$@" >words
[[ -z ${SRUN_CODE:-} ]] || exit "$SRUN_CODE"
trap 'until [[ -e may_end ]]; do sleep 0.05; done; echo saved >>words; exit 75' USR1
echo ready >ready
while true; do sleep 0.1; done
"""
_SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf 'n7\\nn8\\n'; else echo "$*" >requeued; fi
"""


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch shell, with stand-ins for srun and scontrol before everything else."""
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        "SLURM_JOB_ID": "4511",
        "SLURM_JOB_NODELIST": "n[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "6",
    }


def start(
    folder: Path, environment: dict[str, str], *, requeue: bool = True, edits: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    words = ["a b.yaml", "x=$(id)"]
    request = slurm_script.SlurmRequest(words, nodes=2, gpus=4, name="x", python="python", requeue=requeue)
    script = slurm_script.script(request, made_by="a test")
    for old, new in (edits or {}).items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (folder / "job.sbatch").write_text(script)
    return subprocess.Popen(["bash", "job.sbatch"], cwd=folder, env=environment)


def wait_for(path: Path, *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not (path.exists() and (path.stat().st_size or path.name.startswith(("started", "ready")))):
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 70, 75, 78, 137])
def test_the_job_ends_as_the_agents_do(code: int, tmp_path: Path, batch: dict[str, str]) -> None:
    """Also with 75, when it was not time that stopped it: then it does not come again."""
    assert start(tmp_path, batch | {"SRUN_CODE": str(code)}).wait(60) == code
    assert not (tmp_path / "requeued").exists()


def test_every_word_arrives_as_it_is(tmp_path: Path, batch: dict[str, str]) -> None:
    start(tmp_path, batch | {"SRUN_CODE": "0"}).wait(60)
    words = (tmp_path / "words").read_text().splitlines()
    member = words[words.index("python") :]
    assert words[0] == "cores=6"
    assert member == [
        "python",
        "-m",
        "framework",
        "launch",
        "node",
        "a b.yaml",
        "x=$(id)",
        "--nnodes",
        "2",
        "--num_gpus",
        "4",
        "--master_addr",
        "n7",
        "--master_port",
        "20022",
        "--grace_seconds",
        "270",
    ]


@pytest.mark.parametrize(
    ("requests", "requeue", "comes_again"),
    [
        ("1", True, True),
        ("111", True, True),
        ("1", False, False),
        ("2", True, False),
        ("12", True, False),
        ("21", True, False),
    ],
)
def test_a_stop_request_is_handed_on_and_its_code_is_kept(
    requests: str, requeue: bool, comes_again: bool, tmp_path: Path, batch: dict[str, str]
) -> None:
    """USR1 is the time limit's; USR2 is a person's, who means it."""
    job = start(tmp_path, batch, requeue=requeue)
    wait_for(tmp_path / "ready")
    for number in requests:
        job.send_signal({"1": signal.SIGUSR1, "2": signal.SIGUSR2}[number])
        time.sleep(0.2)
    (tmp_path / "may_end").touch()
    assert job.wait(60) == errors.EXIT_STOPPED
    assert (tmp_path / "words").read_text().splitlines().count("saved") == 1
    assert (tmp_path / "requeued").exists() == comes_again
    if comes_again:
        assert (tmp_path / "requeued").read_text() == "requeue 4511\n"


def test_a_request_that_comes_before_the_step_is_known_is_handed_on(tmp_path: Path, batch: dict[str, str]) -> None:
    (tmp_path / "may_end").touch()
    job = start(
        tmp_path,
        batch,
        requeue=False,
        edits={
            "\nsrun ": "\necho waits >waits; until [[ -e asked && $asked != 0 ]]; do sleep 0.05; done\nsrun ",
            "sleep 2;": "until [[ -e ready ]]; do sleep 0.05; done;",
        },
    )
    wait_for(tmp_path / "waits")
    job.send_signal(signal.SIGUSR1)
    (tmp_path / "asked").touch()
    assert job.wait(60) == errors.EXIT_STOPPED


def test_an_environment_that_is_not_active_is_named_by_its_whole_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch hands on the PATH of its shell, where another Python may be called python, or none."""
    for path, python in ((f"{Path(sys.executable).parent}:/usr/bin", "python"), ("/nowhere", sys.executable)):
        monkeypatch.setenv("DSF_SHELL_PATH", path)
        assert main(["launch", "slurm", QUICKSTART, "--nodes", "2", "--gpus", "4"]) == 0
        assert f"\n    {python} -m framework launch node " in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- in Slurm, where it is

# Stands for the agent: node 1 takes longer to save than node 0; in its second life it ends well.
_AGENT = """#!/usr/bin/env bash
echo "life ${SLURM_RESTART_COUNT:-0} node $SLURM_NODEID cores $SLURM_CPUS_PER_TASK: $*"
[[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || exit 0
trap 'sleep $((SLURM_NODEID * 2)); echo "node $SLURM_NODEID saved"; exit 75' USR1
touch "started.$SLURM_NODEID"
while true; do sleep 0.1; done
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_two_nodes_of_a_real_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request reaches every node, the slower one saves to its end, the code is 75; after USR1 the job comes
    again.
    """
    (tmp_path / "agent").write_text(_AGENT)
    (tmp_path / "agent").chmod(0o755)
    shutil.copy(QUICKSTART, tmp_path / "run.yaml")
    words = ["run.yaml", "--nodes", "2", "--gpus", "0", "--ranks_per_node", "2", "--cpus", "2", "--python", "./agent"]
    monkeypatch.chdir(tmp_path)
    with OneMachineSlurm(tmp_path / "slurm") as cluster:
        for signal_name, last in (("USR2", "FAILED 75:0"), ("USR1", "PENDING 0:0")):
            assert main(["launch", "slurm", *words, "--time", "5", "--requeue", "--out", "job.sbatch"]) == 0
            job = cluster.call("sbatch", "--parsable", "job.sbatch").strip()
            for node in range(2):
                wait_for(tmp_path / f"started.{node}")
            cluster.call("scancel", "--batch", f"--signal={signal_name}", job)
            assert cluster.end_of(job, last) == last
            log = (tmp_path / f"quickstart-{job}.log").read_text()
            for node in range(2):
                (tmp_path / f"started.{node}").unlink()
                assert f"{node}: node {node} saved" in log
                assert f"{node}: life 0 node {node} cores 2: -m framework launch node run.yaml" in log


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_training_on_two_nodes_of_a_real_slurm_stops_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real agents and DeepSpeed, one rank on each node."""
    words = [
        QUICKSTART,
        "training.max_epochs=4000",
        "--nodes",
        "2",
        "--gpus",
        "0",
        "--time",
        "10",
        "--env",
        "OMP_NUM_THREADS=1",
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = tmp_path / "runs/quickstart"
    with OneMachineSlurm(tmp_path / "slurm") as cluster:
        assert main(["launch", "slurm", *words, "--python", sys.executable, "--out", "job.sbatch"]) == 0
        job = cluster.call("sbatch", "--parsable", "job.sbatch").strip()
        wait_for(run / "metrics.jsonl", seconds=300)
        cluster.call("scancel", "--batch", "--signal=USR1", job)
        assert cluster.end_of(job, "FAILED 75:0") == "FAILED 75:0", (tmp_path / f"quickstart-{job}.log").read_text()[
            -4000:
        ]
    step = (run / "checkpoints/latest").read_text().strip()
    log = (tmp_path / f"quickstart-{job}.log").read_text()
    for node in range(2):
        assert re.search(rf"^{node}: .*{step} is complete", log, re.MULTILINE)
