"""The fp32 weights and optimizer state that this rank holds, as writable pieces of whole tensors,
at any ZeRO stage.

DeepSpeed keeps them flattened, padded and cut in a way that depends on stage and number of ranks.
A `View` has the part and the parameter of each piece, so that the piece can be filled from a
checkpoint of any other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import deepspeed
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from framework.checkpoint.state.schedule_free import AHEAD_KEY
from framework.checkpoint.state.swapped import swapped_groups, swapped_in
from framework.checkpoint.state.weight_names import Names, stepped_groups

FP32: Final = "fp32"
EMA_KEY: Final = "weight_ema"
"""Key of the moving average of the weights among the state of a parameter."""
_ADAM: Final = {"exp_avg", "exp_avg_sq"}
# Class name, torch's or DeepSpeed's -> keys of its state.
_KEYS: Final[Mapping[str, set[str]]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "FusedAdam": _ADAM,
    "DeepSpeedCPUAdam": _ADAM,
    "Lamb": _ADAM,
    "Adagrad": {"sum"},
    "DeepSpeedCPUAdagrad": {"exp_avg_sq"},
    "ScheduleFreeAdamW": {"exp_avg_sq", AHEAD_KEY},
    "Lion": {"exp_avg"},
    "FusedLion": {"exp_avg"},
    "DeepSpeedCPULion": {"exp_avg"},
}
ROW_VAR: Final = "row_var"
COL_VAR: Final = "col_var"
VARIANCE: Final = "variance"
# Adafactor's state of a matrix: key -> the dimension of size one.
_FACTORED: Final = {ROW_VAR: -1, COL_VAR: -2}
ADAFACTOR_KEYS: Final = frozenset({ROW_VAR, COL_VAR, VARIANCE})


def whole_key(key: str, number: int) -> str:
    """Return the key of state that is kept of a whole weight, beside a rank's share of the weights
    that are stepped as one tensor: `number` is the weight's among them.
    """
    return f"{key}.{number}"


def is_whole_key(key: str) -> bool:
    """Check whether state is kept of a whole weight, by its key (`whole_key`)."""
    name, _, number = key.partition(".")
    return name in ADAFACTOR_KEYS and number.isdigit()


def _shape_of_state(key: str, shape: torch.Size) -> list[int]:
    """Return the shape of the state `key` for a weight of this shape."""
    sizes = list(shape)
    if key in _FACTORED:
        sizes[_FACTORED[key]] = 1
    return sizes


def type_of_average(stepped: torch.Tensor) -> torch.dtype:
    """Return the type of the moving average of a tensor that is stepped: in half precision an
    average would hardly move.
    """
    return torch.promote_types(stepped.dtype, torch.float32)


@dataclass(frozen=True)
class ParameterPiece:
    """This rank's piece of a parameter.

    Attributes:
        parameter: the model's.
        stepped: the tensor that the optimizer steps for it.
        start: where the piece begins in the parameter.
        offset: where it begins in the stepped tensor.
        num: how many numbers it has.
    """

    parameter: torch.nn.Parameter
    stepped: torch.nn.Parameter
    start: int
    offset: int
    num: int


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
        """Return the keys of the state that this optimizer keeps of every number; None for an
        unknown optimizer.
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
        """Yield all pieces of this rank: ``fp32``, and `keys` of the optimizer's state, made of
        zeros if it has none. `keys_of` limits the keys of a parameter, by its name. What lies on
        NVMe is in memory until the next piece is asked for.
        """
        pieces: dict[torch.Tensor, list[ParameterPiece]] = {}
        keys_by_name: dict[str, Sequence[str]] = {}
        needed: dict[torch.Tensor, list[str]] = {}
        for piece in self._pieces():
            name = self._names[piece.parameter]
            keys_by_name[name] = keys if keys_of is None else keys_of(name)
            pieces.setdefault(piece.stepped, []).append(piece)
            needed.setdefault(piece.stepped, []).extend(keys_by_name[name])
        for number, (stepped, _) in enumerate(self._stepped_tensors()):
            with swapped_in(self._optimizer, number, writes=True):
                # A tensor without a piece is nothing but padding; it is stepped with all keys.
                self._add_state(stepped, needed.get(stepped, keys))
                for piece in pieces.get(stepped, ()):
                    name = self._names[piece.parameter]
                    yield from self._views_of(piece, name, keys_by_name[name])

    def _views_of(self, piece: ParameterPiece, name: str, keys: Sequence[str]) -> Iterator[View]:
        weights = piece.stepped.data.view(-1).narrow(0, piece.offset, piece.num)
        yield View(name, FP32, piece.start, weights)
        for key in keys:
            values = self._base.state[piece.stepped][key].view(-1)
            if key not in _FACTORED:
                values = values.narrow(0, piece.offset, piece.num)
            yield View(name, key, piece.start, values)

    def _add_state(self, stepped: torch.nn.Parameter, keys: Sequence[str]) -> None:
        state = self._base.state[stepped]
        dtype = stepped.dtype
        # DeepSpeed's optimizers on the host keep moments in fp32 beside weights in half precision
        if getattr(self._base, "fp32_optimizer_states", False):
            dtype = torch.float32
        for key in keys:
            if key not in state:
                shape = _shape_of_state(key, stepped.shape)
                kept_as = type_of_average(stepped) if key == EMA_KEY else dtype
                state[key] = stepped.data.new_zeros(shape, dtype=kept_as)

    def piece_of(self, parameter: torch.nn.Parameter) -> ParameterPiece | None:
        """Return this rank's piece of a parameter; None if this rank steps none of it."""
        for piece in self._pieces():
            if piece.parameter is parameter:
                return piece
        return None

    def is_stepped(self, parameter: torch.nn.Parameter) -> bool:
        """Check whether the optimizer steps a parameter of the model, on this rank or on others."""
        return any(parameter is member for member in chain(*self._members()))

    def _pieces(self) -> Iterator[ParameterPiece]:
        """Yield this rank's pieces of the parameters, as the ZeRO stage lays them."""
        optimizer = self._optimizer
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            yield from self._stage3_pieces()
        elif self._groups_and_flats():
            yield from self._stage12_pieces()
        elif hasattr(optimizer, "fp32_groups_flat"):
            # Half precision at stage 0 with DeepSpeed's FusedAdam: the fp32 copies of a group lie
            # end to end.
            flats = optimizer.fp32_groups_flat
            for group, flat in zip(stepped_groups(optimizer), flats, strict=True):
                offset = 0
                for parameter in group:
                    yield ParameterPiece(parameter, flat, 0, offset, parameter.numel())
                    offset += parameter.numel()
        else:
            # In half precision the optimizer steps fp32 copies, which have no name of their own.
            parameters = chain(*stepped_groups(optimizer))
            for parameter, (copy, _) in zip(parameters, self._stepped_tensors(), strict=True):
                yield ParameterPiece(parameter, copy, 0, 0, copy.numel())

    def _stage3_pieces(self) -> Iterator[ParameterPiece]:
        """Yield the pieces of stage 3: parameters are cut into equal pieces, the last one padded; a
        sub-group lays its pieces in a row.
        """
        optimizer = self._optimizer
        flats = optimizer.fp32_partitioned_groups_flat
        for group, flat in zip(optimizer.fp16_groups, flats, strict=True):
            offset = 0
            for parameter in group:
                size = parameter.partition_numel()
                rank = torch.distributed.get_rank(group=parameter.ds_process_group)
                num = min(size, parameter.ds_numel - size * rank)
                if num > 0:
                    yield ParameterPiece(parameter, flat, size * rank, offset, num)
                offset += size

    def _stage12_pieces(self) -> Iterator[ParameterPiece]:
        """Yield the pieces of stages 1 and 2: the parameters of a group lie in a row, and every
        rank has an equal part of it. DeepSpeed's `_hp_mapping` of a parameter does not serve: it is
        of another order if gradients go round robin.
        """
        groups_and_flats = self._groups_and_flats()
        assert groups_and_flats is not None
        process_groups = self._optimizer.real_dp_process_group
        for number, (group, flat) in enumerate(zip(*groups_and_flats, strict=True)):
            # Where the parameter begins in this rank's part; negative if in an earlier rank's.
            offset = -flat.numel() * torch.distributed.get_rank(group=process_groups[number])
            for parameter in group:
                start = max(offset, 0)
                stop = min(offset + parameter.numel(), flat.numel())
                if start < stop:
                    yield ParameterPiece(parameter, flat, start - offset, start, stop - start)
                offset += parameter.numel()

    def set_steps(self, step_of: Callable[[str], float | None]) -> None:
        """Set the number of steps that the optimizer has taken of each weight, by the weight's
        name; a weight that was never stepped (None) has no state.
        """
        for stepped, group, names in self._stepped_names():
            steps = [step_of(name) for name in names]
            most = max((step for step in steps if step is not None), default=None)
            if most is None:
                self._base.state.pop(stepped, None)
            else:
                self._set_step(stepped, group, most)

    def set_scalars(self, scalars_of: Callable[[str], Mapping[str, torch.Tensor]]) -> None:
        """Set the single numbers that the optimizer keeps of a weight beside its steps (NAdam's
        `mu_product`), by the weight's name.
        """
        for stepped, _, names in self._stepped_names():
            state = self._base.state.get(stepped, {})
            device = getattr(state.get("step"), "device", torch.device("cpu"))
            for name in names:
                for key, value in scalars_of(name).items():
                    state[key] = value.to(device, copy=True)

    def _stepped_names(
        self,
    ) -> Iterator[tuple[torch.nn.Parameter, Mapping[str, Any], list[str]]]:
        """Yield each stepped tensor with its group and the names of the weights in it."""
        names: dict[torch.Tensor, list[str]] = {}
        for piece in self._pieces():
            names.setdefault(piece.stepped, []).append(self._names[piece.parameter])
        names_in_group: dict[int, list[str]] = {}
        for group, members in zip(self._base.param_groups, self._members(), strict=True):
            names_in_group[id(group)] = [self._names[parameter] for parameter in members]
        for stepped, group in self._stepped_tensors():
            # A rank may have nothing but the padding of a row.
            yield stepped, group, names.get(stepped) or names_in_group[id(group)]

    def _set_step(self, stepped: torch.nn.Parameter, group: Mapping[str, Any], step: float) -> None:
        """Set the number of steps of one tensor, in the type and place that its optimizer reads."""
        state = self._base.state[stepped]
        known = state.get("step")
        is_tensor = isinstance(known, torch.Tensor)
        if known is None:
            is_tensor = type(self._base).__module__.startswith(("torch.", "framework."))
        if not is_tensor:
            state["step"] = int(step)
            return
        # As torch makes it: fused and capturable optimizers read it in kernels, where a tensor of
        # the host is an illegal address.
        if group.get("fused") or group.get("capturable"):
            device = stepped.device
        else:
            device = torch.device("cpu")
        state["step"] = torch.tensor(float(step), device=device)

    def set_groups(self, group_of: Callable[[str], Mapping[str, Any] | None]) -> None:
        """Put back the options of parameter groups (rate, momentum) that a schedule, or the
        optimizer itself, has changed.

        A stage of a pipeline has only the groups that it has weights for, and a group is found by
        its weights. `group_of` returns the options of the group that a parameter, by its name, was
        in; None if that is not known.
        """
        for group, members in zip(self._base.param_groups, self._members(), strict=True):
            for parameter in members:
                options = group_of(self._names[parameter])
                if options:
                    group.update(options)
                    break

    def _members(self) -> list[list[torch.nn.Parameter]]:
        """Return the model's parameters behind each group of the wrapped optimizer."""
        optimizer = self._optimizer
        # stage 3 cuts groups into sub-groups
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            members: list[list[torch.nn.Parameter]] = [[] for _ in self._base.param_groups]
            for number, sub_group in enumerate(optimizer.fp16_groups):
                members[optimizer.sub_group_to_group_id[number]] += sub_group
            return members
        groups_and_flats = self._groups_and_flats()
        if groups_and_flats is None:
            return stepped_groups(optimizer)
        return [list(group) for group in groups_and_flats[0]]

    def set_loss_scale(self, values: Mapping[str, float]) -> None:
        """Put back fp16's dynamic loss scale and its counters, if this optimizer has a dynamic
        one.
        """
        scaler = getattr(self._optimizer, "loss_scaler", None)
        if not scaler:
            scaler = getattr(self._optimizer, "loss_scale_config", None)
        if isinstance(scaler, DynamicLossScaler) or getattr(scaler, "dynamic_loss_scale", False):
            for name, value in values.items():
                if hasattr(scaler, name):
                    setattr(scaler, name, value)

    @torch.no_grad()
    def spread_weights(
        self, change_swapped: Callable[[torch.Tensor], None] | None = None
    ) -> set[torch.Tensor]:
        """Copy the optimizer's weights into the model, as DeepSpeed does at the end of a step.
        Collective. Returns the parameters that are whole, and complete now.

        `change_swapped`: is given each tensor of weights on NVMe while it is in memory; what it
        writes there is copied into the model, and does not get back to the drive.
        """
        optimizer = self._optimizer
        groups_and_flats = self._groups_and_flats()
        if groups_and_flats is not None:  # stages 1 and 2, bf16 pipelines
            optimizer.update_lp_params()
            return set(chain(*groups_and_flats[0]))
        if hasattr(optimizer, "fp32_partitioned_groups_flat"):
            self._spread_stage3(change_swapped)
        if not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
            return set()
        # FP16_Optimizer has a flat copy of each group, FP16_UnfusedOptimizer a copy of each weight.
        flats = getattr(optimizer, "fp32_groups_flat", ())
        for group, flat in zip(optimizer.fp16_groups, flats, strict=False):
            sizes = [parameter.numel() for parameter in group]
            for parameter, weights in zip(group, flat.split(sizes), strict=True):
                parameter.copy_(weights.view_as(parameter))
        copies_of_groups = getattr(optimizer, "fp32_groups", ())
        for group, copies in zip(optimizer.fp16_groups, copies_of_groups, strict=False):
            torch._foreach_copy_(group, copies)
        return set(chain(*optimizer.fp16_groups))

    def _spread_stage3(self, change_swapped: Callable[[torch.Tensor], None] | None) -> None:
        """Copy the fp32 row of every sub-group into its row of the model's precision, or to NVMe,
        and let the model's partitions be stretches of that.
        """
        optimizer = self._optimizer
        swapped = swapped_groups(optimizer)
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            with swapped_in(optimizer, number):
                if change_swapped is not None and number in swapped:
                    change_swapped(flat)
                optimizer._reassign_or_swap_out_partitioned_parameters(number)

    def _stepped_tensors(self) -> Iterator[tuple[torch.nn.Parameter, Mapping[str, Any]]]:
        """Yield the tensors that the wrapped optimizer steps (flat pieces, or the model's own
        parameters), and their groups.
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

    def _groups_and_flats(self) -> tuple[Any, Any] | None:
        """Return the model's parameters group by group, and this rank's flat piece of each group,
        at stages 1 and 2; None at others.
        """
        optimizer = self._optimizer
        if hasattr(optimizer, "single_partition_of_fp32_groups"):
            return optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups
        if hasattr(optimizer, "fp32_groups_flat_partition"):
            return optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
        return None
