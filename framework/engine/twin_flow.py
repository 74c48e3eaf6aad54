"""Twin-Flow: `zero.offload_optimizer.ratio` below 1 keeps the state of the first sub-groups of
weights on the device, which steps them, and the host steps the others (ZeRO-Offload++).

DeepSpeed 0.19.8 steps the part on the device by an AdamW of its own (runtime/zero/stage3.py,
`backup_optimizer`). It is made with the learning rate at the start and the options of the first
parameter group, which no schedule moves, and its moments are in no checkpoint. Here that part is
stepped with the groups and the state of DeepSpeed's Adam for the host, so that schedules, hooks,
checkpoints and moves know one optimizer.
"""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import torch

from framework.system.log import warn

_KEPT_OPTIONS = ("lr", "betas", "eps", "weight_decay")


def join_parts(engine: deepspeed.DeepSpeedEngine) -> None:
    """Let one optimizer step both parts of the weights of an engine at stage 3, and warn if there
    is none on the device.
    """
    zero = engine.optimizer
    base = zero.optimizer
    on_device = set()
    for number, device in zero.subgroup_to_device.items():
        if device != "cpu":
            on_device.add(zero.fp32_partitioned_groups_flat[number])
    zero.backup_optimizer = base
    if on_device:
        step = _DeviceStep(base, on_device)
        base.step = functools.wraps(base.step)(functools.partial(step, base.step))
        return
    if engine.device.type == "cpu":
        return  # a rule of the plan has warned
    num_parts = len(zero.subgroup_to_device)
    warn(
        f"zero.offload_optimizer.ratio = {zero.partial_offload}: of {num_parts} sub-groups of "
        "weights none stays on the device, and the host steps all; lower zero.sub_group_size, "
        "which is the most elements of a sub-group [no-part-on-device]"
    )


class _DeviceStep:
    """A step of DeepSpeed's Adam for the host that takes weights on the device as well."""

    def __init__(self, base: Any, on_device: set[torch.Tensor]) -> None:
        """Take the optimizer for the host, and the tensors that it cannot step."""
        self._base = base
        self._on_device = on_device
        make = torch.optim.AdamW if base.adam_w_mode else torch.optim.Adam
        self._torch_adam = make([torch.nn.Parameter(torch.zeros(1))])

    def __call__(self, step_on_host: Any, *arguments: Any, **named: Any) -> Any:
        """Step the weights that are in the groups now: DeepSpeed puts one sub-group there."""
        weights = [weight for group in self._base.param_groups for weight in group["params"]]
        if not self._on_device.intersection(weights):
            return step_on_host(*arguments, **named)
        base = self._base
        for hook in base._optimizer_step_pre_hooks.values():
            hook(base, arguments, named)
        self._step_on_device()
        for hook in base._optimizer_step_post_hooks.values():
            hook(base, arguments, named)
        return None

    def _step_on_device(self) -> None:
        """Take torch's step, on the state of the optimizer for the host, which counts steps as
        numbers.
        """
        groups = []
        for group in self._base.param_groups:
            options = {name: group[name] for name in _KEPT_OPTIONS}
            groups.append({**self._torch_adam.defaults, **options, "params": group["params"]})
            for weight in group["params"]:
                state = self._base.state[weight]
                if "step" in state and not isinstance(state["step"], torch.Tensor):
                    state["step"] = torch.tensor(float(state["step"]))
        self._torch_adam.param_groups = groups
        self._torch_adam.state = self._base.state
        self._torch_adam.step()
