"""Finds what is wrong with manifests of training jobs and what a schema does not see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from framework.deploy.k8s.manifests import Manifest, Part, Workload, find_workloads
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
# They hand signals and exit codes on, or become what they start.
_WRAPPERS: Final = ("tini", "dumb-init", "numactl", "env")
# The dash and five characters that a controller puts behind the name of a pod.
_POD_SUFFIX: Final = 6

# What is wrong: the place, the reason, the fix.
Findings = Iterator[tuple[Part, str, str]]


Rule = Callable[[Workload], Findings]
# Kind, without ``k8s-`` -> what it guards, and checks; docs/kubernetes.md lists them.
TABLE: Final = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
CODE: Final[dict[str, Rule]] = {}


def rule(find: Rule) -> Rule:
    """List a function for what the table cannot say: its name, with dashes, is the kind."""
    CODE[find.__name__.strip("_").replace("_", "-")] = find
    return find


def broken(kind: str, work: Workload) -> Findings:
    """Everything that breaks one rule."""
    for check in TABLE[kind].get("checks", ()):
        yield from _of_check(check, work)
    if kind in CODE:
        yield from CODE[kind](work)


def _of_check(check: Mapping[str, Any], work: Workload) -> Findings:
    def is_there(part: str, *keys: str) -> bool:
        found = getattr(work, part)
        if found and keys:
            value = found.get(*keys)
        else:
            value = found
        return value is not None and value is not False

    if "of" in check:
        wanted = getattr(work, check["of"])
    else:
        wanted = check.get("is")
    part, *keys = check["at"]
    if (
        not is_there(part)
        or ("of" in check and not wanted)
        or ("where" in check and not is_there(*check["where"]))
        or ("unless" in check and is_there(*check["unless"]))
    ):
        return
    for place in _places(getattr(work, part), keys):
        value = place.get()
        if "of" in check:
            is_right = str(value) == str(wanted)
        elif "has" in check or "lacks" in check:
            is_right = check.get("has", "") in str(value) and check.get("lacks", "\n") not in str(
                value
            )
        elif "least" in check:
            is_right = (_number(value) or 0) >= check["least"]
        else:
            is_right = value == wanted and type(value) is type(wanted)  # 0 is not false
        if not is_right and not (value is None and check.get("left_out")):
            fix = check.get("fix") or f"{keys[-1]}: {show_value(wanted)}"
            yield place, check["reason"].format(work), fix


def _places(part: Part, keys: Sequence[str | int]) -> Iterator[Part]:
    if "*" not in keys:
        yield part.at(*keys)
        return
    end = keys.index("*")
    for item in part.items(*keys[:end]):
        yield from _places(item, keys[end + 1 :])


def lint(manifests: Sequence[Manifest]) -> list[Problem]:
    """Everything found, in the order of the files."""
    works = find_workloads(manifests)
    if not works:
        file = manifests[0].file if manifests else ""
        reason = "there is no Job, JobSet or TrainJob in it"
        return [
            Problem(
                kind="k8s-no-job", file=file, reason=reason, fix="name all files of a job together"
            )
        ]
    found = [
        place.problem(kind, reason, fix)
        for work in works
        for kind in TABLE
        for place, reason, fix in broken(kind, work)
    ]
    order = {manifest.file: index for index, manifest in enumerate(reversed(manifests))}
    return sorted(
        {str(problem): problem for problem in found}.values(),
        key=lambda problem: (-order[problem.file], problem.line),
    )


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


# A Job, a JobSet and their policies.


def _failure_rules(work: Workload) -> list[Part]:
    if work.job:
        return work.job.items("podFailurePolicy", "rules")
    return []


@rule
def _policy_container(work: Workload) -> Findings:
    names = [
        part.get("name") for key in ("containers", "initContainers") for part in work.pod.items(key)
    ]
    for rule in _failure_rules(work):
        place = rule.at("onExitCodes", "containerName")
        if place.get() is not None and place.get() not in names:
            reason = "the pod has no such container; the rule never fits"
            yield place, reason, f"containerName: {work.container.get('name')}"


@rule
def _exit_codes(work: Workload) -> Findings:
    if not work.job:
        return
    place = work.job.at("podFailurePolicy", "rules")
    pairs = (
        (
            "FailJob",
            NEVER_RETRY,
            NOT_COUNTED,
            "what was refused or given up once would be so again",
        ),
        ("Ignore", NOT_COUNTED, NEVER_RETRY, "a run that was stopped is no failure"),
    )
    for action, codes, others, why in pairs:
        rules = [
            rule.at("onExitCodes") for rule in _failure_rules(work) if rule.get("action") == action
        ]
        texts = {
            text
            for exits in rules
            if exits.get("operator") == "In"
            for text in exits.words("values")
        }
        found = {int(text) for text in texts if text.isdecimal()}
        if not set(codes) <= found or found & set(others):
            listed = ", ".join(map(str, codes))
            yield (
                place,
                f"{action} is for [{listed}]: {why}",
                f"action: {action}, onExitCodes values: [{listed}]",
            )


@rule
def _disruption(work: Workload) -> Findings:
    ignored = [rule for rule in _failure_rules(work) if rule.get("action") == "Ignore"]
    conditions = [part.get("type") for rule in ignored for part in rule.items("onPodConditions")]
    if work.job and "DisruptionTarget" not in conditions:
        yield (
            work.job.at("podFailurePolicy", "rules"),
            "evicted and preempted pods would use up the retries",
            'add {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}',
        )


@rule
def _retries(work: Workload) -> Findings:
    is_counted = (
        work.job
        and work.job.get("backoffLimitPerIndex") is None
        and work.job.get("backoffLimit") != 0
    )
    if work.job and is_counted and not work.jobset and work.num_nodes > 1:
        reason = (
            f"one crash ends all {work.num_nodes} pods, and each doubles the wait of all, up "
            "to ten minutes"
        )
        yield (
            work.job.at("backoffLimit"),
            reason,
            "backoffLimitPerIndex: RESTARTS, maxFailedIndexes: 0",
        )


@rule
def _jobset_policy(work: Workload) -> Findings:
    if work.jobset:
        rules = work.jobset.items("failurePolicy", "rules")
    else:
        rules = []
    found = {
        word
        for rule in rules
        if rule.get("action") == "FailJobSet"
        for word in rule.words("onJobFailureReasons")
    }
    if work.jobset and (missing := [reason for reason in FINAL_REASONS[:2] if reason not in found]):
        reason = f"a job that ended with {missing[0]} would start again until maxRestarts"
        fix = (
            "rules: [{name: refused, action: FailJobSet, onJobFailureReasons: "
            f"[{', '.join(FINAL_REASONS)}]}}]"
        )
        yield work.jobset.at("failurePolicy"), reason, fix


# Names, Service, ports and interfaces: nodes find each other.


@rule
def _service(work: Workload) -> Findings:
    if work.headless is None and work.kind == "Job":
        reason = "no Service in these files has this name; pods would have no names"
        yield work.pod.at("subdomain"), reason, "subdomain: the name of the headless Service"


@rule
def _selector(work: Workload) -> Findings:
    found = work.headless
    if found is None:
        return
    labels = {str(key): value for key, value in work.template.mapping("metadata", "labels").items()}
    labels |= {JOB_NAME_LABEL: work.name, "job-name": work.name}
    wanted = found.mapping("spec", "selector")
    if not wanted or any(labels.get(str(key)) != value for key, value in wanted.items()):
        reason = "no pod of this job has these labels"
        yield found.at("spec", "selector"), reason, f"selector: {{{JOB_NAME_LABEL}: {work.name}}}"


@rule
def _master_addr(work: Workload) -> Findings:
    given = work.option("master_addr")
    pod, _, domain = work.master.partition(".")
    hosts = [
        f"{pod}.{each}"
        for each in (domain, *(found.manifest.name for found in work.objects("Service")))
    ]
    if work.num_nodes and not any(given == host or given.startswith(f"{host}.") for host in hosts):
        reason = f"--master_addr {given or 'is missing'}: node rank 0 is {work.master}"
        yield work.program.at("command"), reason, f"--master_addr {work.master}"


@rule
def _ports(work: Workload) -> Findings:
    text = work.option("master_port")
    if not work.num_nodes or not text.isdecimal():
        return
    ranks = int(text)
    agents = int(text) + 1
    found = work.headless
    if found:
        listed = [(found.at("spec", "ports"), "port")]
    else:
        listed = []
    listed += (
        [(work.container.at("ports"), "containerPort")] if work.container.items("ports") else []
    )
    for place, key in listed:
        if not {ranks, agents} <= {
            number for port in place.items() if isinstance(number := port.get(key), int)
        }:
            reason = f"the command uses {ranks} for ranks and {agents} for agents"
            yield place, reason, f"{key}: {ranks} and {agents}"


@rule
def _name(work: Workload) -> Findings:
    index = len(str(max(0, work.num_nodes - 1)))
    length = len(work.name) + len(work.replicated) + index + _POD_SUFFIX
    place = work.head.at("metadata", "name")
    if not SERVICE_NAME.fullmatch(work.name):
        reason = "the Service of this name needs a label of DNS that begins with a letter"
        yield place, reason, "lower-case letters, digits and -"
    elif length > LONGEST_LABEL:
        reason = f"pods get names of {length} characters, and DNS takes {LONGEST_LABEL}"
        yield place, reason, f"at most {len(work.name) - length + LONGEST_LABEL} characters"


@rule
def _namespace(work: Workload) -> Findings:
    own = work.head.get("metadata", "namespace")
    kinds = (
        "Service",
        "PersistentVolumeClaim",
        "ConfigMap",
        "Secret",
        "NetworkPolicy",
        "TrainingRuntime",
    )
    for found in work.objects(*kinds):
        place = found.at("metadata", "namespace")
        if place.get() != own:
            if own:
                fix = f"namespace: {own}"
            else:
                fix = "leave it out"
            yield place, f"the job is in {own or 'the default one'}", fix


@rule
def _socket_interface(work: Workload) -> Findings:
    for part in work.variables():
        value = str(part.get("value") or "")
        if part.get("name") == "GLOO_SOCKET_IFNAME" and (
            not value or any(sign in value for sign in "^,=")
        ):
            reason = "gloo takes the name of one interface, no pattern and no list"
            yield (
                part.at("value"),
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
    on_cpu = any(
        part.get("name") == "DS_ACCELERATOR" and part.get("value") == "cpu"
        for part in work.variables()
    )
    if gpus is None and not on_cpu:
        reason = f"the command wants {ranks} GPUs and the pod gets none"
        yield limits, reason, f"{GPU_RESOURCE}: {ranks}, or DS_ACCELERATOR=cpu"
    elif gpus is not None and str(gpus) != str(ranks):
        reason = f"the command starts {ranks} ranks, one to a GPU"
        yield limits.at(GPU_RESOURCE), reason, f"{GPU_RESOURCE}: {ranks}"


@rule
def _grace(work: Workload) -> Findings:
    budget = work.template.get("metadata", "annotations", BUDGET_ANNOTATION)
    if isinstance(budget, str) and budget.isdecimal():
        needed = int(budget)
    else:
        needed = 60
    place = work.pod.at("terminationGracePeriodSeconds")
    seconds = place.get()
    given = work.option("grace_seconds")
    if not isinstance(seconds, int) or seconds < needed:
        yield place, f"a step and a save take {needed} s, then comes SIGKILL", f"{needed + 60}"
    elif given.isdecimal() and int(given) >= seconds:
        reason = (
            f"--grace_seconds {given}: the kubelet kills the agent after {seconds} s, before "
            "it has said why"
        )
        yield work.program.at("command"), reason, "less than terminationGracePeriodSeconds"


@rule
def _command(work: Workload) -> Findings:
    words = work.command
    while words and (words[0].startswith("-") or PurePosixPath(words[0]).name in _WRAPPERS):
        words = words[1:]
    program, *rest = words or [""]
    name = PurePosixPath(program).name
    if name == "dsf":
        rest = rest
    elif name in ("python", "python3") and rest[:1] == ["-m"]:
        rest = rest[1:]
    else:
        rest = []
    if rest[:2] != ["launch", "node"] and rest[:3] != ["framework", "launch", "node"]:
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
    """The container's own, or else the pod's."""
    own = work.container.get("securityContext", key)
    if own is None:
        return work.pod.get("securityContext", key)
    return own


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
    for part in work.variables():
        if looks_like_a_secret(str(part.get("name"))) and part.get("value"):
            yield part.at("name"), reason, "valueFrom: {secretKeyRef: {name: SECRET, key: KEY}}"
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
    if work.num_nodes < 2 or any(part.get("name") == "DSF_TOKEN" for part in work.variables()):
        return
    path = work.option("token_file")
    place = work.program.at("command")
    if path:
        volume = work.volume(path)
    else:
        volume = None
    if volume is None or not volume.mapping().keys() & {"secret", "csi", "projected"}:
        reason = f"--token_file {path or 'is left out'}: agents would take anybody for a node"
        yield (
            place,
            reason,
            "--token_file PATH of a key in a Secret that is mounted, as `launch k8s` prints it",
        )
        return
    for found in work.objects("Secret"):
        if found.manifest.name == volume.get("secret", "secretName"):
            texts = found.mapping("data"), found.mapping("stringData")
            text = next(
                (each[key] for each in texts if (key := PurePosixPath(path).name) in each), ""
            )
            if len(str(text)) < _LEAST_TOKEN_BYTES:
                reason = f"agents take no key of less than {_LEAST_TOKEN_BYTES} bytes from {path}"
                yield found.at("metadata", "name"), reason, "32 random bytes: openssl rand -hex 32"


@rule
def _launcher_variable(work: Workload) -> Findings:
    for part in work.variables():
        if str(part.get("name")) in OF_THE_LAUNCHER:
            reason = "the same in every pod, and it contradicts what the launcher finds"
            yield part.at("name"), reason, "remove it; the command says it all"


@rule
def _own_pods(work: Workload) -> Findings:
    selectors = []
    for kind in ("podAntiAffinity", "podAffinity"):
        terms = work.pod.items("affinity", kind, "requiredDuringSchedulingIgnoredDuringExecution")
        preferred = work.pod.items(
            "affinity", kind, "preferredDuringSchedulingIgnoredDuringExecution"
        )
        terms += [each.at("podAffinityTerm") for each in preferred]
        selectors += [term.at("labelSelector") for term in terms]
    for policy in work.objects("NetworkPolicy"):
        callers = [
            caller for rule in policy.items("spec", "ingress") for caller in rule.items("from")
        ]
        selectors += [each.at("podSelector") for each in (policy.at("spec"), *callers)]
    for labels in (selector.at("matchLabels") for selector in selectors):
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
    if folder.startswith("/"):
        volume = work.volume(folder)
    else:
        volume = None
    if volume is None or "emptyDir" in volume.mapping():
        reason = f"run.output_dir {folder or 'is left out'}: each pod would keep its own part"
        yield (
            work.program.at("command"),
            reason,
            "run.output_dir=PATH in a volume that all pods share",
        )
        return
    claim = volume.get("persistentVolumeClaim", "claimName")
    for found in work.objects("PersistentVolumeClaim"):
        modes = found.at("spec", "accessModes")
        if found.manifest.name == claim and "ReadWriteMany" not in modes.words():
            yield modes, "pods on other nodes could not mount it", "accessModes: [ReadWriteMany]"


@rule
def _caches(work: Workload) -> Findings:
    found = {str(part.get("name")): part.at("value") for part in work.variables()}
    for name in CACHE_VARIABLES:
        place = found.get(name, work.container.at("env"))
        value = place.get()
        if isinstance(value, str):
            volume = work.volume(value)
        else:
            volume = None
        if volume is None or "emptyDir" not in volume.mapping():
            of_user = (
                "must be a folder that the user may write, on the node: locks on network "
                "volumes stay behind"
            )
            yield place, f"{name} {of_user}", f"{name}: a path in an emptyDir"


@rule
def _mount(work: Workload) -> Findings:
    names = [volume.get("name") for volume in work.pod.items("volumes")]
    for mount in work.container.items("volumeMounts"):
        if mount.get("name") not in names:
            fix = f"one of {', '.join(sorted(map(str, names)))}"
            yield mount.at("name"), "the pod has no volume of this name", fix


@rule
def _config_file(work: Workload) -> Findings:
    words = work.command
    if "node" in words[:-1]:
        config = words[words.index("node") + 1]
    else:
        config = ""
    if config.startswith("/"):
        volume = work.volume(config)
    else:
        volume = None
    if volume:
        name = volume.get("configMap", "name")
    else:
        name = None
    for data in (
        found.at("data") for found in work.objects("ConfigMap") if found.manifest.name == name
    ):
        keys = data.mapping()
        wrong = [key for key in keys if not (isinstance(key, str) and CONFIG_KEY.fullmatch(key))]
        if wrong:
            yield (
                data,
                f"no key can be {wrong[0]!r}",
                "letters, digits, - _ and ., at most 253 of them",
            )
        if PurePosixPath(config).name not in keys:
            reason = f"{config}: ConfigMap {name} holds {', '.join(map(str, keys)) or 'nothing'}"
            yield work.program.at("command"), reason, "name a file that it holds"
