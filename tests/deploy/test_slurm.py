"""`launch slurm`: what it prints, what bash makes of it, and what a Slurm of two nodes on this
machine makes of it.
"""

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
def test_shellcheck_finds_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    if not program.exists():
        pytest.skip("shellcheck comes with the dev extra")
    file = tmp_path / "job.sbatch"
    file.write_text(printed(capsys, *words))
    done = subprocess.run([program, file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_directives_are_those_of_one_agent_to_a_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--nodes",
        "2",
        "--gpus",
        "4",
        "--time",
        "24:00:00",
        "--partition",
        "gpu",
        "--account",
        "ml",
    ]
    lines = printed(
        capsys, *words, "--signal_seconds", "120", "--requeue", "--sbatch=--exclusive"
    ).splitlines()
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
        "--mem=0",
        "--exclusive",
    ]


def test_the_head_states_how_to_stop_it_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        printed(capsys, "--gpus", "1")
        .splitlines()[2]
        .endswith("for good: scancel --batch --signal=USR2 JOB")
    )
    assert (
        printed(capsys, "--gpus", "1", "--requeue")
        .splitlines()[2]
        .endswith("--signal=USR2 JOB   and come again: --signal=USR1")
    )


def test_dry_run_prints_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, "--gpus", "1", "--dry_run", "--out", str(tmp_path / "job"))
    assert "#SBATCH --gpus-per-node=1" in shown
    assert not (tmp_path / "job").exists()


def test_a_job_that_comes_again_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "checkpoint.resume=auto" in printed(capsys, "--gpus", "1", "--requeue")
    assert "checkpoint.resume" not in printed(capsys, "--gpus", "1")
    assert "resume=auto" not in printed(
        capsys, "--gpus", "1", "--requeue", "checkpoint.resume=never"
    )


def test_a_job_that_comes_again_does_not_go_back_to_one_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(QUICKSTART).read_text()
    assert "checkpoint: {" in text
    (tmp_path / "run.yaml").write_text(
        text.replace("checkpoint: {", "checkpoint: {resume: old/run, ")
    )
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
        main(
            [
                "launch",
                "slurm",
                str(tmp_path / "run.yaml"),
                "--gpus",
                "1",
                "--requeue",
                "checkpoint.resume=auto",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["--nodes", "7", "--gpus", "1"], errors.EXIT_CONFIG, "[batch-not-divisible]"),
        ([], errors.EXIT_USAGE, "--gpus G"),
        (["--gpus", "2", "--ranks_per_node", "3"], errors.EXIT_USAGE, "one rank to each"),
        (
            ["--gpus", "1", "--partition", "a\n#SBATCH --wrap=x"],
            errors.EXIT_USAGE,
            "one plain word",
        ),
        (["--gpus", "1", "--name", "$(id)"], errors.EXIT_USAGE, "one plain word"),
        (["--gpus", "1", "--time", "soon"], errors.EXIT_USAGE, "a time such as"),
        (["--gpus", "1", "--log", "a b"], errors.EXIT_USAGE, "the path of a file"),
        (["--gpus", "1", "--sbatch=--wrap=a b"], errors.EXIT_USAGE, "an option of sbatch"),
        (
            ["--gpus", "1", "--env", "WANDB_API_KEY=x"],
            errors.EXIT_USAGE,
            "the shell that calls sbatch",
        ),
        (
            ["--gpus", "1", "data={target: a:b, args: {token: hf_not_a_real_one}}"],
            errors.EXIT_USAGE,
            "[secret-in-the-job]",
        ),
        (["--gpus", "1", "--spares", "1"], errors.EXIT_USAGE, "supervision.max_restarts"),
        (["--gpus", "1", "--min_nodes", "2"], errors.EXIT_USAGE, "more than --nodes"),
    ],
)
def test_what_cannot_work_prints_nothing(
    words: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "slurm", QUICKSTART, *words]) == code
    out, err = capsys.readouterr()
    assert not out
    assert sentence in err
    assert "hf_not_a_real_one" not in err


def test_all_memory_of_a_node_that_is_the_jobs_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Sites that give memory by the core would leave a part of it out."""
    whole = (
        ["--gpus", "8"],
        ["--gpus", "1", "--sbatch=--exclusive"],
        ["--gpus", "1", "--mem", "0"],
    )
    shared = (
        ["--gpus", "4"],
        ["--gpus", "8", "--mem", "200G"],
        ["--gpus", "8", "--sbatch=--mem-per-gpu=9G"],
    )
    for words, expected in ((each, group is whole) for group in (whole, shared) for each in group):
        assert (
            "#SBATCH --mem=0\n" in printed(capsys, *words, "batch.global_size=120")
        ) == expected, words


def test_nodes_have_logs_of_their_own_where_the_name_asks_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(capsys, "--gpus", "1", "--log", "logs/%x-%j-%N.log")
    assert "#SBATCH --output=logs/%x-%j.log\n" in text
    assert " --output=logs/%x-%j-%N.log " in text


def test_agents_that_start_ranks_again_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A node that has ended is missed by the others, for half an hour; with others in its place it
    is not.
    """
    supervised = ["--nodes", "2", "--gpus", "1", "supervision.max_restarts=20"]
    assert " --wait=300 " in printed(capsys, *supervised[:4])
    assert " --wait=2100 " in printed(capsys, *supervised)
    text = printed(capsys, *supervised, "--spares", "1", "--min_nodes", "1")
    assert "#SBATCH --nodes=3\n" in text
    assert "#SBATCH --no-kill\n" in text
    assert " --wait=0 --no-kill " in text
    assert '--nnodes "$SLURM_JOB_NUM_NODES" ' in text
    assert " --spares 1 --min_nodes 1 2>" in text


# ------------------------------------------------------------------------------------------- in bash, without Slurm

# Stands for srun: notes its words, and the secret that it is handed, and ends as it is told, or
# with 75 after USR1, when it may. Like srun it ends with the greatest code of its tasks.
_SRUN = """#!/usr/bin/env bash
printf '%s\\n' "cores=$SRUN_CPUS_PER_TASK" "$@" >words
env >environment
while [[ $1 != --token_file ]]; do shift; done
stat -c %a "$2" >>modes; cat "$2" >>tokens; echo >>tokens
if [[ -n ${SRUN_CODES:-} ]]; then
    for code in $SRUN_CODES; do
        [[ $code == 0 ]] || echo "srun: error: n7: task 0: Exited with exit code $code" >&2
    done
    exit "$(printf '%s\\n' $SRUN_CODES | sort -n | tail -1)"
fi
trap 'until [[ -e may_end ]]; do sleep 0.05; done; echo saved >>words; exit 75' USR1
echo ready >ready
while true; do sleep 0.1; done
"""
_SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf 'n7\\nn8\\n' ;;
    "show job") echo "   JobState=${JOB_STATE:-RUNNING} Reason=None" ;;
    *) echo "$*" >requeued ;;
esac
"""


@pytest.fixture
def batch(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch shell, with stand-ins for srun and scontrol before everything
    else.
    """
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
    folder: Path,
    environment: dict[str, str],
    *,
    requeue: bool = True,
    edits: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    words = ["a b.yaml", "x=$(id)"]
    request = slurm_script.SlurmRequest(
        words, nodes=2, gpus=4, name="x", python="python", requeue=requeue
    )
    script = slurm_script.script(request, made_by="a test")
    for old, new in (edits or {}).items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (folder / "job.sbatch").write_text(script)
    return subprocess.Popen(["bash", "job.sbatch"], cwd=folder, env=environment)


def wait_for(path: Path, *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not (
        path.exists() and (path.stat().st_size or path.name.startswith(("started", "ready")))
    ):
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)


# Codes of the nodes, of the job, whether it comes again, and what else there is.
ENDS: list[tuple[str, int, bool, dict[str, str]]] = [
    ("0 0", 0, False, {}),
    ("75 75", 75, True, {}),  # a preemption asks the agents alone
    ("75 75", 75, False, {"JOB_STATE": "CANCELLED"}),
    ("76 76", 76, True, {}),
    ("76 76", 76, True, {"SLURM_RESTART_COUNT": "2"}),
    ("76 76", 76, False, {"SLURM_RESTART_COUNT": "3"}),  # at once, again and again
    ("76 75", 76, True, {}),
    # one fails, the others lose it
    *((f"{code} 76", max(code, 76), False, {}) for code in (64, 70, 74, 77, 78)),
    ("75 70", 75, False, {}),
    ("137 76", 137, False, {}),
]


@pytest.mark.parametrize(("codes", "code", "comes_again", "more"), ENDS)
def test_the_job_ends_as_the_agents_do(
    codes: str,
    code: int,
    comes_again: bool,
    more: dict[str, str],
    tmp_path: Path,
    batch: dict[str, str],
) -> None:
    assert start(tmp_path, batch | more | {"SRUN_CODES": codes}).wait(60) == code
    assert (tmp_path / "requeued").exists() == comes_again


def test_without_requeue_nothing_comes_again(tmp_path: Path, batch: dict[str, str]) -> None:
    for code in (75, 76):
        assert start(tmp_path, batch | {"SRUN_CODES": str(code)}, requeue=False).wait(60) == code
    assert not (tmp_path / "requeued").exists()


def test_each_start_has_a_secret_of_its_own_that_others_cannot_read(
    tmp_path: Path, batch: dict[str, str]
) -> None:
    (tmp_path / ".dsf-4511.killed").mkdir()  # of a life that did not end by itself
    for _ in range(2):
        assert start(tmp_path, batch | {"SRUN_CODES": "0"}).wait(60) == 0
        assert not list(tmp_path.glob(".dsf-*"))
    tokens = (tmp_path / "tokens").read_text().split()
    assert len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    assert (tmp_path / "modes").read_text().split() == ["600", "600"]
    for name in ("words", "environment"):
        text = (tmp_path / name).read_text()
        assert not [token for token in tokens if token in text]
    assert "DSF_JOB_ID=4511" in text
    assert "SLURM_EXPORT_ENV=ALL" in text


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_a_shell_that_is_asked_to_end_waits_for_what_the_nodes_save(
    state: str, tmp_path: Path, batch: dict[str, str]
) -> None:
    """A cancelled job gets SIGTERM, shell and nodes; some sites send a preemption there as well."""
    job = start(tmp_path, batch | {"JOB_STATE": state})
    wait_for(tmp_path / "ready")
    job.terminate()
    time.sleep(0.2)
    assert list(tmp_path.glob(".dsf-4511.*/token"))
    (tmp_path / "may_end").touch()
    assert job.wait(60) == errors.EXIT_STOPPED
    assert (tmp_path / "requeued").exists() == (state == "RUNNING")
    assert not list(tmp_path.glob(".dsf-*"))


def test_every_word_arrives_as_it_is(tmp_path: Path, batch: dict[str, str]) -> None:
    start(tmp_path, batch | {"SRUN_CODES": "0"}).wait(60)
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
        "--token_file",
        member[member.index("--token_file") + 1],
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


def test_a_request_that_comes_before_the_step_is_known_is_handed_on(
    tmp_path: Path, batch: dict[str, str]
) -> None:
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
    for path, python in (
        (f"{Path(sys.executable).parent}:/usr/bin", "python"),
        ("/nowhere", sys.executable),
    ):
        monkeypatch.setenv("DSF_SHELL_PATH", path)
        assert main(["launch", "slurm", QUICKSTART, "--nodes", "2", "--gpus", "4"]) == 0
        assert f"\n    {python} -m framework launch node " in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- in Slurm, where it is

# Stands for the agent: node 1 takes longer to save than node 0; in its second life it ends well.
_AGENT = """#!/usr/bin/env bash
echo "life ${SLURM_RESTART_COUNT:-0} node $SLURM_NODEID cores $SLURM_CPUS_PER_TASK $MARK: $*"
[[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || exit 0
trap 'sleep $((SLURM_NODEID * 2)); echo "node $SLURM_NODEID saved"; exit 75' USR1 TERM
while [[ $1 != --token_file ]]; do shift; done
wc -c <"$2" >"size.$SLURM_NODEID"
mv "size.$SLURM_NODEID" "started.$SLURM_NODEID"
while [[ ! -e ends.$SLURM_NODEID ]]; do sleep 0.1; done
exit "$(cat "ends.$SLURM_NODEID")"
"""
# Who asks, or the codes that the nodes end with by themselves, and what becomes of the job.
_OF_SLURM: list[tuple[list[str], str]] = [
    (["--batch", "--signal=USR2"], "FAILED 75:0"),
    (["--batch", "--signal=USR1"], "PENDING 0:0"),
    (["--signal=TERM"], "PENDING 0:0"),  # as a preemption: the nodes alone
    ([], "CANCELLED 75:0"),
    (["76", "76"], "PENDING 0:0"),
    (["76", "70"], "FAILED 76:0"),
]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_two_nodes_of_a_real_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request reaches every node, the slower one saves to its end, the code is 75; the job
    comes again where it should, and of its secret nothing is left. Nothing of the environment is
    handed on but by the script.
    """
    (tmp_path / "agent").write_text(_AGENT)
    (tmp_path / "agent").chmod(0o755)
    shutil.copy(QUICKSTART, tmp_path / "run.yaml")
    words = [
        "run.yaml",
        "--nodes",
        "2",
        "--gpus",
        "0",
        "--ranks_per_node",
        "2",
        "--cpus",
        "2",
        "--python",
        "./agent",
    ]
    words += [
        "--time",
        "5",
        "--requeue",
        "--env",
        "MARK=here",
        "--sbatch=--export=NONE",
        "--out",
        "job.sbatch",
    ]
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", *words]) == 0
    with OneMachineSlurm(tmp_path / "slurm") as cluster:
        for how, last in _OF_SLURM:
            job = cluster.call("sbatch", "--parsable", "job.sbatch").strip()
            for node in range(2):
                wait_for(tmp_path / f"started.{node}")
                assert (tmp_path / f"started.{node}").read_text() == "64\n"
            if how and how[0].isdecimal():
                for node, code in enumerate(how):
                    (tmp_path / f"ends.{node}").write_text(code)
            else:
                cluster.call("scancel", *how, job)
            assert cluster.end_of(job, last) == last, how
            log = (tmp_path / f"quickstart-{job}.log").read_text()
            for node in range(2):
                (tmp_path / f"started.{node}").unlink()
                (tmp_path / f"ends.{node}").unlink(missing_ok=True)
                assert f"{node}: node {node} saved" in log or how[:1] == ["76"]
                assert (
                    f"{node}: life 0 node {node} cores 2 here: -m framework launch node run.yaml"
                    in log
                )
            assert "Exited with exit code" in log
        assert not list(tmp_path.glob(".dsf-*"))


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
        assert (
            main(["launch", "slurm", *words, "--python", sys.executable, "--out", "job.sbatch"])
            == 0
        )
        job = cluster.call("sbatch", "--parsable", "job.sbatch").strip()
        wait_for(run / "metrics.jsonl", seconds=300)
        cluster.call("scancel", "--batch", "--signal=USR1", job)
        assert cluster.end_of(job, "FAILED 75:0") == "FAILED 75:0", (
            tmp_path / f"quickstart-{job}.log"
        ).read_text()[-4000:]
    step = (run / "checkpoints/latest").read_text().strip()
    log = (tmp_path / f"quickstart-{job}.log").read_text()
    for node in range(2):
        assert re.search(rf"^{node}: .*{step} is complete", log, re.MULTILINE)
