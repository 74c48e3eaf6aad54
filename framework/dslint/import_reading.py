"""State of an import: which keys found a place, what is worth a comment, and what has no place at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from framework.config.deepspeed_words import SHARED, TYPED
from framework.dslint.facts import DEPRECATED, Facts
from framework.dslint.keys import Key, KeyTable
from framework.errors import MISSING, Problem, show_value
from framework.plan.rules.passthrough import not_in_a_run

Values = dict[str, Any]
_NO_KEY: Final = ("a run config has no key for it", "remove it, or train with DeepSpeed's own API")
# These work without the switch of their section.
_NEVER_IDLE: Final = frozenset(
    {
        "fp16.fp16_master_weights_and_grads",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
    }
)


@dataclass
class Reading:
    """A DeepSpeed JSON on its way to a run config.

    Attributes:
        facts: the values as DeepSpeed sees them.
        table: the keys of the release.
        comments: run-config key -> what to say beside it.
        left_out: what is said at the top about keys that have no effect.
        problems: what a run config cannot say.
        given: run-config key -> the DeepSpeed key that decided it; "auto" and keys left out decide nothing.
        further: DeepSpeed key -> value: keys beside those of a typed section.
    """

    facts: Facts
    table: KeyTable
    comments: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    further: dict[str, Any] = field(default_factory=dict)
    _placed: set[str] = field(default_factory=set)
    _idle: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._autos = {self.key_path(path) for path, value in leaves(self.facts.values) if value == "auto"}

    def is_auto(self, path: str) -> bool:
        """Check whether the value is left to another tool."""
        return path in self._autos

    def take(self, path: str, key: str, ours: Any, theirs: Any = MISSING) -> Any:
        """The value of a DeepSpeed key for a run-config key.

        Args:
            path: DeepSpeed's key, which has found its place with this call.
            key: ours.
            ours: our default, for "auto".
            theirs: what DeepSpeed does where the key is left out; not given: as the table says.
        """
        self.place(path)
        if self.is_auto(path):
            self.comments[key] = '"auto" in the file; this is our default'
            return ours
        if self.facts.given(path):
            self.given[key] = self.facts.written(path)
        known = self.key(path)
        if theirs is MISSING and known is not None and known.default is not MISSING:
            theirs = known.default
        return self._typed(path, known.types if known is not None else ("any",), None if theirs is MISSING else theirs)

    def _typed(self, path: str, types: tuple[str, ...], theirs: Any) -> Any:
        """Sections that a model reads take "2" and 1.0 for whole numbers."""
        readers: dict[tuple[str, ...], Callable[[str, Any], Any]] = {
            ("boolean",): self.facts.flag,
            ("integer",): self.facts.whole,
            ("number",): self.facts.number,
        }
        found = self.facts.get(path, theirs)
        reader = readers.get(types)
        read = None if found is None or reader is None else reader(path, theirs)
        return found if read is None else read

    def place(self, path: str) -> None:
        """The key needs no more attention."""
        self._placed.add(path)

    def idle(self, section: str, why: str) -> None:
        """Mark the rest of this section as without effect."""
        self._idle[section] = why

    def refuse(self, path: str, reason: str, fix: str) -> None:
        """A run config cannot say this."""
        problem = Problem(
            kind="not-expressible", key=self.facts.written(path), value=self.facts.raw(path), reason=reason, fix=fix
        )
        self.problems.append(problem)

    def drop(self, path: str, value: Any, why: str) -> None:
        """Say at the top that a key was left out, and why."""
        self.left_out.append(f"{path}: {show_value(value)} ({why})")

    def key(self, path: str) -> Key | None:
        """Look up a key in the table."""
        kind = (
            self.facts.text(f"{path.partition('.')[0]}.type") if path.startswith(("optimizer.", "scheduler.")) else None
        )
        return self.table.get(path, kind)

    def key_path(self, written: str) -> str:
        """Today's name of a key, without the type that the table may hold it under."""
        found = self.key(written)
        if found is None or "[" in found.path or "*" in found.path:
            return written
        if written.startswith("bfloat16"):
            return f"bf16{written[8:]}"
        return found.path

    def settle(self, section: str) -> None:
        """Judge every key of a section that has found no place: without effect, or beyond what we can say."""
        for written, value in leaves(self.facts.values):
            path = self.key_path(written)
            if written.partition(".")[0] == section and path not in self._placed:
                self._settle(written, path, value)

    def _settle(self, written: str, path: str, value: Any) -> None:
        key = self.key(written)
        why = self.why_without_effect(written, value)
        idle = next((text for part, text in self._idle.items() if f"{path}.".startswith(f"{part}.")), None)
        if path in DEPRECATED:
            return  # facts has put it under today's name
        if why is not None:
            self.drop(written, value, why)
        elif key is not None and (value is None or (key.default is not MISSING and value == key.default)):
            return
        elif idle is not None and path not in _NEVER_IDLE:
            self.drop(written, value, idle)
        elif value != {}:
            self._pass(path, value)

    def _pass(self, path: str, value: Any) -> None:
        """A key beside those of a typed section goes to `deepspeed:`, where a run can have it."""
        reason, fix = not_in_a_run(path, value) or _NO_KEY
        if (
            path.partition(".")[0] in SHARED
            and path not in TYPED
            and not_in_a_run(path, value) is None
            and value is not None
        ):
            self.further[path] = value
            self.given[f"deepspeed.{path}"] = self.facts.written(path)
        else:
            self.refuse(path, reason, fix)

    def why_without_effect(self, written: str, value: Any) -> str | None:
        """Why DeepSpeed does nothing with a key; None where it does something."""
        key, release = self.key(written), self.table.release
        if key is None:
            return f"DeepSpeed {release} has no such key"
        if key.status == "refused":
            return f"DeepSpeed {release} refuses it"
        if key.status == "inert":
            return "DeepSpeed does nothing with it"
        if key.status == "deprecated" and not written.startswith("bfloat16"):
            return "DeepSpeed no longer looks at it"
        if value == "auto" and "auto" not in (key.default, *key.enum, *key.examples):
            return "other tools fill it in; DeepSpeed's default holds"
        return None


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not a section; an empty section counts as a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
