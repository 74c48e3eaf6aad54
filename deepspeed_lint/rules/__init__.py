"""Rules between the keys of a DeepSpeed JSON: what DeepSpeed refuses, breaks on, or silently does
otherwise.

A rule is a row of `tables/rules.json`, where settings do not go together and nothing has to be
computed, or a function under `@rule` in the module of its theme; its name is the stable kind of its
problems. An error is what DeepSpeed stops at, when it reads the file, at `deepspeed.initialize`, in
the first step, or in the call that the key is for. A warning is what it takes and does otherwise. A
note depends on code outside the JSON. Unknown keys, types, ranges and removed keys are the key
table's (`deepspeed_lint/keys.py`). The README of this package has what is left out, and why.
"""

from __future__ import annotations

from deepspeed_lint.errors import Problem
from deepspeed_lint.facts import Facts
from deepspeed_lint.rules import batch, optimizer, parallel, precision, silent, zero  # noqa: F401
from deepspeed_lint.rules.base import ALL, list_rows

__all__ = ["ALL", "apply_rules"]

list_rows()


def apply_rules(facts: Facts) -> list[Problem]:
    """Return the problems of all rules."""
    problems: list[Problem] = []
    for rule in ALL:
        problems += rule(facts)
    return problems
