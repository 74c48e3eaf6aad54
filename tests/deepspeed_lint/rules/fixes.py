"""Fixes of problems, as a machine reads them: `set a.b: 1 and c: 2 or remove d` is two ways out."""

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
    """List the ways out, each of which fixes the config; one without keys does not count."""
    found: list[Changes] = []
    for clause in re.split(r" or (?=set |remove |[a-z_0-9.]+: )", fix):
        changes = [(key, json.loads(value.rstrip(".,"))) for key, value in _SETTING.findall(clause)]
        changes += [(key, GONE) for key in re.findall(r"remove ([a-z_0-9.]+)", clause)]
        if changes:
            found.append(changes)
    return found


def mended(case: Case, changes: Changes) -> dict[str, Any]:
    """Return the config with one alternative applied."""
    config = case.config
    for key, value in changes:
        change: Any = value
        for name in reversed(key.split(".")):
            change = {name: change}
        config = merged(config, change)
    return config
