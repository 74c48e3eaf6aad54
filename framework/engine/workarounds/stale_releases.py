"""Lets ZeRO stage 3 keep weights from the forward to the backward pass, where an evaluation came
before the first step.

DeepSpeed 0.19.8 notes in which order modules run, and releases a weight unless a module that comes
soon needs it. What it releases is kept for good by module and position (an `lru_cache` of
runtime/zero/partitioned_param_coordinator.py `__params_to_release`), and not forgotten with the
order: after a pass that was forward alone, every later step released all weights in the forward
pass, and gathered them again in the backward pass.
"""

from __future__ import annotations

from typing import Any

from framework.engine.workarounds.left_by_stage_3 import forget_releases


def forget_releases_with_order(coordinator: Any) -> None:
    """Have a coordinator of stage 3 forget what it releases where it forgets the order."""
    invalidate = coordinator._invalidate_trace

    def forget() -> None:
        forget_releases()
        invalidate()

    coordinator._invalidate_trace = forget
