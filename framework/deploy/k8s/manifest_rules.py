"""Rules that manifests of training jobs keep: a table, and code for what it cannot express."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from framework.deploy.k8s.read_manifests import ManifestPart, Workload
from framework.errors import show_value

# Each finding: the place of the mistake, the reason, the fix.
Findings = Iterator[tuple[ManifestPart, str, str]]


Rule = Callable[[Workload], Findings]
# Kind, without ``k8s-`` -> why the rule exists, and its checks; docs/kubernetes.md lists them.
TABLE: Final = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
CODE: Final[dict[str, Rule]] = {}


def rule(find: Rule) -> Rule:
    """Register a rule that the table cannot express; its name, with dashes, is the kind."""
    CODE[find.__name__.strip("_").replace("_", "-")] = find
    return find


def broken(kind: str, work: Workload) -> Findings:
    """Yield part, reason and fix of everything that breaks the rule `kind`, by its checks in the
    table and its code.
    """
    for check in TABLE[kind].get("checks", ()):
        yield from _failures_of(check, work)
    if kind in CODE:
        yield from CODE[kind](work)


def _failures_of(check: Mapping[str, Any], work: Workload) -> Findings:
    """Yield part, reason and fix where a check of the table fails; ``rules.yaml`` describes its
    keys.
    """
    expected = check.get("is")
    if "of" in check:
        expected = getattr(work, check["of"])
    if not _is_relevant(check, expected, work):
        return
    attribute, *keys = check["at"]
    for place in _places(getattr(work, attribute), keys):
        value = place.get()
        is_left_out = value is None and check.get("left_out")
        if not is_left_out and not _is_right(value, check, expected):
            fix = check.get("fix") or f"{keys[-1]}: {show_value(expected)}"
            yield place, check["reason"].format(work), fix


def _is_relevant(check: Mapping[str, Any], expected: Any, work: Workload) -> bool:
    """Return whether the manifests have the part that is checked, and fulfil its conditions."""
    attribute = check["at"][0]
    if not _is_there(work, attribute):
        return False
    if "of" in check and not expected:
        return False
    if "where" in check and not _is_there(work, *check["where"]):
        return False
    return "unless" not in check or not _is_there(work, *check["unless"])


def _is_there(work: Workload, attribute: str, *keys: str) -> bool:
    """Return whether a part of the job, or the value at `keys` in it, is set and not false."""
    value = getattr(work, attribute)
    if value and keys:
        value = value.get(*keys)
    return value is not None and value is not False


def _is_right(value: Any, check: Mapping[str, Any], expected: Any) -> bool:
    """Check a value by the keys of a check: `of` (equal as text), `has` and `lacks` (parts of
    text), `least`, or else `is`.
    """
    if "of" in check:
        return str(value) == str(expected)
    if "has" in check or "lacks" in check:
        text = str(value)
        return check.get("has", "") in text and check.get("lacks", "\n") not in text
    if "least" in check:
        return bool((_number(value) or 0) >= check["least"])
    return value == expected and type(value) is type(expected)  # 0 is not false


def _places(part: ManifestPart, keys: Sequence[str | int]) -> Iterator[ManifestPart]:
    """Yield the parts at `keys`, in which "*" stands for each mapping of a list."""
    if "*" not in keys:
        yield part.at(*keys)
        return
    end = keys.index("*")
    for item in part.items(*keys[:end]):
        yield from _places(item, keys[end + 1 :])


def _number(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None
