#!/usr/bin/env bash
# Made by: @made_by@
# Start: sbatch FILE   Stop with a checkpoint, for good: scancel --batch --signal=USR2 JOB@again@
@directives@
# shellcheck disable=SC2016  # settings are taken as they are
set -euo pipefail

# Node rank 0 is on the first node. Two ports of the job's own, below those that the system hands out.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
master=${hosts%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 4500 * 2))
# Since Slurm 22.05 srun does not take the number of cores from the job, and data loading would get one.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# After `sbatch --export=NONE` srun would hand on neither PATH nor what is exported here.
export SLURM_EXPORT_ENV=ALL DSF_JOB_ID=$SLURM_JOB_ID
@exports@
# The secret of this start, which agents prove to each other: every user of the cluster reaches their port. In a file
# that this user alone may read, in this folder, which all nodes share; it goes when the script ends.
kept=$PWD/.dsf-$SLURM_JOB_ID
rm -rf "$kept".*
kept=$(mktemp -d "$kept.XXXXXX")
trap 'rm -rf "$kept"' EXIT
(umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$kept/token")

# The stop request before the time limit, USR1, comes to this shell alone; srun hands USR1 on to every task.
asked=0
step=''
# shellcheck disable=SC2329  # called by the traps
on_request() {
    asked=$((asked + 1))
    kill -USR1 "$step" 2>/dev/null || true
}
@once?trap on_request USR1 USR2 TERM
@requeue?for_good=0
@requeue?trap on_request USR1 TERM
@requeue?trap 'for_good=1; on_request' USR2

# Agents end each other within seconds. --kill-on-bad-exit would kill those that still save: the first to end has ended
# with @stopped@. Should an agent hang all the same, --wait ends it. What srun itself says is kept apart from the nodes' output.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=@wait@ @srun@--label --output=@log@ --open-mode=append \
    @command@ \
    --nnodes "$SLURM_JOB_NUM_NODES" --num_gpus @ranks@ --master_addr "$master" --master_port "$port" \
    --token_file "$kept/token" --grace_seconds @grace@@spares@ 2>"$kept/srun" &
step=$!
# A request that came before is told as soon as srun can take it.
[[ $asked == 0 ]] || { sleep 2; kill -USR1 "$step" 2>/dev/null || true; }

# A signal interrupts `wait`: then the code is not that of srun.
code=0
while true; do
    before=$asked
    code=0
    wait "$step" || code=$?
    [[ $asked != "$before" ]] || break
done
cat "$kept/srun" >&2
@requeue?
@requeue?# Once more, from the newest checkpoint: what was stopped with one, and a job that has lost a node, if it ran for an hour or
@requeue?# has not come again often. Never what failed or was refused (srun ends with the greatest code, and the nodes around one
@requeue?# that fails end as those that lost it), nor a job that somebody has cancelled.
@requeue?failed=$(grep -cE 'xited with exit code (@failed@)$' "$kept/srun" || true)
@requeue?may_retry=$((SECONDS > 3600 || ${SLURM_RESTART_COUNT:-0} < 3))
@requeue?if [[ $for_good == 0 && $failed == 0 && ($code == @stopped@ || ($code == @lost@ && $may_retry == 1)) ]] &&
@requeue?    [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then
@requeue?    rm -rf "$kept"
@requeue?    scontrol requeue "$SLURM_JOB_ID"
@requeue?fi
exit "$code"
