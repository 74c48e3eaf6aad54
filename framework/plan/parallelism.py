"""Distribution of an optimizer step over devices, and what else decides its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from framework.config.optimizer import (
    SGD,
    Adafactor,
    Adagrad,
    AdamW8bit,
    Lion,
    Muon,
    OptimizerSection,
)
from framework.config.precision import (
    BF16,
    FP16,
    FP32,
    Autocast,
    PrecisionSection,
    fp8_of,
    state_widths,
)
from framework.config.run_config import RunConfig
from framework.plan.compiling import compile_choice
from framework.plan.flat_sums import coalesces, may_sum_flat, waits
from framework.plan.plan import Plan, ring_size
from framework.plan.rules.devices import sums_of


@dataclass(frozen=True)
class Parallelism:
    """Distribution of one optimizer step over devices, and what else decides its time.

    Attributes:
        data: ranks that see different samples.
        pipe: pipeline stages.
        tensor: ranks that share every matrix product.
        sequence: ranks that share every sample's tokens.
        ring: teams of them around which keys and values go, where they are more than heads.
        key_share: heads of keys for each head of queries.
        expert: ranks that share the experts.
        zero_stage: 0 to 3.
        accumulation: micro-batches of a rank, or of a pipeline, per optimizer step.
        micro_size: samples of a micro-batch.
        dtype: what matrix products are computed in: fp32, tf32, fp16, bf16 or fp8.
        rounding_bytes: bytes that are moved for each element of an operand that is rounded to fp8;
            then the products of blocks with their weights are computed in it. 0: none are.
        weight_bytes: of an element of the weights.
        gradient_bytes: of an element of the gradients that are sent.
        state_bytes: of optimizer state for an element, with the fp32 weight where there is one.
        recomputed: share of the forward pass that runs again in the backward pass.
        keeps_products: whether the products of that share are kept, and do not run again.
        overlaps: sums of gradients run beside the backward pass.
        scatters: each rank gets its part of the sums alone, as with FSDP; DeepSpeed does so at
            stage 3 only, `engine/flat_sums.py` at stages 1 and 2.
        coalesces: gradients of stage 2 are summed once in a step, not after each micro-batch.
        bucket: elements of gradients that are summed at once (`zero.reduce_bucket_size`).
        prefetch: elements of weights that stage 3 gathers ahead of their use; 0: none.
        reuse: elements of weights between two uses of one at stage 3 up to which it stays whole.
        live: elements of weights that stay whole at stage 3 between the forward and the backward
            pass.
        persistent: elements up to which a weight stays whole at stage 3.
        by_weight: the host handles each weight by itself at stage 3, as DeepSpeed does; FSDP
            handles blocks.
        joins_gradients: stages 1 and 2: the optimizer steps on a joined fp32 copy.
        interleaving: parts of the model on each pipeline stage.
        sends_parts: each tensor rank sends a part of what crosses to the next stage.
        block_sums: all-reduces of tensor parallelism in a block, forward and backward.
        is_offloaded: the optimizer runs on the host.
        host_kernel: it is DeepSpeed's kernel there, and not torch's Adam.
        host_share: share of the weights that it steps there.
        weights_offloaded: weights of stage 3 lie on the host.
        muon: the section of the optimizer if it is Muon.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    sequence: int = 1
    ring: int = 1
    key_share: float = 1.0
    expert: int = 1
    zero_stage: int = 0
    accumulation: int = 1
    micro_size: int = 1
    dtype: str = "bf16"
    rounding_bytes: int = 0
    weight_bytes: int = 2
    gradient_bytes: int = 2
    state_bytes: int = 12
    recomputed: float = 0.0
    keeps_products: bool = False
    overlaps: bool = True
    scatters: bool = False
    coalesces: bool = False
    bucket: int = 50_000_000
    prefetch: int = 50_000_000
    reuse: int = 1_000_000_000
    live: int = 1_000_000_000
    persistent: int = 100_000
    by_weight: bool = True
    joins_gradients: bool = False
    interleaving: int = 1
    sends_parts: bool = True
    block_sums: tuple[int, int] = (2, 4)
    is_offloaded: bool = False
    host_kernel: bool = True
    host_share: float = 1.0
    weights_offloaded: bool = False
    muon: Muon | None = None

    @property
    def num_devices(self) -> int:
        """Devices of one step."""
        return self.data * self.pipe * self.tensor * self.sequence

    @property
    def products_again(self) -> float:
        """Share of the products of a forward pass that run again in the backward pass."""
        return 0.0 if self.keeps_products else self.recomputed

    @staticmethod
    def from_plan(plan: Plan) -> Parallelism:
        """Return the distribution of a plan."""
        config = plan.config
        layout = plan.layout
        zero = config.zero
        stage = zero.stage
        is_half = isinstance(config.precision, BF16 | FP16)
        gradients_wait = waits(config, layout)
        return Parallelism(
            data=layout.data_parallel_size,
            pipe=layout.pipe_size,
            tensor=layout.tensor_size,
            sequence=layout.sequence_size,
            ring=ring_size(plan),
            key_share=_key_share(config.model),
            sends_parts=False,
            block_sums=(2, 2),
            expert=layout.expert_size,
            zero_stage=stage,
            accumulation=layout.accumulation_steps,
            micro_size=layout.micro_size,
            dtype=_product_dtype(config.precision),
            rounding_bytes=_rounding_bytes(plan),
            weight_bytes=2 if is_half else 4,
            gradient_bytes=_gradient_bytes(plan, is_half=is_half),
            state_bytes=_state_bytes(config, has_copies=is_half or stage > 0),
            recomputed=1.0 if config.training.recompute_every else 0.0,
            keeps_products=config.training.keeps_products,
            overlaps=stage == 0 or zero.sums_overlap,
            scatters=stage == 3 or (gradients_wait and may_sum_flat(config, layout)),
            coalesces=coalesces(config, layout),
            bucket=zero.reduce_bucket_size,
            prefetch=zero.stage3_prefetch_bucket_size,
            reuse=zero.reuse_distance,
            live=zero.stage3_max_live_parameters,
            persistent=zero.stage3_param_persistence_threshold,
            joins_gradients=stage in (1, 2),
            is_offloaded=stage > 0 and zero.offload_optimizer.device != "none",
            host_kernel=_has_host_kernel(config.optimizer),
            host_share=getattr(zero.offload_optimizer, "ratio", 1.0),
            weights_offloaded=stage == 3 and zero.offload_param.device != "none",
            muon=config.optimizer if isinstance(config.optimizer, Muon) else None,
        )


def _has_host_kernel(optimizer: OptimizerSection) -> bool:
    """Check whether DeepSpeed's kernel steps the optimizer where it is offloaded: Adam's only if it
    is asked for.
    """
    implementation = getattr(optimizer, "implementation", "deepspeed")
    return bool(implementation == "deepspeed")


def _key_share(model: Any) -> float:
    """Return the heads of keys for each head of queries; 1 where they are not known."""
    num_heads = getattr(model, "num_heads", None)
    num_kv_heads = getattr(model, "num_kv_heads", None)
    if not num_heads or not num_kv_heads:
        return 1.0
    return float(num_kv_heads / num_heads)


def _gradient_bytes(plan: Plan, *, is_half: bool) -> int:
    """Return the bytes of an element of the gradients that are sent."""
    _, reduction = sums_of(plan.config, plan.layout)
    if is_half and not reduction:
        return 2
    return 4


def _state_bytes(config: RunConfig, *, has_copies: bool) -> int:
    """Return the bytes of optimizer state of an element, with the copy that is stepped where there
    is one.
    """
    widths = state_widths(config.precision)
    moment_bytes = widths.moment * _num_moments(config.optimizer)
    if isinstance(config.optimizer, AdamW8bit):
        moment_bytes = 2
    if has_copies:
        return moment_bytes + widths.weight
    return moment_bytes


def _product_dtype(precision: PrecisionSection) -> str:
    """Return the type that matrix products are computed in."""
    if isinstance(precision, Autocast):
        return precision.compute_dtype
    if isinstance(precision, FP32):
        return "fp32" if precision.matmul == "highest" else "tf32"
    return precision.dtype


# Bytes of an element of bf16 that is rounded to fp8. Compiled: read for the largest one, read again
# and written. As written, in torchao 0.18: read and written for its size (4), read for the largest
# (2), and passes that make fp32 of it (6), scale (8), clamp (8) and round (5).
_ROUNDED_COMPILED: Final = 5
_ROUNDED_AS_WRITTEN: Final = 33


def _rounding_bytes(plan: Plan) -> int:
    section = fp8_of(plan.config.precision)
    if section is None or section.emulate:
        return 0
    if compile_choice(plan.config, "cuda").section is None:
        return _ROUNDED_AS_WRITTEN
    return _ROUNDED_COMPILED


def _num_moments(optimizer: OptimizerSection) -> int:
    """Return the fp32 numbers of optimizer state that most elements have."""
    if isinstance(optimizer, SGD):
        return 1 if optimizer.momentum else 0
    if isinstance(optimizer, Adagrad | Lion | Muon):
        return 1
    if isinstance(optimizer, Adafactor):
        return 0
    return 2
