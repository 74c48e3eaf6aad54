"""Mistakes in a Job, a JobSet and their policies that a schema does not see. One function, one kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from framework.deploy.k8s.manifests import Part, Rule, Workload
from framework.deploy.k8s.render import NEVER_RETRY, NOT_COUNTED
from framework.errors import Problem

_DAY_SECONDS: Final = 86_400


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def counts(work: Workload) -> Iterator[Problem]:
    """All pods that the command waits for are started, at the same time."""
    if not work.num_nodes:
        return
    places = [(work.head.at("spec", "trainer"), "numNodes")] if work.head.manifest.kind == "TrainJob" else []
    places += [(work.job, "completions"), (work.job, "parallelism")] if work.job is not None else []
    for part, key in places:
        if part.get(key) != work.num_nodes:
            yield part.problem(
                "counts", key, reason=f"the command waits for {work.num_nodes} nodes", fix=f"{key}: {work.num_nodes}"
            )
    replicas = work.jobset.at("replicatedJobs", 0) if work.jobset is not None else None
    if replicas is not None and replicas.get("replicas") not in (None, 1):
        yield replicas.problem("counts", "replicas", reason="each replica would be a job of its own", fix="replicas: 1")


def indexed(work: Workload) -> Iterator[Problem]:
    """Pods know their number."""
    if work.job is not None and work.job.get("completionMode") != "Indexed":
        yield work.job.problem(
            "not-indexed", "completionMode", reason="the pods get no node rank", fix="completionMode: Indexed"
        )


def restart_policy(work: Workload) -> Iterator[Problem]:
    """The kubelet restarts nothing: the failure policy would never see the exit code."""
    if work.job is not None and work.pod.get("restartPolicy") != "Never":
        yield work.pod.problem(
            "restart-policy",
            "restartPolicy",
            reason="a container restarted in place meets peers that have ended",
            fix="restartPolicy: Never",
        )


def replacement_policy(work: Workload) -> Iterator[Problem]:
    """One pod for each node rank at a time."""
    if work.job is not None and work.job.get("podReplacementPolicy") != "Failed":
        yield work.job.problem(
            "replacement-policy",
            "podReplacementPolicy",
            reason="a second pod of the same rank starts while the first still saves",
            fix="podReplacementPolicy: Failed",
        )


def policy_container(work: Workload) -> Iterator[Problem]:
    """Exit codes are those of a container that exists."""
    names = [part.get("name") for key in ("containers", "initContainers") for part in work.pod.items(key)]
    for rule in _failure_rules(work):
        name = rule.get("onExitCodes", "containerName")
        if name is not None and name not in names:
            yield rule.problem(
                "policy-container",
                "onExitCodes",
                "containerName",
                reason="the pod has no such container; the rule never fits",
                fix=f"containerName: {work.container.get('name')}",
            )


def _failure_rules(work: Workload) -> list[Part]:
    return work.job.items("podFailurePolicy", "rules") if work.job is not None else []


def exit_codes(work: Workload) -> Iterator[Problem]:
    """The policy knows the exit codes of this framework."""
    if work.job is None:
        return
    for action, codes in (("FailJob", NEVER_RETRY), ("Ignore", NOT_COUNTED)):
        found: set[Any] = set()
        for rule in _failure_rules(work):
            values = rule.get("onExitCodes", "values")
            if (
                rule.get("action") == action
                and rule.get("onExitCodes", "operator") == "In"
                and isinstance(values, list)
            ):
                found |= {_number(value) for value in values}
        if found != set(codes):
            listed = ", ".join(map(str, codes))
            why = (
                "configuration that was refused once is refused again"
                if action == "FailJob"
                else "a run that was stopped is no failure"
            )
            yield work.job.problem(
                "exit-codes",
                "podFailurePolicy",
                "rules",
                reason=f"{action} is for [{listed}]: {why}",
                fix=f"action: {action}, onExitCodes values: [{listed}]",
            )


def condition_status(work: Workload) -> Iterator[Problem]:
    """API servers up to 1.34 refuse a condition without its status."""
    for rule in _failure_rules(work):
        for condition in rule.items("onPodConditions"):
            if condition.get("status") != "True":
                yield condition.problem(
                    "condition-status", "status", reason="servers up to 1.34 require it, as text", fix='status: "True"'
                )


def disruption(work: Workload) -> Iterator[Problem]:
    """Eviction, preemption and a drained node are nobody's failure."""
    rules = [rule for rule in _failure_rules(work) if rule.get("action") == "Ignore"]
    if work.job is not None and not any(
        part.get("type") == "DisruptionTarget" for rule in rules for part in rule.items("onPodConditions")
    ):
        yield work.job.problem(
            "disruption",
            "podFailurePolicy",
            "rules",
            reason="evicted and preempted pods would use up the retries",
            fix='add {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}',
        )


def retries(work: Workload) -> Iterator[Problem]:
    """`backoffLimit` counts pods, and one crash ends all of them."""
    limit = _number(work.job.get("backoffLimit")) if work.job is not None else 0
    if work.job is None or (limit == 0 and work.job.get("backoffLimit") is not None):
        return
    if work.jobset is not None:
        yield work.job.problem(
            "retries",
            "backoffLimit",
            reason="one pod alone would start again, beside peers that have ended",
            fix="backoffLimit: 0; failurePolicy.maxRestarts counts",
        )
    elif limit is None or limit < work.num_nodes:
        yield work.job.problem(
            "retries",
            "backoffLimit",
            reason=f"it counts pods: one crash ends all {work.num_nodes}",
            fix=f"0, or {work.num_nodes} for every restart",
        )


def jobset_policy(work: Workload) -> Iterator[Problem]:
    """A JobSet does not restart what its Job refused to."""
    if work.jobset is None:
        return
    rules = work.jobset.items("failurePolicy", "rules")
    if not any(
        rule.get("action") == "FailJobSet" and "PodFailurePolicy" in rule.words("onJobFailureReasons") for rule in rules
    ):
        yield work.jobset.problem(
            "jobset-policy",
            "failurePolicy",
            reason="a refused configuration would start again until maxRestarts",
            fix="rules: [{name: refused, action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}]",
        )


def deadline(work: Workload) -> Iterator[Problem]:
    """Restarts that do not count end at some time."""
    where = work.job if work.job is not None else work.head.at("spec")
    values = [where.get("activeDeadlineSeconds"), work.head.get("spec", "activeDeadlineSeconds")]
    if not any(_number(value) for value in values):
        yield where.problem(
            "deadline",
            "activeDeadlineSeconds",
            reason="stopped and evicted pods start again without end",
            fix="activeDeadlineSeconds: the longest the job may take",
        )


def logs_kept(work: Workload) -> Iterator[Problem]:
    """Logs outlive the job by a day."""
    for part in [part for part in (work.job, work.jobset) if part is not None]:
        seconds = _number(part.get("ttlSecondsAfterFinished"))
        if seconds is not None and seconds < _DAY_SECONDS:
            yield part.problem(
                "ttl",
                "ttlSecondsAfterFinished",
                reason="the logs go with the job",
                fix=f"{_DAY_SECONDS} or more, or leave it out",
            )


def runtime(work: Workload) -> Iterator[Problem]:
    """Kubeflow's DeepSpeed runtime starts ranks over ssh and MPI, without our agent."""
    name = work.head.get("spec", "runtimeRef", "name")
    if work.head.manifest.kind == "TrainJob" and "deepspeed" in str(name):
        yield work.head.problem(
            "runtime",
            "spec",
            "runtimeRef",
            "name",
            reason="it starts ranks by mpirun and ssh in one launcher pod",
            fix="torch-distributed, or the TrainingRuntime that launch k8s prints",
        )


JOB_RULES: Final[tuple[Rule, ...]] = (
    counts,
    indexed,
    restart_policy,
    replacement_policy,
    policy_container,
    exit_codes,
    condition_status,
    disruption,
    retries,
    jobset_policy,
    deadline,
    logs_kept,
    runtime,
)
