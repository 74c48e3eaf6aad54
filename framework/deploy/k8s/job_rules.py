"""Rules for a Job, a JobSet and their policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from framework.deploy.k8s.manifest_rules import Findings, rule
from framework.deploy.k8s.read_manifests import ManifestPart, Workload
from framework.deploy.k8s.render import FINAL_REASONS, NEVER_RETRY, NOT_COUNTED


def _failure_rules(work: Workload) -> list[ManifestPart]:
    """Return the rules of the job's pod failure policy; empty without a job."""
    if work.job:
        return work.job.items("podFailurePolicy", "rules")
    return []


@rule
def _policy_container(work: Workload) -> Findings:
    containers = work.pod.items("containers") + work.pod.items("initContainers")
    names = [container.get("name") for container in containers]
    for failure_rule in _failure_rules(work):
        place = failure_rule.at("onExitCodes", "containerName")
        if place.get() is not None and place.get() not in names:
            reason = "the pod has no such container; the rule never fits"
            yield place, reason, f"containerName: {work.container.get('name')}"


@rule
def _exit_codes(work: Workload) -> Findings:
    if not work.job:
        return
    place = work.job.at("podFailurePolicy", "rules")
    never_retry = (
        "FailJob",
        NEVER_RETRY,
        NOT_COUNTED,
        "what was refused or given up once would be so again",
    )
    not_counted = ("Ignore", NOT_COUNTED, NEVER_RETRY, "a run that was stopped is no failure")
    for action, codes, other_codes, why in (never_retry, not_counted):
        listed_codes = _exit_codes_of(_failure_rules(work), action)
        if not set(codes) <= listed_codes or listed_codes & set(other_codes):
            expected = ", ".join(map(str, codes))
            yield (
                place,
                f"{action} is for [{expected}]: {why}",
                f"action: {action}, onExitCodes values: [{expected}]",
            )


def _exit_codes_of(failure_rules: Sequence[ManifestPart], action: str) -> set[int]:
    """Return the exit codes that the failure policy answers with this action."""
    codes = set()
    for failure_rule in failure_rules:
        on_exit_codes = failure_rule.at("onExitCodes")
        if failure_rule.get("action") == action and on_exit_codes.get("operator") == "In":
            codes |= {int(word) for word in on_exit_codes.words("values") if word.isdecimal()}
    return codes


@rule
def _disruption(work: Workload) -> Findings:
    conditions: list[Any] = []
    for failure_rule in _failure_rules(work):
        if failure_rule.get("action") == "Ignore":
            conditions += [part.get("type") for part in failure_rule.items("onPodConditions")]
    if work.job and "DisruptionTarget" not in conditions:
        yield (
            work.job.at("podFailurePolicy", "rules"),
            "evicted and preempted pods would use up the retries",
            'add {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}',
        )


@rule
def _retries(work: Workload) -> Findings:
    if not work.job or work.jobset or work.num_nodes < 2:
        return
    is_per_pod = work.job.get("backoffLimitPerIndex") is not None
    if not is_per_pod and work.job.get("backoffLimit") != 0:
        reason = (
            f"one crash ends all {work.num_nodes} pods, and each doubles the wait of all, up "
            "to ten minutes"
        )
        yield (
            work.job.at("backoffLimit"),
            reason,
            "backoffLimitPerIndex: RESTARTS, maxFailedIndexes: 0",
        )


def _final_reasons(jobset: ManifestPart) -> set[str]:
    """Return the reasons of failed jobs after which a JobSet does not start again."""
    reasons: set[str] = set()
    for failure_rule in jobset.items("failurePolicy", "rules"):
        if failure_rule.get("action") == "FailJobSet":
            reasons.update(failure_rule.words("onJobFailureReasons"))
    return reasons


@rule
def _jobset_policy(work: Workload) -> Findings:
    if not work.jobset:
        return
    final_reasons = _final_reasons(work.jobset)
    missing = [name for name in FINAL_REASONS[:2] if name not in final_reasons]
    if missing:
        reason = f"a job that ended with {missing[0]} would start again until maxRestarts"
        fix = (
            "rules: [{name: refused, action: FailJobSet, onJobFailureReasons: "
            f"[{', '.join(FINAL_REASONS)}]}}]"
        )
        yield work.jobset.at("failurePolicy"), reason, fix
