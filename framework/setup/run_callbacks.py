"""The callbacks of a run, from the config or handed over, checked before one is called."""

from __future__ import annotations

import inspect
from typing import Any, Final

from framework.config.base import Target
from framework.config.run_config import RunConfig
from framework.errors import ConfigError
from framework.setup.user_code import (
    Objects,
    call_factory,
    takes,
    type_name,
)
from framework.system.log import warn
from framework.train.callbacks import EVENTS
from framework.train.metric_watch import EarlyStopping, ReduceOnPlateau

_BUILT_IN_CALLBACKS: Final = {"early_stopping": EarlyStopping, "reduce_on_plateau": ReduceOnPlateau}


def checked_callbacks(config: RunConfig, objects: Objects) -> tuple[Any, ...]:
    """Return the callbacks of the config, then those that were handed over.

    Raises:
        ConfigError: kinds ``callback-without-events``, ``callback-event``.
    """
    named: list[tuple[str, str, Any]] = []  # key in the config, name, callback
    for number, section in enumerate(config.callbacks):
        key = f"callbacks.{number}"
        if isinstance(section, Target):
            named.append((key, section.target, call_factory(section.factory(), key=key)))
        else:
            build = _BUILT_IN_CALLBACKS[section.kind]
            named.append((key, section.kind, build(**section.model_dump(exclude={"kind"}))))
    for number, callback in enumerate(objects.callbacks):
        named.append((f"callbacks.{number}", type_name(callback), callback))
    for key, name, callback in named:
        _refuse_without_events(callback, key, name)
        check_events(callback, key, name)
    return tuple(callback for _, _, callback in named)


def _refuse_without_events(callback: Any, key: str, name: str) -> None:
    if inspect.isclass(callback):
        raise ConfigError.of(
            "callback-without-events", "it is a class", "hand over an object of it", key, name
        )
    if not any(callable(getattr(callback, event, None)) for event in EVENTS):
        fix = f"give it one of {', '.join(EVENTS)}"
        raise ConfigError.of(
            "callback-without-events", "it has no method of an event", fix, key, name
        )


def _why_not_called(method: Any, event: str) -> str:
    """Return why the method of an event cannot be called, or empty text."""
    if not callable(method):
        return ""
    if inspect.iscoroutinefunction(method):
        return f"{event} is a coroutine, and nothing awaits it"
    if not takes(method, {}, positional=1):
        return f"{event} cannot be called with one argument, the state"
    return ""


def check_events(callback: Any, key: str, name: str) -> None:
    """Refuse methods of events that cannot be called with the state alone, and name methods that
    look like events and are none: both would show when the event comes, after hours.

    A callback is not called to try it: what it does (files, messages, states) is meant for real
    events.

    Raises:
        ConfigError: kind ``callback-event``.
    """
    for event in EVENTS:
        reason = _why_not_called(getattr(callback, event, None), event)
        if reason:
            raise ConfigError.of(
                "callback-event", reason, f"write def {event}(self, state)", key, name
            )
    for attribute in dir(type(callback)):
        if not attribute.startswith("on_") or attribute in EVENTS:
            continue
        from deepspeed_lint.text.typos import nearest

        similar = nearest(attribute, EVENTS)
        if similar:
            line = f"{key} = {name}: {attribute} is no event; is {similar} meant? [callback-event]"
            warn(line, is_of_all_ranks=True)
