"""What a run reads must be on every node, and readable there: data, first weights, the checkpoint that it goes on
from.
"""

from __future__ import annotations

import os

from framework.doctor.node.findings import Check
from framework.doctor.node.need import Need
from framework.errors import Problem


def check_inputs(need: Need) -> Check:
    """Files and folders that the config names; what is in them is for training to judge."""
    problems = []
    for key, path in need.inputs:
        readable = os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0))
        if not readable:
            reason = "it cannot be read" if os.path.lexists(path) else "it is not on this node"
            problems.append(
                Problem(
                    kind="input-not-found",
                    key=key,
                    value=str(path),
                    reason=reason,
                    fix="name a path that every node has, or bring it there",
                )
            )
    stated = ", ".join(str(path) for _, path in need.inputs)
    return Check("inputs", stated or "nothing is read from files that the config names", tuple(problems))
