"""`Kubelet`: makes the pods of a job, lets them run, and decides about them as the Job controller
does.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.host import Host, Mount
from tests.hosts.network import Network
from tests.kubelet.manifest import Manifest, Volume, num_bytes
from tests.launched import ROOT

_MESSAGE_BYTES, _MESSAGE_LINES = 2048, 80
_LOOK_SECONDS = 0.05


@dataclass
class Pod:
    """One try of one index.

    Attributes:
        exit_code: of its container; None while it runs.
        message: what `kubectl describe pod` shows of its end.
        verdict: what the failure policy made of it.
    """

    index: int
    host: Host
    started: float
    exit_code: int | None = None
    message: str = ""
    verdict: str = ""
    ended: float = 0.0
    conditions: set[str] = field(default_factory=set)
    _kill_at: float | None = None


class Kubelet:
    """Runs one job.

    Args:
        manifest: as read.
        volumes: folder behind each claim.
        image: folders that the image has filled: their content is copied into an emptyDir of that
            path. What a real image would keep elsewhere is prepared in this way, such as compiled
            ops.
        publish_after: seconds until others can resolve a new pod's name; infinite: not before
            `publish_now`.
        restart_after: seconds until a failed pod is made anew; the real controller waits 10 s, then
            twice as long each time.
    """

    def __init__(
        self,
        network: Network,
        manifest: Manifest,
        *,
        volumes: Mapping[str, Path] | None = None,
        image: Mapping[str, Path] | None = None,
        publish_after: float = 0.0,
        restart_after: float = 0.2,
    ) -> None:
        self._network, self._manifest = network, manifest
        self._volumes, self._image = dict(volumes or {}), dict(image or {})
        self._publish_after, self._restart_after = publish_after, restart_after
        self.pods: list[Pod] = []
        self.result = ""
        self._failed: list[int] = []
        self._unpublished: list[tuple[float, str, str]] = []
        self._began = time.monotonic()
        self._dying = ""

    def run(self, *, timeout: float, meanwhile: Callable[[Kubelet], object] | None = None) -> str:
        """Until the job is over: ``Complete``, or ``Failed: REASON``. `meanwhile` is called again
        and again.
        """
        deadline = time.monotonic() + timeout
        while not self.result:
            self.step()
            if meanwhile is not None:
                meanwhile(self)
            assert time.monotonic() < deadline, f"the job runs after {timeout} s:\n{self.stated()}"
            time.sleep(_LOOK_SECONDS)
        return self.result

    def step(self) -> None:
        """Look at everything once."""
        now = time.monotonic()
        self._publish(now)
        for pod in self.pods:
            if pod.exit_code is None:
                self._look(pod, now)
        seconds = self._manifest.job.spec.activeDeadlineSeconds
        if seconds is not None and now - self._began > seconds:
            self._fail("DeadlineExceeded")
        self._decide(now)

    def pod(self, index: int) -> Pod:
        """The newest of an index."""
        return next(pod for pod in reversed(self.pods) if pod.index == index)

    def delete(self, index: int) -> None:
        """As `kubectl delete pod`: a signal, then the grace period, then SIGKILL."""
        self._terminate(self.pod(index))

    def evict(self, index: int) -> None:
        """As a drained node or a preemption does: deleted, and the pod says that it was a
        disruption.
        """
        self.pod(index).conditions.add("DisruptionTarget")
        self.delete(index)

    def stated(self) -> str:
        """Logs of all pods, for the messages of tests."""
        return "\n".join(
            f"--- pod {pod.index} ({pod.exit_code}) ---\n{pod.host.log.read_text()[-3000:]}"
            for pod in self.pods
        )

    # ------------------------------------------------------------------------------------------- the Job controller

    def _decide(self, now: float) -> None:
        spec = self._manifest.job.spec
        newest = {pod.index: pod for pod in self.pods}
        if self._dying:
            if all(pod.exit_code is not None for pod in newest.values()):
                self.result = f"Failed: {self._dying}"
            return
        if len(newest) == spec.completions and all(pod.exit_code == 0 for pod in newest.values()):
            self.result = "Complete"
        for index in range(spec.completions):
            last = newest.get(index)
            is_due = (
                last is not None
                and last.exit_code not in (None, 0)
                and now - last.ended >= self._restart_after
            )
            if last is None or is_due:
                self.pods.append(self._create(index))

    def _judge(self, pod: Pod) -> None:
        """What the end of a pod means for the job."""
        assert pod.exit_code is not None
        if pod.exit_code == 0:
            pod.verdict = "Succeeded"
            return
        policy, container = (
            self._manifest.job.spec.podFailurePolicy,
            self._manifest.job.spec.template.spec.containers[0],
        )
        fitting = (
            rule.action
            for rule in policy.rules
            if rule.fits(code=pod.exit_code, container=container.name, conditions=pod.conditions)
        )
        pod.verdict = next(fitting, "Count")
        if pod.verdict == "FailJob":
            self._fail("PodFailurePolicy")
        elif pod.verdict == "Count" and not self._dying:
            self._failed.append(pod.index)
            spec = self._manifest.job.spec
            if spec.backoffLimitPerIndex is not None:
                if self._failed.count(pod.index) > spec.backoffLimitPerIndex:
                    self._fail("MaxFailedIndexesExceeded")
            elif len(self._failed) > (6 if spec.backoffLimit is None else spec.backoffLimit):
                self._fail("BackoffLimitExceeded")

    def _fail(self, reason: str) -> None:
        if not self._dying:
            self._dying = reason
            for pod in self.pods:
                self._terminate(pod)

    # ------------------------------------------------------------------------------------------------- the kubelet

    def _create(self, index: int) -> Pod:
        job, spec = self._manifest.job, self._manifest.job.spec.template.spec
        name, container = f"{job.metadata.name}-{index}", spec.containers[0]
        environment = {
            "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), *os.defpath.split(os.pathsep)]),
            "HOSTNAME": name,
            "PYTHONPATH": str(ROOT),
            "JOB_COMPLETION_INDEX": str(index),
        }
        environment |= {variable.name: variable.value for variable in container.env}
        volumes = {volume.name: volume for volume in spec.volumes}
        mounts, shm_bytes = {}, 64 << 20  # the container runtime's default
        for mount in container.volumeMounts:
            volume = volumes[mount.name]
            if mount.mountPath == "/dev/shm":
                assert volume.emptyDir is not None
                assert volume.emptyDir.medium == "Memory"
                shm_bytes = num_bytes(volume.emptyDir.sizeLimit or "0")
            else:
                mounts[mount.mountPath] = self._mount(
                    volume, mount.mountPath, read_only=mount.readOnly
                )
        host = self._network.host(
            name,
            publish=False,
            mounts=mounts,
            shm_bytes=shm_bytes,
            command=container.command,
            environment=environment,
            cwd=str(ROOT),
            uid=spec.securityContext.runAsUser,
        )
        service = self._manifest.service.metadata.name
        self._unpublished.append(
            (time.monotonic() + self._publish_after, f"{name}.{service}", host.address)
        )
        self._publish(time.monotonic())
        return Pod(index, host, time.monotonic())

    def _mount(self, volume: Volume, path: str, *, read_only: bool) -> Mount:
        security = self._manifest.job.spec.template.spec.securityContext
        if volume.persistentVolumeClaim is not None:
            folder = self._volumes[volume.persistentVolumeClaim.claimName]
        else:
            folder = self._network.folder / f"volume-{volume.name}-{time.monotonic_ns()}"
            if path in self._image:
                shutil.copytree(self._image[path], folder)
            else:
                folder.mkdir()
            for name, text in self._files(volume).items():
                (folder / name).write_text(text)
        if security.fsGroup is not None and folder.stat().st_gid != security.fsGroup:
            for entry in (folder, *folder.rglob("*")):
                os.chown(entry, -1, security.fsGroup)
                entry.chmod(entry.stat().st_mode | (0o2770 if entry.is_dir() else 0o660))
        if volume.secret is not None:
            for entry in folder.iterdir():
                entry.chmod(volume.secret.defaultMode)
        return Mount(bind=folder, read_only=read_only or bool(self._files(volume)))

    def _files(self, volume: Volume) -> Mapping[str, str]:
        if volume.configMap is not None:
            return self._manifest.config_maps[volume.configMap.name]
        return self._manifest.secrets[volume.secret.secretName] if volume.secret is not None else {}

    def publish_now(self) -> None:
        """Others can resolve the name of every pod, those to come as well."""
        self._publish_after = 0.0
        self._publish(float("inf"))

    def _publish(self, now: float) -> None:
        for due, name, address in [entry for entry in self._unpublished if entry[0] <= now]:
            self._unpublished.remove((due, name, address))
            self._network.publish(name, address)

    def _terminate(self, pod: Pod) -> None:
        if pod.exit_code is None and pod._kill_at is None:
            pod.host.signal(signal.SIGTERM)
            pod._kill_at = (
                time.monotonic()
                + self._manifest.job.spec.template.spec.terminationGracePeriodSeconds
            )

    def _look(self, pod: Pod, now: float) -> None:
        if pod._kill_at is not None and now > pod._kill_at:
            pod.host.kill()
        code = pod.host.exit_code()
        if code is None:
            return
        pod.exit_code, pod.ended = code, now
        pod.message = self._message(pod)
        service = self._manifest.service.metadata.name
        self._unpublished = [entry for entry in self._unpublished if entry[2] != pod.host.address]
        self._network.publish(f"{pod.host.name}.{service}", None)
        self._judge(pod)

    def _message(self, pod: Pod) -> str:
        stated = pod.host.termination_log.read_text(encoding="utf-8", errors="replace")
        policy = self._manifest.job.spec.template.spec.containers[0].terminationMessagePolicy
        if not stated and policy == "FallbackToLogsOnError" and pod.exit_code:
            lines = pod.host.log.read_text(encoding="utf-8", errors="replace").splitlines()[
                -_MESSAGE_LINES:
            ]
            stated = "\n".join(lines)[-_MESSAGE_BYTES:]
        return stated
