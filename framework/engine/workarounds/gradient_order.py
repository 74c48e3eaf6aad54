"""Keeps ZeRO right for models whose graph differs between ranks or steps: experts chosen by the data, dropped layers.

DeepSpeed 0.19.8 fills its buckets in the order in which gradients arrive, leaves out weights without one, and reduces
the buckets by position: where ranks used different weights, the gradient of one is added to that of another
(runtime/zero/stage_1_and_2.py `reduce_independent_p_g_buckets_and_remove_grads`, stage3.py likewise). At stage 3 the
weights of a module are gathered when it is called, by position as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import deepspeed
import torch
import torch.distributed

from framework.errors import TrainingError


def keep_gradient_order(engine: deepspeed.DeepSpeedEngine) -> None:
    """Make all ranks reduce all gradients in one order, at stages 1 to 3; at stage 3 refuse modules that not all ranks
    call.
    """
    optimizer = engine.optimizer
    group = getattr(optimizer, "dp_process_group", None)
    if group is None or not hasattr(optimizer, "reduce_ready_partitions_and_remove_grads"):
        return
    if torch.distributed.get_world_size(group) == 1:
        return
    fetches = None
    if hasattr(optimizer, "parameter_offload"):
        fetches = _FetchOrder(optimizer.parameter_offload.get_param_coordinator(), group, _names(engine.module))
    _GradientOrder(optimizer, engine.module, group, at_end=fetches.end if fetches is not None else None)


# Gradients that may wait before it is asked which weights have none: asking takes a microsecond for each.
_MOST_WAITING: Final = 8


class _GradientOrder:
    """Passes gradients on to DeepSpeed in one order; zeros for weights without one.

    A gradient waits until all before it have come or are known not to come, or the backward pass is over. So that few
    wait, the order is that of rank 0's modules in its first forward pass, from back to front. It is known before the
    first backward pass, so that a resumed run adds the same numbers in the same places of the same buckets.
    """

    def __init__(
        self, optimizer: Any, model: torch.nn.Module, group: Any, *, at_end: Callable[[], None] | None
    ) -> None:
        self._optimizer, self._group, self._at_end = optimizer, group, at_end
        self._pass_on = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.independent_gradient_partition_epilogue
        groups = getattr(optimizer, "bit16_groups", None)  # stage 3 has others, and is not passed the group
        known = enumerate(groups if groups is not None else optimizer.fp16_groups)
        calls = {id(one): (one, *([number] if groups is not None else [])) for number, some in known for one in some}
        self._order = [
            calls[id(one)] for one in reversed(list(model.parameters())) if one.requires_grad and id(one) in calls
        ]
        self._sort()
        self._knows_graph = True
        optimizer.reduce_ready_partitions_and_remove_grads = self._arrived
        optimizer.independent_gradient_partition_epilogue = self._end
        self._called: dict[int, None] = {}  # positions, in the order in which the modules were called
        self._hooks = [module.register_forward_pre_hook(self._note_call) for module in model.modules()]
        self._hooks.append(model.register_forward_hook(self._adopt_calls))

    def _note_call(self, module: torch.nn.Module, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if id(parameter) in self._positions:
                self._called.setdefault(self._positions[id(parameter)])
                # Layers that are called without gradients and again in the backward pass (reentrant checkpoints) have
                # graphs of their own, of which the first one does not know.
                self._knows_graph = self._knows_graph and torch.is_grad_enabled()

    def _adopt_calls(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """Take over rank 0's order after the first forward pass of training. Collective."""
        if not torch.is_grad_enabled():
            self._called.clear()
            self._knows_graph = True
            return
        for hook in self._hooks:
            hook.remove()
        box: list[Any] = [list(reversed(self._called))]
        source = torch.distributed.get_global_rank(self._group, 0)
        torch.distributed.broadcast_object_list(box, src=source, group=self._group)
        rest = sorted(set(range(len(self._order))) - set(box[0]))
        self._order = [self._order[position] for position in [*box[0], *rest]]
        self._sort()

    def _sort(self) -> None:
        self._positions = {id(call[0]): position for position, call in enumerate(self._order)}
        self._restart()

    def _restart(self) -> None:
        self._waiting: set[int] = set()
        self._unused: set[int] | None = None
        self._next = 0

    def _is_reduced_now(self) -> bool:
        """Return whether DeepSpeed would reduce; at stage 1 it does at the last micro-batch of a step only."""
        optimizer = self._optimizer
        return getattr(optimizer, "partition_gradients", True) or optimizer.is_gradient_accumulation_boundary()

    def _arrived(self, parameter: torch.nn.Parameter, *group: int) -> None:
        position = self._positions.get(id(parameter))
        if position is None or not self._is_reduced_now() or not getattr(parameter, "ds_grad_is_ready", True):
            self._pass_on(parameter, *group)
            return
        self._waiting.add(position)
        self._pass_on_next()
        if len(self._waiting) > _MOST_WAITING and self._unused is None:
            self._unused = set(self._without_gradient())
            self._pass_on_next()

    def _pass_on_next(self) -> None:
        while self._next in self._waiting or (self._unused and self._next in self._unused):
            self._waiting.discard(self._next)
            self._fill(self._order[self._next][0])
            self._pass_on(*self._order[self._next])
            self._next += 1

    def _without_gradient(self) -> Iterator[int]:
        """Yield the positions of weights that this backward pass does not reach, so that nothing waits for them."""
        if not self._knows_graph or torch._C._current_graph_task_id() == -1:
            return
        with torch.enable_grad():
            for position, (parameter, *_) in enumerate(self._order):
                if position >= self._next and not hasattr(parameter, "ds_z3_leaf_module"):
                    node = torch.autograd.graph.get_gradient_edge(parameter).node
                    if not torch._C._will_engine_execute_node(node):
                        yield position

    def _end(self) -> None:
        """Pass on what is left, then what DeepSpeed does at the end of a backward pass."""
        if self._at_end is not None:
            self._at_end()
        if self._is_reduced_now():
            for call in self._order[self._next :]:
                self._fill(call[0])
                self._pass_on(*call)
            self._restart()
        self._finish()

    def _fill(self, parameter: torch.nn.Parameter) -> None:
        of = getattr(self._optimizer, "get_gradient_for_reduction", None)
        if (of(parameter) if of is not None else parameter.grad) is not None:
            return
        whole = getattr(parameter, "ds_shape", parameter.shape)  # at stage 3 the weight itself may have been taken away
        data, zeros = parameter.data, torch.zeros(whole, dtype=parameter.dtype, device=parameter.device)
        parameter.data = zeros
        parameter.grad = zeros.clone()
        parameter.data = data
        if getattr(self._optimizer, "use_grad_accum_attribute", False):
            self._optimizer._fill_param_grad_accum_attribute(parameter)


class _FetchOrder:
    """Compares the order in which training needs the weights of modules with all ranks' in the first pass, then with
    that.

    A pass is all forward passes with gradients up to the end of a backward pass. Evaluations are not compared: they may
    differ from batch to batch, and a model that chooses by the data is refused in its first step of training.

    Raises from within `forward` or `backward`:
        TrainingError: kind ``graph-differs-between-ranks``.
    """

    def __init__(self, coordinator: Any, group: Any, names: dict[int, str]) -> None:
        self._group, self._names, self._fetch, self._reset = (
            group,
            names,
            coordinator.fetch_sub_module,
            coordinator.reset_step,
        )
        self._numbers = {module: number for number, module in enumerate(names)}
        self._known: list[int] | None = None
        self._seen: list[int] = []
        self._trains = False
        coordinator.fetch_sub_module, coordinator.reset_step = self._fetched, self._begin

    def _begin(self) -> None:
        """Begin a forward pass of the whole model."""
        self._trains = torch.is_grad_enabled()
        self._reset()

    def _fetched(self, module: torch.nn.Module, forward: bool) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # also where layers are computed again
        if id(module) in self._numbers and (self._trains or in_backward):
            self._see(2 * self._numbers[id(module)] + (not forward))
        self._fetch(module, forward)

    def end(self) -> None:
        """End a backward pass: it has called all that the first one called."""
        if self._known is None:
            self._compare(-1)
            self._known = self._seen
        elif len(self._seen) < len(self._known):
            self._refuse(-1, self._known[len(self._seen)])
        self._seen, self._trains = [], False

    def _see(self, one: int) -> None:
        known, number = self._known, len(self._seen)
        if known is None:
            self._compare(one)
        elif number >= len(known) or known[number] != one:
            self._refuse(one, known[number] if number < len(known) else -1)
        self._seen.append(one)

    def _compare(self, one: int) -> None:
        """Compare one entry of the first pass over the ranks. Collective."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(everyone, one, group=self._group)
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise _refusal(
                    f"rank 0 {self._text(everyone[0])} where rank {rank} {self._text(other)}", is_of_one_rank=False
                )

    def _refuse(self, found: int, expected: int) -> None:
        rank = torch.distributed.get_rank()
        text = f"rank {rank} {self._text(found)} where the first step {self._text(expected).replace('calls', 'called')}"
        raise _refusal(text, is_of_one_rank=True)

    def _text(self, one: int) -> str:
        if one < 0:
            return "ends its pass"
        name = list(self._names.values())[one // 2]
        return f"calls {name}" if one % 2 == 0 else f"calls {name} in the backward pass"


def _names(model: torch.nn.Module) -> dict[int, str]:
    """Return the names, with a first weight, of the modules whose weights are gathered when they are called, by
    identity.
    """
    found = {}
    for name, module in model.named_modules():
        weights = [weight for weight, value in module.named_parameters(recurse=False) if hasattr(value, "ds_id")]
        if weights:
            found[id(module)] = ".".join(filter(None, [name, weights[0]]))
    return found


def _refusal(what: str, *, is_of_one_rank: bool) -> TrainingError:
    error = TrainingError(
        f"zero.stage = 3: {what}: which modules run may not differ between ranks or steps, for ranks gather weights "
        "by position; "
        "set zero.stage: 2, or name the module that chooses in deepspeed.zero_optimization.leaf_module.names "
        "[graph-differs-between-ranks]"
    )
    error.is_of_one_rank = is_of_one_rank
    return error
