"""The manifest that `launch k8s` prints, executed: its command, user, volumes and policies, in pods
made of namespaces.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from framework import cli
from framework.engine.extensions import use_own_cache
from tests.campaign.fault_stage import CONFIG, SAVE_EVERY, TOTAL_STEPS, last_logged
from tests.hosts.network import Network, why_not
from tests.kubelet.kubelet import Kubelet
from tests.kubelet.manifest import read_manifest
from tests.launched import NO_COMPILE, series
from tests.warm_ranks import WarmRanks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timing,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "hosts can be made"),
]

IMAGE = "registry.example/dsf-trainer@sha256:" + "0" * 64


def rendered(config: Path, *words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert (
            cli.main(
                [
                    "launch",
                    "k8s",
                    str(config),
                    "--nodes",
                    "2",
                    "--gpus",
                    "0",
                    "--image",
                    IMAGE,
                    "--ckpt_pvc",
                    "runs",
                    "--config_map",
                    "--env",
                    "DSF_STEP_SECONDS=0.1",
                    "--env",
                    f"{NO_COMPILE}=1",
                    *words,
                ]
            )
            == 0
        )
    return printed.getvalue()


def image(folder: Path) -> dict[str, Path]:
    """The operator that a first use in a pod would compile for half a minute, at every start."""
    with patch.dict(os.environ):
        os.environ.pop("TORCH_EXTENSIONS_DIR", None)
        use_own_cache()
        shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], folder / "torch_extensions")
    return {"/cache": folder}


class Disturbance:
    """A rank of pod 1 is killed; then the agent of pod 0, process 1 there; pod 0 is evicted when it
    is back.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._num_done = run, 0

    def __call__(self, kubelet: Kubelet) -> None:
        step = last_logged(self._run)
        if self._num_done == 0 and step > SAVE_EVERY:
            (rank,) = [
                pid
                for pid, words in kubelet.pod(1).host.processes().items()
                if "--local_rank=0" in words
            ]
            os.kill(rank, signal.SIGKILL)
            self._num_done = 1
        elif self._num_done == 1 and step > 2 * SAVE_EVERY and is_restarted(kubelet):
            kubelet.pod(0).host.kill()
            self._num_done = 2
        elif self._num_done == 2 and len(kubelet.pods) == 3 and step > 4 * SAVE_EVERY:
            kubelet.evict(0)
            self._num_done = 3


def is_restarted(kubelet: Kubelet) -> bool:
    return "[restart]" in kubelet.pod(0).host.log.read_text()


def test_a_rendered_job_survives_a_killed_rank_a_lost_pod_and_an_eviction(
    warm: WarmRanks, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    values = {key: value for key, value in CONFIG.items() if key != "run"} | {
        "run": {"name": "run"}
    }
    values |= {"supervision": {"max_restarts": 9, "wait_seconds": 1}}
    config.write_text(yaml.safe_dump(values))
    manifest = read_manifest(rendered(config, "--name", "demo"))
    claim, unbroken = tmp_path / "claim", tmp_path / "unbroken"
    claim.mkdir()
    job = warm.start(
        ["--config", str(config), f"run.output_dir={unbroken}"],
        num_ranks=2,
        folder=tmp_path / "said",
    )
    assert set(job.wait(300)) == {0}, job.stated()

    with Network(None) as network:
        kubelet = Kubelet(
            network,
            manifest,
            volumes={"runs": claim},
            image=image(tmp_path / "cache"),
            publish_after=1.0,
        )
        result = kubelet.run(timeout=600, meanwhile=Disturbance(claim / "run"))
        assert result == "Complete", kubelet.stated()
        ends = [(pod.index, pod.exit_code, pod.verdict) for pod in kubelet.pods]
        # No pod ends for a rank, and only its own for an agent; an eviction is a request to all.
        assert ends[0] == (0, 137, "Count"), kubelet.stated()
        assert sorted(ends[1:3]) == [(0, 75, "Ignore"), (1, 75, "Ignore")], kubelet.stated()
        assert sorted(ends[3:]) == [(0, 0, "Succeeded"), (1, 0, "Succeeded")], kubelet.stated()
        assert "node 1 (demo-1) rank 1: killed by SIGKILL" in kubelet.pods[1].host.log.read_text()
        assert "calling it again [rejoining]" in kubelet.pods[1].host.log.read_text()
        assert "stopped on request" in kubelet.pods[1].message
    assert series(claim / "run", "train/loss") == series(unbroken / "run", "train/loss")
    assert max(series(claim / "run", "train/loss")) == TOTAL_STEPS
