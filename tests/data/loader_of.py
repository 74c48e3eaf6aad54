"""Loaders for tests, built of flat options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from framework.data.loaders import Reading, TrainLoader
from framework.data.order import Ordering, Share
from framework.data.streams import StreamLoader


def _of(kind: type[Any], options: dict[str, Any]) -> Any:
    """Build a dataclass of the options with the names of its fields, and take them out."""
    names = [field.name for field in fields(kind) if field.name in options]
    return kind(**{name: options.pop(name) for name in names})


def train_loader(dataset: Any, **options: Any) -> TrainLoader:
    """A loader; options are fields of `Share`, `Reading` and `Ordering`."""
    loader = TrainLoader(
        dataset,
        share=_of(Share, options),
        reading=_of(Reading, options),
        ordering=_of(Ordering, options),
    )
    assert not options
    return loader


def stream_loader(
    dataset: Any,
    *,
    share: Share,
    seed: int = 0,
    lanes: Any = None,
    places: Any = None,
    **reading: Any,
) -> StreamLoader:
    """A loader of a stream; further options are fields of `Reading`."""
    return StreamLoader(
        dataset,
        share=share,
        reading=Reading(seed, **{"random_samples": True, **reading}),
        lanes=lanes,
        places=places,
    )
