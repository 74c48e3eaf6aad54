"""``launch slurm``: prints the batch script of a run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from framework.deploy.options import count, matching, option, parse, resume_setting, variable, whole
from framework.errors import EXIT_OK, EXIT_STOPPED, UsageError, printable
from framework.launch.job import hand_out, refuse_one_start
from framework.load_run import load_run
from framework.plan.cluster import Cluster

# The batch script of a run. One task on each node, which is our node agent; no ssh, no hostfile. Slurm starts the
# agents, so that accounting, cgroups and `scancel` hold for every process. A stop request before the time limit
# reaches the batch shell alone (`--signal=B:`), which hands it to the agents; they save, and end with 75. USR1 is
# that request: a job with --requeue comes again. USR2 is a person's: the same, and the job stays stopped.

# Between the end of what our agents give the ranks and the end of the job.
_LAST_WORD_SECONDS: Final = 30

# The script; ``@name@`` stands for what `script` fills in.
_SCRIPT: Final = Path(__file__).with_suffix(".sh")
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


_word: Final = matching(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@/%-]*", "one plain word")
_file: Final = matching(r"[A-Za-z0-9_./%-]+", "the path of a file")
_time: Final = matching(r"[0-9]+(-[0-9]{1,2})?(:[0-9]{1,2}){0,2}|UNLIMITED", "a time such as 24:00:00 or 2-12")
_directive: Final = matching(
    r"--[a-z][a-z-]*(=[A-Za-z0-9_.,:+@/%&|*\[\]()-]+)?", "an option of sbatch such as --constraint=h100"
)


@dataclass(frozen=True)
class SlurmRequest:
    """Request of ``launch slurm``: the fields are its options."""

    words: Sequence[str]
    nodes: int = option("machines (1)", "N", count, default=1)
    gpus: int | None = option(
        "GPUs of each, one rank to a GPU; 0: none, then --ranks_per_node", "G", whole, default=None
    )
    ranks_per_node: int = option("ranks on a node without GPUs (1)", "N", count, default=0)
    cpus: int = option("cores of a node (4 a GPU, 1 a rank on CPU)", "C", count, default=0)
    mem: str = option("memory of a node, for example 200G; 0: all of it", "M", _word)
    time: str = option("time limit, as sbatch takes it: 24:00:00, 2-12", "T", _time)
    partition: str = option("", "P", _word)
    account: str = option("", "A", _word)
    qos: str = option("", "Q", _word)
    signal_seconds: int = option(
        "the stop request comes this long before the time limit; a step and a save must fit (300)",
        "S",
        count,
        default=300,
    )
    requeue: bool = option(
        "start again where the time limit stopped the run; scancel --batch --signal=USR2 stops it for good"
    )
    name: str = option("of the job (run.name)", "X", _word)
    python: str = option(
        "as the nodes find it (python where this environment is active; else its whole path)", "PROGRAM"
    )
    log: str = option("output; %%x: name, %%j: number (%%x-%%j.log)", "FILE", _file, default="%x-%j.log")
    env: Sequence[tuple[str, str]] = option("variable of the run", "NAME=VALUE", variable, many=True)
    sbatch: Sequence[str] = option(
        "further option of sbatch, for example --sbatch=--constraint=h100", "=--OPTION[=VALUE]", _directive, many=True
    )
    out: str | None = option("write there instead of printing", "FILE", default=None)
    dry_run: bool = option("print and write nothing; without --out it is what happens anyway")

    @property
    def ranks(self) -> int:
        """Ranks of a node, one to a GPU."""
        return self.gpus or self.ranks_per_node or 1

    @property
    def cores(self) -> int:
        """Cores of a node."""
        return self.cpus or self.ranks * (4 if self.gpus else 1)


def main(words: Sequence[str]) -> int:
    """Print the script that the words behind ``launch slurm`` ask for; returns the exit code.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: the run cannot work on those nodes; nothing has been printed.
        StorageError: `--out` cannot be written.
    """
    request = parse(SlurmRequest, words, command="launch slurm", description="Print the batch script of a run.")
    if not request.words:
        raise UsageError("launch slurm: name a run config, for example ds_configs/quickstart.yaml")
    if request.gpus is None:
        raise UsageError("launch slurm: give the GPUs of a node with --gpus G; --gpus 0 --ranks_per_node N for none")
    if request.ranks_per_node and request.gpus:
        raise UsageError("launch slurm: with GPUs there is one rank to each; leave --ranks_per_node out")
    path, *overrides = request.words
    config = load_run(path, overrides).config
    if request.requeue:
        refuse_one_start(config, place="launch slurm --requeue", once="without --requeue")
        overrides += resume_setting(overrides, config)
    request = replace(request, words=[path, *overrides], name=request.name or config.run.name)
    cluster = Cluster(request.nodes, request.ranks, "cuda" if request.gpus else "cpu")
    load_run(path, overrides).checked_plan(cluster)
    text = script(request, made_by=f"python -m framework launch slurm {shlex.join(words)}")
    hand_out(text, to=None if request.dry_run else request.out)
    return EXIT_OK


def script(request: SlurmRequest, *, made_by: str) -> str:
    """The batch script; `made_by` is the command that made it, for its head."""
    words = [request.python or _python(), "-m", "framework", "launch", "node", *request.words]
    variables = dict(request.env)
    if not request.gpus:
        threads = str(max(1, request.cores // request.ranks))
        variables = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads} | variables
    filled_in = {
        "made_by": printable(made_by),
        "directives": "\n".join(f"#SBATCH {line}" for line in _directives(request)),
        "exports": "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
        "stopped": EXIT_STOPPED,
        "wait": max(60, request.signal_seconds),
        "command": shlex.join(words),
        "ranks": request.ranks,
        "grace": request.signal_seconds - min(_LAST_WORD_SECONDS, request.signal_seconds // 5),
        "requeue": _REQUEUE.format(stopped=EXIT_STOPPED) if request.requeue else "",
        "traps": _TRAPS_OF_REQUEUE if request.requeue else _TRAPS,
        "again": "   and come again: --signal=USR1" if request.requeue else "",
    }
    text = _SCRIPT.read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda name: str(filled_in[name[1]]), text)


def _directives(request: SlurmRequest) -> list[str]:
    """The options that sbatch reads; the user's own come last and win."""
    same = {name: getattr(request, name) for name in ("time", "partition", "account", "qos", "mem")}
    return [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        f"--cpus-per-task={request.cores}",
        f"--signal=B:USR1@{request.signal_seconds}",
        "--requeue" if request.requeue else "--no-requeue",
        f"--output={request.log}",
        "--open-mode=append",
        *(f"--{name}={value}" for name, value in same.items() if value),
        *request.sbatch,
    ]


def _python() -> str:
    """Return how the shell that calls sbatch names this Python: an environment that is not active there is none of the
    nodes'.
    """
    found = shutil.which("python", path=os.environ.get("DSF_SHELL_PATH") or os.environ.get("PATH"))
    return "python" if found and Path(found).parent == Path(sys.executable).parent else sys.executable
