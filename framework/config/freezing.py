"""Which weights `training.freeze` keeps from training, and in which steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from framework.config.training import FreezeEntry, FrozenSteps
from framework.errors import ConfigError, Problem
from framework.text.typos import unmatched_pattern

_KEY = "training.freeze"


def patterns_of(entry: FreezeEntry) -> list[str]:
    """List the patterns of an entry."""
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry.match, str):
        return [entry.match]
    return list(entry.match)


def always_frozen(entries: Iterable[FreezeEntry]) -> list[str]:
    """List the patterns of weights that are never trained."""
    return [entry for entry in entries if isinstance(entry, str)]


def scheduled(entries: Iterable[FreezeEntry]) -> dict[int, FrozenSteps]:
    """Entries of weights that are trained in some steps, by their number."""
    return {number: entry for number, entry in enumerate(entries) if not isinstance(entry, str)}


def entry_of(name: str, entries: Sequence[FreezeEntry]) -> int | None:
    """Number of the first entry that matches the whole name of a weight; None where none does."""
    for number, entry in enumerate(entries):
        if any(re.fullmatch(pattern, name) for pattern in patterns_of(entry)):
            return number
    return None


def refuse_bad_freeze(names: Iterable[str], entries: Sequence[FreezeEntry]) -> None:
    """Refuse what does not fit the weights of a model.

    Raises:
        ConfigError: kind ``freeze-matches-nothing`` for every pattern without a weight,
            ``freeze-overlaps`` for two entries of one weight, ``freeze-matches-all`` where a step
            would train nothing.
    """
    if not entries:
        return
    names = list(names)
    problems = [*_unmatched(names, entries)] or [*_overlaps(names, entries)]
    if problems:
        raise ConfigError(problems)
    own = {name: entry_of(name, entries) for name in names}
    steps = [1, *(entry.from_step for entry in scheduled(entries).values() if entry.from_step)]
    for step in sorted(steps):
        if all(number is not None and is_frozen(entries[number], step) for number in own.values()):
            raise everything_frozen(entries, step=step if scheduled(entries) else 0)


def is_frozen(entry: FreezeEntry, step: int) -> bool:
    """Check whether the weights of an entry stay as they are in a step; the first step is 1."""
    if isinstance(entry, str):
        return True
    if entry.until_step is not None:
        return step <= entry.until_step
    return step >= (entry.from_step or 0)


def everything_frozen(entries: Sequence[FreezeEntry], *, step: int = 0) -> ConfigError:
    """The error of a run, or of a step, that would train nothing."""
    reason = "nothing would be left to train" + (f" in step {step}" if step else "")
    value = [
        entry if isinstance(entry, str) else entry.model_dump(exclude_none=True)
        for entry in entries
    ]
    return ConfigError.of("freeze-matches-all", reason, "leave some parameters out", _KEY, value)


def _unmatched(names: Sequence[str], entries: Sequence[FreezeEntry]) -> Iterator[Problem]:
    reason = "no parameter of the model has such a name"
    for number, entry in enumerate(entries):
        for pattern in patterns_of(entry):
            if not any(re.fullmatch(pattern, name) for name in names):
                if isinstance(entry, str):
                    key = f"{_KEY}.{number}"
                else:
                    key = f"{_KEY}.{number}.match"
                yield Problem(
                    "freeze-matches-nothing",
                    reason,
                    unmatched_pattern(pattern, names),
                    key,
                    pattern,
                )


def _overlaps(names: Sequence[str], entries: Sequence[FreezeEntry]) -> Iterator[Problem]:
    """Weights of two entries of which one at least has steps; several patterns for the whole run
    may overlap.
    """
    for number, entry in scheduled(entries).items():
        for other, second in enumerate(entries):
            if other == number or (other < number and not isinstance(second, str)):
                continue
            both = next(
                (one for one in names if entry_of(one, [entry]) == 0 == entry_of(one, [second])),
                None,
            )
            if both is not None:
                reason = f"it matches {both}, and so does {_KEY}.{other}"
                yield Problem(
                    "freeze-overlaps",
                    reason,
                    "let one entry name it",
                    f"{_KEY}.{number}",
                    _shown(entry),
                )
                break


def _shown(entry: FrozenSteps) -> Mapping[str, object]:
    return entry.model_dump(exclude_none=True)


def length_for_freeze(entries: Sequence[FreezeEntry], total_steps: int | None) -> Iterator[Problem]:
    """Find steps that a run of this length never reaches."""
    for number, entry in scheduled(entries).items():
        until = entry.until_step
        first = entry.from_step
        if not total_steps:
            return
        run = f"the run has {total_steps} steps"
        if until is not None and until >= total_steps:
            fix = f"write a step below {total_steps}, or the pattern alone, without steps"
            reason = f"{run}, and these weights would never be trained"
            yield Problem("freeze-beyond-run", reason, fix, f"{_KEY}.{number}.until_step", until)
        if first is not None and first > total_steps:
            reason = f"{run}, and these weights would never be frozen"
            fix = f"write a step up to {total_steps}, or remove the entry"
            yield Problem("freeze-beyond-run", reason, fix, f"{_KEY}.{number}.from_step", first)
