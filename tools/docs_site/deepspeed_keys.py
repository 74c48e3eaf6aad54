"""The page "DeepSpeed, key by key": what a run does with each key that DeepSpeed reads, from its key
table and the tables of the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from deepspeed_lint.key_files import without_variant
from deepspeed_lint.keys import Key, KeyTable, load_table
from framework.config.deepspeed_words import OWNED, SHARED, TYPED
from framework.plan.rules.passthrough import REMOVED, TABLE, not_in_a_run

State = Literal["typed", "passes", "no effect", "refused", "gone", "Python"]
_MEANINGS: Final[dict[State, str]] = {
    "typed": "A key of the run config decides it.",
    "passes": "It stands under `deepspeed:` in the run config, and has DeepSpeed's effect.",
    "no effect": "It is taken and does nothing in a run.",
    "refused": "A run cannot have it; `check` says what to do.",
    "gone": "DeepSpeed refuses it itself, since the release that is named.",
    "Python": "Only Python code can give the value.",
}
_ANY_VALUE: Final = object()
# Optimizers that DeepSpeed makes for a run; `optimizer.kind: muon` is torch's.
_MADE: Final = frozenset({"Adam", "AdamW", "Adagrad", "Lion", "Lamb"})


@dataclass(frozen=True)
class Row:
    """What a run does with a key: its path in DeepSpeed's JSON, the state, and key or reason."""

    path: str
    state: State
    answer: str


def rows() -> Iterator[Row]:
    """Yield a row for each key of the newest release that holds no section."""
    table = load_table()
    for path in table:
        key = table.exact(path)
        assert key is not None
        if not _has_keys(table, path):
            state, answer = _state(key)
            yield Row(path, state, answer)


def _has_keys(table: KeyTable, path: str) -> bool:
    return bool(table.children(path) or table.variants(path))


def _state(key: Key) -> tuple[State, str]:
    path = without_variant(key.path)
    section = path.partition(".")[0]
    if path == "zero_optimization.legacy_stage1":
        return "gone", "0.5.9: remove it"
    if section in REMOVED:
        release, instead = REMOVED[section]
        return "gone", f"{release}: {instead}"
    if key.status == "refused":
        return "gone", key.instead or "remove it"
    if key.from_python:
        return "Python", ""
    optimizer = re.match(r"optimizer\.params\[(\w+)\]", key.path)
    if optimizer is not None and optimizer[1] not in _MADE:
        return "refused", "no `optimizer.kind` is this class; `optimizer.target` takes any class"
    for prefix in _prefixes(path):
        reason = not_in_a_run(prefix, _ANY_VALUE)
        if reason is not None:
            return "refused", f"{reason[0]}; {reason[1]}"
    if path in TYPED:
        return "typed", f"`{TYPED[path]}`"
    if section in OWNED and section not in SHARED:
        return "typed", f"`{OWNED[section]}`"
    return _state_of_passed(key, path)


def _state_of_passed(key: Key, path: str) -> tuple[State, str]:
    if key.enum == (key.default,):
        return "no effect", "its only value is the default"
    if key.status == "inert":
        return "no effect", "DeepSpeed reads it and does nothing with it"
    for row in TABLE["inert"]:
        if any(prefix in row["keys"] for prefix in _prefixes(path)):
            if "needs" not in row:
                return "no effect", row["reason"]
            return "passes", f"`deepspeed.{path}`; needs {row['needs']}"
    if path.startswith("activation_checkpointing."):
        reason = "nothing is recomputed until the model calls deepspeed.checkpointing"
        return "no effect", f"{reason}; set `training.recompute_every`"
    return "passes", f"`deepspeed.{path}`"


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def state_table(meanings: Mapping[str, str], found: list[str], what: str) -> list[str]:
    """Return the lines of a table of states: what each means, and how many of `what` have it."""
    lines = [f"| state | meaning | {what} |", "|---|---|---|"]
    for state, meaning in meanings.items():
        lines.append(f"| {state} | {meaning} | {found.count(state)} |")
    return lines


def deepspeed_keys_page() -> str:
    """Return the page as Markdown: a table for each section of the JSON."""
    table = load_table()
    found = list(rows())
    lines = [
        "# DeepSpeed, key by key\n",
        f"What a run does with each of the {len(found)} keys that DeepSpeed {table.release} reads. The tests",
        "`tests/plan/rules/test_passed_keys.py` train with each key that passes, and without it.\n",
        *state_table(_MEANINGS, [row.state for row in found], "keys"),
    ]
    for section in sorted({row.path.partition(".")[0] for row in found}):
        lines += [f"\n## {section}\n", "| key | state | here |", "|---|---|---|"]
        for row in found:
            if row.path.partition(".")[0] == section:
                lines.append(f"| `{row.path}` | {row.state} | {row.answer} |")
    return "\n".join(lines) + "\n"
