"""Which of torch's kernels computes attention on a GPU (`training.attention`): the one that is
named, or the fastest that computes this model's attention, by a short measurement.

It holds for all that calls `scaled_dot_product_attention`: our models and transformers'.
A kernel that cannot compute some other attention of the run leaves it to the next one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from framework.config.model import LanguageModel
from framework.config.training import MaskedLM
from framework.engine.distributed import from_rank0, rank
from framework.errors import ConfigError, in_one_line
from framework.plan.plan import Plan
from framework.system.log import note, print_line

_KEY: Final = "training.attention"
_BACKENDS: Final = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
# In torch's own order, and FlashAttention 3 where it is installed. `math` keeps all pairs of
# positions, and stands in where no other kernel can.
_MEASURED: Final = ("flash", "efficient", "cudnn", "fa3")
# Another kernel than torch's own has to take this much less time: two measurements of one differ
# by a few percent, and a resumed run should choose as the first one did.
_FASTER_BY: Final = 0.95
_RUNS: Final = 5


class AttentionShape(NamedTuple):
    """What a model's attention computes in a micro-batch of a rank.

    Attributes:
        batch: number of sequences.
        heads: of queries.
        kv_heads: of keys and values.
        length: positions of a sequence.
        head_size: numbers of a head.
        is_causal: whether a position sees those before it alone.
        is_masked: whether there is a mask of padding.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_size: int
    is_causal: bool = True
    is_masked: bool = False


_ANY_SHAPE: Final = AttentionShape(batch=1, heads=8, kv_heads=8, length=128, head_size=64)


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention.

    Attributes:
        name: value of `training.attention`.
    """

    name: str

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this kernel compute attention within the block, and no other one."""
        with self._implementation(), sdpa_kernel(_BACKENDS[self.name]):
            yield

    @contextmanager
    def first(self) -> Iterator[None]:
        """Let this kernel compute attention within the block wherever it can, and otherwise the
        others in torch's order.
        """
        if self.name == "math":  # it can compute all; on processors torch has an order of its own
            with self.alone():
                yield
            return
        order = [_BACKENDS[self.name]]
        order += [other for other in dict.fromkeys(_BACKENDS.values()) if other != order[0]]
        with self._implementation(), sdpa_kernel(order, set_priority=True):
            yield

    @contextmanager
    def _implementation(self) -> Iterator[None]:
        """Put FlashAttention 3 in place of torch's own, if this is it.

        Raises:
            RuntimeError: it is not there.
        """
        if self.name != "fa3":
            yield
            return
        import torch.nn.attention as attention

        activate = getattr(attention, "activate_flash_attention_impl", None)  # torch 2.11 and later
        if activate is None:
            raise RuntimeError(f"torch {torch.__version__} does not know FlashAttention 3")
        try:
            activate("FA3")
        except (ImportError, ValueError, AttributeError) as error:
            raise RuntimeError(in_one_line(error)) from error
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()


@contextmanager
def kernel_of_run(plan: Plan, model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the kernel of `chosen_kernel` compute attention within the block. Collective."""
    kernel = chosen_kernel(plan, model, device)
    if kernel is None:
        yield
        return
    with kernel.first():
        yield


def chosen_kernel(plan: Plan, model: nn.Module, device: torch.device) -> Kernel | None:
    """Return the kernel of `training.attention`; None: torch's own choice stays. Collective.

    Raises:
        ConfigError: kind ``attention-kernel-missing``: the config names a kernel that cannot
            compute this model's attention here.
    """
    name = plan.config.training.attention
    shape = attention_shape(plan, model)
    if name != "auto":
        kernel = Kernel(name)
        _refuse_missing(kernel, shape or _ANY_SHAPE, _dtype(plan), device)
        return kernel
    if shape is None or plan.config.training.deterministic:
        return None
    return _fastest(shape, _dtype(plan), device)


def _dtype(plan: Plan) -> torch.dtype:
    """Return the type of queries, keys and values."""
    precision = plan.config.precision
    name = getattr(precision, "compute_dtype", precision.dtype)
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


def attention_shape(plan: Plan, model: nn.Module) -> AttentionShape | None:
    """Return what a named model, or a model of transformers, computes in its attention; None where
    that, or the length of sequences, is not known.
    """
    config = plan.config
    described: Any = config.model
    if not isinstance(described, LanguageModel):
        described = _described(model)
    length = getattr(config.data, "sequence_length", None)
    if described is None or not length:
        return None
    names = ("num_heads", "num_attention_heads")
    heads = next(getattr(described, name) for name in names if hasattr(described, name))
    kv_heads = heads
    for name in ("num_kv_heads", "num_key_value_heads"):
        kv_heads = getattr(described, name, None) or kv_heads
    head_size = getattr(described, "head_dim", None) or described.hidden_size // heads
    # Ranks that share sequences have all positions of their share of the heads, or a chunk of them.
    own_heads = max(heads // config.parallel.tensor, 1)
    team = gcd(own_heads, config.parallel.sequence)
    ranks = config.parallel.tensor * team
    is_causal = not isinstance(config.task, MaskedLM) and not getattr(
        described, "num_classes", None
    )
    return AttentionShape(
        batch=plan.layout.micro_size,
        heads=max(heads // ranks, 1),
        kv_heads=max(kv_heads // ranks, 1),
        length=length // (config.parallel.sequence // team),
        head_size=head_size,
        is_causal=is_causal,
        is_masked=not is_causal,
    )


def _described(model: nn.Module) -> Any:
    """Return the config of the outermost module that has one in transformers' words."""
    for module in model.modules():
        described = getattr(module, "config", None)
        if hasattr(described, "num_attention_heads") and hasattr(described, "hidden_size"):
            return described
    return None


def _refuse_missing(
    kernel: Kernel, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a kernel that the config names, and that cannot compute attention of this shape."""
    try:
        _seconds(kernel, shape, dtype, device)
    except RuntimeError as error:
        reason = f"it cannot compute attention of this model here: {error}"
        fix = f"set {_KEY}: auto"
        raise ConfigError.of("attention-kernel-missing", reason, fix, _KEY, kernel.name) from error


def _fastest(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """Return the kernel that rank 0 found to be faster than torch's choice, if one is. Only half
    precision has several kernels. Collective.
    """
    if dtype == torch.float32:
        return None
    name: str | None = None
    if rank() == 0:
        times, reasons = measured(shape, dtype, device)
        name = choose_kernel(times)
        note(f"attention: {times or 'no kernel'}; not there: {reasons}")
        if name is not None:
            shown = ", ".join(f"{one} {1000 * times[one]:.2f}" for one in times)
            print_line(f"{_KEY}: auto takes {name} (ms forward and backward: {shown})")
    name = from_rank0(name)
    if name is None:
        return None
    return Kernel(name)


def choose_kernel(times: Mapping[str, float]) -> str | None:
    """Return the kernel to use, given the seconds of all that can compute a model's attention;
    None: torch's own choice stays, which is the first of them in its order.
    """
    able = [name for name in _MEASURED if name in times]
    if not able:
        return None
    best = min(able, key=lambda name: times[name])
    if times[best] > _FASTER_BY * times[able[0]]:
        return None
    return best


def measured(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of each kernel, forward and backward, and why the others have none."""
    times: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name in _MEASURED:
        try:
            times[name] = _seconds(Kernel(name), shape, dtype, device)
        except RuntimeError as error:
            reasons[name] = str(error)
    return times, reasons


def _seconds(
    kernel: Kernel, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the least seconds of a pass of attention, forward and backward.

    Raises:
        RuntimeError: the kernel cannot compute it, with torch's reason.
    """
    compute = _passes_of(shape, dtype, device)
    with kernel.alone():
        _tried(compute)
        compute()
        return min(_timed(compute, device) for _ in range(_RUNS))


def _passes_of(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Return a function that computes attention of this shape, forward and backward."""
    make = partial(torch.randn, dtype=dtype, device=device)
    inputs: list[Tensor] = []
    for heads in (shape.heads, shape.kv_heads, shape.kv_heads):
        # in memory as a projection makes them
        rows = make(shape.batch, shape.length, heads, shape.head_size)
        inputs.append(rows.transpose(1, 2).requires_grad_())
    mask: Tensor | None = None
    if shape.is_masked:
        mask = torch.ones(shape.batch, 1, 1, shape.length, dtype=torch.bool, device=device)
    query, key, value = inputs
    gradient = torch.ones_like(query)

    def compute() -> None:
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=shape.is_causal and mask is None,
            enable_gqa=shape.heads != shape.kv_heads,
        )
        torch.autograd.grad(output, inputs, gradient)

    return compute


def _tried(compute: Callable[[], None]) -> None:
    """Call a function once.

    Raises:
        RuntimeError: it fails, with the reasons that torch gives in warnings.
    """
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            compute()
        except RuntimeError as error:
            reasons = [in_one_line(warning.message) for warning in given]  # type: ignore[arg-type]
            reasons = [reason for reason in reasons if "not" in reason] or [in_one_line(error)]
            raise RuntimeError("; ".join(reasons)) from error


def _timed(compute: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that a call takes on its device."""
    if device.type != "cuda":
        start = time.perf_counter()
        compute()
        return time.perf_counter() - start
    make: Any = torch.cuda.Event
    begin = make(enable_timing=True)
    end = make(enable_timing=True)
    begin.record()
    compute()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
