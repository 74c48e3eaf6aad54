"""Mistakes for which nodes do not find each other: names, Service, ports, interfaces. One function, one kind of
finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.deploy.k8s.manifests import Manifest, Part, Rule, Workload
from framework.deploy.k8s.pod import ISTIO_LABEL, JOB_NAME_LABEL
from framework.deploy.k8s.values import LONGEST_LABEL, POD_SUFFIX, is_service_name
from framework.errors import Problem


def service(work: Workload) -> Iterator[Problem]:
    """Pods have names, before they are ready."""
    if work.jobset is not None:
        for key in ("enableDNSHostnames", "publishNotReadyAddresses"):
            if work.jobset.get("network", key) is False:
                yield work.jobset.problem(
                    "service", "network", key, reason="pods would not find each other", fix=f"{key}: true"
                )
        return
    if work.job is None:
        return
    found = _service(work)
    if found is None:
        yield work.pod.problem(
            "service",
            "subdomain",
            reason="no Service in these files has this name; pods would have no names",
            fix="subdomain: the name of the headless Service",
        )
        return
    for key, wanted in (("clusterIP", "None"), ("publishNotReadyAddresses", True)):
        if found.get("spec", key) != wanted:
            text = str(wanted).lower() if wanted is True else wanted
            yield found.problem(
                "service",
                "spec",
                key,
                reason="pods would not find each other before all are ready",
                fix=f"{key}: {text}",
            )


def _services(work: Workload) -> list[Manifest]:
    return [manifest for manifest in work.manifests if manifest.kind == "Service"]


def _service(work: Workload) -> Part | None:
    return next((Part(found) for found in _services(work) if found.name == work.service and found.name), None)


def selector(work: Workload) -> Iterator[Problem]:
    """The Service means the pods of this job."""
    found = _service(work) if work.jobset is None and work.job is not None else None
    if found is None:
        return
    labels = {str(key): value for key, value in work.template.mapping("metadata", "labels").items()}
    labels |= {JOB_NAME_LABEL: work.name, "job-name": work.name}
    wanted = found.mapping("spec", "selector")
    if not wanted or any(labels.get(str(key)) != value for key, value in wanted.items()):
        yield found.problem(
            "selector",
            "spec",
            "selector",
            reason="no pod of this job has these labels",
            fix=f"selector: {{{JOB_NAME_LABEL}: {work.name}}}",
        )


def master_addr(work: Workload) -> Iterator[Problem]:
    """Ranks meet at the pod with node rank 0."""
    if not work.num_nodes:
        return
    given = work.option("--master_addr", "--master-addr")
    pod, _, domain = work.master.partition(".")
    domains = {domain, *(found.name for found in _services(work))}
    if not any(given == f"{pod}.{each}" or given.startswith(f"{pod}.{each}.") for each in domains):
        yield work.program.problem(
            "master-addr",
            "command",
            reason=f"--master_addr {given or 'is missing'}: node rank 0 is {work.master}",
            fix=f"--master_addr {work.master}",
        )


def ports(work: Workload) -> Iterator[Problem]:
    """Service and container name the ports that the command uses."""
    text = work.option("--master_port", "--master-port")
    if not work.num_nodes or not text.isdecimal():
        return
    wanted = {int(text), int(text) + 1}
    found = _service(work) if work.jobset is None and work.job is not None else None
    listed = [(found.at("spec"), "port")] if found is not None else []
    if work.container.items("ports"):
        listed.append((work.container, "containerPort"))
    for part, key in listed:
        if not wanted <= {number for port in part.items("ports") if isinstance(number := port.get(key), int)}:
            yield part.problem(
                "ports",
                "ports",
                reason=f"the command uses {min(wanted)} for ranks and {max(wanted)} for agents",
                fix=f"{key}: {min(wanted)} and {max(wanted)}",
            )


def names(work: Workload) -> Iterator[Problem]:
    """The longest name that a pod gets is a label of DNS."""
    index = len(str(max(0, work.num_nodes - 1)))
    middle = "-" if work.head.manifest.kind == "Job" else f"-{work.replicated}-0-"
    length = len(work.name) + len(middle) + index + POD_SUFFIX
    if not is_service_name(work.name):
        yield work.head.problem(
            "name",
            "metadata",
            "name",
            reason="the Service of this name needs a label of DNS that begins with a letter",
            fix="lower-case letters, digits and -",
        )
    elif length > LONGEST_LABEL:
        yield work.head.problem(
            "name",
            "metadata",
            "name",
            reason=f"pods get names of {length} characters, and DNS takes {LONGEST_LABEL}",
            fix=f"at most {len(work.name) - length + LONGEST_LABEL} characters",
        )


def namespaces(work: Workload) -> Iterator[Problem]:
    """A Service, a claim and a ConfigMap are found in the job's own namespace only."""
    own = work.head.get("metadata", "namespace")
    for manifest in work.manifests:
        found = Part(manifest).get("metadata", "namespace")
        if manifest.kind in ("Service", "PersistentVolumeClaim", "ConfigMap", "TrainingRuntime") and found != own:
            yield Part(manifest).problem(
                "namespace",
                "metadata",
                "namespace",
                reason=f"the job is in {own or 'the default one'}",
                fix=f"namespace: {own}" if own else "leave it out",
            )


def host_network(work: Workload) -> Iterator[Problem]:
    """On the node's network the node's resolver is used, which does not know pods."""
    if work.pod.get("hostNetwork") is True and work.pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield work.pod.problem(
            "host-network",
            "dnsPolicy",
            reason="with hostNetwork the names of the pods are not found",
            fix="dnsPolicy: ClusterFirstWithHostNet",
        )


def socket_interface(work: Workload) -> Iterator[Problem]:
    """NCCL takes patterns, gloo takes one name."""
    for part in work.variables():
        value = str(part.get("value") or "")
        if part.get("name") == "GLOO_SOCKET_IFNAME" and (not value or any(sign in value for sign in "^,=")):
            yield part.problem(
                "socket-interface",
                "value",
                reason="gloo takes the name of one interface, no pattern and no list",
                fix="eth0, or remove it: the agent finds the interface to the master",
            )


def istio(work: Workload) -> Iterator[Problem]:
    """A proxy in front of the ranks' ports lets them connect and then hang."""
    if work.template.get("metadata", "labels", ISTIO_LABEL) != "false":
        yield work.template.problem(
            "istio",
            "metadata",
            "labels",
            reason="where Istio is, its proxy would take the ports of the ranks",
            fix=f'{ISTIO_LABEL}: "false"',
        )


NETWORK_RULES: Final[tuple[Rule, ...]] = (
    service,
    selector,
    master_addr,
    ports,
    names,
    namespaces,
    host_network,
    socket_interface,
    istio,
)
