"""Reads the fix of a problem as a machine would: `set a.b: 1 and c: 2 or remove d` is two ways
out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tests.deepspeed_lint.rules.cases import GONE, Case, merged

Changes = Sequence[tuple[str, Any]]
_SETTING = re.compile(
    r"(?:^|(?<=set )|(?<=and ))([a-z]\w*(?:\.\w+)*): (\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}|[-+\w./]+)"
)


def alternatives(fix: str) -> list[Changes]:
    """Each of them mends the config; what is said in words only is none."""
    found: list[Changes] = []
    for clause in re.split(r" or (?=set |remove |[a-z_0-9.]+: )", fix):
        changes = [(key, json.loads(value.rstrip(".,"))) for key, value in _SETTING.findall(clause)]
        changes += [(key, GONE) for key in re.findall(r"remove ([a-z_0-9.]+)", clause)]
        if changes:
            found.append(changes)
    return found


def mended(case: Case, changes: Changes) -> dict[str, Any]:
    """The config with one alternative applied."""
    config = case.config
    for key, value in changes:
        change: Any = value
        for name in reversed(key.split(".")):
            change = {name: change}
        config = merged(config, change)
    return config
