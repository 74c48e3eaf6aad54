"""Keeps ZeRO correct for models with a graph that differs between ranks or steps: experts chosen by
the data, dropped layers.

DeepSpeed 0.19.8 fills its buckets in the order in which gradients arrive, leaves out weights
without one, and reduces the buckets by position: where ranks used different weights, the gradient
of one is added to that of another (runtime/zero/stage_1_and_2.py
`reduce_independent_p_g_buckets_and_remove_grads`, stage3.py likewise). At stage 3 the weights of a
module are gathered when it is called, by position as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import deepspeed
import torch
import torch.distributed

from framework.engine.distributed import device
from framework.errors import TrainingError


def keep_gradient_order(
    engine: deepspeed.DeepSpeedEngine, *, refuse_changes: Callable[[], None] = lambda: None
) -> Callable[[], None] | None:
    """Make all ranks reduce all gradients in one order, at stages 1 to 3. At stage 3 refuse ranks
    that call different modules; `refuse_changes` is called first, and may raise a better reason.

    Returns:
        At stage 3 a function that ends a pass whose gradients DeepSpeed does not reduce; else None.
    """
    optimizer = engine.optimizer
    group = getattr(optimizer, "dp_process_group", None)
    reduces = group is not None and hasattr(optimizer, "reduce_ready_partitions_and_remove_grads")
    if not reduces or torch.distributed.get_world_size(group) == 1:
        return None
    at_end = None
    if hasattr(optimizer, "parameter_offload"):
        from framework.engine.workarounds.stale_releases import forget_releases_with_order

        coordinator = optimizer.parameter_offload.get_param_coordinator()
        forget_releases_with_order(coordinator)
        at_end = _FetchOrder(coordinator, group, engine.module, refuse_changes).end
    _GradientOrder(optimizer, engine.module, group, at_end=at_end)
    return at_end


# Gradients that may wait before the graph is searched for weights without one, which takes a
# microsecond for each weight.
_MOST_WAITING: Final = 8


class _GradientOrder:
    """Passes gradients on to DeepSpeed in one order; zeros for weights without one.

    A gradient waits until all before it have come or are known not to come, or the backward pass is
    over. So that few wait, the order is that of rank 0's modules in its first forward pass, from
    back to front; of a compiled model, that of its parameters. It is known before the first
    backward pass, so that a resumed run adds the same numbers in the same places of the same
    buckets.
    """

    def __init__(
        self,
        optimizer: Any,
        model: torch.nn.Module,
        group: Any,
        *,
        at_end: Callable[[], None] | None,
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._at_end = at_end
        self._pass_on = optimizer.reduce_ready_partitions_and_remove_grads
        self._finish = optimizer.independent_gradient_partition_epilogue
        arguments = _reduce_arguments(optimizer)
        # by position: the arguments of `_pass_on`, the weight first
        self._order: list[tuple[Any, ...]] = []
        for parameter in reversed(list(model.parameters())):
            if parameter.requires_grad and id(parameter) in arguments:
                self._order.append(arguments[id(parameter)])
        self._sort()
        self._knows_graph = True
        optimizer.reduce_ready_partitions_and_remove_grads = self._arrived
        optimizer.independent_gradient_partition_epilogue = self._end
        # positions, in the order in which the modules were called
        self._called: dict[int, None] = {}
        # hooks would be a part of its graphs
        if any(module._compiled_call_impl for module in model.modules()):
            self._knows_graph = False
            return
        self._hooks = [
            module.register_forward_pre_hook(self._note_call) for module in model.modules()
        ]
        self._hooks.append(model.register_forward_hook(self._adopt_calls))

    def _note_call(self, module: torch.nn.Module, inputs: Any) -> None:
        """Note the place of a module's weights among the calls of the first forward pass."""
        for parameter in module.parameters(recurse=False):
            if id(parameter) in self._positions:
                self._called.setdefault(self._positions[id(parameter)])
                # Layers that are called without gradients and again in the backward pass (reentrant
                # checkpoints) have graphs of their own, which are not part of the first one.
                self._knows_graph = self._knows_graph and torch.is_grad_enabled()

    # Layers that are computed as one product call it themselves (`models/products.py`).
    vars(_note_call)["observes"] = True

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
        positions: list[int] = box[0]
        positions += sorted(set(range(len(self._order))) - set(positions))
        self._order = [self._order[position] for position in positions]
        self._sort()

    def _sort(self) -> None:
        """Number the weights by the order, and begin a pass."""
        self._positions = {id(call[0]): position for position, call in enumerate(self._order)}
        self._restart()

    def _restart(self) -> None:
        self._waiting = set[int]()
        self._unused = set[int]()
        self._has_searched = False
        self._next = 0

    def _is_reduced_now(self) -> bool:
        """Check whether DeepSpeed would reduce: at stage 1 without ZenFlow only at the last
        micro-batch of a step.
        """
        optimizer = self._optimizer
        return (
            getattr(optimizer, "partition_gradients", True)
            or getattr(optimizer, "zenflow", False)
            or optimizer.is_gradient_accumulation_boundary()
        )

    def _arrived(self, parameter: torch.nn.Parameter, *group: int) -> None:
        """Stand in for `reduce_ready_partitions_and_remove_grads`: pass on, in order, the gradients
        that need not wait. `group` is its number at stages 1 and 2, nothing at stage 3.
        """
        position = self._positions.get(id(parameter))
        if (
            position is None
            or not self._is_reduced_now()
            or not getattr(parameter, "ds_grad_is_ready", True)
        ):
            self._pass_on(parameter, *group)
            return
        self._waiting.add(position)
        self._pass_on_next()
        if len(self._waiting) > _MOST_WAITING and not self._has_searched:
            self._has_searched = True
            self._unused = set(self._without_gradient())
            self._pass_on_next()

    def _pass_on_next(self) -> None:
        while self._next in self._waiting or self._next in self._unused:
            self._waiting.discard(self._next)
            self._reduce(*self._order[self._next])
            self._next += 1

    def _without_gradient(self) -> Iterator[int]:
        """Yield the positions of weights that this backward pass does not reach, so that nothing
        waits for them.
        """
        if not self._knows_graph or torch._C._current_graph_task_id() == -1:
            return
        with torch.enable_grad():
            for position, call in enumerate(self._order):
                parameter = call[0]
                if position >= self._next and not hasattr(parameter, "ds_z3_leaf_module"):
                    node = torch.autograd.graph.get_gradient_edge(parameter).node
                    if not torch._C._will_engine_execute_node(node):
                        yield position

    def _end(self) -> None:
        """Pass on the gradients that are left, then end the backward pass as DeepSpeed does."""
        if self._at_end is not None:
            self._at_end()
        if self._is_reduced_now():
            for call in self._order[self._next :]:
                self._reduce(*call)
            self._restart()
        self._finish()

    def _reduce(self, parameter: torch.nn.Parameter, *group: int) -> None:
        """Pass a gradient on to DeepSpeed; zeros if the weight has none."""
        if not self._has_gradient(parameter):
            # Torch takes only a gradient of the weight's shape, and stage 3 may have released the
            # weight: zeros stand in for it meanwhile.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            data = parameter.data
            zeros = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
            parameter.data = zeros
            parameter.grad = zeros.clone()
            parameter.data = data
            if getattr(self._optimizer, "use_grad_accum_attribute", False):
                self._optimizer._fill_param_grad_accum_attribute(parameter)
        self._pass_on(parameter, *group)

    def _has_gradient(self, parameter: torch.nn.Parameter) -> bool:
        get_gradient = getattr(self._optimizer, "get_gradient_for_reduction", None)
        if get_gradient is not None:
            return get_gradient(parameter) is not None
        return parameter.grad is not None


def _reduce_arguments(optimizer: Any) -> dict[int, tuple[Any, ...]]:
    """Return the arguments of `reduce_ready_partitions_and_remove_grads` for each weight, by its
    id: the weight, and at stages 1 and 2 the number of its group.
    """
    arguments: dict[int, tuple[Any, ...]] = {}
    groups = getattr(optimizer, "bit16_groups", None)
    if groups is None:  # stage 3
        for group in optimizer.fp16_groups:
            for parameter in group:
                arguments[id(parameter)] = (parameter,)
        return arguments
    for number, group in enumerate(groups):
        for parameter in group:
            arguments[id(parameter)] = (parameter, number)
    return arguments


_END: Final = -1


class _FetchOrder:
    """Compares the order in which training needs the weights of modules: in the first pass between
    the ranks, later with the first pass.

    A pass is all forward passes with gradients up to the end of a backward pass. Evaluations are
    not compared: they may differ from batch to batch, and a model that chooses by the data is
    refused in its first step of training.

    Raises from within `forward` or `backward`:
        TrainingError: kind ``graph-differs-between-ranks``.
    """

    def __init__(
        self,
        coordinator: Any,
        group: Any,
        model: torch.nn.Module,
        refuse_changes: Callable[[], None],
    ) -> None:
        self._group = group
        self._refuse_changes = refuse_changes
        # By id of a module: name of its first weight that is gathered when the module is called.
        names: dict[int, str] = {}
        for name, module in model.named_modules():
            for weight, value in module.named_parameters(recurse=False):
                if hasattr(value, "ds_id"):
                    names.setdefault(id(module), f"{name}.{weight}".lstrip("."))
        self._names = list(names.values())
        self._numbers = {module: number for number, module in enumerate(names)}
        # Entries (see `_describe_entry`) of the first pass, up to `_END`, and of this pass.
        self._known: list[int] = []
        self._seen: list[int] = []
        self._trains = False
        self._fetch = coordinator.fetch_sub_module
        self._reset = coordinator.reset_step
        coordinator.fetch_sub_module = self._check_and_fetch
        coordinator.reset_step = self._begin

    def _begin(self) -> None:
        """Stand in for `reset_step`, which begins a forward pass of the whole model."""
        self._trains = torch.is_grad_enabled()
        self._reset()

    def _check_and_fetch(self, module: torch.nn.Module, forward: bool) -> None:
        """Stand in for `fetch_sub_module`: gather a module's weights if it is next in the order."""
        # also where layers are computed again
        in_backward = torch._C._current_graph_task_id() != -1
        if id(module) in self._numbers and (self._trains or in_backward):
            entry = 2 * self._numbers[id(module)]
            if not forward:
                entry += 1
            self._check_entry(entry)
        self._fetch(module, forward)

    def end(self) -> None:
        """End a backward pass, and refuse it if it has called fewer modules than the first one."""
        self._check_entry(_END)
        self._known = self._known or self._seen
        self._seen = []
        self._trains = False

    def _check_entry(self, entry: int) -> None:
        """Refuse an entry that differs from other ranks' in the first pass (collective), or from
        this rank's first pass later.
        """
        if not self._known:
            entries = self._gather(entry)
            first = self._describe_entry(entries[0])
            for rank, other in enumerate(entries):
                if other != entries[0]:
                    self._refuse(f"rank 0 {first} where rank {rank} {self._describe_entry(other)}")
        else:
            expected = self._known[len(self._seen)]
            if entry != expected:
                known = self._describe_entry(expected).replace("calls", "called")
                rank = torch.distributed.get_rank()
                self._refuse(
                    f"rank {rank} {self._describe_entry(entry)} where the first step {known}",
                    is_of_one_rank=True,
                )
        self._seen.append(entry)

    def _gather(self, entry: int) -> list[int]:
        """Return the entry of every rank. Collective: one message, where an object takes two."""
        own = torch.tensor([entry], device=device())
        entries = own.new_empty(torch.distributed.get_world_size(self._group))
        torch.distributed.all_gather_into_tensor(entries, own, group=self._group)
        numbers: list[int] = entries.tolist()
        return numbers

    def _describe_entry(self, entry: int) -> str:
        """Describe an entry: 2 x number of a module, + 1 in the backward pass."""
        if entry == _END:
            return "ends its pass"
        call = f"calls {self._names[entry // 2]}"
        if entry % 2:
            call += " in the backward pass"
        return call

    def _refuse(self, what: str, *, is_of_one_rank: bool = False) -> NoReturn:
        # a weight that was frozen or thawed has other modules called in the backward pass
        self._refuse_changes()
        raise TrainingError(
            f"zero.stage = 3: {what}: which modules run may not differ between ranks or steps, "
            "for ranks gather weights by position; set zero.stage: 2, or name the module that "
            "chooses in deepspeed.zero_optimization.leaf_module.names "
            "[graph-differs-between-ranks]",
            is_of_one_rank=is_of_one_rank,
        )
