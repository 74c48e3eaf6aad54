"""The lint of manifests: every rule is broken once, and that rule alone finds it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli import main
from framework.deploy.k8s.lint import lint
from framework.deploy.k8s.manifest_rules import CODE, TABLE, broken
from framework.deploy.k8s.read_manifests import Manifest, find_workloads, parse_manifests
from framework.errors import EXIT_PROBLEMS, ConfigError
from tests.deploy.k8s.cases import CASES, GOLDEN
from tests.places import ROOT

Documents = dict[str, Any]


@cache
def _read(name: str) -> Documents:
    return {
        document["kind"]: document for document in yaml.safe_load_all((GOLDEN / name).read_text())
    }


def load(name: str) -> Documents:
    """The objects of a golden file by kind, to be changed."""
    return copy.deepcopy(_read(name))


def as_manifests(documents: Documents) -> list[Manifest]:
    return [Manifest(document, "job.yaml", {(): 1}) for document in documents.values()]


def job(documents: Documents) -> Any:
    return documents["Job"]["spec"]


def pod(documents: Documents) -> Any:
    return job(documents)["template"]["spec"]


def container(documents: Documents) -> Any:
    return pod(documents)["containers"][0]


def set_option(words: list[str], option: str, value: str) -> None:
    words[words.index(option) + 1] = value


def leave_out(words: list[str], option: str) -> None:
    place = words.index(option)
    del words[place : place + 2]


def failing(documents: Documents, *codes: int) -> None:
    job(documents)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=list(codes))


def jobset_job(documents: Documents) -> Any:
    return documents["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def set_variable(documents: Documents, name: str, value: str) -> None:
    variables = [each for each in container(documents)["env"] if each["name"] != name]
    container(documents)["env"] = [*variables, {"name": name, "value": value}]


def volume(documents: Documents, name: str) -> Any:
    return next(each for each in pod(documents)["volumes"] if each["name"] == name)


def add_host_path(documents: Documents) -> None:
    pod(documents)["volumes"].append({"name": "ib", "hostPath": {"path": "/dev/infiniband"}})


def rename(documents: Documents, name: str) -> None:
    """Change one thing, and keep the rest right."""
    documents["Job"]["metadata"]["name"] = name
    label = {"batch.kubernetes.io/job-name": name}
    documents["Service"]["spec"]["selector"] = label
    policy = documents["NetworkPolicy"]["spec"]
    policy["podSelector"]["matchLabels"] = policy["ingress"][0]["from"][0]["podSelector"][
        "matchLabels"
    ] = label
    (apart,) = pod(documents)["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    apart["labelSelector"]["matchLabels"] = label
    set_option(container(documents)["command"], "--master_addr", f"{name}-0.quickstart")


def selectors(documents: Documents, kind: str) -> Any:
    """What a pod keeps away from, or near to."""
    if kind == "podAffinity":
        (term,) = pod(documents)["affinity"][kind][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        return term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    return pod(documents)["affinity"][kind]["requiredDuringSchedulingIgnoredDuringExecution"][0][
        "labelSelector"
    ]["matchLabels"]


def runtime_job(documents: Documents) -> Any:
    return documents["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0][
        "template"
    ]["spec"]


Mutation = Callable[[Documents], object]
# kind of finding -> (golden file, the change to it). What is reached by several ways stands
# several times.
MUTATIONS: list[tuple[str, str, Mutation]] = [
    ("counts", "job.yaml", lambda d: job(d).update(completions=3)),
    ("counts", "job.yaml", lambda d: job(d).update(parallelism=1)),
    (
        "counts",
        "jobset.yaml",
        lambda d: d["JobSet"]["spec"]["replicatedJobs"][0].update(replicas=2),
    ),
    ("counts", "trainjob.yaml", lambda d: d["TrainJob"]["spec"]["trainer"].pop("numNodes")),
    ("counts", "trainjob.yaml", lambda d: d["TrainJob"]["spec"]["trainer"].update(numNodes=1)),
    ("not-indexed", "job.yaml", lambda d: job(d).update(completionMode="NonIndexed")),
    ("restart-policy", "job.yaml", lambda d: pod(d).update(restartPolicy="OnFailure")),
    (
        "replacement-policy",
        "job.yaml",
        lambda d: job(d).update(podReplacementPolicy="TerminatingOrFailed"),
    ),
    ("lost-node", "job.yaml", lambda d: job(d).pop("maxFailedIndexes")),
    ("lost-node", "jobset-supervised.yaml", lambda d: jobset_job(d).update(maxFailedIndexes=1)),
    ("service", "job.yaml", lambda d: pod(d).update(subdomain="other")),
    ("service", "job.yaml", lambda d: d["Service"]["metadata"].update(name="other")),
    ("service", "job.yaml", lambda d: d["Service"]["spec"].pop("clusterIP")),
    ("service", "job.yaml", lambda d: d["Service"]["spec"].update(publishNotReadyAddresses=False)),
    (
        "service",
        "jobset.yaml",
        lambda d: d["JobSet"]["spec"]["network"].update(publishNotReadyAddresses=False),
    ),
    ("selector", "job.yaml", lambda d: d["Service"]["spec"].update(selector={"app": "other"})),
    (
        "master-addr",
        "job.yaml",
        lambda d: set_option(container(d)["command"], "--master_addr", "quickstart-1.quickstart"),
    ),
    (
        "master-addr",
        "job.yaml",
        lambda d: set_option(container(d)["command"], "--master_addr", "10.0.0.1"),
    ),
    ("ports", "job.yaml", lambda d: d["Service"]["spec"]["ports"].pop()),
    ("ports", "job.yaml", lambda d: container(d)["ports"][0].update(containerPort=1)),
    (
        "gpu-count",
        "job.yaml",
        lambda d: container(d)["resources"]["limits"].update({"nvidia.com/gpu": 8}),
    ),
    ("gpu-count", "job.yaml", lambda d: container(d)["resources"]["limits"].pop("nvidia.com/gpu")),
    (
        "gpu-count",
        "trainjob.yaml",
        lambda d: d["TrainJob"]["spec"]["trainer"].update(numProcPerNode=1),
    ),
    ("shm", "job.yaml", lambda d: volume(d, "dshm")["emptyDir"].update(sizeLimit="64Gi")),
    ("shm", "job.yaml", lambda d: volume(d, "dshm")["emptyDir"].pop("medium")),
    ("shm", "job.yaml", lambda d: volume(d, "dshm")["emptyDir"].pop("sizeLimit")),
    ("shm", "job.yaml", lambda d: container(d)["volumeMounts"].pop(0)),
    ("memory", "job.yaml", lambda d: container(d)["resources"]["requests"].update(memory="1Gi")),
    ("grace", "job.yaml", lambda d: pod(d).update(terminationGracePeriodSeconds=200)),
    ("grace", "job.yaml", lambda d: pod(d).pop("terminationGracePeriodSeconds")),
    ("grace", "job.yaml", lambda d: set_option(container(d)["command"], "--grace_seconds", "300")),
    (
        "shared-storage",
        "job.yaml",
        lambda d: d["PersistentVolumeClaim"]["spec"].update(accessModes=["ReadWriteOnce"]),
    ),
    (
        "shared-storage",
        "job-cpu.yaml",
        lambda d: pod(d)["volumes"].__setitem__(2, {"name": "runs", "emptyDir": {}}),
    ),
    (
        "shared-storage",
        "job.yaml",
        lambda d: container(d)["command"].append("run.output_dir=/tmp/runs"),
    ),
    (
        "command",
        "job.yaml",
        lambda d: container(d).update(command=["bash", "-c", "dsf launch node x"]),
    ),
    ("command", "job.yaml", lambda d: container(d)["command"].insert(0, "/usr/bin/supervisord")),
    (
        "policy-container",
        "job.yaml",
        lambda d: job(d)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(
            containerName="main"
        ),
    ),
    (
        "exit-codes",
        "job.yaml",
        lambda d: job(d)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[78]),
    ),
    ("exit-codes", "job.yaml", lambda d: failing(d, 64, 78)),
    ("exit-codes", "job.yaml", lambda d: failing(d, 64, 75, 77, 78)),
    ("exit-codes", "job.yaml", lambda d: job(d)["podFailurePolicy"]["rules"].pop(2)),
    (
        "exit-codes",
        "job.yaml",
        lambda d: job(d)["podFailurePolicy"]["rules"][2]["onExitCodes"].update(values=[75, 78]),
    ),
    (
        "condition-status",
        "job.yaml",
        lambda d: job(d)["podFailurePolicy"]["rules"][1]["onPodConditions"][0].pop("status"),
    ),
    ("disruption", "job.yaml", lambda d: job(d)["podFailurePolicy"]["rules"].pop(1)),
    ("name", "job.yaml", lambda d: rename(d, "a" * 60)),
    ("name", "job.yaml", lambda d: rename(d, "7b-model")),
    (
        "image",
        "job.yaml",
        lambda d: container(d).update(image="registry.example/team/train:latest"),
    ),
    ("image", "job.yaml", lambda d: container(d).update(image="registry.example:5000/team/train")),
    (
        "istio",
        "job.yaml",
        lambda d: job(d)["template"]["metadata"]["labels"].pop("sidecar.istio.io/inject"),
    ),
    ("retries", "job.yaml", lambda d: job(d).pop("backoffLimitPerIndex")),
    (
        "retries",
        "job-rdma.yaml",
        lambda d: (job(d).pop("backoffLimitPerIndex"), job(d).update(backoffLimit=9)),
    ),
    ("retries", "trainjob.yaml", lambda d: runtime_job(d).update(backoffLimit=6)),
    (
        "ipc-lock",
        "job.yaml",
        lambda d: container(d)["securityContext"]["capabilities"].update(add=["IPC_LOCK"]),
    ),
    ("jobset-policy", "jobset.yaml", lambda d: d["JobSet"]["spec"]["failurePolicy"].pop("rules")),
    (
        "jobset-policy",
        "jobset.yaml",
        lambda d: d["JobSet"]["spec"]["failurePolicy"]["rules"][0].update(
            onJobFailureReasons=["PodFailurePolicy"]
        ),
    ),
    ("deadline", "job.yaml", lambda d: job(d).pop("activeDeadlineSeconds")),
    ("ttl", "job.yaml", lambda d: job(d).update(ttlSecondsAfterFinished=100)),
    ("namespace", "job-rdma.yaml", lambda d: d["Service"]["metadata"].update(namespace="other")),
    ("namespace", "job-rdma.yaml", lambda d: d["Secret"]["metadata"].pop("namespace")),
    ("namespace", "job.yaml", lambda d: d["NetworkPolicy"]["metadata"].update(namespace="other")),
    ("token", "job.yaml", lambda d: leave_out(container(d)["command"], "--token_file")),
    (
        "token",
        "trainjob.yaml",
        lambda d: leave_out(d["TrainJob"]["spec"]["trainer"]["command"], "--token_file"),
    ),
    (
        "token",
        "job.yaml",
        lambda d: set_option(container(d)["command"], "--token_file", "/opt/token"),
    ),
    (
        "token",
        "job.yaml",
        lambda d: set_option(container(d)["command"], "--token_file", "/cache/token"),
    ),
    (
        "token",
        "job.yaml",
        lambda d: set_option(container(d)["command"], "--token_file", "/etc/dsf-token/other"),
    ),
    ("token", "job.yaml", lambda d: d["Secret"].update(stringData={"token": "fifteen letters"})),
    # 12 bytes, which are 16 letters in base64
    (
        "token",
        "job.yaml",
        lambda d: d["Secret"].update(stringData={}, data={"token": "dHdlbHZlIGJ5dGVz"}),
    ),
    (
        "runtime",
        "trainjob-on-runtime.yaml",
        lambda d: d["TrainJob"]["spec"]["runtimeRef"].update(name="deepspeed-distributed"),
    ),
    ("privileges", "job.yaml", lambda d: container(d)["securityContext"].update(privileged=True)),
    ("privileges", "job.yaml", lambda d: pod(d).pop("securityContext")),
    ("service-links", "job.yaml", lambda d: pod(d).pop("enableServiceLinks")),
    ("account-token", "job.yaml", lambda d: pod(d).pop("automountServiceAccountToken")),
    ("termination-message", "job.yaml", lambda d: container(d).pop("terminationMessagePolicy")),
    ("caches", "job.yaml", lambda d: set_variable(d, "TRITON_CACHE_DIR", "/checkpoints/triton")),
    ("literal-secret", "job.yaml", lambda d: set_variable(d, "HF_TOKEN", "hf_not_a_real_one")),
    (
        "literal-secret",
        "job.yaml",
        lambda d: container(d)["command"].append("task.args.hub_token=hf_not_a_real_one"),
    ),
    ("launcher-variable", "job.yaml", lambda d: set_variable(d, "WORLD_SIZE", "8")),
    (
        "socket-interface",
        "job.yaml",
        lambda d: set_variable(d, "GLOO_SOCKET_IFNAME", "^lo,docker0"),
    ),
    ("host-network", "job-rdma.yaml", lambda d: pod(d).pop("dnsPolicy")),
    (
        "mount",
        "job.yaml",
        lambda d: container(d)["volumeMounts"].append({"name": "data", "mountPath": "/data"}),
    ),
    ("host-path", "job.yaml", add_host_path),
    (
        "own-pods",
        "job-placed.yaml",
        lambda d: selectors(d, "podAntiAffinity").update({"batch.kubernetes.io/job-name": "old"}),
    ),
    (
        "own-pods",
        "job-placed.yaml",
        lambda d: selectors(d, "podAffinity").update({"batch.kubernetes.io/job-name": "old"}),
    ),
    (
        "own-pods",
        "job-placed.yaml",
        lambda d: d["NetworkPolicy"]["spec"]["podSelector"].update(
            matchLabels={"batch.kubernetes.io/job-name": "old"}
        ),
    ),
    (
        "own-pods",
        "job-placed.yaml",
        lambda d: d["NetworkPolicy"]["spec"]["ingress"][0]["from"][0]["podSelector"][
            "matchLabels"
        ].update({"batch.kubernetes.io/job-name": "old"}),
    ),
    ("config-file", "job.yaml", lambda d: d["ConfigMap"].update(data={"other.yaml": ""})),
    ("config-file", "job.yaml", lambda d: d["ConfigMap"]["data"].update({"a run.yaml": ""})),
]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_nothing_is_wrong_with_what_is_printed(path: Path) -> None:
    assert lint(parse_manifests(path.read_text(), name=path.name)) == []


@pytest.mark.parametrize(
    ("kind", "file", "mutate"),
    MUTATIONS,
    ids=[f"{kind}-{n}" for n, (kind, _, _) in enumerate(MUTATIONS)],
)
def test_one_mistake_is_found_by_one_rule(kind: str, file: str, mutate: Mutation) -> None:
    documents = load(file)
    mutate(documents)
    problems = lint(as_manifests(documents))
    assert {problem.kind for problem in problems} == {f"k8s-{kind}"}
    assert all(
        problem.fix and problem.reason and problem.line and problem.file == "job.yaml"
        for problem in problems
    )


# Other valid spellings.
ALSO_RIGHT: list[tuple[str, Mutation]] = [
    ("job.yaml", lambda d: failing(d, 64, 77, 78, 139)),
    ("job.yaml", lambda d: job(d).pop("podReplacementPolicy")),
    ("job.yaml", lambda d: container(d)["command"].__setitem__(slice(0), ["/usr/bin/tini", "--"])),
    (
        "job.yaml",
        lambda d: container(d)["command"].__setitem__(slice(0), ["numactl", "--interleave=all"]),
    ),
    (
        "job.yaml",
        lambda d: (
            job(d).pop("backoffLimitPerIndex"),
            job(d).pop("maxFailedIndexes"),
            job(d).update(backoffLimit=0),
        ),
    ),
    (
        "job.yaml",
        lambda d: (
            job(d).update(completions=3, parallelism=3),
            container(d)["command"].extend(["--spares", "1"]),
        ),
    ),
    ("job.yaml", lambda d: d.pop("NetworkPolicy")),
    ("job.yaml", lambda d: d.pop("Secret")),  # it is in the cluster
    (
        "job.yaml",
        lambda d: volume(d, "token").update(
            secret=None, csi={"driver": "secrets-store.csi.k8s.io"}
        ),
    ),
    (
        "job.yaml",
        lambda d: (
            leave_out(container(d)["command"], "--token_file"),
            container(d)["env"].append(
                {"name": "DSF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
            ),
        ),
    ),
]


@pytest.mark.parametrize(("file", "mutate"), ALSO_RIGHT, ids=range(len(ALSO_RIGHT)))
def test_what_is_written_in_another_way_is_right_as_well(file: str, mutate: Mutation) -> None:
    documents = load(file)
    mutate(documents)
    assert lint(as_manifests(documents)) == []


def test_no_finding_shows_a_secret() -> None:
    documents = load("job.yaml")
    documents["Secret"]["stringData"]["token"] = "s3cret"
    container(documents)["command"] = [
        "task.args.hub_token=s3cret",
        *container(documents)["command"],
    ]
    set_variable(documents, "HF_TOKEN", "s3cret")
    problems = lint(as_manifests(documents))
    assert {"k8s-token", "k8s-command", "k8s-literal-secret"} <= {
        problem.kind for problem in problems
    }
    assert "hub_token=***" in "".join(map(str, problems))
    assert "s3cret" not in json.dumps([problem.to_dict() for problem in problems])


def test_every_rule_is_broken_once() -> None:
    """A rule that no mutation reaches alone would show here: each rule finds something in some
    mutation.
    """
    reached = set()
    for _, file, mutate in MUTATIONS:
        documents = load(file)
        mutate(documents)
        works = find_workloads(as_manifests(documents))
        reached |= {
            kind for kind in TABLE if any(True for work in works for _ in broken(kind, work))
        }
    assert reached == TABLE.keys()
    assert CODE.keys() | {kind for kind, row in TABLE.items() if "checks" in row} == TABLE.keys()


def test_the_line_of_a_mistake_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        (GOLDEN / "job.yaml")
        .read_text()
        .replace("restartPolicy: Never", "restartPolicy: OnFailure")
    )
    line = 1 + text[: text.index("restartPolicy: OnFailure")].count("\n")
    file = tmp_path / "job.yaml"
    file.write_text(text)
    assert main(["launch", "k8s", "--lint", str(file)]) == EXIT_PROBLEMS
    assert capsys.readouterr().out.startswith(
        f"{file}:{line}: Job/quickstart spec.template.spec.restartPolicy = OnFailure: "
    )
    assert main(["launch", "k8s", "--lint", "--json", str(file)]) == EXIT_PROBLEMS
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["severity"], finding["line"]) == (
        "k8s-restart-policy",
        "error",
        line,
    )


def test_a_list_and_several_files_are_one_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = load("job.yaml")
    service, others = tmp_path / "service.yaml", tmp_path / "others.yaml"
    service.write_text(yaml.safe_dump(documents.pop("Service")))
    others.write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": list(documents.values())})
    )
    assert main(["launch", "k8s", "--lint", str(service), str(others)]) == 0
    assert capsys.readouterr().out.endswith("fine\n")
    assert main(["launch", "k8s", "--lint", str(others)]) == EXIT_PROBLEMS
    assert "[k8s-service]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("kind: Job\nkind: Job\n", "duplicate-key"),
        ("a: [", "config-syntax"),
        ("- 1\n", "k8s-no-object"),
        ("!!python/object:os.system {}\n", "config-syntax"),
        ("[" * 2000, "config-too-deep"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n"
                for n in range(8)
            ),
            "config-too-large",
        ),
    ],
)
def test_what_is_no_manifest_is_refused(text: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_manifests(f"kind: Service\n--- # another one\n{text}", name="x.yaml")
    (problem,) = caught.value.problems
    assert problem.kind == kind
    assert problem.line > 2


@pytest.mark.parametrize("text", ["", "---\n---\n", "kind: Service\n", "kind: [Job]\n"])
def test_files_without_a_job_report_it(text: str) -> None:
    assert [problem.kind for problem in lint(parse_manifests(text, name="x.yaml"))] == [
        "k8s-no-job"
    ]


VALUES: tuple[Any, ...] = (None, 7, "x", [None, {}], {"x": [1]})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["job.yaml", "trainjob.yaml", "trainjob-on-runtime.yaml"])
def test_any_value_anywhere_is_no_crash(name: str) -> None:
    """Every value of a job is replaced by every kind of value: findings, never an exception."""
    documents = load(name)
    manifests = as_manifests(documents)
    for holder, key in [pair for document in documents.values() for pair in holders(document)]:
        kept = holder[key]
        for value in VALUES:
            holder[key] = value
            assert all(problem.kind.startswith("k8s-") for problem in lint(manifests))
        holder[key] = kept
    assert lint(manifests) == []


def holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a value: what holds it, and under which key."""
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in list(pairs):
        yield value, key
        yield from holders(child)


def test_the_page_lists_every_rule() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    listed = re.findall(r"^\| `k8s-([a-z-]+)` \| (.*) \|$", page, re.MULTILINE)
    assert listed == [(kind, row["guards"]) for kind, row in TABLE.items()]
