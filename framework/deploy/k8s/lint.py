"""Finds mistakes in manifests of training jobs that a schema does not see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from framework.deploy.k8s.read_manifests import Manifest, ManifestPart, Workload, find_workloads
from framework.deploy.k8s.render import (
    BUDGET_ANNOTATION,
    CACHE_VARIABLES,
    FINAL_REASONS,
    GPU_RESOURCE,
    JOB_NAME_LABEL,
    JOBSET_NAME_LABEL,
    NEVER_RETRY,
    NOT_COUNTED,
)
from framework.deploy.options import (
    CONFIG_KEY,
    LONGEST_LABEL,
    OF_THE_LAUNCHER,
    SERVICE_NAME,
    last_setting,
    looks_like_a_secret,
    parse_quantity,
    what_is_wrong_with_image,
)
from framework.errors import Problem, show_value
from framework.system.output import masked

_LEAST_TOKEN_BYTES: Final = 16
# Programs that pass signals and exit codes on, or replace themselves by the program they start.
_WRAPPERS: Final = ("tini", "dumb-init", "numactl", "env")
# The dash and five characters that a controller puts behind the name of a pod.
_POD_SUFFIX: Final = 6

# Each finding: the place of the mistake, the reason, the fix.
Findings = Iterator[tuple[ManifestPart, str, str]]


Rule = Callable[[Workload], Findings]
# Kind, without ``k8s-`` -> why the rule exists, and its checks; docs/kubernetes.md lists them.
TABLE: Final = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
CODE: Final[dict[str, Rule]] = {}


def rule(find: Rule) -> Rule:
    """Register a rule that the table cannot express; its name, with dashes, is the kind."""
    CODE[find.__name__.strip("_").replace("_", "-")] = find
    return find


def broken(kind: str, work: Workload) -> Findings:
    """Yield part, reason and fix of everything that breaks the rule `kind`, by its checks in the
    table and its code.
    """
    for check in TABLE[kind].get("checks", ()):
        yield from _failures_of(check, work)
    if kind in CODE:
        yield from CODE[kind](work)


def _failures_of(check: Mapping[str, Any], work: Workload) -> Findings:
    """Yield part, reason and fix where a check of the table fails; ``rules.yaml`` describes its
    keys.
    """
    expected = check.get("is")
    if "of" in check:
        expected = getattr(work, check["of"])
    if not _is_relevant(check, expected, work):
        return
    attribute, *keys = check["at"]
    for place in _places(getattr(work, attribute), keys):
        value = place.get()
        is_left_out = value is None and check.get("left_out")
        if not is_left_out and not _is_right(value, check, expected):
            fix = check.get("fix") or f"{keys[-1]}: {show_value(expected)}"
            yield place, check["reason"].format(work), fix


def _is_relevant(check: Mapping[str, Any], expected: Any, work: Workload) -> bool:
    """Return whether the manifests have the part that is checked, and fulfil its conditions."""
    attribute = check["at"][0]
    if not _is_there(work, attribute):
        return False
    if "of" in check and not expected:
        return False
    if "where" in check and not _is_there(work, *check["where"]):
        return False
    return "unless" not in check or not _is_there(work, *check["unless"])


def _is_there(work: Workload, attribute: str, *keys: str) -> bool:
    """Return whether a part of the job, or the value at `keys` in it, is set and not false."""
    value = getattr(work, attribute)
    if value and keys:
        value = value.get(*keys)
    return value is not None and value is not False


def _is_right(value: Any, check: Mapping[str, Any], expected: Any) -> bool:
    """Check a value by the keys of a check: `of` (equal as text), `has` and `lacks` (parts of
    text), `least`, or else `is`.
    """
    if "of" in check:
        return str(value) == str(expected)
    if "has" in check or "lacks" in check:
        text = str(value)
        return check.get("has", "") in text and check.get("lacks", "\n") not in text
    if "least" in check:
        return bool((_number(value) or 0) >= check["least"])
    return value == expected and type(value) is type(expected)  # 0 is not false


def _places(part: ManifestPart, keys: Sequence[str | int]) -> Iterator[ManifestPart]:
    """Yield the parts at `keys`, in which "*" stands for each mapping of a list."""
    if "*" not in keys:
        yield part.at(*keys)
        return
    end = keys.index("*")
    for item in part.items(*keys[:end]):
        yield from _places(item, keys[end + 1 :])


def lint(manifests: Sequence[Manifest]) -> list[Problem]:
    """Return all problems, each once, in the order of the files and of the lines in them."""
    workloads = find_workloads(manifests)
    if not workloads:
        problem = Problem(
            kind="k8s-no-job",
            file=manifests[0].file if manifests else "",
            reason="there is no Job, JobSet or TrainJob in it",
            fix="name all files of a job together",
        )
        return [problem]
    problems: dict[str, Problem] = {}
    for work, kind in itertools.product(workloads, TABLE):
        for place, reason, fix in broken(kind, work):
            problem = place.problem(kind, reason, fix)
            problems[str(problem)] = problem
    file_order: dict[str, int] = {}
    for number, manifest in enumerate(manifests):
        file_order.setdefault(manifest.file, number)
    return sorted(problems.values(), key=lambda problem: (file_order[problem.file], problem.line))


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


# A Job, a JobSet and their policies.


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


# Names, Service, ports and interfaces, by which nodes find each other.


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


# The container: devices, command, image, rights, variables.


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
    """Return the words behind our command line; none if process 1 is something else."""
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
        reason = f"--token_file {path or 'is left out'}: agents would take anybody for a node"
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


def _secret_value(secret: ManifestPart, key: str) -> str:
    """Return the value of a Secret's key, in base64 if ``data`` holds it; empty if missing."""
    for field in ("data", "stringData"):
        values = secret.mapping(field)
        if key in values:
            return str(values[key])
    return ""


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


# Memory, volumes and files of a pod.


@rule
def _shm(work: Workload) -> Findings:
    volume = work.volume("/dev/shm")
    if volume is None or volume.get("emptyDir", "medium") != "Memory":
        reason = "/dev/shm has 64 MiB: NCCL and data loaders die in it"
        yield (
            work.container.at("volumeMounts"),
            reason,
            "mount an emptyDir with medium: Memory at /dev/shm",
        )
        return
    place = volume.at("emptyDir", "sizeLimit")
    size = parse_quantity(place.get())
    memory = parse_quantity(work.resources.get("limits", "memory"))
    if size is None:
        yield place, "it may take all of the node's memory", "sizeLimit: a part of the memory limit"
    elif memory is not None and size >= memory:
        reason = "what is in it counts against the memory limit, which it would fill"
        yield place, reason, "less than limits.memory"


@rule
def _memory(work: Workload) -> Findings:
    requested = work.resources.get("requests", "memory")
    limit = parse_quantity(work.resources.get("limits", "memory"))
    if limit is None or (requested is not None and parse_quantity(requested) != limit):
        reason = "a pod that may use more memory than it requests is evicted first"
        yield work.resources, reason, "the same memory under requests and limits"


@rule
def _shared_storage(work: Workload) -> Findings:
    if work.num_nodes < 2:
        return
    folder = last_setting(work.command, "run.output_dir") or ""
    volume = work.volume(folder) if folder.startswith("/") else None
    if volume is None or "emptyDir" in volume.mapping():
        reason = f"run.output_dir {folder or 'is left out'}: each pod would keep its own part"
        yield (
            work.program.at("command"),
            reason,
            "run.output_dir=PATH in a volume that all pods share",
        )
        return
    yield from _unshared_claims(work, volume.get("persistentVolumeClaim", "claimName"))


def _unshared_claims(work: Workload, claim_name: Any) -> Findings:
    for claim in work.objects("PersistentVolumeClaim"):
        modes = claim.at("spec", "accessModes")
        if claim.manifest.name == claim_name and "ReadWriteMany" not in modes.words():
            yield modes, "pods on other nodes could not mount it", "accessModes: [ReadWriteMany]"


@rule
def _caches(work: Workload) -> Findings:
    values = {str(variable.get("name")): variable.at("value") for variable in work.variables()}
    for name in CACHE_VARIABLES:
        place = values.get(name, work.container.at("env"))
        path = place.get()
        volume = work.volume(path) if isinstance(path, str) else None
        if volume is None or "emptyDir" not in volume.mapping():
            reason = (
                f"{name} must be a folder that the user may write, on the node: locks on network "
                "volumes stay behind"
            )
            yield place, reason, f"{name}: a path in an emptyDir"


@rule
def _mount(work: Workload) -> Findings:
    names = [volume.get("name") for volume in work.pod.items("volumes")]
    for mount in work.container.items("volumeMounts"):
        if mount.get("name") not in names:
            fix = f"one of {', '.join(sorted(map(str, names)))}"
            yield mount.at("name"), "the pod has no volume of this name", fix


@rule
def _config_file(work: Workload) -> Findings:
    config = _config_of(work.command)
    volume = work.volume(config) if config.startswith("/") else None
    if volume is None:
        return
    name = volume.get("configMap", "name")
    for config_map in work.objects("ConfigMap"):
        if config_map.manifest.name != name:
            continue
        data = config_map.at("data")
        yield from _odd_keys(data)
        keys = data.mapping()
        if PurePosixPath(config).name not in keys:
            reason = f"{config}: ConfigMap {name} holds {', '.join(map(str, keys)) or 'nothing'}"
            yield work.program.at("command"), reason, "name a file that it holds"


def _config_of(words: Sequence[str]) -> str:
    """Return the run config behind `launch node`; empty without one."""
    if "node" not in words[:-1]:
        return ""
    return words[words.index("node") + 1]


def _odd_keys(data: ManifestPart) -> Findings:
    for key in data.mapping():
        if not _is_config_key(key):
            yield data, f"no key can be {key!r}", "letters, digits, - _ and ., at most 253 of them"
            return


def _is_config_key(key: object) -> bool:
    return isinstance(key, str) and CONFIG_KEY.fullmatch(key) is not None
