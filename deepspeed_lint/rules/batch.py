"""Batch sizes: three numbers and the data-parallel size, which must multiply."""

from __future__ import annotations

from typing import Final

from deepspeed_lint.facts import Facts
from deepspeed_lint.rules.base import Found, divisor_below, rule

GLOBAL: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
STEPS: Final = "gradient_accumulation_steps"
_SEQUENCE: Final = "sequence_parallel_size"


@rule()
def batch_arithmetic(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `_batch_assertion`: train_batch_size = micro x accumulation x
    data-parallel ranks.

    Without a topology only what no number of ranks can make right is an error. With a `pipeline`
    section the code may split the model, and then fewer ranks share the batch.
    """
    total = facts.whole(GLOBAL)
    if total is None or not _can_multiply(facts):
        return
    micro = facts.whole(MICRO)
    steps = facts.whole(STEPS)
    ranks = facts.data_parallel_size
    candidates = _candidate_ranks(facts, ranks, total // _product(micro, steps))
    if not any(_fits(total, micro, steps, candidate) for candidate in candidates):
        product = _product_text(micro, steps, ranks)
        fixes = _batch_fixes(total, micro, steps, ranks)
        yield GLOBAL, f"{total} is not {product}", f"set {' or '.join(fixes)}"


def _can_multiply(facts: Facts) -> bool:
    """Check whether the arithmetic is the file's own, and no type or range is at fault in it."""
    if facts.is_elastic:
        return False  # elasticity sets all three
    if any(_is_at_fault(facts, name) for name in (GLOBAL, MICRO, STEPS)):
        return False
    # Without a data-parallel size `sequence_parallel_fraction` or the key table has the reason.
    return facts.world_size is None or facts.data_parallel_size is not None


def _product(*factors: int | None) -> int:
    """Multiply the factors that are known."""
    product = 1
    for factor in factors:
        if factor:
            product *= factor
    return product


def _product_text(micro: int | None, steps: int | None, ranks: int | None) -> str:
    factors = []
    if micro:
        factors.append(f"{micro} per rank")
    if steps:
        factors.append(f"{steps} accumulation steps")
    factors.append(f"{ranks} ranks" if ranks else "any number of ranks")
    return " x ".join(factors)


def _batch_fixes(total: int, micro: int | None, steps: int | None, ranks: int | None) -> list[str]:
    """Return the settings that fit: another global size, or another number of steps."""
    unit = _product(micro, steps, ranks)
    if not (micro and steps and ranks):
        return [f"{GLOBAL}: {max(unit, total // unit * unit)}"]
    fixes = [f"{GLOBAL}: {unit}"]
    if total % (micro * ranks) == 0:
        fixes.append(f"{STEPS}: {total // (micro * ranks)}")
    return fixes


def _is_at_fault(facts: Facts, name: str) -> bool:
    size = facts.whole(name)
    return facts.given(name) and (size is None or size < 1)


def _candidate_ranks(facts: Facts, ranks: int | None, fitting_ranks: int) -> list[int]:
    """Return the numbers of ranks that may share the batch.

    Args:
        facts: the file.
        ranks: data-parallel ranks, if known.
        fitting_ranks: the number that would fit, for unknown ones.
    """
    if ranks is None:
        return [max(1, fitting_ranks)]
    if facts.given("pipeline"):
        return [size for size in range(1, min(ranks, 4096) + 1) if ranks % size == 0]
    return [ranks]


@rule(before="0.19.8")
def elastic_batch_sizes(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `DeepSpeedConfig` until 0.19.8: `elasticity` sets the sizes, and
    refuses any.
    """
    written = [name for name in (GLOBAL, MICRO, STEPS) if name in facts.values]
    ignored = "elasticity.ignore_non_elastic_batch_info"
    if facts.is_elastic and written and not facts.get(ignored):
        removals = " and ".join(f"remove {name}" for name in written)
        reason = "elasticity sets the batch sizes, and takes none beside its own"
        yield written[0], reason, f"{removals}, or set {ignored}: true"


def _fits(total: int, micro: float | None, steps: float | None, ranks: float) -> bool:
    """Check DeepSpeed's own arithmetic: what is missing is divided out with a floor, then the
    product must be the total.
    """
    if micro is None:
        steps = steps or 1
        micro = total // ranks // steps
    if steps is None:
        steps = max(total // micro // ranks, 0) if micro else 0
    return min(micro, steps) > 0 and micro * steps * ranks == total


@rule("warning")
def batch_with_tensor_parallel(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `DeepSpeedConfig`: AutoTP without an mpu divides the batch by all
    ranks.
    """
    size = facts.tensor_parallel_size
    total = facts.whole(GLOBAL)
    if size > 1 and total is not None:
        if total % size == 0:
            numbers = f": a step sees {total // size} samples"
        else:
            numbers = ""
        yield (
            GLOBAL,
            f"DeepSpeed divides the batch by {facts.world_size or 'all'} ranks though {size} at a "
            f"time hold one replica{numbers}",
            f"remove {GLOBAL}, set {MICRO} and {STEPS}, and multiply them by the replicas yourself",
        )


@rule(since="0.17.0")
def sequence_parallel_mesh(facts: Facts) -> Found:
    """deepspeed/__init__.py `initialize_mesh_device`: both sizes make a mesh, which must hold every
    rank.
    """
    sequence = facts.whole(_SEQUENCE)
    data = facts.whole("data_parallel_size")
    if sequence and data and facts.world_size not in (None, 0, data * sequence):
        ranks = f"{data} data-parallel x {sequence} sequence-parallel ranks"
        yield (
            _SEQUENCE,
            f"{ranks} are not the {facts.world_size} there are",
            f"start it on {data * sequence} ranks",
        )


def _mesh_fits(facts: Facts) -> bool:
    sequence = facts.whole(_SEQUENCE, 1)
    data = facts.whole("data_parallel_size", 1)
    world = facts.world_size
    return world is None or sequence is None or data is None or sequence * data == world


@rule(since="0.17.0")
def sequence_parallel_fraction(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `_batch_assertion` divides by `sequence_parallel_size`, and takes
    a fitting float.
    """
    sequence = facts.whole(_SEQUENCE) or 0
    world = facts.world_size or 0
    if sequence <= 0 or facts.given("data_parallel_size") or world % sequence == 0:
        return
    is_taken = _fits_or_is_unknown(facts, world / sequence)
    yield (
        _SEQUENCE,
        f"DeepSpeed divides the batch by {world} / {sequence} = {world / sequence:.3g} ranks",
        f"set {_SEQUENCE}: {divisor_below(world, sequence)}",
        "warning" if is_taken else "error",
    )


def _fits_or_is_unknown(facts: Facts, ranks: float) -> bool:
    total = facts.whole(GLOBAL)
    return total is None or _fits(total, facts.whole(MICRO), facts.whole(STEPS), ranks)


@rule("warning")
def sequence_parallel_gradients(facts: Facts) -> Found:
    """deepspeed/utils/groups.py `_get_sequence_data_parallel_group`: with the mesh it is the
    data-parallel group alone.

    Measured on 2 ranks, stages 0 and 1: the two copies of the weights differ by 0.02 after one Adam
    step at lr 1e-2.
    """
    sequence = facts.whole(_SEQUENCE) or 0
    if sequence > 1 and facts.given("data_parallel_size") and _mesh_fits(facts):
        yield (
            "data_parallel_size",
            f"gradients are not reduced over the {sequence} sequence-parallel ranks, whose "
            "weights drift apart",
            "remove data_parallel_size and pass "
            "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        )


@rule("note", since="0.17.0")
def sequence_parallel_alone(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `DeepSpeedConfig`: by itself the key only divides the ranks of
    the arithmetic.
    """
    sequence = facts.whole(_SEQUENCE) or 0
    world = facts.world_size
    if sequence <= 1 or facts.given("data_parallel_size"):
        return
    if world is None or world % sequence == 0:
        yield (
            _SEQUENCE,
            f"by itself it only divides the ranks of the batch arithmetic by {sequence}",
            "split the sequence in code: pass "
            "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        )
