"""``launch slurm``: prints the batch script of a run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from framework.deploy.k8s.values import count, variable, whole
from framework.errors import EXIT_OK, EXIT_STOPPED, UsageError, printable
from framework.launch.job import hand_out, refuse_one_start
from framework.load_run import load_run
from framework.plan.cluster import Cluster
from framework.system.arguments import CommandParser

# The batch script of a run. One task on each node, which is our node agent; no ssh, no hostfile. Slurm starts the
# agents, so that accounting, cgroups and `scancel` hold for every process. A stop request before the time limit
# reaches the batch shell alone (`--signal=B:`), which hands it to the agents; they save, and end with 75. USR1 is
# that request: a job with --requeue comes again. USR2 is a person's: the same, and the job stays stopped.


# Between the end of what our agents give the ranks and the end of the job.
_LAST_WORD_SECONDS: Final = 30

_SCRIPT: Final = """\
#!/usr/bin/env bash
# Made by: {made_by}
# Start: sbatch FILE   Stop with a checkpoint, for good: scancel --batch --signal=USR2 JOB{again}
{directives}
# shellcheck disable=SC2016  # settings are taken as they are
set -euo pipefail

# Node rank 0 is on the first node. Two ports of the job's own, below those that the system hands out.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
master=${{hosts%%$'\\n'*}}
port=$((20000 + SLURM_JOB_ID % 4500 * 2))
# Since Slurm 22.05 srun does not take the number of cores from the job, and data loading would get one.
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}}
{exports}
# The stop request before the time limit, USR1, comes to this shell alone; srun hands USR1 on to every task.
asked=0
step=''
# shellcheck disable=SC2329  # called by the traps
on_request() {{
    asked=$((asked + 1))
    kill -USR1 "$step" 2>/dev/null || true
}}
{traps}

# Agents end each other within seconds. --kill-on-bad-exit would kill those that still save: the first to end has ended
# with {stopped}. Should an agent hang all the same, --wait ends it.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait={wait} --label \\
    {command} \\
    --nnodes "$SLURM_JOB_NUM_NODES" --num_gpus {ranks} --master_addr "$master" --master_port "$port" \\
    --grace_seconds {grace} &
step=$!
# A request that came before is told as soon as srun can take it.
[[ $asked == 0 ]] || {{ sleep 2; kill -USR1 "$step" 2>/dev/null || true; }}

# A signal interrupts `wait`: then the code is not that of srun.
code=0
while true; do
    before=$asked
    code=0
    wait "$step" || code=$?
    [[ $asked != "$before" ]] || break
done
{requeue}exit "$code"
"""
_TRAPS: Final = "trap on_request USR1 USR2"
_TRAPS_OF_REQUEUE: Final = """\
for_good=0
trap on_request USR1
trap 'for_good=1; on_request' USR2"""
_REQUEUE: Final = """
# Stopped because time was up, with a checkpoint: once more, from there.
if [[ $code == {stopped} && $asked != 0 && $for_good == 0 ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""


@dataclass(frozen=True)
class SlurmRequest:
    """Request of ``launch slurm``.

    Attributes:
        config: path of the run config, from the folder where `sbatch` is called.
        overrides: ``key=value`` settings.
        nodes: machines.
        ranks_per_node: ranks on each, one to a GPU.
        device: ``cuda``, or ``cpu`` for a job without GPUs.
        name: of the job.
        cpus: cores of a node.
        signal_seconds: the stop request comes this long before the time limit.
        requeue: a run that was stopped by the time limit starts again.
        python: the program, as the nodes find it.
        log: file of the output; ``%x`` is the job's name and ``%j`` its number.
        env: variables of the run.
        directives: further options of sbatch, complete.
    """

    config: str
    nodes: int
    ranks_per_node: int
    name: str
    overrides: tuple[str, ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"
    cpus: int = 1
    signal_seconds: int = 300
    requeue: bool = False
    python: str = "python"
    log: str = "%x-%j.log"
    env: tuple[tuple[str, str], ...] = ()
    directives: tuple[str, ...] = ()

    @property
    def cluster(self) -> Cluster:
        """The cluster that the nodes make."""
        return Cluster(num_hosts=self.nodes, devices_per_host=self.ranks_per_node, device=self.device)


def script(request: SlurmRequest, *, made_by: str) -> str:
    """The batch script; `made_by` is the command that made it, for its head."""
    words = [request.python, "-m", "framework", "launch", "node", request.config, *request.overrides]
    variables = dict(request.env)
    if request.device == "cpu":
        variables = {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": str(max(1, request.cpus // request.ranks_per_node)),
        } | variables
    return _SCRIPT.format(
        made_by=printable(made_by),
        directives="\n".join(f"#SBATCH {line}" for line in directives(request)),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
        stopped=EXIT_STOPPED,
        wait=max(60, request.signal_seconds),
        command=shlex.join(words),
        ranks=request.ranks_per_node,
        grace=request.signal_seconds - min(_LAST_WORD_SECONDS, request.signal_seconds // 5),
        requeue=_REQUEUE.format(stopped=EXIT_STOPPED) if request.requeue else "",
        traps=_TRAPS_OF_REQUEUE if request.requeue else _TRAPS,
        again="   and come again: --signal=USR1" if request.requeue else "",
    )


def directives(request: SlurmRequest) -> list[str]:
    """The options that sbatch reads; the user's own come last and win."""
    gpus = [f"--gpus-per-node={request.ranks_per_node}"] if request.device == "cuda" else []
    return [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *gpus,
        f"--cpus-per-task={request.cpus}",
        f"--signal=B:USR1@{request.signal_seconds}",
        "--requeue" if request.requeue else "--no-requeue",
        f"--output={request.log}",
        "--open-mode=append",
        *request.directives,
    ]


_WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/%-]*")
_TIME: Final = re.compile(r"[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}|UNLIMITED")
_DIRECTIVE: Final = re.compile(r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:+@/%&|*\[\]()-]+)?")


def main(words: Sequence[str]) -> int:
    """Print the script that the words behind ``launch slurm`` ask for; returns the exit code.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: the run cannot work on those nodes; nothing has been printed.
        StorageError: `--out` cannot be written.
    """
    found = _parser().parse_intermixed_args(list(words))
    if not found.words:
        raise UsageError("launch slurm: name a run config, for example ds_configs/quickstart.yaml")
    request = request_of(found)
    load_run(request.config, request.overrides).checked_plan(request.cluster)
    text = script(request, made_by=f"python -m framework launch slurm {shlex.join(words)}")
    hand_out(text, to=None if found.dry_run else found.out)
    return EXIT_OK


def request_of(found: argparse.Namespace) -> SlurmRequest:
    """The request that these arguments make.

    Raises:
        UsageError: two arguments contradict each other, or one is missing.
        ConfigError: the run config cannot be read.
    """
    ranks, on_cpu = _ranks(found)
    config, *overrides = found.words
    settings = load_run(config, overrides).config
    if found.requeue:
        refuse_one_start(settings, place="launch slurm --requeue", once="without --requeue")
        is_set = any(word.startswith("checkpoint.resume=") for word in overrides)
        overrides += ["checkpoint.resume=auto"] if settings.checkpoint.resume == "never" and not is_set else []
    return SlurmRequest(
        config,
        found.nodes,
        ranks,
        found.name or settings.run.name,
        tuple(overrides),
        "cpu" if on_cpu else "cuda",
        cpus=found.cpus or ranks * (1 if on_cpu else 4),
        signal_seconds=found.signal_seconds,
        requeue=found.requeue,
        python=found.python,
        log=found.log,
        env=tuple(found.env),
        directives=(*_named_directives(found), *found.sbatch),
    )


def _ranks(found: argparse.Namespace) -> tuple[int, bool]:
    """Of a node, and whether it has no GPUs.

    Raises:
        UsageError: nobody can tell, or it is said twice.
    """
    on_cpu = found.gpus == 0
    if found.gpus is None:
        raise UsageError("launch slurm: give the GPUs of a node with --gpus G; --gpus 0 --ranks_per_node N for none")
    if found.ranks_per_node and not on_cpu:
        raise UsageError("launch slurm: with GPUs there is one rank to each; leave --ranks_per_node out")
    return ((found.ranks_per_node or 1) if on_cpu else found.gpus), on_cpu


def _named_directives(found: argparse.Namespace) -> list[str]:
    """The options that are called here as sbatch calls them."""
    values = {name: getattr(found, name) for name in ("time", "partition", "account", "qos", "mem")}
    return [f"--{name}={value}" for name, value in values.items() if value]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m framework launch slurm", description="Print the batch script of a run.", allow_abbrev=False
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG key=value", help="the run config, and settings that win over it"
    )
    add = parser.option
    add("--nodes", type=count, default=1, metavar="N", help="machines (1)")
    add("--gpus", type=whole, metavar="G", help="GPUs of each, one rank to a GPU; 0: none, then --ranks_per_node")
    add("--ranks_per_node", type=count, metavar="N", help="ranks on a node without GPUs (1)")
    add("--cpus", type=count, metavar="C", help="cores of a node (4 a GPU, 1 a rank on CPU)")
    add("--mem", type=_word, metavar="M", help="memory of a node, for example 200G; 0: all of it")
    add("--time", type=_time, metavar="T", help="time limit, as sbatch takes it: 24:00:00, 2-12")
    add("--partition", type=_word, metavar="P")
    add("--account", type=_word, metavar="A")
    add("--qos", type=_word, metavar="Q")
    add(
        "--signal_seconds",
        type=count,
        default=300,
        metavar="S",
        help="the stop request comes this long before the time limit; a step and a save must fit (300)",
    )
    add(
        "--requeue",
        action="store_true",
        help="start again where the time limit stopped the run; scancel --batch --signal=USR2 stops it for good",
    )
    add("--name", type=_word, metavar="X", help="of the job (run.name)")
    add(
        "--python",
        default=_python(),
        metavar="PROGRAM",
        help="as the nodes find it (python where this environment is active; else its whole path)",
    )
    add(
        "--log",
        type=_word_or_pattern,
        default="%x-%j.log",
        metavar="FILE",
        help="output; %%x: name, %%j: number (%%x-%%j.log)",
    )
    add("--env", type=variable, action="append", default=[], metavar="NAME=VALUE", help="variable of the run")
    add(
        "--sbatch",
        type=_directive,
        action="append",
        default=[],
        metavar="=--OPTION[=VALUE]",
        help="further option of sbatch, for example --sbatch=--constraint=h100",
    )
    add("--out", metavar="FILE", help="write there instead of printing")
    add("--dry_run", action="store_true", help="print and write nothing; without --out it is what happens anyway")
    return parser


def _python() -> str:
    """Return how the shell that calls sbatch names this Python: an environment that is not active there is none of the
    nodes'.
    """
    found = shutil.which("python", path=os.environ.get("DSF_SHELL_PATH") or os.environ.get("PATH"))
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return text


def _word(text: str) -> str:
    return _matching(_WORD, text, "one plain word")


def _word_or_pattern(text: str) -> str:
    return _matching(re.compile(r"[A-Za-z0-9_./%-]+"), text, "the path of a file")


def _time(text: str) -> str:
    return _matching(_TIME, text, "a time such as 24:00:00 or 2-12")


def _directive(text: str) -> str:
    return _matching(_DIRECTIVE, text, "an option of sbatch such as --constraint=h100")
