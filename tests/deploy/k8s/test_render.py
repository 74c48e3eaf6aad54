"""What `launch k8s` prints: compared with files, validated against the schemas of several releases,
and right where it counts.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework import errors
from framework.cli import main
from framework.deploy.k8s.lint import lint
from framework.deploy.k8s.read_manifests import parse_manifests
from framework.deploy.k8s.render import write_yaml
from tests.deploy.k8s.cases import BASE, CASES, GOLDEN, ROOT, text_of

RELEASES = ("1.29", "1.32", "1.34", "1.37")
_BY_MODELS = ("JobSet", "TrainJob", "TrainingRuntime")
_OF_KUBEFLOW = [
    "jobset.yaml",
    "jobset-supervised.yaml",
    "trainjob.yaml",
    "trainjob-on-runtime.yaml",
]
QUICKSTART = "ds_configs/quickstart.yaml"
POD = ["--gpus", "1", "--image", "registry.example/train:1"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(path.read_text(), Loader=yaml.CSafeLoader))


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The objects that a command prints, by kind."""
    assert main(["launch", "k8s", *words]) == 0
    return {found["kind"]: found for found in yaml.safe_load_all(capsys.readouterr().out)}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_it_prints_what_is_in_the_file(path: Path) -> None:
    assert text_of(CASES[path]) == path.read_text(), (
        "if that is meant: python -m tests.deploy.k8s.cases"
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_the_schemas_of_kubernetes_take_it(path: Path) -> None:
    """Strictly: no key that the release does not know. Kinds that are no part of Kubernetes have a
    test of their own.
    """
    validator = pytest.importorskip("kubernetes_validate", reason="needs the dev extra")
    found = [each for each in objects(path) if each["kind"] not in _BY_MODELS]
    for each in found:
        for release in RELEASES:
            validator.validate(each, release, strict=True)
    assert found or any(each["kind"] in _BY_MODELS for each in objects(path))


@pytest.mark.parametrize(("nodes", "reported"), [(5, False), (6, True)])
def test_the_command_that_watches_follows_every_pod(
    nodes: int, reported: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """kubectl follows five pods, and refuses more unless it is asked to."""
    words = [
        QUICKSTART,
        "batch.global_size=120",
        "--nodes",
        str(nodes),
        *POD,
        "--ckpt_pvc",
        "runs",
        "--config_map",
    ]
    assert main(["launch", "k8s", *words]) == 0
    assert (f"--tail=-1 --max-log-requests={nodes}\n" in capsys.readouterr().out) == reported


def test_the_schemas_see_an_unknown_key_and_a_wrong_type() -> None:
    """Else the test above would pass for any output."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs the dev extra")
    job = next(each for each in objects(GOLDEN / "job.yaml") if each["kind"] == "Job")
    for change in ({"completion": 1}, {"completions": "two"}):
        with pytest.raises(validator.ValidationError):
            validator.validate(job | {"spec": job["spec"] | change}, RELEASES[0], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", _OF_KUBEFLOW)
def test_the_models_of_kubeflow_take_it_whole(name: str) -> None:
    """The models let unknown keys pass: what they write again must be all that they read."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the dev extra")
    found = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    of_kubeflow = [each for each in objects(GOLDEN / name) if each["kind"] in found]
    assert of_kubeflow
    for each in of_kubeflow:
        assert through(found[each["kind"]], each) == each
        assert through(found[each["kind"]], each | {"spec": each["spec"] | {"nonsense": 1}}) == each


def through(model: Any, value: dict[str, Any]) -> Any:
    """What a model keeps of a value, without the protocol of ports, which it fills in."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: plain(item)
                for key, item in value.items()
                if (key, item) != ("protocol", "TCP")
            }
        if isinstance(value, list):
            return [plain(item) for item in value]
        return getattr(value, "root", getattr(value, "actual_instance", value))

    return plain(model.from_dict(value).to_dict())


def test_the_job_of_a_jobset_passes_the_schema_of_jobs() -> None:
    """The models do not look closely into the pod."""
    validator = pytest.importorskip("kubernetes_validate", reason="needs the dev extra")
    found = {
        name: {each["kind"]: each["spec"] for each in objects(GOLDEN / name) if "spec" in each}
        for name in _OF_KUBEFLOW
    }
    jobsets = [found[name]["JobSet"] for name in _OF_KUBEFLOW[:2]]
    for spec in (*jobsets, found["trainjob.yaml"]["TrainingRuntime"]["template"]["spec"]):
        job = spec["replicatedJobs"][0]["template"]["spec"]
        for release in RELEASES:
            whole = {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": job,
            }
            validator.validate(whole, release, strict=True)


def test_the_policy_is_made_of_our_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    rules = printed(capsys, QUICKSTART, *POD)["Job"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [
        errors.EXIT_USAGE,
        errors.EXIT_NO_PROGRESS,
        errors.EXIT_CONFIG,
    ]
    assert rules[2]["onExitCodes"]["values"] == [errors.EXIT_STOPPED]
    listed = {code for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert not listed & {
        errors.EXIT_OK,
        errors.EXIT_TRAINING,
        errors.EXIT_STORAGE,
        errors.EXIT_PEER_LOST,
    }


SHARED = ["--nodes", "2", "--ckpt_pvc", "c"]


def test_each_printed_job_has_a_secret_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a file that pods read: not in a variable, nor in a word of the command. Nobody else reads
    what is written.
    """
    found = [printed(capsys, QUICKSTART, *POD, *SHARED) for _ in range(2)]
    tokens = [each["Secret"]["stringData"]["token"] for each in found]
    assert all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)
    assert len({*tokens, *(each["Secret"]["metadata"]["name"] for each in found)}) == 4
    pod = found[0]["Job"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    path = command[command.index("--token_file") + 1]
    (mount,) = (
        each
        for each in pod["containers"][0]["volumeMounts"]
        if path == f"{each['mountPath']}/token"
    )
    (volume,) = (each for each in pod["volumes"] if each["name"] == mount["name"])
    assert volume["secret"] == {
        "secretName": found[0]["Secret"]["metadata"]["name"],
        "defaultMode": 0o440,
    }
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert tokens[0] not in json.dumps(found[0]["Job"])
    out = tmp_path / "job.yaml"
    assert main(["launch", "k8s", QUICKSTART, *POD, *SHARED, "--out", str(out)]) == 0
    assert out.stat().st_mode & 0o777 == 0o600


def test_one_pod_has_no_other_to_prove_itself_to(capsys: pytest.CaptureFixture[str]) -> None:
    for words, has_token, has_secret in (
        (SHARED, True, True),
        ([*SHARED, "--token_secret", "s"], True, False),
        ([], False, False),
    ):
        found = printed(capsys, QUICKSTART, *POD, *words)
        assert ("--token_file" in json.dumps(found["Job"])) == has_token
        assert ("Secret" in found) == has_secret


def test_pods_of_others_are_kept_out_unless_that_is_not_wanted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, expected in (
        ([], True),
        (["--no_network_policy"], False),
        (["--host_network"], False),
    ):
        assert ("NetworkPolicy" in printed(capsys, QUICKSTART, *POD, *words)) == expected


def test_a_supervised_job_replaces_pods_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """As often as its agents start ranks again; a JobSet as well, whose other pods wait."""
    supervised = [QUICKSTART, *POD, *SHARED, "supervision.max_restarts=20"]
    for words, expected in (
        ([QUICKSTART, *POD], 3),
        (supervised, 20),
        ([*supervised, "--restarts", "7"], 7),
        ([QUICKSTART, *POD, "--restarts", "0"], 0),
    ):
        job = printed(capsys, *words)["Job"]["spec"]
        assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"], "backoffLimit" in job) == (
            expected,
            0,
            False,
        )
    jobset = printed(capsys, *supervised, "--kind", "jobset")["JobSet"]["spec"]["replicatedJobs"][
        0
    ]["template"]["spec"]
    assert (jobset["backoffLimitPerIndex"], jobset["maxFailedIndexes"]) == (20, 0)
    alone = printed(capsys, *supervised[:-1], "--kind", "jobset")["JobSet"]["spec"][
        "replicatedJobs"
    ][0]
    assert alone["template"]["spec"]["backoffLimit"] == 0


def test_a_node_that_does_not_answer_loses_its_pod_within_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pod = printed(capsys, QUICKSTART, *POD, "--toleration", "gpu:NoSchedule")["Job"]["spec"][
        "template"
    ]["spec"]
    assert pod["tolerations"][0] == {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert [each["key"] for each in pod["tolerations"][1:]] == [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    assert {each["tolerationSeconds"] for each in pod["tolerations"][1:]} == {60}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["data={target: a:b, args: {hub_token: hf_not_a_real_one}}"]),
        ("data: {target: 'a:b', args: {hub_token: hf_not_a_real_one}}\n", ["--config_map"]),
        ("", ["deepspeed.comet.api_key=hf_not_a_real_one"]),
    ],
)
def test_no_secret_becomes_a_part_of_the_job(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(f"batch: {{global_size: 8}}\n{text}")
    assert main(["launch", "k8s", str(tmp_path / "run.yaml"), *POD, *words]) == errors.EXIT_USAGE
    out, err = capsys.readouterr()
    assert not out
    assert "hf_not_a_real_one" not in err
    assert "[secret-in-the-job]" in err


def test_pods_have_nodes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """But for one pod, where it was asked for otherwise, and where Kueue chooses the nodes."""
    shared = [QUICKSTART, *POD, "--nodes", "2", "--ckpt_pvc", "c"]
    for kind, label in (
        ("job", "batch.kubernetes.io/job-name"),
        ("jobset", "jobset.sigs.k8s.io/jobset-name"),
    ):
        apart = affinity(printed(capsys, *shared, "--kind", kind))["podAntiAffinity"]
        (term,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term == {
            "labelSelector": {"matchLabels": {label: "quickstart"}},
            "topologyKey": "kubernetes.io/hostname",
        }
    for words in (
        [QUICKSTART, *POD],
        [*shared, "--share_nodes"],
        [*shared, "--queue", "q", "--topology", "rack"],
    ):
        assert affinity(printed(capsys, *words)) == {}


def affinity(documents: dict[str, Any]) -> Any:
    in_jobset = "JobSet" in documents
    job = (
        documents["JobSet"]["spec"]["replicatedJobs"][0]["template"]
        if in_jobset
        else documents["Job"]
    )
    return job["spec"]["template"]["spec"].get("affinity", {})


def test_further_claims_and_marks(capsys: pytest.CaptureFixture[str]) -> None:
    marks = ["--label", "team=ml", "--annotation", 'k8s.v1.cni.cncf.io/networks=[{"name": "ib0"}]']
    words = [
        "--mount",
        "data:/data:ro",
        "--mount",
        "x:/x",
        "--priority_class",
        "p",
        "--scheduler",
        "s",
    ]
    job = printed(capsys, QUICKSTART, *POD, *marks, *words)["Job"]
    pod = job["spec"]["template"]
    claims = [
        volume["persistentVolumeClaim"]
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [{"claimName": "data", "readOnly": True}, {"claimName": "x"}]
    mounts = [
        mount
        for mount in pod["spec"]["containers"][0]["volumeMounts"]
        if mount["name"].startswith("mount-")
    ]
    assert mounts == [
        {"name": "mount-0", "mountPath": "/data", "readOnly": True},
        {"name": "mount-1", "mountPath": "/x"},
    ]
    assert (pod["spec"]["priorityClassName"], pod["spec"]["schedulerName"]) == ("p", "s")
    for marked in (job, pod):
        assert marked["metadata"]["labels"]["team"] == "ml"
        assert json.loads(marked["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]) == [
            {"name": "ib0"}
        ]


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Job" in printed(
        capsys, QUICKSTART, *POD, "--dry_run", "--out", str(tmp_path / "job.yaml")
    )
    assert not (tmp_path / "job.yaml").exists()


def test_what_cannot_work_there_prints_no_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (
            [QUICKSTART, "--nodes", "7", "--gpus", "1", *POD[2:], "--ckpt_pvc", "c"],
            "[batch-not-divisible]",
        ),
        ([QUICKSTART, *POD, "zero.stge=2"], "[unknown-key]"),
        (["ds_configs/fp16.yaml", *POD[2:], "--gpus", "0"], "[fp16-on-cpu]"),
        ([QUICKSTART, *POD, "run.world_size=8"], "run.world_size"),
        ([QUICKSTART, *POD, "--nodes", "2"], "[shared-storage-missing]"),
        (
            [QUICKSTART, *POD, "--ckpt_pvc", "c", "run.output_dir=/elsewhere"],
            "[outside-the-volume]",
        ),
        ([QUICKSTART, *POD, "--shm", "32Gi"], "[k8s-shm]"),
        (["nowhere.yaml", *POD], "[config-not-found]"),
    ]
    for words, sentence in cases:
        assert main(["launch", "k8s", *words]) == errors.EXIT_CONFIG, words
        out, err = capsys.readouterr()
        assert not out
        assert sentence in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name a run config"),
        ([QUICKSTART, "--gpus", "1"], "--image"),
        ([QUICKSTART, *POD[2:]], "--gpus G"),
        ([QUICKSTART, "--gpus", "1", "--image", "train:latest"], "latest moves"),
        ([QUICKSTART, "--gpus", "1", "--image", "train"], "without a tag"),
        (
            [QUICKSTART, "--gpus", "1", "--image", "train:1 --privileged"],
            "not the name of an image",
        ),
        ([QUICKSTART, *POD, "--name", "My_Run"], "lower-case"),
        ([QUICKSTART, *POD, "--device", "cpu"], "contradict"),
        ([QUICKSTART, *POD, "--ranks_per_node", "2"], "one rank to each"),
        ([QUICKSTART, *POD, "--env", "HF_TOKEN=abc"], "--env_secret"),
        ([QUICKSTART, *POD, "--env", "RANK=0"], "the launcher sets it"),
        ([QUICKSTART, *POD, "--env", "A=b\nc"], "on one line"),
        ([QUICKSTART, *POD, "--memory", "lots"], "a quantity"),
        ([QUICKSTART, *POD, "--ckpt_path", "/a/../b"], "an absolute path"),
        ([QUICKSTART, *POD, "--ckpt_path", "relative"], "an absolute path"),
        ([QUICKSTART, *POD, "--ckpt_size", "1Gi"], "--ckpt_pvc"),
        ([QUICKSTART, *POD, "--mount", "data"], "an absolute path"),
        ([QUICKSTART, *POD, "--mount", "data:/data:rx"], "CLAIM:/PATH"),
        ([QUICKSTART, *POD, "--mount", "Data:/data"], "the name of an object"),
        ([QUICKSTART, *POD, "--mount", "data:/cache"], "two volumes at /cache"),
        ([QUICKSTART, *POD, "--mount", "data:/checkpoints"], "two volumes at /checkpoints"),
        ([QUICKSTART, *POD, "--label", "a=b c"], "LABEL=VALUE"),
        ([QUICKSTART, *POD, "--label", "app.kubernetes.io/instance=x"], "the launcher sets it"),
        (
            [QUICKSTART, *POD, "--annotation", "dsf-trainer/save-budget-seconds=1"],
            "the launcher sets it",
        ),
        ([QUICKSTART, *POD, "--annotation", "a=b\nc"], "on one line"),
        ([QUICKSTART, *POD, "--scheduler", "volcano", "--queue", "q"], "leave --scheduler out"),
        (
            [QUICKSTART, *POD, "--kind", "trainjob", "--runtime", "x", "--scheduler", "v"],
            "cannot write --scheduler into",
        ),
        ([QUICKSTART, *POD, "--grace", "10"], "--grace is shorter"),
        ([QUICKSTART, *POD, "--runtime", "torch-distributed"], "--kind trainjob"),
        ([QUICKSTART, *POD, "--kind", "trainjob", "--host_network"], "29500"),
        ([QUICKSTART, *POD, "--toleration", "a:Never"], "KEY[=VALUE]"),
        ([QUICKSTART, *POD, "--rdma", "infiniband"], "rdma/hca"),
        ([QUICKSTART, *POD, "--master_port", "80"], "a port"),
        ([QUICKSTART, *POD, "--nodes", "0"], "above 0"),
        (["nowhere.yaml", *POD, "--config_map"], "nowhere.yaml"),
        (["--lint"], "name the manifests"),
    ],
)
def test_a_wrong_command_line_gives_the_reason(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "k8s", *words]) in (errors.EXIT_USAGE, errors.EXIT_CONFIG)
    out, err = capsys.readouterr()
    assert not out
    assert sentence in err
    assert "Traceback" not in err


def test_settings_reach_the_command_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """No shell stands between; and Kubernetes puts no variable in their place."""
    words = ["run.name=a b;c", "run.output_dir=/checkpoints/$(HOME)"]
    out = printed(capsys, QUICKSTART, *POD, words[1])["Job"]["spec"]["template"]["spec"][
        "containers"
    ][0]["command"]
    assert out[5:7] == [QUICKSTART, "run.output_dir=/checkpoints/$$(HOME)"]
    # no run has this name
    assert main(["launch", "k8s", QUICKSTART, *POD, words[0]]) == errors.EXIT_CONFIG


def expanded(text: str) -> str:
    """As the kubelet does it, for words of a command and values of variables: two signs are one,
    and $(NAME) is its value.
    """
    return re.sub(
        r"\$(\$|\((.*?)\))",
        lambda found: "$" if found[1] == "$" else f"<value of {found[2]}>",
        text,
    )


@pytest.mark.parametrize("text", ["$", "$$", "$(A)", "$$(A)", "$$$(A)", "a$b$", "a$$b", "100%$"])
def test_what_is_typed_is_what_arrives(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expanded("$(A) $$(A) $x") == "<value of A> $(A) $x"
    words = [f"monitors.wandb.project={text}", "--env", f"P={text}"]
    container = printed(capsys, QUICKSTART, *POD, *words)["Job"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert words[0] in list(map(expanded, container["command"]))
    assert [expanded(each["value"]) for each in container["env"] if each["name"] == "P"] == [text]


def test_a_restarted_pod_goes_on_unless_asked_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def settings(*words: str) -> list[str]:
        pod = printed(capsys, QUICKSTART, *POD, *words)["Job"]["spec"]["template"]["spec"]
        return [word for word in pod["containers"][0]["command"] if word.startswith("checkpoint.")]

    assert settings("--ckpt_pvc", "c") == ["checkpoint.resume=auto"]
    assert settings("--ckpt_pvc", "c", "checkpoint.resume=never") == ["checkpoint.resume=never"]
    assert settings() == []


def test_a_restarted_pod_does_not_go_back_to_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    words = [QUICKSTART, *POD, "checkpoint.resume=/checkpoints/old"]
    assert main(["launch", "k8s", *words, "--ckpt_pvc", "c"]) == errors.EXIT_USAGE
    out, err = capsys.readouterr()
    assert not out
    assert "launch k8s --ckpt_pvc: checkpoint.resume = /checkpoints/old: " in err
    assert "checkpoint.resume=auto" in err
    assert printed(capsys, *words, "--ckpt_pvc", "c", "--restarts", "0")
    assert printed(capsys, *words), "without a claim nothing else outlives a pod"


def test_one_and_more_pods_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--ranks-per-node", "2", "--cpus", "8", *POD[2:]]
    container = printed(capsys, QUICKSTART, *words)["Job"]["spec"]["template"]["spec"][
        "containers"
    ][0]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "8Gi"},
        "limits": {"memory": "8Gi"},
    }
    assert (variables["DS_ACCELERATOR"], variables["OMP_NUM_THREADS"]) == ("cpu", "4")


def test_only_root_with_rdma_may_pin_memory(capsys: pytest.CaptureFixture[str]) -> None:
    for user, added in (("0", ["IPC_LOCK"]), ("1000", None)):
        spec = printed(capsys, QUICKSTART, *POD, "--rdma", "rdma/a", "--run_as_user", user)["Job"][
            "spec"
        ]["template"]["spec"]
        assert spec["containers"][0]["securityContext"]["capabilities"].get("add") == added
        assert spec["securityContext"]["runAsNonRoot"] == (user != "0")


def test_jobs_on_the_network_of_their_nodes_have_ports_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ports = {
        printed(capsys, QUICKSTART, *POD, "--host_network", "--name", name)["Service"]["spec"][
            "ports"
        ][0]["port"]
        for name in ("a", "b", "c", "d")
    }
    assert len(ports) == 4
    assert all(20_000 <= port < 29_000 for port in ports)


def test_the_config_map_holds_the_file_and_its_name_the_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    text = "run: {name: a}\n# ein Satz, größer als nichts\nbatch:   {global_size: 8}   \n\n\n"
    names = set()
    for content in (text, text + "training: {max_steps: 1}\n"):
        file.write_text(content)
        found = printed(capsys, str(file), *POD, "--config_map")
        assert found["ConfigMap"]["data"] == {"run.yaml": content}
        names.add(found["ConfigMap"]["metadata"]["name"])
        command = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
        assert "/etc/dsf-trainer/run.yaml" in command
    assert len(names) == 2


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("run.yaml", "run.yaml"),
        ("mein lauf.yaml", "mein-lauf.yaml"),
        ("läuf+1.json", "l-uf-1.json"),
        ("..run.yaml", "run.yaml"),
        ("x" * 250 + ".yaml", "x" * 248 + ".yaml"),
    ],
)
def test_any_name_of_a_config_becomes_one_that_a_config_map_can_hold(
    name: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text('{"batch": {"global_size": 8}}')
    found = printed(capsys, str(tmp_path / name), *POD, "--config_map")
    assert list(found["ConfigMap"]["data"]) == [key]
    assert re.fullmatch(r"(?!\.\.)[-._a-zA-Z0-9]{1,253}", key), "what the API server takes"
    assert (
        f"/etc/dsf-trainer/{key}"
        in found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    )


@pytest.mark.parametrize(
    "text",
    [
        "1e3",
        "y",
        "on",
        "0x1F",
        "1_000",
        "12",
        "",
        " ",
        "null",
        "~",
        "2026-01-01",
        "a: b",
        "#x",
        "{",
        "12:30",
        "ja\nnein",
    ],
)
def test_text_stays_text_for_every_reader(text: str) -> None:
    """Kubernetes reads YAML in Go, where 1e3 is a number and y is true; in quotes they are text
    everywhere.
    """
    written = write_yaml([{"value": text}], reasons={})
    assert yaml.safe_load(written) == {"value": text}
    assert re.match(r'value: ("|\|)', written), written


def test_it_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "job.yaml"
    assert main(["launch", "k8s", QUICKSTART, *POD, "--out", str(out)]) == 0
    assert not capsys.readouterr().out
    assert lint(parse_manifests(out.read_text(), name="job.yaml")) == []
    assert main(["launch", "k8s", QUICKSTART, *POD, "--out", str(tmp_path)]) == errors.EXIT_STORAGE


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on PATH")
def test_kustomize_takes_the_base_and_the_lint_sees_what_an_overlay_breaks(tmp_path: Path) -> None:
    example = kustomize(ROOT / "deploy/kubernetes/overlays/example")
    assert lint(parse_manifests(example, name="example")) == []
    assert "image: registry.example/ml/train:1.1" in example
    (tmp_path / "base").mkdir()
    shutil.copy(BASE, tmp_path / "base")
    (tmp_path / "base/kustomization.yaml").write_text("resources: [job.yaml]\nnamePrefix: my-\n")
    assert {
        found.kind for found in lint(parse_manifests(kustomize(tmp_path / "base"), name="prefixed"))
    } >= {"k8s-master-addr"}


def kustomize(folder: Path) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout
