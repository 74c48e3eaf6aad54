"""Rules for names, Service, ports and interfaces, by which nodes find each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from framework.deploy.k8s.manifest_rules import Findings, rule
from framework.deploy.k8s.read_manifests import ManifestPart, Workload
from framework.deploy.k8s.render import JOB_NAME_LABEL
from framework.deploy.options import LONGEST_LABEL, SERVICE_NAME

# The dash and five characters that a controller puts after the name of a pod.
_POD_SUFFIX: Final = 6


@rule
def _service(work: Workload) -> Findings:
    if work.headless is None and work.kind == "Job":
        reason = "no Service in these files has this name; pods would have no names"
        yield work.pod.at("subdomain"), reason, "subdomain: the name of the headless Service"


@rule
def _selector(work: Workload) -> Findings:
    service = work.headless
    if service is None:
        return
    labels = {str(key): value for key, value in work.template.mapping("metadata", "labels").items()}
    labels |= {JOB_NAME_LABEL: work.name, "job-name": work.name}
    selector = service.mapping("spec", "selector")
    if not selector or any(labels.get(str(key)) != value for key, value in selector.items()):
        reason = "no pod of this job has these labels"
        yield service.at("spec", "selector"), reason, f"selector: {{{JOB_NAME_LABEL}: {work.name}}}"


def _hosts_of_master(work: Workload) -> list[str]:
    """Return the names of node 0: in its own domain, and in the domain of each service."""
    pod, _, domain = work.master.partition(".")
    domains = [domain]
    domains += [service.manifest.name for service in work.objects("Service")]
    return [f"{pod}.{domain}" for domain in domains]


@rule
def _master_addr(work: Workload) -> Findings:
    address = work.option("master_addr")
    # The address may be fully qualified, with the cluster's domain at its end.
    hosts = tuple(f"{host}." for host in _hosts_of_master(work))
    if work.num_nodes and not f"{address}.".startswith(hosts):
        reason = f"--master_addr {address or 'is missing'}: node rank 0 is {work.master}"
        yield work.program.at("command"), reason, f"--master_addr {work.master}"


@rule
def _ports(work: Workload) -> Findings:
    text = work.option("master_port")
    if not work.num_nodes or not text.isdecimal():
        return
    rank_port = int(text)
    agent_port = rank_port + 1
    for place, key in _places_of_ports(work):
        values = [port.get(key) for port in place.items()]
        if not {rank_port, agent_port}.issubset(filter(_is_whole, values)):
            reason = f"the command uses {rank_port} for ranks and {agent_port} for agents"
            yield place, reason, f"{key}: {rank_port} and {agent_port}"


def _places_of_ports(work: Workload) -> Iterator[tuple[ManifestPart, str]]:
    """Yield the lists of ports, and the key of a number in each."""
    if work.headless:
        yield work.headless.at("spec", "ports"), "port"
    if work.container.items("ports"):
        yield work.container.at("ports"), "containerPort"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int)


@rule
def _name(work: Workload) -> Findings:
    num_digits = len(str(max(0, work.num_nodes - 1)))
    length = len(work.name) + len(work.pod_infix) + num_digits + _POD_SUFFIX
    place = work.head.at("metadata", "name")
    if not SERVICE_NAME.fullmatch(work.name):
        reason = "the Service of this name needs a label of DNS that begins with a letter"
        yield place, reason, "lower-case letters, digits and -"
    elif length > LONGEST_LABEL:
        reason = f"pods get names of {length} characters, and DNS takes {LONGEST_LABEL}"
        yield place, reason, f"at most {len(work.name) - length + LONGEST_LABEL} characters"


@rule
def _namespace(work: Workload) -> Findings:
    namespace = work.head.get("metadata", "namespace")
    kinds = (
        "Service",
        "PersistentVolumeClaim",
        "ConfigMap",
        "Secret",
        "NetworkPolicy",
        "TrainingRuntime",
    )
    for item in work.objects(*kinds):
        place = item.at("metadata", "namespace")
        if place.get() != namespace:
            if namespace:
                fix = f"namespace: {namespace}"
            else:
                fix = "leave it out"
            yield place, f"the job is in {namespace or 'the default one'}", fix


@rule
def _socket_interface(work: Workload) -> Findings:
    for variable in work.variables():
        if variable.get("name") != "GLOO_SOCKET_IFNAME":
            continue
        value = str(variable.get("value") or "")
        if not value or any(sign in value for sign in "^,="):
            reason = "gloo takes the name of one interface, no pattern and no list"
            yield (
                variable.at("value"),
                reason,
                "eth0, or remove it: the agent finds the interface to the master",
            )
