"""Searches with another goal than throughput: fewest devices, longest sequence, more devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from framework.errors import UsageError
from framework.plan.alternatives import with_settings
from framework.plan.cluster import Cluster
from framework.plan.search import SearchResult, search
from framework.plan.search_space import (
    LENGTH,
    POSITIONS,
    Request,
    powers_of_two,
)

_LONGEST_SEQUENCE: Final = 1 << 24


def search_fewest_devices(request: Request) -> SearchResult:
    """Search on the smallest part of a cluster on which something fits.

    Parts are whole hosts, or devices of one host in powers of two. If nothing fits, this is the
    search on the whole cluster.

    Raises:
        UsageError: the device's memory is not known.
    """
    cluster = request.cluster
    if request.target.memory_bytes is None:
        raise UsageError("--goal fewest-devices needs the memory of a device; add --gpu KIND")
    for num_hosts, devices_per_host in _smaller_sizes(cluster):
        part = replace(cluster, num_hosts=num_hosts, devices_per_host=devices_per_host)
        smaller = replace(request, cluster=part)
        if search(smaller, is_quick=True).ranked:
            return search(smaller)
    return search(request)


def _smaller_sizes(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield hosts and devices per host of the smaller parts of a cluster, the smallest first."""
    for count in powers_of_two(cluster.devices_per_host):
        if count < cluster.devices_per_host:
            yield 1, count
    for count in powers_of_two(cluster.num_hosts):
        if count < cluster.num_hosts:
            yield count, cluster.devices_per_host


def search_longest_sequence(request: Request) -> SearchResult:
    """Search with the longest sequence on which something fits, to an eighth of its length.

    The settings of its candidates have the length. If nothing fits, this is the search with the
    config's own length.

    Raises:
        UsageError: the length is no key of the data, or the device's memory is not known.
    """
    config = request.config
    length = getattr(config.data, "sequence_length", None)
    positions = getattr(config.model, "max_positions", None)
    if request.target.memory_bytes is None:
        raise UsageError("--goal longest-sequence needs the memory of a device; add --gpu KIND")
    if length is None or positions is None:
        raise UsageError(
            "--goal longest-sequence needs data.sequence_length and model.max_positions, which "
            "this run does not have"
        )

    def search_at(tokens: int) -> SearchResult:
        lengths = {LENGTH: tokens, POSITIONS: max(tokens, positions)}
        result = search(replace(request, config=with_settings(config, lengths)))
        ranked = [
            replace(candidate, settings={LENGTH: tokens, **candidate.settings})
            for candidate in result.ranked
        ]
        return replace(result, ranked=tuple(ranked))

    best = search_at(length)
    if not best.ranked:
        return best
    return _longest(search_at, length, best)


def _longest(
    search_at: Callable[[int], SearchResult], length: int, best: SearchResult
) -> SearchResult:
    """Return the result for the longest sequence on which something fits: doubled while it does,
    then in halved steps.

    Args:
        search_at: searches with a length.
        length: on which something fits.
        best: result for that length.
    """
    while length < _LONGEST_SEQUENCE:
        longer = search_at(2 * length)
        if not longer.ranked:
            break
        best = longer
        length *= 2
    step = length
    while step > max(length // 8, 1):
        step //= 2
        longer = search_at(length + step)
        if longer.ranked:
            best = longer
            length += step
    return best


def search_more_devices(request: Request, *, most: int = 16_384) -> SearchResult | None:
    """Search on the smallest cluster of 2, 4, 8 ... times as many hosts on which something fits;
    None if nothing fits on `most` devices.
    """
    num_hosts = 2 * request.cluster.num_hosts
    while num_hosts * request.cluster.devices_per_host <= most:
        larger = replace(request.cluster, num_hosts=num_hosts)
        result = search(replace(request, cluster=larger), is_quick=True)
        if result.ranked:
            return result
        num_hosts *= 2
    return None
