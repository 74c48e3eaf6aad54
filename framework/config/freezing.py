"""The weights that `training.freeze` keeps from training, and the steps in which it does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from framework.config.training import FreezeEntry, FrozenSteps
from framework.errors import ConfigError, Problem

_KEY = "training.freeze"


def patterns_of(entry: FreezeEntry) -> list[str]:
    """List the patterns of an entry."""
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry.match, str):
        return [entry.match]
    return list(entry.match)


def scheduled(entries: Iterable[FreezeEntry]) -> dict[int, FrozenSteps]:
    """Return the entries of weights that are trained in some steps, by their number."""
    return {number: entry for number, entry in enumerate(entries) if not isinstance(entry, str)}


def entry_of(name: str, entries: Sequence[FreezeEntry]) -> int | None:
    """Return the number of the first entry that matches the whole name of a weight, or None."""
    for number, entry in enumerate(entries):
        if any(re.fullmatch(pattern, name) for pattern in patterns_of(entry)):
            return number
    return None


def refuse_bad_freeze(names: Iterable[str], entries: Sequence[FreezeEntry]) -> None:
    """Refuse entries that do not fit the weights of a model.

    Raises:
        ConfigError: kind ``freeze-matches-nothing`` for every pattern without a weight,
            ``freeze-overlaps`` for two entries of one weight, ``freeze-matches-all`` where a step
            would train nothing.
    """
    if not entries:
        return
    names = list(names)
    problems = list(_unmatched(names, entries)) or list(_overlaps(names, entries))
    if problems:
        raise ConfigError(problems)
    numbers = {entry_of(name, entries) for name in names}
    if None in numbers:  # weights that no entry freezes
        return
    with_steps = scheduled(entries).values()
    # More weights are frozen from these steps on; in the others none becomes frozen.
    steps = [1] + [entry.from_step for entry in with_steps if entry.from_step]
    for step in sorted(steps):
        if all(is_frozen(entries[number], step) for number in numbers if number is not None):
            raise everything_frozen(entries, step=step if with_steps else 0)


def is_frozen(entry: FreezeEntry, step: int) -> bool:
    """Check whether the weights of an entry stay as they are in a step; the first step is 1."""
    if isinstance(entry, str):
        return True
    if entry.until_step is not None:
        return step <= entry.until_step
    return step >= (entry.from_step or 0)


def everything_frozen(entries: Sequence[FreezeEntry], *, step: int = 0) -> ConfigError:
    """Return the error of a run, or of a step, that would train nothing."""
    reason = "nothing would be left to train"
    if step:
        reason += f" in step {step}"
    value = [entry if isinstance(entry, str) else _shown(entry) for entry in entries]
    return ConfigError.of("freeze-matches-all", reason, "leave some parameters out", _KEY, value)


def _unmatched(names: Sequence[str], entries: Sequence[FreezeEntry]) -> Iterator[Problem]:
    reason = "no parameter of the model has such a name"
    for number, entry in enumerate(entries):
        for pattern in patterns_of(entry):
            if not any(re.fullmatch(pattern, name) for name in names):
                key = f"{_KEY}.{number}"
                if not isinstance(entry, str):
                    key += ".match"
                from deepspeed_lint.text.typos import unmatched_pattern  # for messages alone

                fix = unmatched_pattern(pattern, names)
                yield Problem("freeze-matches-nothing", reason, fix, key, pattern)


def _overlaps(names: Sequence[str], entries: Sequence[FreezeEntry]) -> Iterator[Problem]:
    """Yield a problem for each entry with steps that has a weight in common with another entry.

    Several patterns for the whole run may overlap.
    """
    for number, entry in scheduled(entries).items():
        for other_number, other in enumerate(entries):
            if other_number == number:
                continue
            if other_number < number and not isinstance(other, str):  # compared before
                continue
            name = _matched_by_both(names, entry, other)
            if name is not None:
                reason = f"it matches {name}, and so does {_KEY}.{other_number}"
                fix = "let one entry name it"
                yield Problem("freeze-overlaps", reason, fix, f"{_KEY}.{number}", _shown(entry))
                break


def _matched_by_both(names: Sequence[str], first: FreezeEntry, second: FreezeEntry) -> str | None:
    for name in names:
        if entry_of(name, [first]) is not None and entry_of(name, [second]) is not None:
            return name
    return None


def _shown(entry: FrozenSteps) -> Mapping[str, object]:
    return entry.model_dump(exclude_none=True)


def length_for_freeze(entries: Sequence[FreezeEntry], total_steps: int | None) -> Iterator[Problem]:
    """Yield a problem for each step of an entry that a run of `total_steps` makes useless.

    None if `total_steps` is not known.
    """
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
