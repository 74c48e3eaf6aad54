"""The test kubelet itself: policies, retries, names and limits of a manifest are honoured, and what
it does not know is refused.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts.network import Network, why_not
from tests.kubelet.kubelet import Kubelet
from tests.kubelet.manifest import Manifest, read_manifest

JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "demo"},
    "spec": {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 1,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "node", "operator": "In", "values": [64, 78]},
                },
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {
                    "action": "Ignore",
                    "onExitCodes": {"containerName": "node", "operator": "In", "values": [75]},
                },
            ]
        },
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "subdomain": "demo",
                "enableServiceLinks": False,
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "node",
                        "image": "none",
                        "command": [],
                        "terminationMessagePolicy": "FallbackToLogsOnError",
                        "volumeMounts": [
                            {"name": "dshm", "mountPath": "/dev/shm"},
                            {"name": "runs", "mountPath": "/runs"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
                    {"name": "runs", "persistentVolumeClaim": {"claimName": "claim"}},
                ],
            }
        },
    },
}
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "demo"},
    "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": "demo"},
    },
}
pytestmark = [pytest.mark.slow, pytest.mark.timing]
needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made")


def manifest(
    script: str, change: Callable[[dict[str, Any]], object] = lambda job: None
) -> Manifest:
    job = copy.deepcopy(JOB)
    job["spec"]["template"]["spec"]["containers"][0]["command"] = ["bash", "-c", script]
    change(job)
    return read_manifest(yaml.safe_dump_all([SERVICE, job]))


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(None) as network:
        yield network


def kubelet(network: Network, folder: Path, script: str, **how: Any) -> Kubelet:
    change = how.pop("change", lambda job: None)
    return Kubelet(network, manifest(script, change), volumes={"claim": folder}, **how)


@needs_hosts
def test_pods_know_who_they_are_and_find_each_other(network: Network, tmp_path: Path) -> None:
    job = kubelet(
        network,
        tmp_path,
        """
        echo $JOB_COMPLETION_INDEX $(hostname) > /runs/$JOB_COMPLETION_INDEX
        getent hosts demo-0.demo || touch /runs/not-yet
        until getent hosts demo-0.demo && getent hosts demo-1.demo; do sleep 0.05; done
        touch /runs/found-$JOB_COMPLETION_INDEX
        until [ -e /runs/found-0 -a -e /runs/found-1 ]; do sleep 0.05; done  # the name of a pod goes with the pod
        df --output=size -B1M /dev/shm | tail -1 > /runs/shm; [ $$ = 1 ] && ! [ -w /proc/sysrq-trigger ]
    """,
        publish_after=float("inf"),
        change=lambda job: job["spec"]["template"]["spec"].update(
            securityContext={
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "runAsGroup": 1000,
                "fsGroup": 1000,
            }
        ),
    )

    def name_them(job: Kubelet) -> None:
        if (tmp_path / "not-yet").exists():
            job.publish_now()

    assert job.run(timeout=60, meanwhile=name_them) == "Complete", job.stated()
    assert [(tmp_path / str(index)).read_text() for index in (0, 1)] == ["0 demo-0\n", "1 demo-1\n"]
    assert (tmp_path / "shm").read_text().strip() == "8"
    assert (tmp_path / "0").stat().st_uid == 1000


@needs_hosts
def test_failures_are_counted_up_to_the_limit(network: Network, tmp_path: Path) -> None:
    job = kubelet(network, tmp_path, "echo because; exit 70")
    assert job.run(timeout=60) == "Failed: BackoffLimitExceeded"
    assert {pod.verdict for pod in job.pods} == {"Count"}
    assert job.pods[0].message == "because"
    once = "mkdir /runs/first-$JOB_COMPLETION_INDEX 2>/dev/null || exit 0; sleep 0.$JOB_COMPLETION_INDEX; exit 70"
    again = kubelet(network, tmp_path, once, change=lambda job: job["spec"].update(backoffLimit=2))
    assert again.run(timeout=60) == "Complete"
    addresses = [pod.host.address for pod in again.pods]
    assert len(set(addresses)) == 4  # a new address for each


@needs_hosts
def test_failures_of_each_pod_are_counted_for_itself(network: Network, tmp_path: Path) -> None:
    def by_pod(restarts: int) -> Callable[[dict[str, Any]], None]:
        def change(job: dict[str, Any]) -> None:
            del job["spec"]["backoffLimit"]
            job["spec"].update(backoffLimitPerIndex=restarts, maxFailedIndexes=0)

        return change

    twice = (
        "for n in 1 2; do mkdir /runs/$n-$JOB_COMPLETION_INDEX 2>/dev/null && exit 70; done; exit 0"
    )
    (tmp_path / "a").mkdir()
    again = kubelet(network, tmp_path / "a", twice, change=by_pod(2))
    assert again.run(timeout=60) == "Complete"
    assert len(again.pods) == 6
    once = f"[ $JOB_COMPLETION_INDEX = 1 ] || sleep 600; {twice}"
    assert (
        kubelet(network, tmp_path, once, change=by_pod(1)).run(timeout=60)
        == "Failed: MaxFailedIndexesExceeded"
    )


@needs_hosts
def test_some_exit_codes_end_the_job_and_others_do_not_count(
    network: Network, tmp_path: Path
) -> None:
    job = kubelet(network, tmp_path, "[ $JOB_COMPLETION_INDEX = 0 ] && exit 78; sleep 600")
    assert job.run(timeout=60) == "Failed: PodFailurePolicy"
    assert [pod.exit_code for pod in job.pods] == [78, 137]  # bash as PID 1 ignores SIGTERM
    four_times = "for n in 1 2 3 4; do mkdir /runs/$n-$JOB_COMPLETION_INDEX 2>/dev/null && exit 75; done; exit 0"
    ignored = kubelet(network, tmp_path, four_times)
    assert ignored.run(timeout=60) == "Complete"
    assert len(ignored.pods) == 10


@needs_hosts
def test_evicted_pods_get_their_grace_and_are_not_counted(network: Network, tmp_path: Path) -> None:
    script = (
        "trap 'echo saved > /dev/termination-log; exit 70' TERM; "
        "touch /runs/up-$JOB_COMPLETION_INDEX; sleep 600 & wait"
    )
    job = kubelet(
        network,
        tmp_path,
        f"[ -e /runs/done ] || {{ {script}; }}",
        change=lambda job: job["spec"].update(backoffLimit=0),
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("up-*"))) < 2 and time.monotonic() < deadline:
        job.step()
    (tmp_path / "done").touch()
    job.evict(0)
    job.evict(1)
    assert job.run(timeout=60) == "Complete"
    assert [(pod.exit_code, pod.verdict) for pod in job.pods] == [(70, "Ignore")] * 2 + [
        (0, "Succeeded")
    ] * 2
    assert job.pods[0].message == "saved\n"


@needs_hosts
def test_a_job_ends_at_its_deadline(network: Network, tmp_path: Path) -> None:
    job = kubelet(
        network,
        tmp_path,
        "sleep 600",
        change=lambda job: job["spec"].update(activeDeadlineSeconds=1),
    )
    assert job.run(timeout=60) == "Failed: DeadlineExceeded"
    assert {pod.exit_code for pod in job.pods} == {137}


# Away from the pods of another job: of its own there would be no event.
_OTHER = {
    "labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": "other"}},
    "topologyKey": "kubernetes.io/hostname",
}
OTHERS = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_OTHER]}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.suspend", True),
        ("spec.podReplacementPolicy", "TerminatingOrFailed"),
        ("spec.completionMode", "NonIndexed"),
        ("spec.template.spec.restartPolicy", "OnFailure"),
        ("spec.template.spec.initContainers", []),
        ("spec.template.spec.subdomain", "other"),
        ("spec.template.spec.containers.0.livenessProbe", {}),
        ("spec.template.spec.securityContext", {"runAsNonRoot": True}),
        ("spec.backoffLimitPerIndex", 1),
        ("spec.maxFailedIndexes", 1),
        ("kind", "JobSet"),
        ("spec.template.spec.affinity", OTHERS),
    ],
)
def test_what_it_does_not_know_is_an_error(path: str, value: object) -> None:
    def change(job: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = job
        for name in parents:
            place = place[int(name)] if name.isdecimal() else place[name]
        place[last] = value

    with pytest.raises(ValueError, match=r"."):
        manifest("true", change)
