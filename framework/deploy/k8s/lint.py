"""Finds what is wrong with manifests of training jobs and what a schema does not see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from framework.deploy.k8s.job_rules import JOB_RULES
from framework.deploy.k8s.manifests import Manifest, Rule, find_workloads
from framework.deploy.k8s.network_rules import NETWORK_RULES
from framework.deploy.k8s.pod_rules import POD_RULES
from framework.deploy.k8s.storage_rules import STORAGE_RULES
from framework.errors import Problem

RULES: Final[tuple[Rule, ...]] = (*JOB_RULES, *NETWORK_RULES, *POD_RULES, *STORAGE_RULES)


def lint(manifests: Sequence[Manifest]) -> list[Problem]:
    """Everything found, in the order of the files."""
    works = find_workloads(manifests)
    if not works:
        file = manifests[0].file if manifests else ""
        return [
            Problem(
                kind="k8s-no-job",
                file=file,
                reason="there is no Job, JobSet or TrainJob in it",
                fix="name all files of a job together",
            )
        ]
    found = [problem for work in works for rule in RULES for problem in rule(work)]
    order = {manifest.file: index for index, manifest in enumerate(reversed(manifests))}
    return sorted(
        {str(problem): problem for problem in found}.values(), key=lambda problem: (-order[problem.file], problem.line)
    )
