"""Has DeepSpeed's Adam for the host take the powers of its betas from the count of steps.

DeepSpeed 0.19.8 multiplies them up from step to step, in fp32, as long as the process lives, and
takes them from the count after a resume (csrc/includes/cpu_adam.h `IncrementStep`): a resumed run
would step by others in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch


def take_powers_of_count(adam: Any) -> None:
    """Have each step of a `DeepSpeedCPUAdam` begin with powers that do not depend on the steps
    before it.
    """
    nothing = torch.empty(0)

    def forget_powers(*_: Any) -> None:
        """Step no number at count 0: from there `IncrementStep` multiplies only to count 1."""
        group = adam.param_groups[0]
        first_beta, second_beta = group["betas"]
        adam.ds_opt_adam.adam_update(
            adam.opt_id,
            0,
            group["lr"],
            first_beta,
            second_beta,
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            nothing,
            nothing,
            nothing,
            nothing,
        )

    adam.register_step_pre_hook(forget_powers)
