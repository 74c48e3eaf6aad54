"""Batch sizes: three numbers and the data-parallel size, which must multiply."""

from __future__ import annotations

from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import Found, divisor_below, rule

GLOBAL: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
STEPS: Final = "gradient_accumulation_steps"
_SEQUENCE: Final = "sequence_parallel_size"


@rule()
def batch_arithmetic(facts: Facts) -> Found:
    """deepspeed/runtime/config.py `_batch_assertion`: train_batch_size = micro x accumulation x
    data-parallel ranks.

    Without a topology only what no number of ranks can mend is an error. A `pipeline` section says
    that the code may split the model, and then fewer ranks share the batch.
    """
    sizes = {name: facts.whole(name) for name in (GLOBAL, MICRO, STEPS)}
    total, micro, steps = sizes.values()
    if facts.is_elastic:
        return  # whatever is written, elasticity sets all three
    if total is None or any(
        facts.given(name) and (size is None or size < 1) for name, size in sizes.items()
    ):
        return  # nothing to multiply, or a type or a range is at fault
    ranks = facts.data_parallel_size
    per_step = (micro or 1) * (steps or 1)
    if ranks is None and facts.world_size is not None:
        return  # `sequence_parallel_fraction` speaks, or a range is at fault
    if ranks is None:
        candidates = [max(1, total // per_step)]
    else:
        candidates = [ranks]
    if ranks is not None and facts.given("pipeline"):
        candidates = [size for size in range(1, min(ranks, 4096) + 1) if ranks % size == 0]
    if any(_fits(total, micro, steps, candidate) for candidate in candidates):
        return
    words = [f"{micro} per rank" if micro else "", f"{steps} accumulation steps" if steps else ""]
    product = " x ".join(
        [*filter(None, words), f"{ranks} ranks" if ranks else "any number of ranks"]
    )
    unit = per_step * (ranks or 1)
    fixes = [f"{GLOBAL}: {unit if micro and steps and ranks else max(unit, total // unit * unit)}"]
    if micro and steps and ranks and total % (micro * ranks) == 0:
        fixes.append(f"{STEPS}: {total // (micro * ranks)}")
    yield GLOBAL, f"{total} is not {product}", f"set {' or '.join(fixes)}"


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
    """DeepSpeed's own arithmetic: what is missing is divided out with a floor, then the product
    must be the total.
    """
    if micro is None:
        steps = steps or 1
        micro = total // ranks // steps
    if steps is None:
        if micro:
            steps = max(total // micro // ranks, 0)
        else:
            steps = 0
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
    if facts.world_size and sequence and data and not _mesh_fits(facts):
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
    sequence = facts.whole(_SEQUENCE)
    world = facts.world_size
    total = facts.whole(GLOBAL)
    micro = facts.whole(MICRO)
    steps = facts.whole(STEPS)
    if (
        world
        and sequence
        and sequence > 0
        and not facts.given("data_parallel_size")
        and world % sequence
    ):
        is_taken = total is None or _fits(total, micro, steps, world / sequence)
        yield (
            _SEQUENCE,
            f"DeepSpeed divides the batch by {world} / {sequence} = {world / sequence:.3g} ranks",
            f"set {_SEQUENCE}: {divisor_below(world, sequence)}",
            "warning" if is_taken else "error",
        )


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
    if (
        sequence > 1
        and not facts.given("data_parallel_size")
        and (world is None or world % sequence == 0)
    ):
        yield (
            _SEQUENCE,
            f"by itself it only divides the ranks of the batch arithmetic by {sequence}",
            "split the sequence in code: pass "
            "mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        )
