"""Messages of a step: how many elements DeepSpeed 0.19.8, and our engine in its place, send at
once, as lists of sizes.

No message divides a weight at stage 3, nor in DeepSpeed's buckets; what is gathered follows other
keys than what is summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Final

from framework.plan.flat_sums import most_in_message

# Elements of a message of `PipelineEngine` without ZeRO (runtime/engine.py:
# MEMORY_OPT_ALLREDUCE_SIZE, as runtime/pipe/engine.py `_exec_reduce_grads` gives it).
PIPELINE_BUCKET: Final = 500_000_000


def filled(sizes: Iterable[int], least: int) -> list[int]:
    """Join weights until a message has `least` elements or more.

    So DeepSpeed's prefetch of stage 3 does (runtime/zero/partitioned_param_coordinator.py
    `fetch_sub_module`: while numel_prefetching < max_params_to_prefetch), and its sums of a
    pipeline without ZeRO (runtime/engine.py `allreduce_no_retain`). With 0 each weight is one.
    """
    messages = []
    elements = 0
    for size in sizes:
        elements += size
        if elements >= least:
            messages.append(elements)
            elements = 0
    if elements:
        messages.append(elements)
    return messages


def bounded(sizes: Iterable[int], most: int) -> list[int]:
    """Join weights as long as a message has no more than `most` elements; a larger one goes alone.

    So our sums of stage 0 do (engine/gradient_sums.py `_cut`), and DeepSpeed's buckets of gradients
    with `reduce_bucket_size` (`reduce_independent_p_g_buckets_and_remove_grads` of
    runtime/zero/stage_1_and_2.py and of runtime/zero/stage3.py).
    """
    messages = []
    elements = 0
    for size in sizes:
        if elements and elements + size > most:
            messages.append(elements)
            elements = 0
        elements += size
    if elements:
        messages.append(elements)
    return messages


def whole(sizes: Iterable[int]) -> list[int]:
    """Return the gather of new weights at stages 1 and 2: all at once, however large.

    DeepSpeed's `all_gather_dp_groups` (runtime/utils.py) reads `allgather_bucket_size` only where
    torch has no `all_gather_into_tensor`, which every torch that we run on has;
    engine/flat_step.py sends the same. A message for each group of the optimizer counts as one.
    """
    elements = sum(sizes)
    if not elements:
        return []
    return [elements]


def flat(total: int, bucket: int) -> list[int]:
    """Cut all gradients, joined, into messages of equal size but for the last one, as
    engine/flat_sums.py does at stages 1 and 2.
    """
    width = max(most_in_message(bucket), 1)
    num_whole, rest = divmod(total, width)
    messages = list(repeat(width, num_whole))
    if rest:
        messages.append(rest)
    return messages


def ahead(sizes: Sequence[int], *, prefetch: int, live: int, persistent: int) -> list[int]:
    """Return the gathers of stage 3 in one pass: of weights that are larger than `persistent`, up
    to `prefetch` elements ahead, as long as `live` ones may be whole.

    Source: runtime/zero/partitioned_param_coordinator.py `fetch_sub_module`, where no more is
    fetched than the less of `stage3_prefetch_bucket_size` and what `stage3_max_live_parameters`
    leaves; runtime/zero/partition_parameters.py `all_gather_coalesced` sends each such set at once.
    """
    spread = [size for size in sizes if size > persistent]
    return filled(spread, min(prefetch, live))


def small(sizes: Iterable[int], persistent: int) -> list[int]:
    """Return the gather of the weights that stay whole at stage 3, once a step: all in one message
    (runtime/zero/stage3.py `_post_step`).
    """
    return whole(size for size in sizes if size <= persistent)
