"""Reads the keys of a DeepSpeed JSON for an import, and notes what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from deepspeed_lint.facts import DEPRECATED, Facts, dotted, leaves
from deepspeed_lint.keys import Key, KeyTable
from deepspeed_lint.rules.silent import UNSWITCHED
from framework.config.deepspeed_words import OWNED, SHARED, TYPED
from framework.errors import MISSING, Problem, show_value
from framework.plan.rules.passthrough import not_in_a_run

Values = dict[str, Any]
NO_KEY: Final = ("a run config has no key for it", "remove it, or train with DeepSpeed's own API")


@dataclass(frozen=True)
class Omission:
    """A key of a file that the run config does not take over.

    Attributes:
        key: as the file spells it.
        shown: its value as a message shows it; None if the message leaves it out.
        reason: why it is left out, or what to do instead.
    """

    key: str
    shown: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.shown is None:
            return f"{self.key} ({self.reason})"
        return f"{self.key}: {self.note}"

    @property
    def note(self) -> str:
        """The value and the reason."""
        if not self.reason:
            return self.shown or ""
        return f"{self.shown} ({self.reason})"


@dataclass
class DeepSpeedReader:
    """A DeepSpeed JSON on its way to a run config.

    Attributes:
        facts: the values as DeepSpeed sees them.
        table: the keys of the release.
        comments: run-config key -> comment beside it.
        left_out: keys without effect, for the top of the file.
        problems: keys that a run config cannot express.
        sources: run-config key -> the DeepSpeed key that decided it; "auto" and keys left out
            decide nothing.
        further: DeepSpeed key -> value: keys that no typed section takes.
    """

    facts: Facts
    table: KeyTable
    comments: dict[str, str] = field(default_factory=dict)
    left_out: list[Omission] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    further: dict[str, Any] = field(default_factory=dict)
    _handled: set[str] = field(default_factory=set)
    _without_effect: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._autos = {
            self.key_path(path)
            for path, value in dotted_leaves(self.facts.values)
            if value == "auto"
        }

    def is_auto(self, path: str) -> bool:
        """Check whether the value is left to another tool."""
        return path in self._autos

    def take(self, path: str, our_default: Any, deepspeed_default: Any = MISSING) -> Any:
        """Return the value of a DeepSpeed key for the run-config key that stands for it.

        Args:
            path: DeepSpeed's key, which is handled with this call.
            our_default: the value for "auto".
            deepspeed_default: the value where the key is left out; by default the table's.
        """
        self.mark_handled(path)
        our_key = TYPED.get(path) or OWNED.get(path) or OWNED[path.partition(".")[0]]
        if self.is_auto(path):
            self.comments[our_key] = '"auto" in the file; this is our default'
            return our_default
        if self.facts.given(path):
            self.sources[our_key] = self.facts.written(path)
        if deepspeed_default is MISSING:
            deepspeed_default = _table_default(self.key(path))
        return self._converted(path, deepspeed_default)

    def _converted(self, path: str, default: Any) -> Any:
        """Return the value of a key, "2" or 1.0 as the number it is where a model reads it."""
        value = self.facts.get(path, default)
        key = self.key(path)
        if value is None or key is None:
            return value
        readers: dict[tuple[str, ...], Callable[[str, Any], Any]] = {
            ("boolean",): self.facts.flag,
            ("integer",): self.facts.whole,
            ("number",): self.facts.number,
        }
        if key.types not in readers:
            return value
        converted = readers[key.types](path, default)
        if converted is None:
            return value
        return converted

    def mark_handled(self, *paths: str) -> None:
        """Keep keys from being settled with the rest of their section."""
        self._handled.update(paths)

    def mark_without_effect(self, section: str, reason: str) -> None:
        """Mark the rest of a section as without effect."""
        self._without_effect[section] = reason

    def refuse(self, path: str, reason: str, fix: str) -> None:
        """Report a key that a run config cannot express."""
        written = self.facts.written(path)
        value = self.facts.raw(path)
        self.problems.append(Problem("not-expressible", reason, fix, written, value))

    def leave_out(self, path: str, value: Any, reason: str) -> None:
        """List a key as left out, with the reason."""
        self.left_out.append(Omission(path, show_value(value), reason))

    def key(self, path: str) -> Key | None:
        """Look up a key in the table."""
        variant = None
        if path.startswith(("optimizer.", "scheduler.")):
            variant = self.facts.text(f"{path.partition('.')[0]}.type")
        return self.table.get(path, variant)

    def key_path(self, written: str) -> str:
        """Return today's name of a key, without the type that the table may hold it under."""
        key = self.key(written)
        if key is None or "[" in key.path or "*" in key.path:
            return written
        if written.startswith("bfloat16"):
            return f"bf16{written[8:]}"  # what is after "bfloat16"
        return key.path

    def settle(self, section: str) -> None:
        """Pass on, leave out or refuse every key of a section that is not handled yet."""
        for written, value in dotted_leaves(self.facts.values):
            path = self.key_path(written)
            if written.partition(".")[0] == section and path not in self._handled:
                self._settle_key(written, path, value)

    def _settle_key(self, written: str, path: str, value: Any) -> None:
        """Pass on, leave out or refuse one key, unless it is what DeepSpeed does anyway."""
        if path in DEPRECATED:
            return  # `Facts` has it under today's name
        reason = self.why_without_effect(written, value)
        if reason is not None:
            self.leave_out(written, value, reason)
        elif not self._is_done_anyway(written, value):
            self._settle_effective_key(written, path, value)

    def _is_done_anyway(self, written: str, value: Any) -> bool:
        """Check whether a known key has its default, or none of its own."""
        key = self.key(written)
        return key is not None and (value is None or is_default(key, value))

    def _settle_effective_key(self, written: str, path: str, value: Any) -> None:
        """Pass a key on, or leave it out with its section."""
        reason = self._section_reason(path)
        if reason is not None and path not in UNSWITCHED:
            self.leave_out(written, value, reason)
        elif value != {}:
            self._pass_on(path, value)

    def _section_reason(self, path: str) -> str | None:
        """Return why the section around a key is without effect, or None."""
        for section, reason in self._without_effect.items():
            if f"{path}.".startswith(f"{section}."):
                return reason
        return None

    def _pass_on(self, path: str, value: Any) -> None:
        """Put a key that no typed section takes under `deepspeed:`, or refuse it."""
        refusal = not_in_a_run(path, value)
        is_shared = path.partition(".")[0] in SHARED and path not in TYPED
        if is_shared and refusal is None and value is not None:
            self.further[path] = value
            self.sources[f"deepspeed.{path}"] = self.facts.written(path)
        else:
            reason, fix = refusal or NO_KEY
            self.refuse(path, reason, fix)

    def why_without_effect(self, written: str, value: Any) -> str | None:
        """Return why DeepSpeed does nothing with a key, or None if it does something."""
        key = self.key(written)
        release = self.table.release
        if key is None:
            return f"DeepSpeed {release} has no such key"
        reason_of = {
            "refused": f"DeepSpeed {release} refuses it",
            "inert": "DeepSpeed does nothing with it",
        }
        if not written.startswith("bfloat16"):
            reason_of["deprecated"] = "DeepSpeed no longer looks at it"
        if value == "auto" and not key.knows_auto:
            return reason_of.get(key.status, "other tools fill it in; DeepSpeed's default holds")
        return reason_of.get(key.status)


def _table_default(key: Key | None) -> Any:
    if key is None or key.default is MISSING:
        return None
    return key.default


def is_default(key: Key, value: Any) -> bool:
    """Check whether a value is what DeepSpeed does anyway."""
    return key.default is not MISSING and bool(value == key.default)


def dotted_leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return key and value of everything that is not a section."""
    return ((dotted(path), value) for path, value in leaves(values))
