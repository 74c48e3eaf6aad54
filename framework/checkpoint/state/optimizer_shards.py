"""The fp32 weights and optimizer state that this rank holds, as writable pieces of whole tensors,
at any ZeRO stage.

DeepSpeed keeps them flattened, padded and cut in a way that depends on stage and number of ranks.
Here each piece says which part of which parameter it is, so that it can be filled from a checkpoint
of any other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import deepspeed
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

FP32: Final = "fp32"
EMA_KEY: Final = "weight_ema"
"""Key of the moving average of the weights among the state of a parameter."""
_ADAM: Final = {"exp_avg", "exp_avg_sq"}
# By the names of the classes, torch's and DeepSpeed's.
_KEYS: Final[Mapping[str, set[str]]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "FusedAdam": _ADAM,
    "DeepSpeedCPUAdam": _ADAM,
    "Adagrad": {"sum"},
    "DeepSpeedCPUAdagrad": {"exp_avg_sq"},
    "FusedLion": {"exp_avg"},
    "DeepSpeedCPULion": {"exp_avg"},
}
# Adafactor's: the dimension that is one, of a weight that is stepped whole.
_FACTORED: Final = {"row_var": -1, "col_var": -2}
Names = Mapping[torch.Tensor, str]
"""Parameters and saved buffers of a rank's modules -> their names in the plain module."""


def names_of(module: torch.nn.Module, plain: Callable[[str], str] = str) -> Names:
    """Name its parameters and saved buffers; `plain` turns a name within it into that of the plain
    module.
    """
    saved = module.state_dict(keep_vars=True)
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name in saved)
    return {tensor: plain(name) for name, tensor in (*module.named_parameters(), *buffers)}


def stepped_groups(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """The parameters that an optimizer steps, group by group, in its own order: the model's own at
    stage 0 only.
    """
    # and of bf16: its groups hold copies
    if isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return [list(group) for group in optimizer.fp16_groups]
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", [])]


def _shape_of_state(key: str, shape: torch.Size) -> list[int]:
    found = list(shape)
    if key in _FACTORED:
        found[_FACTORED[key]] = 1
    return found


@contextmanager
def opened(optimizer: Any) -> Iterator[None]:
    """Within it what an optimizer holds may be changed: at stage 3 nothing of a weight is whole
    meanwhile. Collective.

    After an error it stays open: closing is collective as well, and the other ranks are elsewhere.
    """
    if hasattr(optimizer, "checkpoint_event_prologue"):
        optimizer.checkpoint_event_prologue()
    yield
    if hasattr(optimizer, "checkpoint_event_epilogue"):
        optimizer.checkpoint_event_epilogue()


@dataclass(frozen=True)
class View:
    """A piece of one tensor of one parameter.

    Attributes:
        name: the parameter's name in the plain module.
        key: ``fp32`` for the weight itself, otherwise a key of the optimizer's state, such as
            ``exp_avg``.
        start: where the piece begins in the flattened tensor.
        values: the piece, one-dimensional, writable.
    """

    name: str
    key: str
    start: int
    values: torch.Tensor


class OptimizerViews:
    """Pieces of one engine's optimizer."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, names: Names) -> None:
        """Take the engine and the plain names of its parameters."""
        self._optimizer = engine.optimizer
        self._names = names
        self._base = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def known_keys(self) -> set[str] | None:
        """Keys of the state that this optimizer keeps of every number; None for one that is not
        known here.
        """
        options = self._base.param_groups[0]
        if type(self._base).__name__ == "SGD":
            if options.get("momentum"):
                return {"momentum_buffer"}
            return set()
        if options.get("amsgrad"):
            return None
        return _KEYS.get(type(self._base).__name__)

    def views(
        self, keys: Sequence[str], *, keys_of: Callable[[str], Sequence[str]] | None = None
    ) -> Iterator[View]:
        """All pieces of this rank: ``fp32``, and `keys` of the optimizer's state, made of zeros
        where it has none; of each parameter those that `keys_of` its name returns.
        """
        pieces = list(self._pieces())
        own = {each: keys if keys_of is None else keys_of(self._names[each]) for each, *_ in pieces}
        needed: dict[torch.Tensor, list[str]] = {}
        for parameter, stepped, *_ in pieces:
            needed.setdefault(stepped, []).extend(own[parameter])
        for stepped, _ in self._stepped():
            state = self._base.state[stepped]
            for key in needed.get(stepped, keys):  # nothing but padding is stepped with all
                if key not in state:
                    state[key] = stepped.data.new_zeros(_shape_of_state(key, stepped.shape))
        for parameter, stepped, start, offset, count in pieces:
            name = self._names[parameter]
            yield View(name, FP32, start, stepped.data.view(-1).narrow(0, offset, count))
            for key in own[parameter]:
                held = self._base.state[stepped][key].view(-1)
                yield View(
                    name, key, start, held if key in _FACTORED else held.narrow(0, offset, count)
                )

    def _pieces(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter, int, int, int]]:
        """A parameter, the tensor that is stepped for it, where this rank's piece begins in either,
        and its length.
        """
        optimizer = self._optimizer
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            # Stage 3: parameters are cut into equal pieces, the last one padded; a sub-group lays
            # its pieces in a row.
            rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
            for group, flat in zip(
                optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True
            ):
                offset = 0
                for parameter in group:
                    size = parameter.partition_numel()
                    own = min(size, parameter.ds_numel - size * rank)
                    if own > 0:
                        yield parameter, flat, size * rank, offset, own
                    offset += size
        elif fragments := self._fragments():
            # Stages 1 and 2: a row of parameters, of which every rank has an equal part.
            # `_hp_mapping` is of another order where gradients go round robin.
            for number, (group, flat) in enumerate(zip(*fragments, strict=True)):
                offset = -flat.numel() * torch.distributed.get_rank(
                    group=optimizer.real_dp_process_group[number]
                )
                for parameter in group:
                    start = max(offset, 0)
                    stop = min(offset + parameter.numel(), flat.numel())
                    if start < stop:
                        yield parameter, flat, start - offset, start, stop - start
                    offset += parameter.numel()
        elif hasattr(optimizer, "fp32_groups_flat"):
            # Half precision at stage 0 with DeepSpeed's FusedAdam: the fp32 copies of a group lie
            # end to end.
            for group, flat in zip(
                stepped_groups(optimizer), optimizer.fp32_groups_flat, strict=True
            ):
                offset = 0
                for parameter in group:
                    yield parameter, flat, 0, offset, parameter.numel()
                    offset += parameter.numel()
        else:
            # In half precision the optimizer steps fp32 copies, which have no name of their own.
            for parameter, (copy, _) in zip(
                chain(*stepped_groups(optimizer)), self._stepped(), strict=True
            ):
                yield parameter, copy, 0, 0, copy.numel()

    def set_steps(self, step_of: Callable[[str], float | None]) -> None:
        """Tell the optimizer how many steps it has taken of each weight, by the weight's name; what
        was never stepped (None) has no state.
        """
        names: dict[torch.Tensor, list[str]] = {}
        for parameter, stepped, *_ in self._pieces():
            names.setdefault(stepped, []).append(self._names[parameter])
        of_group = {
            id(group): [self._names[parameter] for parameter in members]
            for group, members in zip(self._base.param_groups, self._members(), strict=True)
        }
        for parameter, options in self._stepped():
            # A rank may have nothing but the padding of a row.
            steps = map(step_of, names.get(parameter) or of_group[id(options)])
            step = max((each for each in steps if each is not None), default=None)
            if step is None:
                self._base.state.pop(parameter, None)
                continue
            state = self._base.state[parameter]
            known = state.get("step")
            as_tensor = isinstance(known, torch.Tensor) or (
                known is None and type(self._base).__module__.startswith(("torch.", "framework."))
            )
            # As torch makes it: these two read it in kernels, where a tensor of the host is an
            # illegal address.
            is_on_device = options.get("fused") or options.get("capturable")
            if is_on_device:
                where = parameter.device
            else:
                where = torch.device("cpu")
            state["step"] = torch.tensor(float(step), device=where) if as_tensor else int(step)

    def set_groups(self, group_of: Callable[[str], Mapping[str, Any] | None]) -> None:
        """Put back what a schedule, or the optimizer itself, has changed in the parameter groups
        (rate, momentum).

        A stage of a pipeline has only the groups that it has weights for: they are told by the
        weights, by `group_of`: name of a parameter -> options of the group that it was in; None
        where that is not known.
        """
        for own, members in zip(self._base.param_groups, self._members(), strict=True):
            own.update(
                next(filter(None, (group_of(self._names[parameter]) for parameter in members)), {})
            )

    def _members(self) -> list[list[torch.nn.Parameter]]:
        """The model's parameters behind each group of the wrapped optimizer."""
        optimizer = self._optimizer
        # stage 3 cuts groups into sub-groups
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            members: list[list[torch.nn.Parameter]] = [[] for _ in self._base.param_groups]
            for number, part in enumerate(optimizer.fp16_groups):
                members[optimizer.sub_group_to_group_id[number]] += part
            return members
        fragments = self._fragments()
        if fragments is None:
            return stepped_groups(optimizer)
        return [list(group) for group in fragments[0]]

    def set_loss_scale(self, values: Mapping[str, float]) -> None:
        """Put back fp16's dynamic loss scale and its counters, where this optimizer has one that
        moves.
        """
        holder = getattr(self._optimizer, "loss_scaler", None) or getattr(
            self._optimizer, "loss_scale_config", None
        )
        if isinstance(holder, DynamicLossScaler) or getattr(holder, "dynamic_loss_scale", False):
            for name, value in values.items():
                if hasattr(holder, name):
                    setattr(holder, name, value)

    @torch.no_grad()
    def spread_weights(self) -> set[torch.Tensor]:
        """Give the model the weights that the optimizer has, as DeepSpeed does at the end of a
        step. Collective.

        Returns:
            Those of the model that are whole, and now as they shall be.
        """
        optimizer = self._optimizer
        fragments = self._fragments()
        if fragments is not None:  # stages 1 and 2, bf16 pipelines
            optimizer.update_lp_params()
            return set(chain(*fragments[0]))
        # stage 3
        for number, flat in enumerate(getattr(optimizer, "fp32_partitioned_groups_flat", ())):
            low = optimizer.fp16_partitioned_groups_flat[number]
            if flat.numel():
                low.copy_(flat)
            pieces = optimizer.unflatten(low, optimizer.fp16_partitioned_groups[number])
            for partition, piece in zip(
                optimizer.fp16_partitioned_groups[number], pieces, strict=True
            ):
                partition.data = piece.data
        if not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            return set()
        for group, flat in zip(
            optimizer.fp16_groups, getattr(optimizer, "fp32_groups_flat", ()), strict=False
        ):
            for parameter, weights in zip(
                group, flat.split([one.numel() for one in group]), strict=True
            ):
                parameter.copy_(weights.view_as(parameter))
        for group, copies in zip(
            optimizer.fp16_groups, getattr(optimizer, "fp32_groups", ()), strict=False
        ):
            torch._foreach_copy_(group, copies)
        return set(chain(*optimizer.fp16_groups))

    def _stepped(self) -> Iterator[tuple[torch.nn.Parameter, Mapping[str, Any]]]:
        """Tensors that the wrapped optimizer steps (flat pieces, or the model's own parameters),
        and their groups.
        """
        optimizer = self._optimizer
        groups = self._base.param_groups
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
                yield flat, groups[optimizer.sub_group_to_group_id[number]]
            return
        for group in groups:
            for parameter in group["params"]:
                yield parameter, group

    def _fragments(self) -> tuple[Any, Any] | None:
        """At stages 1 and 2: the model's parameters group by group, and this rank's flat piece of
        each group.
        """
        for groups, flats in (
            ("round_robin_bit16_groups", "single_partition_of_fp32_groups"),
            ("bf16_groups", "fp32_groups_flat_partition"),
        ):
            if hasattr(self._optimizer, flats):
                return getattr(self._optimizer, groups), getattr(self._optimizer, flats)
        return None
