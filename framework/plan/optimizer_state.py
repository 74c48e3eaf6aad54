"""`OptimizerState`: bytes of an optimizer, as the planner derives or measures them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerState:
    """Memory of an optimizer for each element that it steps.

    Attributes:
        bytes_per_element: of what it keeps from step to step.
        step_bytes_per_element: of what it takes while it steps, the gradient not counted.
    """

    bytes_per_element: float
    step_bytes_per_element: int = 0
