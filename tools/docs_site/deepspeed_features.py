"""The page "DeepSpeed, feature by feature": what a run has of each feature that DeepSpeed advertises,
from `deepspeed_features.yaml` and the page "DeepSpeed, key by key".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from deepspeed_lint.keys import load_table
from tools.docs_site import deepspeed_keys

TABLE: Final = Path(__file__).with_suffix(".yaml")
MEANINGS: Final = {
    "typed": "Keys of the run config decide it.",
    "passes": "It stands under `deepspeed:` in the run config, and has DeepSpeed's effect.",
    "own instead": "A mechanism of this framework does it.",
    "refused": "A run cannot have it: `check`, or the start of the run, has the reason.",
    "gone": "DeepSpeed itself refuses it, since the release that is named.",
}


@dataclass(frozen=True)
class Feature:
    """A feature of DeepSpeed.

    Attributes:
        area: heading of its table on the page.
        name: as DeepSpeed's documentation has it.
        state: one of `MEANINGS`; empty if neither its keys nor the table show one.
        here: what a run has of it.
        why: reason of a refusal, after DeepSpeed's file and function.
        test: path below ``tests/``.
        keys: paths in DeepSpeed's JSON, each with all below it.
        python: public names of DeepSpeed, modules and commands.
    """

    area: str
    name: str
    state: str
    here: str
    why: str
    test: str
    keys: tuple[str, ...]
    python: tuple[str, ...]


def features() -> Iterator[Feature]:
    """Yield the features of the table, with their states."""
    areas: dict[str, list[dict[str, Any]]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    for area, entries in areas.items():
        for entry in entries:
            keys = tuple(entry.get("keys", ()))
            state = entry.get("state") or _state_of(keys)
            here = entry.get("here", "")
            if "own" in entry and state == "refused":
                state = "own instead"
                here = entry["own"]
            why = ""
            if state == "refused":
                why = entry.get("why", "")
            yield Feature(
                area=area,
                name=entry["name"],
                state=state,
                here=here,
                why=why,
                test=entry["test"],
                keys=keys,
                python=tuple(entry.get("python", ())),
            )


def covers(prefix: str, path: str) -> bool:
    """Check whether a key is `prefix`, or below it."""
    return path == prefix or path.startswith((f"{prefix}.", f"{prefix}["))


def _state_of(keys: tuple[str, ...]) -> str:
    """Return what a run does with the first of some keys; of a section, the best of its keys."""
    if not keys:
        return ""
    states = {state for path, state in _states().items() if covers(keys[0], path)}
    for state in ("typed", "passes", "refused", "gone"):
        if state in states:
            return state
    return ""


@cache
def _states() -> dict[str, str]:
    return {row.path: row.state for row in deepspeed_keys.rows()}


def deepspeed_features_page() -> str:
    """Return the page as Markdown: a table for each area."""
    found = list(features())
    lines = [
        "# DeepSpeed, feature by feature\n",
        f"What a run has of each of the {len(found)} features of DeepSpeed {load_table().release}, and the test that",
        "holds it. Each key of its JSON: [DeepSpeed, key by key](deepspeed-keys.md).\n",
        *deepspeed_keys.state_table(MEANINGS, [each.state for each in found], "features"),
    ]
    for area in dict.fromkeys(feature.area for feature in found):
        lines += [f"\n## {area}\n", "| feature | state | here | test |", "|---|---|---|---|"]
        for feature in found:
            if feature.area == area:
                answer = feature.here
                if feature.why:
                    place, _, reason = feature.why.partition(" ")
                    answer = f"{answer}; DeepSpeed's `{place}` {reason}".removeprefix("-; ")
                row = (feature.name, feature.state, answer, f"`tests/{feature.test}`")
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"
