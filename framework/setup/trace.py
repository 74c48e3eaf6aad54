"""Work of a model of the user's own: one pass forward and backward on fake tensors, which have
shapes and no numbers.

No weights are allocated. Started by itself (``python -m framework.setup.trace``) by the command
`plan`, which does not import torch: see `framework.commands.traced_work`.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
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
from framework.models.adapters import add_adapters
from framework.models.freezing import freeze
from framework.models.layers import as_layers
from framework.plan.cluster import Cluster
from framework.plan.operations import masked
from framework.plan.plan import make_plan
from framework.plan.work import Device, LayerWork, ModelWork
from framework.setup.components import Parts, gather_parts, optimizer_maker
from framework.setup.pipeline_stages import answer, first_batch
from framework.setup.user_code import Objects
from framework.setup.user_optimizer import measure_optimizer

# A module with more of the weights than this is not one part: the modules in it are.
_LARGEST_SHARE = 0.5


# Make memory, and move nothing.
_EMPTY = (
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty.memory_format,
)


@dataclass
class _Record:
    """What is found of a part while it runs; `most`: bytes alive at most in its forward and in its
    backward pass.
    """

    name: str
    module: nn.Module | None = None
    unsaved: list[Tensor] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations of every part, and the bytes of all storages that they make."""

    def __init__(self, known: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records = [_Record("inputs")]
        self.current = self.records[0]
        self.way = "forward"
        self.first: list[Any] = []  # an edge of the graph: the tensor itself would be kept alive
        self._own = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: set[int] = set()
        self._saved: set[int] = set()
        self._now = 0
        for tensor in inputs:
            self._add(tensor)
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def begin(self, name: str, module: nn.Module | None) -> _Record:
        self.current = _Record(name, module)
        self.records.append(self.current)
        return self.current

    def count(self, flops: int, causal_length: int = 0) -> None:
        """Add operations; `causal_length`: of sequences of causal attention."""
        self.current.figures["flops"] += flops
        self.current.figures["masked"] += masked(flops, causal_length) if causal_length else 0

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        size = storage.nbytes()
        if number in self._live or number in self._own:
            return
        self._live.add(number)
        self._now += size
        weakref.finalize(storage, self._drop, number, size).atexit = False

    def _drop(self, number: int, size: int) -> None:
        self._live.discard(number)
        self._now -= size

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if self.way == "forward" and storage._cdata not in self._own | self._saved:
            self._saved.add(storage._cdata)
            self.current.figures["saved"] += storage.nbytes()
        return tensor

    def has_saved(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        reads = _tensors((args, kwargs))
        tensors = _tensors(made)
        if self.way == "forward" and count is not None:
            # of the fused attention of processors; no other has a truth value there
            is_causal = args[4:5] == (True,)
            self.count(
                int(count(*args, **(kwargs or {}), out_val=made)),
                args[0].shape[-2] if is_causal else 0,
            )
        elif (
            self.way == "forward"
            and (func._schema.is_mutable or _is_new(tensors, reads))
            and func not in _EMPTY
        ):
            self.current.figures["moved"] += sum(map(_bytes, (*reads, *tensors)))
        for tensor in tensors:
            self._add(tensor)
        self.current.most[self.way] = max(self.current.most[self.way], self._now)
        return made


def _is_new(made: Sequence[Tensor], reads: Sequence[Tensor]) -> bool:
    """Check whether an operation has made memory of its own; a view has not."""
    return not {each.untyped_storage()._cdata for each in made} <= {
        each.untyped_storage()._cdata for each in reads
    }


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# What fused operations of GPUs save, and those of CPUs do not: these stand for them.


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        is_alike = query.shape[-1] == value.shape[-1]
        if is_alike:
            made = torch.empty_like(query)
        else:
            made = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, made, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return made

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
    """Attention, dropout and RMSNorm as GPUs have them."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            query, key, value = (
                *args,
                *(kwargs[name] for name in ("query", "key", "value") if name in kwargs),
            )[:3]
            if torch.is_autocast_enabled("cpu"):
                query, key, value = (
                    each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value)
                )
            size = query.shape[-1]
            is_causal = kwargs.get("is_causal", args[5:6] == (True,))
            flops = 2 * query.numel() // size * key.shape[-2] * (size + value.shape[-1])
            self._ledger.count(flops, query.shape[-2] if is_causal else 0)
            return _FusedAttention.apply(query, key, value)
        if func is functional.dropout:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            value = given["input"]
            if given.get("training", True) and 0 < given.get("p", 0.5) < 1:
                self._ledger.current.figures["moved"] += 2 * _bytes(value) + value.numel()
                return _FusedDropout.apply(value)
        if func is functional.rms_norm:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            if given.get("weight") is not None:
                self._ledger.current.figures["moved"] += 2 * _bytes(given["input"])
                return _FusedNorm.apply(given["input"], given["weight"])
        return func(*args, **kwargs)


def trace_work(
    config: RunConfig, parts: Parts, batch: tuple[Any, Any], *, device: Device = "cuda"
) -> ModelWork:
    """Find the work of a model and its loss on one micro-batch.

    Args:
        config: of the run: precision and frozen weights.
        parts: its model and task.
        batch: inputs and targets of one micro-batch, on the CPU; of tensors only the shapes count.
        device: what it is to run on.

    Raises:
        Exception: whatever the model's code does where it asks for numbers, which there are none.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        with _nothing_drawn():
            model = parts.build_model()
        freeze(model, config.training.freeze)
        if config.training.lora is not None:
            model = add_adapters(model, config.training.lora, seed=config.run.seed)
        buffer_bytes = sum(map(_bytes, model.buffers()))
        inputs, targets = tree_map_only(Tensor, fake.from_tensor, batch)
        samples = parts.task.num_samples(targets)
        if config.precision.dtype in ("bf16", "fp16"):
            half = torch.bfloat16 if config.precision.dtype == "bf16" else torch.float16
            _cast(model, half)
            inputs = tree_map_only(
                Tensor, lambda each: each.to(half) if each.is_floating_point() else each, inputs
            )
        ledger = _Ledger([*model.parameters(), *model.buffers()], _tensors((inputs, targets)))
        handles = [
            handle for name, part in _part_modules(model) for handle in _watch(ledger, name, part)
        ]
        autocast = (
            torch.autocast("cpu", torch.bfloat16)
            if config.precision.dtype == "autocast"
            else nullcontext()
        )
        with (
            ledger,
            ledger.hooks,
            _AsOnGPU(ledger) if device == "cuda" else nullcontext(),
            autocast,
        ):
            outputs = parts.task.forward(model, inputs)
            made = ledger.begin("loss", None)
            loss = parts.task.loss(outputs, targets)
            losses = loss if isinstance(loss, tuple) else (loss,)
            total = torch.stack(
                [each if isinstance(each, Tensor) else each.total for each in losses]
            ).sum()
            made.figures["output"] = _bytes(total)
        del outputs, loss, losses
        for handle in handles:
            handle.remove()
        ledger.way = "backward"
        # back to the first value that has a gradient: no gradients of weights come into it
        with ledger:
            torch.autograd.grad(total, ledger.first or list(model.parameters()), allow_unused=True)
    trained, frozen = (
        {
            name: tuple(weight.shape)
            for name, weight in model.named_parameters()
            if weight.requires_grad is kind
        }
        for kind in (True, False)
    )
    return ModelWork(
        trained, buffer_bytes, tuple(_parts(ledger, model)), samples, _num_tokens(inputs), frozen
    )


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """torch draws truncated normals anew until all are within their bounds, which numbers alone can
    tell.
    """
    own = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = own


def _num_tokens(inputs: Any) -> int | None:
    """Elements of the first input, where it is of whole numbers."""
    first = next(iter(_tensors(inputs)), None)
    if first is None or first.is_floating_point():
        return None
    return first.numel()


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """`model.to(dtype)` for fake tensors; a weight in two places stays one."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in made:
                    other = tensor.detach().to(dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (
                        nn.Parameter(other, tensor.requires_grad) if is_weight else other
                    )
                tensors[name] = made[id(tensor)]


def _part_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model that has such; else its modules, and in their place what is in those
    that hold most.
    """
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
    for name, child in module.named_children():
        share = sum(weight.numel() for weight in child.parameters()) / total
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or (share > _LARGEST_SHARE and any(True for _ in child.children())):
            yield from _children(child, f"{prefix}{name}.", total)
        else:
            yield f"{prefix}{name}", child


def _watch(ledger: _Ledger, name: str, module: nn.Module) -> Iterator[Any]:
    """Begin a part where the module is called, and again where a gradient comes back to what it
    returned.
    """

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        ledger.begin(name, module).unsaved = [
            each for each in _tensors((args, kwargs)) if not ledger.has_saved(each)
        ]

    def after(module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        record = ledger.current
        record.figures["input"] = sum(
            _bytes(each) for each in record.unsaved if ledger.has_saved(each)
        )
        record.unsaved = []
        tensors = _tensors(made)
        record.figures["output"] = sum(map(_bytes, tensors))
        for tensor in tensors:
            if tensor.requires_grad:
                ledger.first = ledger.first or [torch.autograd.graph.get_gradient_edge(tensor)]
                tensor.register_hook(partial(_come_back, ledger, record))  # type: ignore[no-untyped-call]

    yield module.register_forward_pre_hook(before, with_kwargs=True)
    yield module.register_forward_hook(after, with_kwargs=True)


def _come_back(ledger: _Ledger, record: _Record, gradient: Tensor) -> None:
    ledger.current = record


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _parts(ledger: _Ledger, model: nn.Module) -> Iterator[LayerWork]:
    """Figures of every part; weights that none of them has are of the first one."""
    weights = {id(weight): weight.numel() for weight in model.parameters() if weight.requires_grad}
    within = {
        id(weight)
        for record in ledger.records
        if record.module
        for weight in record.module.parameters()
    }
    first_of: dict[int, str] = {}
    saved = 0
    for number, record in enumerate(ledger.records):
        if (
            not number
            and not sum(record.figures.values())
            and {*map(id, model.parameters())} <= within
        ):
            continue  # nothing stands before the first part
        if record.module:
            own = [id(weight) for weight in record.module.parameters()]
        else:
            own = []
        if number:
            own = [each for each in own if each in weights]
        else:
            own = [each for each in weights if each not in within]
        shared = [each for each in own if each in first_of]
        saved += record.figures["saved"]
        if not shared or len(shared) < len(own):
            name = record.name
        else:
            name = f"{record.name}-{number}"
        yield LayerWork(
            name,
            num_params=sum(weights[each] for each in own if each not in first_of),
            flops=record.figures["flops"],
            masked_flops=record.figures["masked"],
            moved_bytes=record.figures["moved"],
            saved_bytes=record.figures["saved"],
            split_bytes=0,
            peak_bytes=max(record.most["forward"] - saved, 0),
            output_bytes=record.figures["output"],
            input_bytes=record.figures["input"],
            backward_bytes=max(record.most["backward"] - saved, 0),
            passing_bytes=max(record.most["forward"] - saved, 0) + record.figures["saved"],
            shared_params=sum(weights[each] for each in shared),
            shares=first_of[shared[0]] if shared else "",
        )
        first_of |= {each: record.name for each in own if each not in first_of}


def describe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The work of a run's model, for the command `plan`.

    Args:
        asked: ``config`` and ``cluster`` as plain values, and the ``device`` that is meant.

    Returns:
        ``work`` as plain values, or ``unknown``, the reason why it is not known.
    """
    config = config_from_values(asked["config"])
    cluster = Cluster(**asked["cluster"])
    if asked.get("optimizer"):
        try:
            make = optimizer_maker(config)
        except ConfigError as error:
            return {"unknown": str(error.problems[0])}
        found = "it is a named one" if make is None else measure_optimizer(make)
        return {"unknown": found} if isinstance(found, str) else asdict(found)
    try:
        parts = gather_parts(config, Objects())
        plan = make_plan(config, cluster, num_train_samples=parts.splits.num_train)
        batch = first_batch(plan, parts)
    except ConfigError as error:
        return {"unknown": str(error.problems[0])}
    try:
        return {"work": asdict(trace_work(config, parts, batch, device=asked["device"]))}
    except Exception as error:  # whatever code does with tensors that hold no numbers
        return {"unknown": f"it does not run without numbers: {in_one_line(error)}"}


if __name__ == "__main__":
    sys.exit(answer(describe))
