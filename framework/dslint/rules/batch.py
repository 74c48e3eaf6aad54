"""Batch sizes: three numbers and the data-parallel size, which must multiply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from framework.dslint.facts import Facts
from framework.dslint.rules.base import divisor_below, error, holds, note, warning
from framework.errors import Problem

GLOBAL: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
STEPS: Final = "gradient_accumulation_steps"


def batch_size_missing(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_set_batch_related_parameters`: one of the two sizes has to be there."""
    if not facts.given(GLOBAL) and not facts.given(MICRO) and not _is_elastic(facts):
        yield error(
            facts,
            "batch-size-missing",
            MICRO,
            f"DeepSpeed needs {GLOBAL} or {MICRO}, and neither is given",
            f"set {MICRO}: 1",
        )


def batch_arithmetic(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `_batch_assertion`: train_batch_size = micro x accumulation x data-parallel ranks.

    Without a topology only what no number of ranks can mend is an error. A `pipeline` section says that the code may
    split the model, and then fewer ranks share the batch.
    """
    sizes = {name: facts.whole(name) for name in (GLOBAL, MICRO, STEPS)}
    total, micro, steps = sizes[GLOBAL], sizes[MICRO], sizes[STEPS]
    if _is_elastic(facts):
        return  # whatever is written, elasticity sets all three
    if total is None or any(facts.given(name) and (size is None or size < 1) for name, size in sizes.items()):
        return  # nothing to multiply, or a type or a range is at fault
    ranks, per_step = facts.data_parallel_size, (micro or 1) * (steps or 1)
    if ranks is None and facts.topology.world_size is not None:
        return  # `sequence_parallel_fraction` speaks, or a range is at fault
    candidates = [max(1, total // per_step)] if ranks is None else [ranks]
    if ranks is not None and facts.given("pipeline"):
        candidates = [size for size in range(1, min(ranks, 4096) + 1) if ranks % size == 0]
    if any(_fits(total, micro, steps, candidate) for candidate in candidates):
        return
    words = [f"{micro} per rank" if micro else "", f"{steps} accumulation steps" if steps else ""]
    product = " x ".join([*filter(None, words), f"{ranks} ranks" if ranks else "any number of ranks"])
    unit = per_step * (ranks or 1)
    fixes = [f"{GLOBAL}: {unit if micro and steps and ranks else max(unit, total // unit * unit)}"]
    if micro and steps and ranks and total % (micro * ranks) == 0:
        fixes.append(f"{STEPS}: {total // (micro * ranks)}")
    yield error(facts, "batch-arithmetic", GLOBAL, f"{total} is not {product}", f"set {' or '.join(fixes)}")


@holds(before="0.19.8")
def elastic_batch(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `DeepSpeedConfig` until 0.19.8: `elasticity` sets the sizes, and refuses any that is
    written.
    """
    written = [name for name in (GLOBAL, MICRO, STEPS) if name in facts.values]
    if _is_elastic(facts) and written and not facts.get("elasticity.ignore_non_elastic_batch_info", False):
        yield error(
            facts,
            "elastic-batch-sizes",
            written[0],
            "elasticity sets the batch sizes, and takes none beside its own",
            f"{' and '.join(f'remove {name}' for name in written)}, "
            "or set elasticity.ignore_non_elastic_batch_info: true",
        )


def _is_elastic(facts: Facts) -> bool:
    return bool(facts.get("elasticity.enabled", False)) and not facts.since("0.19.8")


def _fits(total: int, micro: float | None, steps: float | None, ranks: float) -> bool:
    """DeepSpeed's own arithmetic: what is missing is divided out with a floor, then the product must be the total."""
    if micro is None:
        steps = steps or 1
        micro = total // ranks // steps
    if steps is None:
        steps = max(total // micro // ranks, 0) if micro else 0
    return min(micro, steps) > 0 and micro * steps * ranks == total


def tensor_parallel_batch(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `DeepSpeedConfig`: AutoTP without an mpu divides the batch by all ranks."""
    size, total, world = facts.whole("tensor_parallel.autotp_size", 0), facts.whole(GLOBAL), facts.topology.world_size
    if size is None or size < 2 or total is None:
        return
    numbers = f": a step sees {total // size} samples" if total % size == 0 else ""
    ranks = f"{world}" if world else "all"
    yield warning(
        facts,
        "batch-with-tensor-parallel",
        GLOBAL,
        f"DeepSpeed divides the batch by {ranks} ranks though {size} at a time hold one replica{numbers}",
        f"remove {GLOBAL}, set {MICRO} and {STEPS}, and multiply them by the replicas yourself",
    )


@holds(since="0.17.0")
def sequence_parallel_mesh(facts: Facts) -> Iterator[Problem]:
    """deepspeed/__init__.py `initialize_mesh_device`: both sizes make a mesh, which must hold every rank."""
    sequence, data = facts.whole("sequence_parallel_size"), facts.whole("data_parallel_size")
    world = facts.topology.world_size
    if world and sequence and data and not _mesh_fits(facts):
        yield error(
            facts,
            "sequence-parallel-mesh",
            "sequence_parallel_size",
            f"{data} data-parallel x {sequence} sequence-parallel ranks are not the {world} there are",
            f"start it on {data * sequence} ranks",
        )


def _mesh_fits(facts: Facts) -> bool:
    sequence, data = facts.whole("sequence_parallel_size", 1), facts.whole("data_parallel_size", 1)
    world = facts.topology.world_size
    return world is None or sequence is None or data is None or sequence * data == world


@holds(since="0.17.0")
def data_parallel_alone(facts: Facts) -> Iterator[Problem]:
    """deepspeed/__init__.py `initialize`: `data_parallel_size` is read beside `sequence_parallel_size` only."""
    if facts.given("data_parallel_size") and not facts.given("sequence_parallel_size"):
        yield warning(
            facts,
            "data-parallel-size-alone",
            "data_parallel_size",
            "without sequence_parallel_size DeepSpeed does not look at it",
            "remove data_parallel_size",
        )


@holds(since="0.17.0")
def sequence_parallel_fraction(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `DeepSpeedConfig`: `dist.get_world_size() / config["sequence_parallel_size"]`, a
    float.

    `_batch_assertion` takes it when the floats happen to multiply.
    """
    sequence, world = facts.whole("sequence_parallel_size"), facts.topology.world_size
    total, micro, steps = facts.whole(GLOBAL), facts.whole(MICRO), facts.whole(STEPS)
    if world and sequence and sequence > 0 and not facts.given("data_parallel_size") and world % sequence:
        is_taken = total is None or _fits(total, micro, steps, world / sequence)
        report = warning if is_taken else error
        yield report(
            facts,
            "sequence-parallel-fraction",
            "sequence_parallel_size",
            f"DeepSpeed divides the batch by {world} / {sequence} = {world / sequence:.3g} ranks",
            f"set sequence_parallel_size: {divisor_below(world, sequence)}",
        )


def sequence_parallel_gradients(facts: Facts) -> Iterator[Problem]:
    """deepspeed/utils/groups.py `_get_sequence_data_parallel_group`: with the mesh it is the data-parallel group alone.

    Measured on 2 ranks, stages 0 and 1: the two copies of the weights differ by 0.02 after one Adam step at lr 1e-2.
    """
    sequence = facts.whole("sequence_parallel_size")
    if sequence is not None and sequence > 1 and facts.given("data_parallel_size") and _mesh_fits(facts):
        yield warning(
            facts,
            "sequence-parallel-gradients",
            "data_parallel_size",
            f"gradients are not reduced over the {sequence} sequence-parallel ranks, whose weights drift apart",
            "remove data_parallel_size and pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        )


@holds(since="0.17.0")
def sequence_parallel_alone(facts: Facts) -> Iterator[Problem]:
    """deepspeed/runtime/config.py `DeepSpeedConfig`: by itself the key only divides the world size of the
    arithmetic.
    """
    sequence, world = facts.whole("sequence_parallel_size"), facts.topology.world_size
    divides = world is None or (sequence is not None and sequence > 0 and world % sequence == 0)
    if sequence is not None and sequence > 1 and not facts.given("data_parallel_size") and divides:
        yield note(
            facts,
            "sequence-parallel-alone",
            "sequence_parallel_size",
            f"by itself it only divides the ranks of the batch arithmetic by {sequence}",
            "split the sequence in code: pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp",
        )
