"""Perplexity, the one metric of language models that is no ratio of sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

# exp of more than this is no float any more.
_LARGEST_EXPONENT: Final = 709.0


def perplexity_of(metrics: Mapping[str, float], *, loss: str) -> dict[str, float]:
    """``{"perplexity": exp(metrics[loss])}``; infinite where a float ends, nothing where the loss was not measured."""
    if loss not in metrics:
        return {}
    nats = metrics[loss]
    return {"perplexity": math.inf if nats > _LARGEST_EXPONENT else math.exp(nats)}
