"""Refusal of losses without a graph, and of losses that are sums over the samples of a batch.

DeepSpeed takes the mean of losses over micro-batches and ranks: a mean of sums would depend on how
a batch is divided. The graph shows at no cost whether a loss may be a sum; only then it is compared
with the losses of both halves of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from framework.errors import ConfigError

if TYPE_CHECKING:
    from framework.tasks.task import Task

_SUM: Final = 2  # number of torch's reduction "sum" (torch/nn/_reduction.py)
# Names of a graph's nodes, without the number of the overload (SumBackward1 -> Sum).
_SUMS: Final = frozenset({"Sum", "Bmm", "Mm", "Mv", "Dot"})
_ADDED: Final = frozenset({"Add", "Sub"})
_FACTORS: Final = frozenset({"Mul", "Div"})
_PASSED: Final = frozenset(
    {"Neg", "ToCopy", "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Permute", "Clone"}
)
# Nodes in a row, and terms of one sum, that are looked at.
_DEEPEST: Final = 16
_MOST_TERMS: Final = 256
_TOLERANCE: Final = 1e-4  # of the loss: what rounding may differ by


def refuse_without_graph(loss: Any, outputs: Any = None, *, key: str = "task") -> None:
    """Refuse a loss without a gradient, which DeepSpeed would answer with an AssertionError.

    Raises:
        ConfigError: kind ``loss-without-graph``.
    """
    if not isinstance(loss, Tensor) or loss.requires_grad:
        return
    causes = "argmax, comparisons, .item(), .detach() and torch.no_grad()"
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if leaves and not any(leaf.requires_grad for leaf in leaves):
        reason = (
            f"the model's outputs depend on no weight that is trained; {causes} in forward() "
            "end the graph"
        )
        fix = "remove what ends it, or let weights be trained that the outputs depend on"
        raise ConfigError.of("loss-without-graph", reason, fix, "model")
    if leaves:
        where = "between the model's outputs and the loss"
    else:
        where = "on the way to it"
    reason = f"no gradient can be computed of the loss; {causes} {where} end its graph"
    fix = (
        "compute it from the outputs by operations that have a gradient, such as a "
        "cross-entropy of logits"
    )
    raise ConfigError.of("loss-without-graph", reason, fix, key)


def refuse_first_sum(task: Task, loss: Any, outputs: Any, targets: Any) -> None:
    """Refuse a task with a loss that is the sum over the batch; called once, for the first batch of
    a run.

    Raises:
        ConfigError: kind ``task-loss-result``.
    """
    if isinstance(loss, Tensor) and is_sum(task.loss, loss, outputs, targets):
        raise refusal("task", task.shown_name())


def refusal(key: str, value: str = "") -> ConfigError:
    """Return the problem of a loss that is a sum."""
    reason = (
        "the loss is a sum over the batch, and a mean of sums depends on the micro-batches "
        "and ranks"
    )
    fix = "return the mean over the batch, or Ratio(sum, count) from a Task that has count()"
    return ConfigError.of("task-loss-result", reason, fix, key, value)


def refuse_summed(loss: Any, *, key: str) -> None:
    """Refuse a loss object that is set to sum: a module, or a `partial`, with
    ``reduction="sum"``.

    Raises:
        ConfigError: kind ``task-loss-result``.
    """
    option: Any = None
    if isinstance(loss, partial):
        option = loss.keywords.get("reduction")
        loss = loss.func
    if "sum" in (option, getattr(loss, "reduction", None)):
        raise refusal(key, 'reduction="sum"')


def is_summed_by_torch(loss: Tensor) -> bool:
    """Check whether the last operation of a loss is one of torch's losses, set to sum."""
    return getattr(loss.grad_fn, "_saved_reduction", None) == _SUM


def is_sum(loss_of: Callable[[Any, Any], Any], loss: Tensor, outputs: Any, targets: Any) -> bool:
    """Check whether a loss is the sum of the losses of both halves of its batch, and not their
    mean.

    It waits for the device where the graph of the loss ends in a sum.
    """
    leaves = [leaf for leaf in tree_leaves(targets) if isinstance(leaf, Tensor)]
    if not leaves or leaves[0].ndim == 0:
        return False
    size = len(leaves[0])
    if size < 2 or not _ends_in_sum(loss.grad_fn, size, _DEEPEST):
        return False
    devices = [loss.device] if loss.device.type == "cuda" else []
    half = size // 2

    def loss_of_rows(rows: slice) -> Any:
        return loss_of(_rows_of(outputs, rows, size), _rows_of(targets, rows, size))

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            first_loss = loss_of_rows(slice(half))
            second_loss = loss_of_rows(slice(half, None))
            losses = [loss.detach().double(), first_loss.double(), second_loss.double()]
            whole, first, second = torch.stack(losses).tolist()
    except Exception:  # the user's code may raise anything: a half may be no batch for it
        return False
    tolerance = _TOLERANCE * abs(whole)
    mean = (half * first + (size - half) * second) / size
    is_sum_of_both: bool = abs(whole - first - second) <= tolerance
    return is_sum_of_both and abs(whole - mean) > tolerance


def _ends_in_sum(node: Any, size: int, depth: int) -> bool:
    """Check whether a graph ends in a sum over a batch of `size` samples.

    The sum may stand alone, among terms, or times a constant that does not divide by the batch. As
    many terms as the batch has samples are a sum as well.
    """
    if node is None or not depth:
        return False
    name = _name(node)
    if name in _SUMS or getattr(node, "_saved_reduction", None) == _SUM:
        return True
    if name in _ADDED:
        terms = _terms(node)
        return len(terms) >= size or any(_ends_in_sum(term, size, depth - 1) for term in terms)
    if name in _PASSED or (name in _FACTORS and _is_large_factor(node, size)):
        input_node, _ = node.next_functions[0]
        return _ends_in_sum(input_node, size, depth - 1)
    return False


def _name(node: Any) -> str:
    name: str = node.name()
    return name.partition("Backward")[0]


def _terms(node: Any) -> list[Any]:
    """Return the terms of an addition, and of additions among its terms, 256 at most."""
    nodes: list[Any] = [node]
    terms: list[Any] = []
    while nodes and len(terms) < _MOST_TERMS:
        current = nodes.pop()
        if current is None:
            continue
        if _name(current) in _ADDED:
            nodes.extend(before for before, _ in current.next_functions)
        else:
            terms.append(current)
    return terms


def _is_large_factor(node: Any, size: int) -> bool:
    """Check that a node's constant factor is too large to be a division by the batch size.

    Such a division makes a mean of a sum.
    """
    constant = getattr(node, "_saved_other", None)
    if isinstance(constant, Tensor):
        if constant.ndim or constant.device.type != "cpu":
            return False
        constant = float(constant)
    if not isinstance(constant, (int, float)) or not constant:
        return False
    factor = constant if _name(node) == "Mul" else 1 / constant
    # 1 if the factor is a division by `size`
    return abs(factor) * size > 1.5


def _rows_of(value: Any, rows: slice, size: int) -> Any:
    """Take these rows of all tensors with `size` rows."""

    def rows_of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == size:
            return leaf.detach()[rows]
        return leaf

    return tree_map(rows_of_leaf, value)
