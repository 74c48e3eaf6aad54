"""Rules for the container: devices, command, image, rights, variables; and for pods beside it."""

from __future__ import annotations

import itertools
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Final

from framework.deploy.k8s.manifest_rules import Findings, rule
from framework.deploy.k8s.read_manifests import ManifestPart, Workload
from framework.deploy.k8s.render import (
    BUDGET_ANNOTATION,
    GPU_RESOURCE,
    JOB_NAME_LABEL,
    JOBSET_NAME_LABEL,
)
from framework.deploy.options import (
    OF_THE_LAUNCHER,
    looks_like_a_secret,
    what_is_wrong_with_image,
)
from framework.system.output import masked

_LEAST_TOKEN_BYTES: Final = 16
# Programs that pass signals and exit codes on, or replace themselves by the program they start.
_WRAPPERS: Final = ("tini", "dumb-init", "numactl", "env")


@rule
def _gpu_count(work: Workload) -> Findings:
    ranks = work.num_ranks
    if not work.num_nodes or not ranks:
        return
    limits = work.resources.at("limits")
    gpus = limits.get(GPU_RESOURCE)
    if gpus is None:
        if not _is_on_cpu(work):
            reason = f"the command wants {ranks} GPUs and the pod gets none"
            yield limits, reason, f"{GPU_RESOURCE}: {ranks}, or DS_ACCELERATOR=cpu"
    elif str(gpus) != str(ranks):
        reason = f"the command starts {ranks} ranks, one to a GPU"
        yield limits.at(GPU_RESOURCE), reason, f"{GPU_RESOURCE}: {ranks}"


def _is_on_cpu(work: Workload) -> bool:
    settings = [(variable.get("name"), variable.get("value")) for variable in work.variables()]
    return ("DS_ACCELERATOR", "cpu") in settings


def _save_seconds(work: Workload) -> int:
    """Return the seconds of a step and a save that the pod's annotation gives, or 60."""
    budget = work.template.get("metadata", "annotations", BUDGET_ANNOTATION)
    if isinstance(budget, str) and budget.isdecimal():
        return int(budget)
    return 60


@rule
def _grace(work: Workload) -> Findings:
    save_seconds = _save_seconds(work)
    place = work.pod.at("terminationGracePeriodSeconds")
    pod_seconds = place.get()
    agent_seconds = work.option("grace_seconds")
    if not isinstance(pod_seconds, int) or pod_seconds < save_seconds:
        reason = f"a step and a save take {save_seconds} s, then comes SIGKILL"
        yield place, reason, f"{save_seconds + 60}"
    elif agent_seconds.isdecimal() and int(agent_seconds) >= pod_seconds:
        reason = (
            f"--grace_seconds {agent_seconds}: the kubelet kills the agent after {pod_seconds} s, "
            "before it has printed why"
        )
        yield work.program.at("command"), reason, "less than terminationGracePeriodSeconds"


def _framework_arguments(words: Sequence[str]) -> Sequence[str]:
    """Return the words after our command line; none if process 1 is something else."""
    own_words = list(itertools.dropwhile(_is_of_wrapper, words))
    if not own_words:
        return []
    name = PurePosixPath(own_words[0]).name
    arguments = own_words[1:]
    if name == "dsf":
        return arguments
    if name in ("python", "python3") and arguments[:2] == ["-m", "framework"]:
        return arguments[2:]
    return []


def _is_of_wrapper(word: str) -> bool:
    """Check whether a word before our command is a wrapper or an option of one."""
    return word.startswith("-") or PurePosixPath(word).name in _WRAPPERS


@rule
def _command(work: Workload) -> Findings:
    if _framework_arguments(work.command)[:2] != ["launch", "node"]:
        yield (
            work.program.at("command"),
            "process 1 must be our agent: a shell or launcher keeps SIGTERM to itself",
            "command: [python, -m, framework, launch, node, CONFIG, ...], without a shell",
        )


@rule
def _image(work: Workload) -> Findings:
    place = work.program.at("image")
    reason = what_is_wrong_with_image(place.get())
    if reason:
        yield place, reason, "NAME:TAG or NAME@sha256:DIGEST"


def _setting(work: Workload, key: str) -> object:
    """Return a setting of the container's security context, or else of the pod's."""
    value = work.container.get("securityContext", key)
    if value is None:
        return work.pod.get("securityContext", key)
    return value


@rule
def _ipc_lock(work: Workload) -> Findings:
    added = work.container.at("securityContext", "capabilities", "add")
    if "IPC_LOCK" in added.words() and _setting(work, "runAsUser") != 0:
        reason = "it does nothing for a user other than root"
        yield added, reason, "let the container runtime set LimitMEMLOCK=infinity, or runAsUser: 0"


@rule
def _privileges(work: Workload) -> Findings:
    if _setting(work, "runAsNonRoot") is not True and _setting(work, "runAsUser") != 0:
        fix = "runAsNonRoot: true and runAsUser, or an explicit runAsUser: 0"
        yield work.pod.at("securityContext"), "the image decides whether this is root", fix


@rule
def _literal_secret(work: Workload) -> Findings:
    reason = "everybody who may read the job reads its value"
    for variable in work.variables():
        if looks_like_a_secret(str(variable.get("name"))) and variable.get("value"):
            yield variable.at("name"), reason, "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}"
    for word in work.command:
        key, _, value = word.partition("=")
        if masked(key, value) != value:
            yield (
                work.program.at("command"),
                f"{key}: {reason}",
                "a variable that is valueFrom a Secret",
            )


@rule
def _token(work: Workload) -> Findings:
    names = [variable.get("name") for variable in work.variables()]
    if work.num_nodes < 2 or "DSF_TOKEN" in names:
        return
    path = work.option("token_file")
    volume = work.volume(path) if path else None
    if volume is None or not volume.mapping().keys() & {"secret", "csi", "projected"}:
        if path:
            reason = f"--token_file {path} lies on no mounted Secret: others may read or replace it"
        else:
            reason = "--token_file is left out: agents do not start without it, or take anybody"
        yield (
            work.program.at("command"),
            reason,
            "--token_file PATH of a key in a Secret that is mounted, as `launch k8s` prints it",
        )
        return
    for secret in work.objects("Secret"):
        if secret.manifest.name == volume.get("secret", "secretName"):
            yield from _short_token(secret, path)


def _short_token(secret: ManifestPart, path: str) -> Findings:
    """Report a token in a Secret of these files that is shorter than agents take."""
    token = _secret_value(secret, PurePosixPath(path).name)
    if len(token) < _LEAST_TOKEN_BYTES:
        reason = f"agents take no key of less than {_LEAST_TOKEN_BYTES} bytes from {path}"
        yield secret.at("metadata", "name"), reason, "32 random bytes: openssl rand -hex 32"


def _secret_value(secret: ManifestPart, key: str) -> bytes:
    """Return the value of a Secret's key; empty if it is missing."""
    plain = secret.mapping("stringData")  # Kubernetes takes it before what ``data`` has
    if key in plain:
        return str(plain[key]).encode()
    encoded = str(secret.mapping("data").get(key, ""))
    with suppress(ValueError):  # kubectl says what is wrong with it
        return b64decode(encoded)
    return encoded.encode()


@rule
def _launcher_variable(work: Workload) -> Findings:
    for variable in work.variables():
        if str(variable.get("name")) in OF_THE_LAUNCHER:
            reason = "the same in every pod, and it contradicts what the launcher finds"
            yield variable.at("name"), reason, "remove it; the command says it all"


def _affinity_terms(affinity: ManifestPart) -> list[ManifestPart]:
    """Return the required terms of a pod affinity, and the preferred ones without their weights."""
    terms = affinity.items("requiredDuringSchedulingIgnoredDuringExecution")
    for weighted_term in affinity.items("preferredDuringSchedulingIgnoredDuringExecution"):
        terms.append(weighted_term.at("podAffinityTerm"))
    return terms


def _pod_selectors(work: Workload) -> list[ManifestPart]:
    """Return the selectors of pods in the job's affinity and in network policies."""
    selectors = []
    for kind in ("podAntiAffinity", "podAffinity"):
        terms = _affinity_terms(work.pod.at("affinity", kind))
        selectors += [term.at("labelSelector") for term in terms]
    for policy in work.objects("NetworkPolicy"):
        selectors.append(policy.at("spec", "podSelector"))
        for ingress in policy.items("spec", "ingress"):
            selectors += [peer.at("podSelector") for peer in ingress.items("from")]
    return selectors


@rule
def _own_pods(work: Workload) -> Findings:
    for selector in _pod_selectors(work):
        labels = selector.at("matchLabels")
        for label, value in labels.mapping().items():
            if label in (JOB_NAME_LABEL, JOBSET_NAME_LABEL) and value != work.name:
                yield (
                    labels.at(label),
                    f"pods of this job have {work.name}",
                    f"{label}: {work.name}",
                )
