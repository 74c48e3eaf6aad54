"""fp32 sums of half-precision gradients at ZeRO stage 1.

For bf16 weights with `data_types.grad_accum_dtype` fp32 DeepSpeed 0.19.8 takes its BF16_Optimizer
there (runtime/engine.py `_do_optimizer_sanity_check`). Its checkpoints cannot go on with other
ranks. The optimizer of stages 1 and 2 sums in fp32 as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION


@contextmanager
def taking_zero_optimizer() -> Iterator[None]:
    """Build engines with ZeRO's own optimizer wherever ZeRO is on, for the time of the block."""
    choose = deepspeed.DeepSpeedEngine._do_optimizer_sanity_check

    def zero_optimizer(engine: deepspeed.DeepSpeedEngine, basic_optimizer: Any) -> Any:
        chosen = choose(engine, basic_optimizer)
        if chosen == BFLOAT16 and engine.zero_optimization():
            return ZERO_OPTIMIZATION
        return chosen

    deepspeed.DeepSpeedEngine._do_optimizer_sanity_check = zero_optimizer
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._do_optimizer_sanity_check = choose
