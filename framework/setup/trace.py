"""Traces the work of a user's model: one forward and backward pass on fake tensors, which have
shapes and no numbers.

No weights are allocated. The command `plan`, which does not import torch, starts this module as a
process of its own (``python -m framework.setup.trace``): see `framework.commands.traced_work`.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from framework.config.load import config_from_values
from framework.config.run_config import RunConfig
from framework.errors import ConfigError, in_one_line
from framework.models.freezing import freeze
from framework.models.layer_lists import as_layers
from framework.models.recomputation import can_recompute
from framework.plan.cluster import Cluster
from framework.plan.operations import masked
from framework.plan.plan import make_plan
from framework.plan.rank_work import Collective, CollectiveKind, WorkOfRank
from framework.plan.work import Device, LayerWork, ModelWork
from framework.setup.components import Parts, gather_parts
from framework.setup.lone_rank import LoneRank, lone_rank
from framework.setup.optimizer_makers import optimizer_maker
from framework.setup.pipeline_stages import answer, first_batch
from framework.setup.user_code import Objects
from framework.setup.user_optimizer import measure_optimizer
from framework.setup.weightless import build_weightless, replace_tensors

# A module with a larger share of the weights than this is divided into the modules in it.
_LARGEST_SHARE = 0.5


# Operations that allocate memory and move nothing.
_EMPTY = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty.memory_format,
)


# Collectives of tensor and sequence groups: kind, and the number of the argument with its bytes.
_COLLECTIVES: dict[Any, tuple[CollectiveKind, int]] = {
    torch.ops.c10d.allreduce_.default: ("sum", 0),
    torch.ops.c10d.allgather_.default: ("join", 0),
    torch.ops.c10d.alltoall_base_.default: ("exchange", 1),
}

# Products that selective recomputation runs again (`models.kept_products`).
_BATCHED_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)


@dataclass
class _Record:
    """Figures of one part of the model.

    Attributes:
        name, module: of the part; no module for the loss and for what runs before the first part.
        unsaved: inputs that no operation had saved for the backward pass when the part began.
        figures: operations and bytes by name.
        peak_bytes: most bytes alive in its forward and in its backward pass.
    """

    name: str
    module: nn.Module | None = None
    unsaved: list[Tensor] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    peak_bytes: Counter[str] = field(default_factory=Counter)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of every part, and the bytes of all storages that they allocate.

    Attributes:
        phase: ``forward`` or ``backward``.
        first_edges: edge of the autograd graph to the first value with a gradient; the tensor
            itself would be kept alive.
        collectives: how many there are of each kind, phase and number of bytes.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = [_Record("inputs")]
        self.current = self.records[0]
        self.phase = "forward"
        self.first_edges: list[Any] = []
        self.collectives: Counter[tuple[CollectiveKind, str, int]] = Counter()
        weights = chain(model.parameters(), model.buffers())
        self._of_weights = {tensor.untyped_storage()._cdata for tensor in weights}
        self._live: set[int] = set()
        self._saved: set[int] = set()
        self._live_bytes = 0
        for tensor in inputs:
            self._add_storage(tensor)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            self._note_saved, lambda tensor: tensor
        )

    def begin(self, name: str, module: nn.Module | None) -> _Record:
        """Begin the record of a part; operations count for it from now on."""
        self.current = _Record(name, module)
        self.records.append(self.current)
        return self.current

    def count(self, flops: int, operands: Sequence[Tensor]) -> None:
        """Add the operations of a product with a weight.

        `operands`: the two that it multiplies; one without a gradient spares the backward pass one
        of its two products.
        """
        figures = self.current.figures
        figures["flops"] += flops
        figures["frozen"] += sum(flops for tensor in operands if not tensor.requires_grad)

    def count_scores(self, flops: int, operands: Sequence[Tensor], causal_length: int = 0) -> None:
        """Add the operations of products without a weight, such as attention's; causal attention
        states the length of its sequences.
        """
        figures = self.current.figures
        hidden = masked(flops, causal_length) if causal_length else 0
        figures["flops"] += flops
        figures["masked"] += hidden
        figures["scores"] += flops - hidden
        if not any(tensor.requires_grad for tensor in operands):
            figures["frozen"] += 2 * flops
            figures["frozen_scores"] += 2 * flops

    def _add_storage(self, tensor: Tensor) -> None:
        """Count the bytes of a tensor's storage until it is freed; a weight's do not count."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        size = storage.nbytes()
        if number in self._live or number in self._of_weights:
            return
        self._live.add(number)
        self._live_bytes += size
        weakref.finalize(storage, self._drop_storage, number, size).atexit = False

    def _drop_storage(self, number: int, size: int) -> None:
        self._live.discard(number)
        self._live_bytes -= size

    def _note_saved(self, tensor: Tensor) -> Tensor:
        """Count a storage that the forward pass saves for the backward pass, once; returns the
        tensor.
        """
        storage = tensor.untyped_storage()
        number = storage._cdata
        is_counted = number in self._of_weights or number in self._saved
        if self.phase == "forward" and not is_counted:
            self._saved.add(number)
            figures = self.current.figures
            figures["saved"] += storage.nbytes()
            figures["widest"] = max(figures["widest"], storage.nbytes())
        return tensor

    def _has_weight(self, operands: Sequence[Tensor]) -> bool:
        """Check whether one of the tensors is a weight, or a view of one."""
        return any(each.untyped_storage()._cdata in self._of_weights for each in operands)

    def has_saved(self, tensor: Tensor) -> bool:
        """Check whether the tensor's storage is saved for the backward pass."""
        return tensor.untyped_storage()._cdata in self._saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if func in _COLLECTIVES:
            kind, place = _COLLECTIVES[func]
            self.collectives[kind, self.phase, _total_bytes(_tensors(args[place]))] += 1
        elif self.phase == "forward":
            self._count_operation(func, args, kwargs, result)
        for tensor in outputs:
            self._add_storage(tensor)
        peak_bytes = self.current.peak_bytes
        peak_bytes[self.phase] = max(peak_bytes[self.phase], self._live_bytes)
        return result

    def _count_operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs of a matrix product, or the bytes that another operation moves. Views, and
        questions of fake tensors for their device, start nothing on a device.
        """
        figures = self.current.figures
        count_flops = flop_registry.get(func._overloadpacket)
        if count_flops is not None:
            figures["operations"] += 1
            flops = int(count_flops(*args, **kwargs, out_val=result))
            operands = _tensors(args)
            if func in _BATCHED_PRODUCTS and self._has_weight(operands):
                self.count(flops, operands[-2:])
            elif func in _BATCHED_PRODUCTS or "attention" in func.__name__:
                # the fifth argument of the CPU's fused attention; no other has a truth value there
                is_causal = args[4:5] == (True,)
                causal_length = args[0].shape[-2] if is_causal else 0
                self.count_scores(flops, operands, causal_length)
            elif func is torch.ops.aten.addmm.default:  # the first one is added
                self.count(flops, operands[1:3])
            else:
                self.count(flops, operands[:2])
            if func not in _BATCHED_PRODUCTS:
                figures["products"] += _total_bytes(_tensors(result))
            return
        inputs = _tensors((args, kwargs))
        outputs = _tensors(result)
        is_written = func._schema.is_mutable or _has_new_memory(outputs, inputs)
        if is_written and func not in _EMPTY:
            figures["operations"] += 1
            figures["moved"] += _total_bytes(inputs) + _total_bytes(outputs)


def _has_new_memory(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether an operation has allocated memory for an output; a view has not."""
    input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return any(tensor.untyped_storage()._cdata not in input_storages for tensor in outputs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(_bytes, tensors))


# The fused operations of GPUs save tensors that the operations of CPUs do not; these classes stand
# in for them.


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[-1] == value.shape[-1]:
            output = torch.empty_like(query)
        else:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors[:3]))


class _FusedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(value, dtype=torch.bool))
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, value.new_empty(value.shape[:-1], dtype=torch.float32), weight)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient), torch.empty_like(ctx.saved_tensors[2])


class _AsOnGPU(TorchFunctionMode):
    """Replaces attention, dropout and RMSNorm by stand-ins for the fused operations of GPUs."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        figures = self._ledger.current.figures
        if func is functional.scaled_dot_product_attention:
            return self._attention(args, kwargs)
        if func is functional.dropout:
            arguments = inspect.signature(func).bind(*args, **kwargs).arguments
            value = arguments["input"]
            if arguments.get("training", True) and 0 < arguments.get("p", 0.5) < 1:
                figures["operations"] += 1
                # Read and written, and a mask of one byte for each element.
                figures["moved"] += 2 * _bytes(value) + value.numel()
                return _FusedDropout.apply(value)
        if func is functional.rms_norm:
            arguments = inspect.signature(func).bind(*args, **kwargs).arguments
            if arguments.get("weight") is not None:
                figures["operations"] += 1
                figures["moved"] += 2 * _bytes(arguments["input"])
                return _FusedNorm.apply(arguments["input"], arguments["weight"])
        return func(*args, **kwargs)

    def _attention(self, args: Any, kwargs: Any) -> Any:
        """Count the operations of an attention, and return the output of its stand-in."""
        operands = list(args)
        operands += [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
        query, key, value = operands[:3]
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        size = query.shape[-1]
        is_causal = kwargs.get("is_causal", args[5:6] == (True,))  # the sixth argument
        # Two products: of queries and keys, and of their scores and the values.
        flops = 2 * query.numel() // size * key.shape[-2] * (size + value.shape[-1])
        causal_length = query.shape[-2] if is_causal else 0
        self._ledger.count_scores(flops, (query, key, value), causal_length)
        output = _FusedAttention.apply(query, key, value)
        log_sums_bytes = 4 * query.numel() // size
        figures = self._ledger.current.figures
        figures["operations"] += 1
        figures["products"] += _bytes(output) + log_sums_bytes
        return output


def trace_work(
    config: RunConfig,
    parts: Parts,
    batch: tuple[Any, Any],
    *,
    device: Device = "cuda",
    tensor: int = 1,
    sequence: int = 1,
) -> ModelWork:
    """Return the work of a model and its loss on one micro-batch.

    Args:
        config: of the run: precision, frozen weights and how weights are divided.
        parts: its model and task.
        batch: inputs and targets of one micro-batch, on the CPU; of tensors only the shapes count.
        device: the kind of device that the run will use.
        tensor: ranks that divide the weights; the work is that of the last one.
        sequence: ranks that share the sequences, likewise.

    Raises:
        NotTracedError: the model has recurrent layers of torch's.
        ConfigError: the weights cannot be divided so, or the sequences not shared.
        Exception: the model's code fails, for example because it reads numbers of a tensor.
    """
    # The task of a divided model has a part of the vocabulary.
    parts = replace(parts, task=copy(parts.task))
    with lone_rank(tensor, sequence) as rank:
        return _trace_rank(config, parts, batch, device, rank)


def _trace_rank(
    config: RunConfig, parts: Parts, batch: tuple[Any, Any], device: Device, rank: LoneRank
) -> ModelWork:
    """Return the work of one rank on one micro-batch; arguments and errors as of `trace_work`."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_weightless(parts.build_model, fake)
    _refuse_recurrent(model)
    recomputes = can_recompute(model)
    with fake:
        model = rank.divided(model, config, parts.task)
        model = _prepared(model, config, rank)
        buffer_bytes = _total_bytes(model.buffers())
        inputs, targets = tree_map_only(Tensor, fake.from_tensor, batch)
        samples = parts.task.num_samples(targets)
        inputs, targets = rank.share_sequences(model, parts.task, inputs, targets)
        if config.precision.dtype in ("bf16", "fp16"):
            half = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float16
            to_half = partial(_as_dtype, half)
            replace_tensors(model.modules(), to_half)
            inputs = tree_map_only(Tensor, to_half, inputs)
        ledger = _Ledger(model, _tensors((inputs, targets)))
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
    layers = tuple(_layer_works(ledger, model))
    collectives = []
    for (kind, phase, num_bytes), count in ledger.collectives.items():
        collectives.append(Collective(kind, phase == "backward", num_bytes, count))
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
    ledger: _Ledger,
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
        fused = _AsOnGPU(ledger)
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
        record.figures["output"] = _bytes(total)
    return total


def _num_tokens(inputs: Any) -> int | None:
    """Return the number of elements of the first input, or None if it has no whole numbers."""
    first = next(iter(_tensors(inputs)), None)
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


def _watch(ledger: _Ledger, name: str, module: nn.Module) -> Iterator[Any]:
    """Make the part current when the module is called, and again when a gradient of its output
    arrives. Yields the handles of the hooks.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = _tensors((args, kwargs))
        record = ledger.begin(name, module)
        record.unsaved = [tensor for tensor in inputs if not ledger.has_saved(tensor)]

    def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        record = ledger.current
        saved_by_part = [tensor for tensor in record.unsaved if ledger.has_saved(tensor)]
        record.figures["input"] = _total_bytes(saved_by_part)
        record.unsaved = []
        outputs = _tensors(result)
        record.figures["output"] = _total_bytes(outputs)
        for tensor in outputs:
            if tensor.requires_grad:
                if not ledger.first_edges:
                    ledger.first_edges = [torch.autograd.graph.get_gradient_edge(tensor)]
                hook = partial(_make_current, ledger, record)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after, with_kwargs=True)


def _make_current(ledger: _Ledger, record: _Record, gradient: Tensor) -> None:
    ledger.current = record


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _layer_works(ledger: _Ledger, model: nn.Module) -> Iterator[LayerWork]:
    """Yield the figures of every part; weights that no part has count for the first record."""
    sizes = {id(weight): weight.numel() for weight in model.parameters() if weight.requires_grad}
    first_part_of: dict[int, str] = {}  # of each weight that a part before this one has
    saved_bytes = 0
    for number, record in enumerate(ledger.records):
        if number == 0:
            weight_ids = _ids_outside_parts(ledger, model)
            if not weight_ids and not any(record.figures.values()):
                continue  # nothing runs before the first part
        else:
            weight_ids = _weight_ids(record.module)
        new_ids, shared_ids = _split_ids(weight_ids, sizes, first_part_of)
        saved_bytes += record.figures["saved"]
        name = record.name
        if shared_ids and not new_ids:  # several parts of this name have these weights
            name += f"-{number}"
        shares = ""
        if shared_ids:
            shares = first_part_of[shared_ids[0]]
        yield _layer_work(
            record,
            name,
            saved_bytes,
            num_params=sum(map(sizes.__getitem__, new_ids)),
            shared_params=sum(map(sizes.__getitem__, shared_ids)),
            shares=shares,
        )
        first_part_of |= dict.fromkeys(new_ids, record.name)


def _split_ids(
    weight_ids: Iterable[int], sizes: Mapping[int, int], first_part_of: Mapping[int, str]
) -> tuple[list[int], list[int]]:
    """Return the trained weights of a part that no part before it has, and the others."""
    new_ids = []
    shared_ids = []
    for key in weight_ids:
        if key in first_part_of:
            shared_ids.append(key)
        elif key in sizes:
            new_ids.append(key)
    return new_ids, shared_ids


def _ids_outside_parts(ledger: _Ledger, model: nn.Module) -> list[int]:
    """Return the ids of the model's weights that no part has."""
    ids_in_parts: set[int] = set()
    for record in ledger.records:
        ids_in_parts.update(_weight_ids(record.module))
    return [key for key in _weight_ids(model) if key not in ids_in_parts]


def _layer_work(
    record: _Record,
    name: str,
    saved_bytes: int,
    *,
    num_params: int,
    shared_params: int,
    shares: str,
) -> LayerWork:
    """Return the figures of a part; `saved_bytes`: of all parts up to this one."""
    figures = record.figures
    forward_bytes = max(record.peak_bytes["forward"] - saved_bytes, 0)
    return LayerWork(
        name,
        num_params=num_params,
        flops=figures["flops"],
        masked_flops=figures["masked"],
        score_flops=figures["scores"],
        num_operations=figures["operations"],
        frozen_flops=figures["frozen"],
        frozen_score_flops=figures["frozen_scores"],
        moved_bytes=figures["moved"],
        saved_bytes=figures["saved"],
        split_bytes=0,
        peak_bytes=forward_bytes,
        output_bytes=figures["output"],
        input_bytes=figures["input"],
        backward_bytes=max(record.peak_bytes["backward"] - saved_bytes, 0),
        passing_bytes=forward_bytes + figures["saved"],
        product_bytes=figures["products"],
        selective_bytes=forward_bytes + figures["saved"],
        gradient_bytes=max(record.peak_bytes["backward"] - saved_bytes, 0) + figures["saved"],
        widest_bytes=figures["widest"],
        shared_params=shared_params,
        shares=shares,
    )


def _weight_ids(module: nn.Module | None) -> list[int]:
    if module is None:
        return []
    return [id(weight) for weight in module.parameters()]


def describe(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the work of a run's model, or the state of its optimizer, for the command `plan`.

    Args:
        question: ``config`` and ``cluster`` as plain values, the ``device`` of the run, and
            ``sizes`` of tensor and sequence groups, in pairs; with a true ``optimizer`` the answer
            is about that.

    Returns:
        ``work`` as plain values, or the optimizer's state; or ``unknown``, the reason why
        neither can be found; with a true ``is_final`` it holds as long as the code is the same.
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
        return {"unknown": str(error.problems[0])}
    trace = partial(trace_work, config, parts, batch, device=question["device"])
    try:
        work = trace()
    except Exception as error:  # the user's code may do anything with tensors without numbers
        # a package or a file that is missing may be there the next time, and memory too
        passes = isinstance(error, ImportError | OSError | MemoryError)
        is_final = not passes and "allocate memory" not in str(error)
        return {"unknown": _reason_of(error), "is_final": is_final}
    of_ranks = []
    for tensor, sequence in question.get("sizes", ()):
        try:
            share = WorkOfRank(tensor, sequence, trace(tensor=tensor, sequence=sequence))
        except Exception as error:
            share = WorkOfRank(tensor, sequence, None, _reason_of(error))
        of_ranks.append(share)
    return {"work": asdict(replace(work, of_ranks=tuple(of_ranks)))}


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
        return {"unknown": str(error.problems[0])}
    if make is None:
        return {"unknown": "it is a named one"}
    state = measure_optimizer(make)
    if isinstance(state, str):
        return {"unknown": state}
    return asdict(state)


if __name__ == "__main__":
    sys.exit(answer(describe))
