"""The batch script of a run. One task on each node, which is our node agent; no ssh, no hostfile.

Slurm starts the agents, so that accounting, cgroups and `scancel` hold for every process. A stop request before the
time limit reaches the batch shell alone (`--signal=B:`), which hands it to the agents; they save, and end with 75. USR1
is that
request: a job with --requeue comes again. USR2 is a person's: the same, and the job stays stopped.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final, Literal

from framework.errors import EXIT_STOPPED, printable
from framework.plan.cluster import Cluster

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
    """What was asked of ``launch slurm``.

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
