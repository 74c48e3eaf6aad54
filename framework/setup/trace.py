"""Traces the work of a user's model: one forward and backward pass on fake tensors, which have
shapes and no numbers.

No weights are allocated. The command `plan`, which does not import torch, starts this module as a
process of its own (``python -m framework.setup.trace``): see `framework.commands.traced_work`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, in_one_line
from framework.models.freezing import freeze
from framework.models.layer_lists import as_layers
from framework.models.recomputation import can_recompute
from framework.plan.cluster import Cluster
from framework.plan.plan import make_plan
from framework.plan.rank_work import Collective, WorkOfRank
from framework.plan.work import Device, ModelWork
from framework.setup.components import Parts, gather_parts
from framework.setup.fused_operations import AsOnGPU
from framework.setup.lone_rank import LoneRank, lone_rank
from framework.setup.optimizer_makers import optimizer_maker
from framework.setup.pipeline_stages import answer, first_batch, is_wrong_anywhere
from framework.setup.trace_ledger import Ledger, Record, num_bytes, tensors_in, total_bytes
from framework.setup.traced_layers import layer_works
from framework.setup.user_code import Objects
from framework.setup.user_optimizer import measure_optimizer
from framework.setup.weightless import build_weightless, replace_tensors

# A module with a larger share of the weights than this is divided into the modules in it.
_LARGEST_SHARE = 0.5


def trace_work(
    config: RunConfig,
    parts: Parts,
    batch: tuple[Any, Any],
    *,
    device: Device = "cuda",
    tensor: int = 1,
    sequence: int = 1,
    expert: int = 1,
) -> ModelWork:
    """Return the work of a model and its loss on one micro-batch.

    Args:
        config: of the run: precision, frozen weights and how weights are divided.
        parts: its model and task.
        batch: inputs and targets of one micro-batch, on the CPU; of tensors only the shapes count.
        device: the kind of device that the run will use.
        tensor: ranks that divide the weights; the work is that of the last one.
        sequence: ranks that share the sequences, likewise.
        expert: ranks that share the experts; the work is that of all experts.

    Raises:
        NotTracedError: the model has recurrent layers of torch's.
        ConfigError: the weights cannot be divided so, the sequences or experts not shared, or a
            pattern of names has no weight.
        Exception: the model's code fails, for example because it reads numbers of a tensor.
    """
    # The task of a divided model has a part of the vocabulary.
    parts = replace(parts, task=copy(parts.task))
    with lone_rank(tensor, sequence) as rank:
        return _trace_rank(config, parts, batch, device, rank, expert=expert)


def _trace_rank(
    config: RunConfig,
    parts: Parts,
    batch: tuple[Any, Any],
    device: Device,
    rank: LoneRank,
    *,
    expert: int,
) -> ModelWork:
    """Return the work of one rank on one micro-batch; arguments and errors as in `trace_work`."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_weightless(parts.build_model, fake)
    _refuse_recurrent(model)
    recomputes = can_recompute(model)
    with fake:
        model = rank.divided(model, config, parts.task)
        if expert > 1:
            from framework.engine.packed_experts import refuse_undividable

            refuse_undividable(model, expert)
        model = _prepared(model, config, rank)
        buffer_bytes = total_bytes(model.buffers())
        inputs, targets = tree_map_only(Tensor, fake.from_tensor, batch)
        samples = parts.task.num_samples(targets)
        inputs, targets = rank.share_sequences(model, parts.task, inputs, targets)
        if config.precision.dtype in ("bf16", "fp16"):
            half = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float16
            to_half = partial(_as_dtype, half)
            replace_tensors(model.modules(), to_half)
            inputs = tree_map_only(Tensor, to_half, inputs)
        ledger = Ledger(model, tensors_in((inputs, targets)))
        handles: list[Any] = []
        for name, part in _part_modules(model):
            handles += _watch(ledger, name, part)
        with rank.sharing():
            loss = _run_forward(ledger, config, parts, model, inputs, targets, device)
        for handle in handles:
            handle.remove()
        ledger.phase = "backward"
        # back to the first value that has a gradient: no gradients of weights come into it
        with ledger, rank.sharing():
            sources = ledger.first_edges or list(model.parameters())
            torch.autograd.grad(loss, sources, allow_unused=True)
    trained = _shapes(model, trained=True)
    frozen = _shapes(model, trained=False)
    layers = tuple(layer_works(ledger, model))
    collectives = []
    for (kind, phase, sent_bytes), count in ledger.collectives.items():
        collectives.append(Collective(kind, phase == "backward", sent_bytes, count))
    return ModelWork(
        trained,
        buffer_bytes,
        layers,
        samples,
        _num_tokens(inputs),
        frozen,
        collectives=tuple(collectives),
        can_recompute=recomputes,
    )


class NotTracedError(Exception):
    """A module has work that a pass on fake tensors does not show."""


def _refuse_recurrent(model: nn.Module) -> None:
    """Raise NotTracedError for `nn.RNN`, `nn.LSTM` and `nn.GRU`: their kernels keep a workspace
    for the backward pass, which cuDNN and oneDNN size, and count as one operation without products.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            raise NotTracedError(
                f"{name or 'the model'} is a recurrent layer ({type(module).__name__}): what its "
                "kernels compute and keep for the backward pass is known to cuDNN and oneDNN alone"
            )


def _shapes(model: nn.Module, *, trained: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that are trained, or of those that are not, by name."""
    shapes = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad == trained:
            shapes[name] = tuple(weight.shape)
    return shapes


def _prepared(model: nn.Module, config: RunConfig, rank: LoneRank) -> nn.Module:
    """Return the model with what the config has of frozen weights, tiles and adapters."""
    freeze(model, config.training.freeze)
    if config.training.mlp_tile:
        from framework.models.tiled_perceptron import tile_perceptrons

        tile_perceptrons(model, config.training.mlp_tile)
    return rank.adapted(model, config)


def _run_forward(
    ledger: Ledger,
    config: RunConfig,
    parts: Parts,
    model: nn.Module,
    inputs: Any,
    targets: Any,
    device: Device,
) -> Tensor:
    """Return the sum of the losses. All other values that are not saved die with this call."""
    fused: AbstractContextManager[Any] = nullcontext()
    if device == "cuda":
        fused = AsOnGPU(ledger)
    autocast: AbstractContextManager[Any] = nullcontext()
    if config.precision.dtype == "autocast":
        autocast = torch.autocast("cpu", torch.bfloat16)
    with ledger, ledger.hooks, fused, autocast:
        outputs = parts.task.forward(model, inputs)
        record = ledger.begin("loss", None)
        loss = parts.task.loss(outputs, targets)
        losses = loss if isinstance(loss, tuple) else (loss,)
        total = torch.stack(
            [part if isinstance(part, Tensor) else part.total for part in losses]
        ).sum()
        record.figures["output"] = num_bytes(total)
    return total


def _num_tokens(inputs: Any) -> int | None:
    """Return the number of elements of the first input, or None if it has no whole numbers."""
    first = next(iter(tensors_in(inputs)), None)
    if first is None or first.is_floating_point():
        return None
    return first.numel()


def _as_dtype(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor


def _part_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of a model, or else its modules, those with most weights divided."""
    try:
        layers = as_layers(model)
    except ConfigError:
        total = max(sum(weight.numel() for weight in model.parameters()), 1)
        yield from _children(model, "", total)
        return
    seen = set[int]()
    for layer in layers:
        module = layer.build()
        if id(module) not in seen:
            yield layer.name, module
        seen.add(id(module))


def _children(module: nn.Module, prefix: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a module, by name. Lists, and modules with a large share of the model's
    `total` weights, are divided further.
    """
    for name, child in module.named_children():
        share = sum(weight.numel() for weight in child.parameters()) / total
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or (share > _LARGEST_SHARE and any(True for _ in child.children())):
            yield from _children(child, f"{prefix}{name}.", total)
        else:
            yield f"{prefix}{name}", child


def _watch(ledger: Ledger, name: str, module: nn.Module) -> Iterator[Any]:
    """Make the part current when the module is called, and again when a gradient of its output
    arrives. Yields the handles of the hooks.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = tensors_in((args, kwargs))
        record = ledger.begin(name, module)
        record.unsaved = [tensor for tensor in inputs if not ledger.has_saved(tensor)]

    def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        record = ledger.current
        saved_by_part = [tensor for tensor in record.unsaved if ledger.has_saved(tensor)]
        record.figures["input"] = total_bytes(saved_by_part)
        record.unsaved = []
        outputs = tensors_in(result)
        record.figures["output"] = total_bytes(outputs)
        for tensor in outputs:
            if tensor.requires_grad:
                if not ledger.first_edges:
                    ledger.first_edges = [torch.autograd.graph.get_gradient_edge(tensor)]
                hook = partial(_make_current, ledger, record)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after, with_kwargs=True)


def _make_current(ledger: Ledger, record: Record, gradient: Tensor) -> None:
    ledger.current = record


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the work of a run's model, or the state of its optimizer, for the command `plan`.

    Args:
        question: ``config`` and ``cluster`` as plain values, the ``device`` of the run, and
            ``sizes`` of tensor and sequence groups, in pairs; with a true ``optimizer`` the answer
            is about that.

    Returns:
        ``work`` as plain values, or the optimizer's state; or ``problems``, as plain values, why
        the run cannot work; or ``unknown``, the reason why nothing is found. With a true
        ``is_final`` the answer holds as long as the code is the same.
    """
    config = config_from_values(question["config"])
    cluster = Cluster(**question["cluster"])
    if question.get("optimizer"):
        return _describe_optimizer(config)
    try:
        parts = gather_parts(config, Objects())
        plan = make_plan(config, cluster, num_train_samples=parts.splits.num_train)
        batch = first_batch(plan, parts)
    except ConfigError as error:
        if is_wrong_anywhere(error):
            return {"problems": [problem.to_dict() for problem in error.problems]}
        return {"unknown": str(error.problems[0])}
    trace = partial(
        trace_work,
        config,
        parts,
        batch,
        device=question["device"],
        expert=plan.layout.expert_size,
    )
    try:
        work = trace()
    except Exception as error:  # the user's code may do anything with tensors without numbers
        return _describe_failure(error)
    of_ranks = []
    for tensor, sequence in question.get("sizes", ()):
        of_ranks.append(_describe_share(trace, tensor, sequence))
    return {"work": asdict(work) | {"of_ranks": of_ranks}}


def _describe_failure(error: Exception) -> dict[str, Any]:
    """Return the answer of `describe` for a trace that has failed."""
    if isinstance(error, ConfigError) and not _may_work_elsewhere(error):
        return {"problems": [problem.to_dict() for problem in error.problems], "is_final": True}
    # a package or a file that is missing may be there the next time, and memory too
    passes = isinstance(error, ImportError | OSError | MemoryError)
    is_final = not passes and "allocate memory" not in str(error)
    return {"unknown": _reason_of(error), "is_final": is_final}


def _describe_share(trace: Callable[..., ModelWork], tensor: int, sequence: int) -> dict[str, Any]:
    """Return the work of one rank of groups of these sizes, a `WorkOfRank`, as plain values."""
    try:
        work = trace(tensor=tensor, sequence=sequence)
    except Exception as error:
        share = asdict(WorkOfRank(tensor, sequence, None, _reason_of(error)))
        if isinstance(error, ConfigError) and not _may_work_elsewhere(error):
            share["problem"] = error.problems[0].to_dict()
        return share
    return asdict(WorkOfRank(tensor, sequence, work))


def _may_work_elsewhere(error: ConfigError) -> bool:
    """Return whether an error may come of this process alone: code of the user's own has failed in
    it, which may work with numbers, or on another machine.
    """
    return error.__cause__ is not None and not is_wrong_anywhere(error)


def _reason_of(error: Exception) -> str:
    """Return why a model's work is not known, in one line."""
    if isinstance(error, NotTracedError):
        return str(error)
    if isinstance(error, ConfigError):
        return str(error.problems[0])
    return f"it does not run without numbers: {in_one_line(error)}"


def _describe_optimizer(config: RunConfig) -> dict[str, Any]:
    try:
        make = optimizer_maker(config)
    except ConfigError as error:
        if _may_work_elsewhere(error):
            return {"unknown": str(error.problems[0])}
        return {"problems": [problem.to_dict() for problem in error.problems]}
    if make is None:
        return {"unknown": "it is a named one"}
    state = measure_optimizer(make)
    if isinstance(state, str):
        return {"unknown": state}
    return asdict(state)


if __name__ == "__main__":
    sys.exit(answer(describe))
