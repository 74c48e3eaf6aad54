"""``launch k8s``: prints the objects of a run, or says what is wrong with manifests."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from secrets import token_hex

from framework.deploy.k8s.lint import lint
from framework.deploy.k8s.manifests import parse_manifests
from framework.deploy.k8s.render import manifest
from framework.deploy.k8s.request import K8sRequest
from framework.deploy.options import as_service_name, last_setting, parse, resume_setting
from framework.errors import EXIT_OK, EXIT_PROBLEMS, ConfigError, UsageError, printable
from framework.launch.job import hand_out, refuse_one_start
from framework.load_run import load_run
from framework.text.document import read_text

_MARK = b"app.kubernetes.io/name: dsf-trainer"  # of our objects
_RESTARTS = 3
_LOGS_AT_ONCE = 5  # `kubectl logs` follows no more pods unless it is asked to


def main(words: Sequence[str]) -> int:
    """Do what the words behind ``launch k8s`` say; after an error nothing has been printed."""
    about = "Print the Kubernetes objects of a run, or check manifests with --lint."
    request = parse(K8sRequest, words, command="launch k8s", description=about)
    if request.lint:
        return _lint(request.words, as_json=request.json)
    request.refuse_contradictions()
    text = _render(request, words)
    before = os.umask(0o077)  # there may be a secret in it
    try:
        hand_out(text, to=None if request.dry_run else request.out, mark=_MARK)
    finally:
        os.umask(before)
    return EXIT_OK


def _render(request: K8sRequest, words: Sequence[str]) -> str:
    """The manifest, checked: the run against the cluster, the objects by our own rules."""
    config = load_run(request.config, request.overrides).config
    max_restarts = config.supervision.max_restarts
    if request.restarts < 0:
        restarts = max_restarts or _RESTARTS
    else:
        restarts = request.restarts
    request = replace(request, restarts=restarts, max_restarts=max_restarts, token=token_hex(32))
    # without a claim nothing but that path outlives a pod
    if request.ckpt_pvc and request.restarts:
        refuse_one_start(config, place="launch k8s --ckpt_pvc", once="with --restarts 0")
    is_set = last_setting(request.overrides, "run.output_dir") is not None
    if is_set:
        added = []
    else:
        added = [f"run.output_dir={request.ckpt_path}"]
    added += resume_setting(request.overrides, config) if request.ckpt_pvc else []
    name = request.name or as_service_name(config.run.name)
    if request.config_map:
        text = read_text(Path(request.config), name=request.config)
    else:
        text = ""
    request = replace(request, words=[*request.words, *added], name=name, config_text=text)
    request.refuse_secrets("launch k8s")
    load_run(request.config, request.overrides).checked_plan(request.cluster)
    _refuse_lone_folders(request)
    text = manifest(request, heading=_heading(request, words))
    problems = lint(parse_manifests(text, name="command line"))
    if problems:
        raise ConfigError(problems)
    for note in _notes(request):
        print(f"note: {note}", file=sys.stderr)
    return text


def _refuse_lone_folders(request: K8sRequest) -> None:
    """Several nodes write one checkpoint; and what is asked for on the claim must be on it."""
    folder = last_setting(request.overrides, "run.output_dir") or ""
    if request.nodes > 1 and not request.ckpt_pvc:
        reason = f"{request.nodes} pods write one checkpoint together and share no folder"
        fix = "give a ReadWriteMany claim: --ckpt_pvc CLAIM"
        raise ConfigError.of(
            "shared-storage-missing", reason, fix, "--ckpt_pvc", file="command line"
        )
    if not PurePosixPath(folder).is_relative_to(request.ckpt_path):
        reason = f"the pods' volume is at {request.ckpt_path}"
        fix = "leave it out, or change --ckpt_path"
        raise ConfigError.of(
            "outside-the-volume", reason, fix, "run.output_dir", folder, file="command line"
        )


def _heading(request: K8sRequest, words: Sequence[str]) -> str:
    if request.namespace:
        namespace = f"-n {request.namespace} "
    else:
        namespace = ""
    logs = f"kubectl logs -f -l app.kubernetes.io/instance={request.name} --prefix --tail=-1"
    if request.nodes > _LOGS_AT_ONCE:
        logs += f" --max-log-requests={request.nodes}"
    return (
        f"Made by: python -m framework launch k8s {printable(shlex.join(words))}\n"
        f"Start: kubectl apply {namespace}-f FILE   Watch: {logs}\n"
        "After a change: python -m framework launch k8s --lint FILE"
    )


def _notes(request: K8sRequest) -> list[str]:
    notes = (
        (
            not request.ckpt_pvc,
            "run folders live and die with the pod; --ckpt_pvc CLAIM keeps them [k8s-nothing-kept]",
        ),
        (
            not request.config_map,
            f"{request.config} is a path in the image; --config_map sends it along "
            "[k8s-config-in-image]",
        ),
        (
            request.makes_token,
            "it holds the token of the job, with which any reader of it can pass for a pod; "
            "--token_secret S names a Secret that is there [k8s-token-inside]",
        ),
        (
            request.nodes > 1 and not request.queue and not request.scheduler,
            "without a queue some pods may wait for ever while others hold their GPUs; --queue Q "
            "(Kueue) or a gang scheduler, --scheduler volcano, starts all or none [k8s-no-gang]",
        ),
        (
            request.runtime,
            f"retries are those of the runtime {request.runtime}, which knows no exit codes; "
            "leave --runtime out for one that does [k8s-runtime-retries]",
        ),
        (
            request.rdma and request.run_as_user,
            "RDMA pins memory: the container runtime of the nodes must set LimitMEMLOCK=infinity, "
            "for IPC_LOCK does nothing for a user other than root [k8s-memlock]",
        ),
    )
    return [note for is_due, note in notes if is_due]


def _lint(files: Sequence[str], *, as_json: bool) -> int:
    if not files:
        raise UsageError("launch k8s --lint: name the manifests, all files of a job together")
    try:
        problems = lint(
            [
                found
                for file in files
                for found in parse_manifests(read_text(Path(file), name=file), name=file)
            ]
        )
    except ConfigError as error:
        problems = list(error.problems)
    if as_json:
        print(json.dumps({"findings": [problem.to_dict() for problem in problems]}, indent=2))
    else:
        print("\n".join(map(str, problems)) or f"{', '.join(files)}: fine")
    return EXIT_PROBLEMS if problems else EXIT_OK
