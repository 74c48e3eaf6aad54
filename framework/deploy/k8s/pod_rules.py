"""Mistakes in the container: devices, command, image, rights, variables. One function, one kind of finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from framework.deploy.k8s.manifests import Rule, Workload
from framework.deploy.k8s.pod import BUDGET_ANNOTATION, GPU_RESOURCE, JOB_NAME_LABEL, JOBSET_NAME_LABEL
from framework.deploy.k8s.values import OF_THE_LAUNCHER, looks_like_a_secret, what_is_wrong_with_image
from framework.errors import Problem

_PROGRAMS: Final = ("python", "python3", "dsf")


def gpu_count(work: Workload) -> Iterator[Problem]:
    """One rank to a GPU."""
    ranks = work.option("--num_gpus", "--num-gpus", "--nproc-per-node", "--nproc_per_node")
    if not work.num_nodes or not ranks:
        return
    gpus = work.program.get(work.resources, "limits", GPU_RESOURCE)
    on_cpu = any(part.get("name") == "DS_ACCELERATOR" and part.get("value") == "cpu" for part in work.variables())
    if gpus is None and not on_cpu:
        yield work.program.problem(
            "gpu-count",
            work.resources,
            "limits",
            reason=f"the command wants {ranks} GPUs and the pod gets none",
            fix=f"{GPU_RESOURCE}: {ranks}, or DS_ACCELERATOR=cpu",
        )
    elif gpus is not None and str(gpus) != ranks:
        yield work.program.problem(
            "gpu-count",
            work.resources,
            "limits",
            GPU_RESOURCE,
            reason=f"the command starts {ranks} ranks, one to a GPU",
            fix=f"{GPU_RESOURCE}: {ranks}",
        )
    processes = work.head.get("spec", "trainer", "numProcPerNode")
    if work.head.manifest.kind == "TrainJob" and str(processes) != ranks:
        yield work.head.problem(
            "gpu-count",
            "spec",
            "trainer",
            "numProcPerNode",
            reason=f"the command starts {ranks} ranks",
            fix=f"numProcPerNode: {ranks}",
        )


def grace(work: Workload) -> Iterator[Problem]:
    """There is time for a step and a save between the stop request and SIGKILL, and our agent knows how much."""
    budget = work.template.get("metadata", "annotations", BUDGET_ANNOTATION)
    needed = int(budget) if isinstance(budget, str) and budget.isdecimal() else 60
    seconds = work.pod.get("terminationGracePeriodSeconds")
    if not isinstance(seconds, int) or seconds < needed:
        yield work.pod.problem(
            "grace",
            "terminationGracePeriodSeconds",
            reason=f"a step and a save take {needed} s, then comes SIGKILL",
            fix=f"{needed + 60}",
        )
        return
    given = work.option("--grace_seconds", "--grace-seconds")
    if given.isdecimal() and int(given) >= seconds:
        yield work.program.problem(
            "grace",
            "command",
            reason=f"--grace_seconds {given}: the kubelet kills the agent after {seconds} s, before it has said why",
            fix="less than terminationGracePeriodSeconds",
        )


def command(work: Workload) -> Iterator[Problem]:
    """Our agent is process 1: it gets the stop request and tells all ranks. A shell would keep it to itself."""
    words = work.command
    program = PurePosixPath(words[0]).name if words else ""
    rest = words[1:4] if program == "dsf" else words[2:5] if words[1:2] == ["-m"] else []
    is_ours = program in _PROGRAMS and (rest[:2] == ["launch", "node"] or rest[:3] == ["framework", "launch", "node"])
    if not is_ours:
        yield work.program.problem(
            "command",
            "command",
            reason="process 1 must be our agent: a shell or launcher keeps SIGTERM to itself",
            fix="command: [python, -m, framework, launch, node, CONFIG, ...], without a shell",
        )


def image(work: Workload) -> Iterator[Problem]:
    """All pods run the same image, today and after a restart."""
    reason = what_is_wrong_with_image(work.program.get("image"))
    if reason:
        yield work.program.problem("image", "image", reason=reason, fix="NAME:TAG or NAME@sha256:DIGEST")


def ipc_lock(work: Workload) -> Iterator[Problem]:
    """A capability has no effect for a user other than root; RDMA then falls back to TCP in silence."""
    added = work.container.words("securityContext", "capabilities", "add")
    if "IPC_LOCK" in added and _setting(work, "runAsUser") != 0:
        yield work.container.problem(
            "ipc-lock",
            "securityContext",
            "capabilities",
            "add",
            reason="it does nothing for a user other than root",
            fix="let the container runtime set LimitMEMLOCK=infinity, or runAsUser: 0",
        )


def _setting(work: Workload, key: str) -> object:
    """The container's own, or else the pod's."""
    own = work.container.get("securityContext", key)
    return work.pod.get("securityContext", key) if own is None else own


def privileges(work: Workload) -> Iterator[Problem]:
    """Training needs no rights beyond a user's."""
    security = work.container.at("securityContext")
    if security.get("privileged") or security.get("allowPrivilegeEscalation") is not False:
        yield security.problem(
            "privileges",
            "allowPrivilegeEscalation",
            reason="training needs no further rights",
            fix="false, and no privileged",
        )
    if "ALL" not in security.words("capabilities", "drop"):
        yield security.problem("privileges", "capabilities", reason="training needs no capabilities", fix="drop: [ALL]")
    if _setting(work, "runAsNonRoot") is not True and _setting(work, "runAsUser") != 0:
        yield work.pod.problem(
            "privileges",
            "securityContext",
            reason="the image decides whether this is root",
            fix="runAsNonRoot: true and runAsUser, or an explicit runAsUser: 0",
        )


def service_links(work: Workload) -> Iterator[Problem]:
    """Variables of other Services stay out."""
    if work.job is not None and work.pod.get("enableServiceLinks") is not False:
        yield work.pod.problem(
            "service-links",
            "enableServiceLinks",
            reason="a Service named master would set MASTER_PORT=tcp://...",
            fix="enableServiceLinks: false",
        )


def account_token(work: Workload) -> Iterator[Problem]:
    """A pod that asks nothing of the cluster holds no key to it."""
    if (
        work.job is not None
        and not work.pod.get("serviceAccountName")
        and work.pod.get("automountServiceAccountToken") is not False
    ):
        yield work.pod.problem(
            "account-token",
            "automountServiceAccountToken",
            reason="training asks nothing of the cluster",
            fix="automountServiceAccountToken: false",
        )


def termination_message(work: Workload) -> Iterator[Problem]:
    """The reason of a failure is where people look first."""
    if work.job is not None and work.container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
        yield work.container.problem(
            "termination-message",
            "terminationMessagePolicy",
            reason="kubectl describe would not show why it ended",
            fix="terminationMessagePolicy: FallbackToLogsOnError",
        )


def secrets(work: Workload) -> Iterator[Problem]:
    """Variables are readable for everybody who may read the job."""
    for part in work.variables():
        if looks_like_a_secret(str(part.get("name"))) and part.get("value"):
            shown = part.problem(
                "literal-secret",
                "name",
                reason="everybody who may read the job reads its value",
                fix="valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}",
            )
            yield shown


def launcher_variables(work: Workload) -> Iterator[Problem]:
    """Variables that identify a process are set by the launcher."""
    for part in work.variables():
        if str(part.get("name")) in OF_THE_LAUNCHER:
            yield part.problem(
                "launcher-variable",
                "name",
                reason="the same in every pod, and it contradicts what the launcher finds",
                fix="remove it; the command says it all",
            )


def own_pods(work: Workload) -> Iterator[Problem]:
    """Pods keep away from, or near to, pods of this very job: after a renaming the label would fit none, and say
    nothing.
    """
    names = {JOB_NAME_LABEL: work.name, JOBSET_NAME_LABEL: work.name}
    for kind in ("podAntiAffinity", "podAffinity"):
        terms = work.pod.items("affinity", kind, "requiredDuringSchedulingIgnoredDuringExecution")
        preferred = work.pod.items("affinity", kind, "preferredDuringSchedulingIgnoredDuringExecution")
        for term in [*terms, *(each.at("podAffinityTerm") for each in preferred)]:
            for label, value in term.mapping("labelSelector", "matchLabels").items():
                if label in names and value != names[label]:
                    yield term.problem(
                        "own-pods",
                        "labelSelector",
                        "matchLabels",
                        label,
                        reason=f"pods of this job have {names[label]}",
                        fix=f"{label}: {names[label]}",
                    )


POD_RULES: Final[tuple[Rule, ...]] = (
    gpu_count,
    grace,
    command,
    image,
    ipc_lock,
    privileges,
    service_links,
    account_token,
    termination_message,
    secrets,
    launcher_variables,
    own_pods,
)
