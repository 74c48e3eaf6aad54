"""A plan with some of its settings changed, and the memory that it would take then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from framework.config.load import Source, config_from_values
from framework.config.run_config import RunConfig, kind_of_default
from framework.errors import ConfigError, show_value
from framework.plan.memory import Memory, NotEstimatedError, estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.work import ModelWork

_MIB: Final = 2**20
# Settings beside the strategy that may free memory, and the values that they are lowered to.
_KNOBS: Final[Sequence[tuple[str, Any]]] = (
    ("zero.reduce_bucket_size", 5_000_000),
    ("zero.overlap_comm", False),
    ("zero.stage3_max_live_parameters", 100_000_000),
    ("zero.stage3_prefetch_bucket_size", 5_000_000),
    ("optimizer.implementation", "deepspeed"),
    ("checkpoint.mode", "sync"),
)


@dataclass(frozen=True)
class Alternative:
    """Memory with some settings changed; none: as planned."""

    settings: Mapping[str, Any]
    memory: Memory

    @property
    def peak_bytes(self) -> int:
        """The most on a device at any moment."""
        return self.memory.total(self.memory.peak)

    def __str__(self) -> str:
        return settings_text(self.settings)


def alternatives(
    plan: Plan, choices: Iterable[Mapping[str, Any]], *, work: ModelWork | None = None
) -> Iterator[Alternative]:
    """Yield the choices (each: dotted keys -> values) that the rules allow and that change the
    plan, with their memory.

    `work`: of a model of the user's own; it is not known in another number type, so that choices of
    one are left out.
    """
    seen = [plan.config.to_dict()]
    for settings in choices:
        if work and "precision.dtype" in settings:
            continue
        try:
            config = with_settings(plan.config, settings)
            changed = make_plan(config, plan.cluster)
            memory = estimate(changed, work=work and work.of_samples(changed.layout.micro_size))
        except (ConfigError, NotEstimatedError):
            continue
        is_new = config.to_dict() not in seen
        seen.append(config.to_dict())
        if is_new:
            yield Alternative(settings, memory)


def knobs(plan: Plan, *, half: str = "bf16") -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and lower value of settings that may free memory; `half`: the device's type
    of half width.
    """
    for key, after in (*_KNOBS, ("precision.dtype", half)):
        section, _, name = key.partition(".")
        before = getattr(getattr(plan.config, section), name, None)
        if before is not None and (isinstance(after, str) or before > after):
            yield key, before, after


def with_settings(
    config: RunConfig, settings: Mapping[str, Any], *, source: Source | None = None
) -> RunConfig:
    """Return a config with dotted keys set; if a kind changes, the keys of the old kind are gone.

    Raises:
        ConfigError: it is no valid config then.
    """
    values = config.written()
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = _section_at(values, sections)
        # these two decide the kind of their section
        if last in {"device", "dtype"} and place.get(last) != value:
            place.clear()
        place[last] = value
    return config_from_values(values, source=source)


def _section_at(values: dict[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """Return the section of a config's values at a path; sections that are left out are added."""
    first, *inner = sections
    section: dict[str, Any]
    if first in values:
        section = values[first]
    else:
        section = values.setdefault(first, kind_of_default(first))
    for name in inner:
        section = section.setdefault(name, {})
    return section


def settings_text(settings: Mapping[str, Any]) -> str:
    """Write settings in one line, as a config has them."""
    return ", ".join(f"{key}: {show_value(value)}" for key, value in settings.items())


def size_text(size: float) -> str:
    """Write bytes for a person, in MiB or GiB."""
    if size < 1024 * _MIB:
        return f"{size / _MIB:,.1f} MiB"
    return f"{size / 1024 / _MIB:,.2f} GiB"
