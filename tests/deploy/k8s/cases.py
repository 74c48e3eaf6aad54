"""The manifests that tests compare, and the commands that print them.

After a change that is meant: ``python -m tests.deploy.k8s.cases``, from the repository root; then
read the difference.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from unittest.mock import patch

from framework.cli import main
from tests.places import ROOT

GOLDEN = ROOT / "tests/deploy/k8s/golden"
BASE = ROOT / "deploy/kubernetes/base/job.yaml"
_RUN = "ds_configs/quickstart.yaml --image registry.example/team/train:1.0 --ckpt_pvc runs"
CASES: dict[Path, str] = {
    # No token stands in a repository.
    BASE: f"{_RUN} --nodes 2 --gpus 4 --name train --token_secret train-token",
    GOLDEN / "job.yaml": f"{_RUN} --nodes 2 --gpus 4 --ckpt_size 100Gi --config_map zero.stage=2",
    GOLDEN
    / "job-cpu.yaml": f"{_RUN} --nodes 2 --gpus 0 --ranks_per_node 2 --memory 3Gi --config_map --save_seconds 30",
    GOLDEN
    / "job-one-pod.yaml": "ds_configs/quickstart.yaml --image registry.example/train:1 --gpus 1 --restarts 0",
    GOLDEN / "job-rdma.yaml": (
        f"{_RUN} --nodes 3 --gpus 8 --rdma rdma/hca_shared_devices_a=2 --queue team --topology "
        "topology.kubernetes.io/zone "
        "--host_network --namespace ml --service_account trainer --pull_secret pull --env NCCL_DEBUG=INFO --env X=1e3 "
        "--env_secret wandb --node_selector gpu=h100 --toleration nvidia.com/gpu:NoSchedule"
    ),
    GOLDEN / "job-placed.yaml": (
        f"{_RUN} --nodes 2 --gpus 4 --mount data:/data:ro --mount scratch:/scratch --scheduler volcano "
        "--priority_class high --label team=ml --annotation k8s.v1.cni.cncf.io/networks=ib0,ib1 "
        "--topology topology.kubernetes.io/zone"
    ),
    GOLDEN
    / "jobset.yaml": f"{_RUN} --kind jobset --nodes 2 --gpus 4 --topology cloud.example/rack --shm 20Gi",
    GOLDEN / "jobset-supervised.yaml": (
        f"{_RUN} --kind jobset --nodes 2 --gpus 4 supervision.max_restarts=20 --no_network_policy"
    ),
    GOLDEN
    / "trainjob.yaml": f"{_RUN} --kind trainjob --nodes 2 --gpus 4 --queue team --token_secret dsf-token",
    GOLDEN
    / "trainjob-on-runtime.yaml": f"{_RUN} --kind trainjob --runtime torch-distributed --nodes 2 --gpus 4 "
    "--mount data:/data:ro --label team=ml --annotation a/b=c",
}


def text_of(command: str) -> str:
    """What the command prints, with a token that is always the same."""
    same = patch("framework.deploy.k8s.command.token_hex", lambda number: "00" * number)
    with same, contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["launch", "k8s", *command.split()]) == 0
    return printed.getvalue()


if __name__ == "__main__":
    os.chdir(ROOT)
    for path, command in CASES.items():
        path.write_text(text_of(command), encoding="utf-8")
        print(path.relative_to(ROOT))
