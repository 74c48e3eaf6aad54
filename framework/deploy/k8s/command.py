"""``launch k8s``: prints the objects of a run, or the mistakes in manifests."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from secrets import token_hex

from deepspeed_lint.text.document import read_text
from framework.config.run_config import RunConfig
from framework.deploy.k8s.lint import lint
from framework.deploy.k8s.read_manifests import parse_manifests
from framework.deploy.k8s.render import manifest
from framework.deploy.k8s.request import K8sRequest
from framework.deploy.options import as_service_name, last_setting, parse, resume_setting
from framework.errors import EXIT_OK, EXIT_PROBLEMS, ConfigError, Problem, UsageError, printable
from framework.launch.job import hand_out, refuse_named_checkpoint
from framework.load_run import load_run

_MARK = b"app.kubernetes.io/name: dsf-trainer"  # in every object that we print
_RESTARTS = 3  # of a pod, if neither options nor run config have a number
_LOGS_AT_ONCE = 5  # `kubectl logs` follows no more pods without --max-log-requests


def main(words: Sequence[str]) -> int:
    """Print or write the objects of a run, or with ``--lint`` the mistakes in manifests; returns
    the exit code. After an error nothing has been printed.
    """
    about = "Print the Kubernetes objects of a run, or check manifests with --lint."
    request = parse(K8sRequest, words, command="launch k8s", description=about)
    if request.lint:
        return _lint(request.words, as_json=request.json)
    request.refuse_contradictions()
    text = _render(request, words)
    previous_umask = os.umask(0o077)  # the manifest may hold a secret
    try:
        hand_out(text, to=None if request.dry_run else request.out, mark=_MARK)
    finally:
        os.umask(previous_umask)
    return EXIT_OK


def _render(request: K8sRequest, words: Sequence[str]) -> str:
    """Return the manifest, and print notes on it to stderr.

    Raises:
        ConfigError: the run cannot work on the cluster, or an object breaks a rule of our own lint.
        UsageError: the settings or the config hold a secret.
    """
    request = _completed(request)
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


def _completed(request: K8sRequest) -> K8sRequest:
    """Return the request with what the run config decides, with values for options that are left
    out, and with a new token.
    """
    config = load_run(request.config, request.overrides).config
    max_restarts = config.supervision.max_restarts
    restarts = request.restarts
    if restarts < 0:
        restarts = max_restarts or _RESTARTS
    # Without a claim the checkpoint that the config names is all that outlives a pod: each start
    # resumes from it rightly.
    if request.ckpt_pvc and restarts:
        refuse_named_checkpoint(config, place="launch k8s --ckpt_pvc", once="with --restarts 0")
    words = list(request.words)
    words += _settings(request, config)
    config_text = ""
    if request.config_map:
        config_text = read_text(Path(request.config), name=request.config)
    return replace(
        request,
        words=words,
        name=request.name or as_service_name(config.run.name),
        restarts=restarts,
        max_restarts=max_restarts,
        token=token_hex(32),
        config_text=config_text,
    )


def _settings(request: K8sRequest, config: RunConfig) -> Iterator[str]:
    """Yield settings for what the pods' volume decides."""
    if last_setting(request.overrides, "run.output_dir") is None:
        yield f"run.output_dir={request.ckpt_path}"
    if request.ckpt_pvc:
        yield from resume_setting(request.overrides, config)


def _refuse_lone_folders(request: K8sRequest) -> None:
    """Raise ConfigError if nodes share no folder, or the run folder is outside the volume."""
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
    """Return the comment at the top of the file: the command that made it, and how to start and
    watch the job.
    """
    namespace = ""
    if request.namespace:
        namespace = f"-n {request.namespace} "
    label = f"app.kubernetes.io/instance={request.name}"
    logs = f"kubectl logs {namespace}-f -l {label} --prefix --tail=-1"
    if request.nodes > _LOGS_AT_ONCE:
        logs += f" --max-log-requests={request.nodes}"
    return (
        f"Made by: dsf launch k8s {printable(shlex.join(words))}\n"
        f"Start: kubectl apply {namespace}-f FILE   Watch: {logs}\n"
        "After a change: dsf launch k8s --lint FILE"
    )


def _notes(request: K8sRequest) -> list[str]:
    """Return what the user should know about the objects; each row below has the condition of its
    note.
    """
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


def _problems_of(files: Sequence[str]) -> list[Problem]:
    """Return the problems of manifests, or those that keep a file from being read."""
    manifests = []
    try:
        for file in files:
            manifests += parse_manifests(read_text(Path(file), name=file), name=file)
        return lint(manifests)
    except ConfigError as error:
        return list(error.problems)


def _lint(files: Sequence[str], *, as_json: bool) -> int:
    if not files:
        raise UsageError("launch k8s --lint: name the manifests, all files of a job together")
    problems = _problems_of(files)
    if as_json:
        print(json.dumps({"findings": [problem.to_dict() for problem in problems]}, indent=2))
    else:
        print("\n".join(map(str, problems)) or f"{', '.join(files)}: fine")
    if problems:
        return EXIT_PROBLEMS
    return EXIT_OK
