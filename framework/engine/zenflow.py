"""ZenFlow at ZeRO 1 and 2: DeepSpeed's optimizer, with the steps of the Trainer and a state that is
saved.

What it computes is defined by DeepSpeed 0.19.8 (runtime/zenflow/zenflow_stage_1_and_2.py, Lan et
al. 2025). Of each matrix the columns with the largest gradients are chosen. They, and all vectors,
are stepped at every micro-batch by an AdamW of their own; clipping does not reach them. All
gradients are summed as ever, and at the last micro-batch of a step the host steps every weight,
with the number of micro-batches as its count of steps; then the chosen columns get their own values
back.

Seven things of DeepSpeed's are replaced here:

- Weights lie column by column in the flat tensor that ZeRO steps (zenflow_utils.py
  `_flatten_dense_tensors`), and runtime/zero/stage_1_and_2.py `_update_model_bit16_weights` reads
  them row by row: from the start on every matrix has its numbers in other places, and gradients go
  to others again. Here matrices are read as they lie.
- `update_selected_channels` passes over vectors in a bucket of gradients without their length, and
  chooses columns by the gradients of others. Here it gets a bucket of matrices alone.
- With `offload`, zenflow_torch_adam.py `_step_with_offload` puts the chosen columns back into a
  copy of them, and steps what the host has stepped. Here they are put back into the weight.
- runtime/zenflow/engine.py `is_zenflow_update_boundary` ends a step wherever columns are chosen,
  and in every micro-batch of the warm-up. Here a step has `batch.accumulation_steps` of them.
- `zenflow_step` moves the schedule on with every micro-batch; here with every step.
- The AdamW of the chosen columns has one weight decay for all groups, and the learning rate of the
  micro-batch before; here both are the group's, of now.
- Neither the columns, nor their moments, nor the count of micro-batches are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import deepspeed
import torch
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from torch import Tensor

from framework.checkpoint.state.weight_names import Names
from framework.errors import ConfigError

_OPTIONS: Final = ("lr", "betas", "eps", "weight_decay")
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def refuse_shapes(model: torch.nn.Module) -> None:
    """Refuse weights that are neither vectors nor matrices of several rows.

    Raises:
        ConfigError: kind ``zenflow-shape``.
    """
    for name, weight in model.named_parameters():
        is_known = weight.ndim == 1 or (weight.ndim == 2 and len(weight) > 1)
        if weight.requires_grad and not is_known:
            raise ConfigError.of(
                "zenflow-shape",
                f"the model's weight {name} is of shape {tuple(weight.shape)}, and ZenFlow steps "
                "vectors and matrices of several rows alone (DeepSpeed, zenflow_stage_1_and_2.py "
                "update_selected_channels)",
                "remove zero.offload_optimizer.zenflow",
                "zero.offload_optimizer.zenflow",
            )


def place_in(flat: Tensor, shape: torch.Size, offset: int) -> Tensor:
    """Return the view of a flat tensor, from element `offset` on, that is a weight of this shape:
    column by column.
    """
    return flat.narrow(0, offset, shape.numel()).view(tuple(reversed(shape))).t()


def _bind_weights(optimizer: Any, number: int) -> None:
    """Stand in for `_update_model_bit16_weights`: bind the weights of a group to their places."""
    flat = optimizer.bit16_groups_flat[number]
    rows = zip(
        optimizer.round_robin_bit16_groups[number],
        optimizer.round_robin_bit16_meta[number],
        optimizer.round_robin_bit16_offsets[number],
        strict=True,
    )
    for weight, meta, offset in rows:
        weight.data = place_in(flat, meta.shape, offset).data


@contextmanager
def binding_columns() -> Iterator[None]:
    """Let optimizers that are built within the block bind weights column by column."""
    before = ZenFlowZeroOptimizer._update_model_bit16_weights
    ZenFlowZeroOptimizer._update_model_bit16_weights = _bind_weights
    try:
        yield
    finally:
        ZenFlowZeroOptimizer._update_model_bit16_weights = before


class ZenFlowSteps:
    """Steps of an engine with ZenFlow, and what DeepSpeed does not save of it."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, names: Names) -> None:
        """Replace DeepSpeed's counting of steps; `names` are plain names of the weights."""
        self._engine = engine
        self._optimizer = engine.optimizer
        self._selective = engine.optimizer.selective_optimizer
        self._names = names
        self._begin = self._optimizer.backward_prologue
        self._optimizer.backward_prologue = self._prepare_pass
        self._selective.clear_selected_mv = self._clear_moments
        self._choose_columns = self._optimizer.update_selected_channels
        self._optimizer.update_selected_channels = self._choose
        self._optimizer._update_model_bit16_weights = partial(_bind_weights, self._optimizer)
        for weight in self._weights():
            mapping = getattr(weight, "_hp_mapping", None)
            if mapping is not None:  # a copy of the weight, as it does not lie row by row
                mapping.lp_fragment = None
        engine._is_zenflow_update_boundary = self._ends_step
        engine._zenflow_step = self._step_selected

    def state(self) -> dict[str, Any]:
        """Return what a resumed run goes on with: the count of micro-batches, and for each weight
        by its name the chosen columns, and their moments. It is the same on all ranks.
        """
        weights: dict[str, Any] = {}
        for weight in self._weights():
            if not hasattr(weight, "selected_grad"):  # no columns have been chosen yet
                continue
            entry: dict[str, Any] = {"step": None}
            if getattr(weight, "selected_indices", None) is not None:
                entry["columns"] = [part.cpu() for part in weight.partition_selected_indices]
            moments = self._moments_of(weight)
            if moments:
                entry["step"] = float(self._selective.state[weight]["step"])
                entry |= {key: moment.cpu() for key, moment in moments.items()}
            weights[self._names[weight]] = entry
        return {"micro_step": self._optimizer.micro_step, "weights": weights}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with a state that `state` returned."""
        self._optimizer.micro_step = saved["micro_step"]
        entries = saved["weights"]
        for weight in self._weights():
            entry = entries.get(self._names[weight])
            if entry is not None:
                self._load_weight(weight, entry)

    def _load_weight(self, weight: Any, entry: Mapping[str, Any]) -> None:
        weight.selected_grad = None
        weight.temp_selected_param = None
        weight.selected_indices = None
        if "columns" in entry:
            parts = [part.to(weight.device) for part in entry["columns"]]
            weight.partition_selected_indices = parts
            weight.selected_indices = torch.cat(parts)
            weight.selected_shape = (len(weight.selected_indices), weight.shape[0])
        if entry["step"] is None:
            return
        step = torch.tensor(entry["step"], dtype=torch.float32, device=weight.device)
        state = {"step": step}
        for key in _MOMENTS:
            if self._selective.offload:
                moment = self._on_host(entry[key])
                setattr(weight, f"{key}_cpu_data", moment)
            else:
                state[key] = entry[key].to(weight.device)
        self._selective.state[weight] = state

    def _on_host(self, moment: torch.Tensor) -> torch.Tensor:
        """Return a moment in the host's memory, pinned if the optimizer's is."""
        copy = moment.clone()
        if self._optimizer.cpu_offload_pin_memory:
            pinned: torch.Tensor = deepspeed.accelerator.get_accelerator().pin_memory(copy)
            return pinned
        return copy

    def _moments_of(self, weight: Any) -> dict[str, torch.Tensor]:
        """Return the moments of a weight's chosen columns by name; empty before their first
        step.
        """
        state = self._selective.state.get(weight)
        if not state:
            return {}
        if self._selective.offload:
            return {key: getattr(weight, f"{key}_cpu_data") for key in _MOMENTS}
        return {key: state[key] for key in _MOMENTS}

    def _clear_moments(self) -> None:
        """Stand in for `clear_selected_mv`, which also prints a line on every rank."""
        for weight in self._weights():
            for moment in self._moments_of(weight).values():
                moment.zero_()

    def _weights(self) -> Iterator[Any]:
        for group in self._optimizer.bit16_groups:
            yield from group

    def _prepare_pass(self) -> None:
        """Stand in for the optimizer's `backward_prologue`: chosen columns are stepped within the
        pass, with their groups' options of now.
        """
        groups = zip(self._selective.param_groups, self._optimizer.param_groups, strict=True)
        for selective_group, group in groups:
            selective_group.update({key: group[key] for key in _OPTIONS})
        self._begin()

    def _choose(self, bucket: Tensor, num_columns: int, dtype: torch.dtype) -> None:
        """Stand in for `update_selected_channels`: choose columns by a bucket of gradients, one
        weight after the other.
        """
        matrices: list[Tensor] = []
        start = 0
        for group, index, _ in self._optimizer.ipg_buckets[dtype].params:
            weight = self._optimizer.bit16_groups[group][index]
            if weight.ndim > 1:
                matrices.append(bucket.narrow(0, start, weight.numel()))
            start += weight.numel()
        if matrices:
            self._choose_columns(torch.cat(matrices), num_columns, dtype)

    def _ends_step(self) -> bool:
        """Stand in for the engine's `_is_zenflow_update_boundary`."""
        engine = self._engine
        size = int(engine.gradient_accumulation_steps())
        return int(engine.micro_steps + 1) % size == 0

    def _step_selected(self, lr_kwargs: Any) -> None:
        """Stand in for the engine's `_zenflow_step`, after the host's step: put the chosen columns
        back and step them.
        """
        has_chosen = self._optimizer.micro_step >= self._optimizer.full_warm_up_rounds
        if not self._ends_step() or not has_chosen:
            return
        if self._selective.offload:
            for weight in self._weights():
                _put_back(weight)
        self._optimizer.selective_optimizer_step()


def _put_back(weight: Any) -> None:
    """Give the chosen columns of a weight the values that they had before the host's step."""
    values = getattr(weight, "temp_selected_param", None)
    if values is None:
        return
    if weight.ndim == 1:
        weight.data.copy_(values)
    else:
        weight.data[:, weight.selected_indices] = values.to(weight.device)
