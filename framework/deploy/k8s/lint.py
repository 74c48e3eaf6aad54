"""Finds mistakes in manifests of training jobs that a schema does not see."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# The modules of rules register them.
from framework.deploy.k8s import (  # noqa: F401
    address_rules,
    container_rules,
    job_rules,
    volume_rules,
)
from framework.deploy.k8s.manifest_rules import TABLE, broken
from framework.deploy.k8s.read_manifests import Manifest, find_workloads
from framework.errors import Problem


def lint(manifests: Sequence[Manifest]) -> list[Problem]:
    """Return all problems, each once, in the order of the files and of the lines in them."""
    workloads = find_workloads(manifests)
    if not workloads:
        problem = Problem(
            kind="k8s-no-job",
            file=manifests[0].file if manifests else "",
            reason="there is no Job, JobSet or TrainJob in it",
            fix="name all files of a job together",
        )
        return [problem]
    problems: dict[str, Problem] = {}
    for work, kind in itertools.product(workloads, TABLE):
        for place, reason, fix in broken(kind, work):
            problem = place.problem(kind, reason, fix)
            problems[str(problem)] = problem
    file_order: dict[str, int] = {}
    for number, manifest in enumerate(manifests):
        file_order.setdefault(manifest.file, number)
    return sorted(problems.values(), key=lambda problem: (file_order[problem.file], problem.line))
