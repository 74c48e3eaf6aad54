"""``launch k8s``: prints the objects of a run, or says what is wrong with manifests."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from framework.config.run_config import RunConfig
from framework.deploy.k8s.arguments import request_of
from framework.deploy.k8s.lint import lint
from framework.deploy.k8s.manifests import parse_manifests, read_manifests
from framework.deploy.k8s.options import parse
from framework.deploy.k8s.render import manifest
from framework.deploy.k8s.request import K8sRequest
from framework.deploy.k8s.values import as_service_name
from framework.errors import EXIT_OK, EXIT_PROBLEMS, ConfigError, UsageError, printable
from framework.launch.job import hand_out, refuse_one_start
from framework.load_run import load_run
from framework.text.document import read_text

_LOGS_AT_ONCE = 5  # `kubectl logs` follows no more pods unless it is asked to


def main(words: Sequence[str]) -> int:
    """Do what the words behind ``launch k8s`` say; returns the exit code.

    Raises:
        UsageError: the command line is wrong.
        ConfigError: the run cannot work on that cluster; nothing has been printed.
        StorageError: `--out` cannot be written.
    """
    found = parse(words)
    if found.lint:
        return _lint(found.words, as_json=found.json)
    if not found.words:
        raise UsageError("launch k8s: name a run config, for example ds_configs/quickstart.yaml")
    text = render(found, words)
    hand_out(text, to=None if found.dry_run else found.out)
    return EXIT_OK


def render(found: argparse.Namespace, words: Sequence[str]) -> str:
    """The manifest that the arguments ask for, checked: the run against the cluster, the objects by our own rules.

    Raises:
        UsageError, ConfigError: as `main`.
    """
    config = load_run(found.words[0], found.words[1:]).config
    if found.ckpt_pvc and found.restarts:  # without a claim nothing but that path outlives a pod
        refuse_one_start(config, place="launch k8s --ckpt_pvc", once="with --restarts 0")
    request = with_settings(request_of(found, name=as_service_name(config.run.name)), config)
    load_run(request.config, request.overrides).checked_plan(request.cluster)
    _refuse_lone_folders(request)
    config_text = read_text(Path(request.config), name=request.config) if request.embed_config else ""
    heading = f"Made by: python -m framework launch k8s {_on_one_line(words)}\n{_how_to_use(request)}"
    text = manifest(request, config_text=config_text, heading=heading)
    problems = lint(parse_manifests(text, name="command line"))
    if problems:
        raise ConfigError(problems)
    for note in _notes(request):
        print(f"note: {note}", file=sys.stderr)
    return text


def with_settings(request: K8sRequest, config: RunConfig) -> K8sRequest:
    """The request with the settings that a job in pods needs: run folders in the volume, and going on after a
    restart.
    """
    added: list[str] = []
    if not _is_set(request, "run.output_dir"):
        added.append(f"run.output_dir={request.run_path}")
    if request.claim and config.checkpoint.resume == "never" and not _is_set(request, "checkpoint.resume"):
        added.append("checkpoint.resume=auto")
    return replace(request, overrides=(*request.overrides, *added))


def _is_set(request: K8sRequest, key: str) -> bool:
    return any(word.startswith(f"{key}=") for word in request.overrides)


def _refuse_lone_folders(request: K8sRequest) -> None:
    """Several nodes write one checkpoint; and what is asked for on the claim must be on it.

    Raises:
        ConfigError: they could not.
    """
    folder = next(word.partition("=")[2] for word in reversed(request.overrides) if word.startswith("run.output_dir="))
    if request.nodes > 1 and not request.claim:
        raise ConfigError.of(
            kind="shared-storage-missing",
            file="command line",
            key="--ckpt_pvc",
            reason=f"{request.nodes} pods write one checkpoint together and share no folder",
            fix="give a ReadWriteMany claim: --ckpt_pvc CLAIM",
        )
    if not PurePosixPath(folder).is_relative_to(request.run_path):
        raise ConfigError.of(
            kind="outside-the-volume",
            file="command line",
            key="run.output_dir",
            value=folder,
            reason=f"the pods' volume is at {request.run_path}",
            fix="leave it out, or change --ckpt_path",
        )


def _how_to_use(request: K8sRequest) -> str:
    start = "kubectl apply -f FILE" if not request.namespace else f"kubectl apply -n {request.namespace} -f FILE"
    logs = f"kubectl logs -f -l app.kubernetes.io/instance={request.name} --prefix --tail=-1"
    if request.nodes > _LOGS_AT_ONCE:
        logs += f" --max-log-requests={request.nodes}"
    return f"Start: {start}   Watch: {logs}\nAfter a change: python -m framework launch k8s --lint FILE"


def _on_one_line(words: Sequence[str]) -> str:
    return printable(shlex.join(words))


def _notes(request: K8sRequest) -> list[str]:
    found: list[str] = []
    if not request.claim:
        found.append("run folders live and die with the pod; --ckpt_pvc CLAIM keeps them [k8s-nothing-kept]")
    if not request.embed_config:
        found.append(f"{request.config} is a path in the image; --config_map sends it along [k8s-config-in-image]")
    if request.nodes > 1 and not request.queue and not request.scheduler:
        found.append(
            "without a queue some pods may wait for ever while others hold their GPUs; --queue Q (Kueue) or a gang "
            "scheduler, --scheduler volcano, starts all or none [k8s-no-gang]"
        )
    if request.runtime:
        found.append(
            f"retries are those of the runtime {request.runtime}, which knows no exit codes; leave --runtime out for "
            "one that does [k8s-runtime-retries]"
        )
    if request.rdma and request.user != 0:
        found.append(
            "RDMA pins memory: the container runtime of the nodes must set LimitMEMLOCK=infinity, for IPC_LOCK does "
            "nothing for a user other than root [k8s-memlock]"
        )
    return found


def _lint(files: Sequence[str], *, as_json: bool) -> int:
    if not files:
        raise UsageError("launch k8s --lint: name the manifests, all files of a job together")
    try:
        problems = lint(read_manifests(files))
    except ConfigError as error:
        problems = list(error.problems)
    wrong = any(problem.severity == "error" for problem in problems)
    if as_json:
        print(json.dumps({"findings": [problem.to_dict() for problem in problems]}, indent=2))
    else:
        for problem in problems:
            print(problem)
        if not problems:
            print(f"{', '.join(files)}: fine")
    return EXIT_PROBLEMS if wrong else EXIT_OK
