"""What `Task.collect` returns of every evaluation batch: held on the hosts of its ranks, and
brought to rank 0 when the pass is over, in the order of the data.

Tensors travel as their bytes, piece by piece, from one rank after the other: beside what is
gathered, rank 0 holds one rank's share and one piece.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from framework.engine.distributed import device, gather
from framework.errors import ConfigError
from framework.plan.layout import Layout
from framework.system.limits import ranks_on_host, room

# Share of the free memory of a host that gathered values may take.
SHARE_OF_HOST: Final = 0.5
# Values that stay on the device before they are copied to the host, all at once.
_MOST_ON_DEVICE: Final = 16 << 20
_PIECE: Final = 16 << 20  # bytes of a message between ranks
_POSITIONS: Final = 1  # dimension that ranks of a sequence group share


def host_limit() -> int:
    """Return how many bytes rank 0 may gather: `SHARE_OF_HOST` of what is free on its host."""
    free = room()
    if free is None:
        return 1 << 62
    return int(SHARE_OF_HOST * max(free.num_bytes, 0))


@dataclass(frozen=True)
class Source:
    """A rank's place among those that hold outputs.

    Attributes:
        rank: in the default group.
        data_rank: which samples it evaluates.
        part: which part of the positions of these samples.
        num_parts: parts of every sequence.
        is_source: whether its outputs count; other ranks hold none, or copies.
    """

    rank: int
    data_rank: int
    part: int
    num_parts: int
    is_source: bool

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Source:
        """Return the place of a rank: the last stage has outputs, alike on the ranks of a
        tensor group.
        """
        is_last = layout.stage_of(rank) == layout.pipe_size - 1
        return cls(
            rank=rank,
            data_rank=layout.data_parallel_rank(rank),
            part=layout.sequence_rank(rank),
            num_parts=layout.sequence_size,
            is_source=is_last and layout.tensor_rank(rank) == 0,
        )


@dataclass(frozen=True)
class _Share:
    """What a rank holds under one name.

    Attributes:
        rows: number of rows of every batch.
        num_bytes: of what is sent.
        dtype: of a tensor; None: a list, which is sent pickled.
        shape: of a row.
    """

    rows: tuple[int, ...]
    num_bytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Header:
    source: Source
    most_bytes: int
    shares: Mapping[str, _Share] = field(default_factory=dict)
    error: str = ""
    fix: str = ""


class Collected:
    """What a task has collected of this rank's samples in one pass."""

    def __init__(self, source: Source, *, task_name: str, most_bytes: int) -> None:
        """Begin a pass.

        Args:
            source: this rank's place.
            task_name: for messages.
            most_bytes: that rank 0 may gather; this rank holds at most its part of them.
        """
        self._source = source
        self._task_name = task_name
        self._most_bytes = most_bytes
        self._most_here = most_bytes // ranks_on_host()
        self._parts: dict[str, list[Any]] = {}
        self._waiting: list[tuple[list[Any], int]] = []  # parts on the device, by their places
        self._waiting_bytes = 0
        self._num_bytes = 0
        self._error = ""
        self._fix = ""

    def add(self, values: Any, targets: Any) -> None:
        """Take the values of a batch: tensors, arrays or lists, with a row for each sample.

        An error, which other ranks may not have, waits for `on_rank0`.
        """
        if self._error:
            return
        if not isinstance(values, Mapping):
            self._refuse(f"collect() returned a {type(values).__name__}", "return a dict by name")
            return
        values = {str(name): value for name, value in values.items()}
        if self._refuses_names(values.keys()):
            return
        for name, value in values.items():
            self._add(name, value, targets)
        if self._num_bytes > self._most_here:
            self._refuse_size(self._num_bytes, self._most_here)
        elif self._waiting_bytes > _MOST_ON_DEVICE:
            self._to_host()

    def _refuses_names(self, given_names: Set[str]) -> bool:
        names = self._parts.keys()
        if not names or names == given_names:
            return False
        known = ", ".join(sorted(names))
        given = ", ".join(sorted(given_names))
        self._refuse(
            f"collect() returned {given or 'nothing'} of one batch and {known} of another",
            "return the same names for every batch",
        )
        return True

    def _add(self, name: str, value: Any, targets: Any) -> None:
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(value)
        part = self._part(name, value, targets)
        if part is None:
            return
        parts = self._parts.setdefault(name, [])
        if parts and not _are_alike(parts[0], part):
            self._refuse(_difference(name, parts[0], part), _LISTS)
            return
        parts.append(part)
        if isinstance(part, list):
            self._num_bytes += sum(_bytes_of(row) for row in part)
            return
        num_bytes = part.numel() * part.element_size()
        self._num_bytes += num_bytes
        if part.device.type != "cpu":
            self._waiting.append((parts, len(parts) - 1))
            self._waiting_bytes += num_bytes

    def _part(self, name: str, value: Any, targets: Any) -> Tensor | list[Any] | None:
        """Return a copy of the values of a batch, rows of lists on the host; None if they are
        refused.
        """
        if isinstance(value, Tensor):
            if self._refuses_shape(name, value, targets):
                return None
            return value.detach().clone(memory_format=torch.contiguous_format)
        if isinstance(value, list | tuple | np.ndarray):
            rows = [_on_host(row) for row in value]
            if self._refuses_rows(name, rows):
                return None
            return rows
        self._refuse(
            f"collect() returned a {type(value).__name__} under {name!r}",
            "return a tensor or a list with a row for each sample",
        )
        return None

    def _refuses_shape(self, name: str, value: Tensor, targets: Any) -> bool:
        if value.ndim == 0:
            fix = "return values of samples; sums are for measure()"
            self._refuse(f"collect() returned one number under {name!r}", fix)
            return True
        if self._source.num_parts == 1:
            return False
        shape = tuple(value.shape[:2])
        is_positions = value.ndim > _POSITIONS
        if isinstance(targets, Tensor) and targets.ndim > _POSITIONS:
            is_positions = is_positions and shape == tuple(targets.shape[:2])
        if not is_positions:
            self._refuse(
                f"collect() returned the shape {tuple(value.shape)} under {name!r}, and ranks "
                "share the positions of every sample (parallel.sequence)",
                "return tensors (samples, positions, ...), which are joined; or set "
                "parallel.sequence: 1",
            )
        return not is_positions

    def _refuses_rows(self, name: str, rows: list[Any]) -> bool:
        """Refuse objects that are no sequences, where ranks share the positions of a sample."""
        if self._source.num_parts == 1 or all(isinstance(row, Tensor | list) for row in rows):
            return False
        self._refuse(
            f"collect() returned a list under {name!r}, and ranks share the positions of every "
            "sample (parallel.sequence)",
            "return tensors, or lists with an item for each position, which are joined; or set "
            "parallel.sequence: 1",
        )
        return True

    def _refuse(self, error: str, fix: str) -> None:
        self._error = error
        self._fix = fix
        self._parts = {}

    def _refuse_size(self, num_bytes: int, most: int) -> None:
        self._refuse(_too_much_here("collect() has returned", num_bytes, most), _LESS)

    def _to_host(self) -> None:
        """Copy what is on the device to the host."""
        for parts, place in self._waiting:
            parts[place] = parts[place].to("cpu", non_blocking=False)
        self._waiting = []
        self._waiting_bytes = 0

    def on_rank0(self, *, takes_turns: bool, num_batches: int = 1) -> Gathered:
        """Bring what all ranks have collected to rank 0. Collective.

        Args:
            takes_turns: batch i of data-parallel rank r is batch i * ranks + r of the data;
                otherwise each rank's samples follow on the samples of the rank before it.
            num_batches: of a whole pass of a rank, where this is one of its first batch alone: what
                a whole pass gathers must fit as well.

        Raises:
            ConfigError: kinds ``task-collect-result``, ``collected-too-large``; on all ranks.
        """
        self._to_host()
        most = self._most_bytes
        header = _Header(self._source, most)
        payloads: dict[str, Tensor] = {}
        if self._error:
            header = _Header(self._source, most, error=self._error, fix=self._fix)
        elif self._source.is_source:
            shares = {}
            for name in list(self._parts):
                shares[name], payloads[name] = _packed(self._parts.pop(name))
            header = _Header(self._source, most, shares)
        headers: list[_Header] = gather(header)
        self._refuse_differences(headers)
        sources = [header for header in headers if header.source.is_source]
        total = sum(share.num_bytes for one in sources for share in one.shares.values())
        of_a_pass = total * num_batches
        limit = headers[0].most_bytes
        if of_a_pass > limit:
            raise too_large("collect() brings", of_a_pass, limit, self._task_name)
        values: dict[str, Any] = {}
        for name in sorted(set().union(*(one.shares for one in sources))):
            values[name] = _gathered(name, payloads, sources, takes_turns=takes_turns)
        return Gathered(values, total)

    def _refuse_differences(self, headers: Sequence[_Header]) -> None:
        firsts: dict[str, _Share] = {}
        for header in headers:
            if header.error:
                kind = "task-collect-result"
                if header.fix == _LESS:
                    kind = "collected-too-large"
                raise ConfigError.of(kind, header.error, header.fix, "task", self._task_name)
            for name, share in header.shares.items():
                first = firsts.setdefault(name, share)
                if (first.dtype, first.shape) != (share.dtype, share.shape):
                    reason = (
                        f"collect() returned rows of {_row(first)} under {name!r} on one rank and "
                        f"of {_row(share)} on another"
                    )
                    raise ConfigError.of(
                        "task-collect-result", reason, _LISTS, "task", self._task_name
                    )


_LISTS: Final = "return a list with a tensor for each sample where their shapes differ"
_LESS: Final = (
    "collect less of each sample (a class instead of logits, .half(), numbers instead of text), or "
    "set evaluation.max_samples"
)


def _too_much_here(what: str, num_bytes: int, most: int) -> str:
    return (
        f"{what} {size_of(num_bytes)}, and {size_of(most)} is the most that a rank of this host "
        f"may hold (its part of {SHARE_OF_HOST:.0%} of the free memory)"
    )


def too_large_here(what: str, num_bytes: int, most: int, task_name: str) -> ConfigError:
    """Return the refusal of more bytes than one rank of a host may hold."""
    reason = _too_much_here(what, num_bytes, most)
    return ConfigError.of("collected-too-large", reason, _LESS, "task", task_name)


def too_large(what: str, num_bytes: int, limit: int, task_name: str) -> ConfigError:
    """Return the refusal of more bytes than the host of rank 0 may hold."""
    return ConfigError.of(
        "collected-too-large",
        f"in an evaluation {what} {size_of(num_bytes)} to rank 0, and {size_of(limit)} is the most "
        f"({SHARE_OF_HOST:.0%} of its host's free memory)",
        _LESS,
        "task",
        task_name,
    )


@dataclass(frozen=True)
class Gathered:
    """What all ranks have collected.

    Attributes:
        values: name -> a tensor on the host, or a list, with the rows of all samples in the order
            of the data; on ranks but rank 0 without content.
        num_bytes: of all of them.
    """

    values: Mapping[str, Any]
    num_bytes: int


def _on_host(row: Any) -> Any:
    if isinstance(row, Tensor):
        return row.detach().cpu().clone()
    return row


def _bytes_of(row: Any) -> int:
    if isinstance(row, Tensor | np.ndarray):
        return int(row.nbytes)
    if isinstance(row, str | bytes):
        return len(row)
    return len(pickle.dumps(row))


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype
    return isinstance(one, list) and isinstance(other, list)


def _difference(name: str, one: Any, other: Any) -> str:
    shown = []
    for value in (one, other):
        if isinstance(value, Tensor):
            shown.append(f"rows {tuple(value.shape[1:])} of {value.dtype}")
        else:
            shown.append("a list")
    return f"collect() returned {shown[0]} under {name!r} of one batch and {shown[1]} of another"


def _row(share: _Share) -> str:
    if share.dtype is None:
        return "a list"
    return f"{share.dtype} {share.shape}"


def size_of(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"


def _packed(parts: list[Any]) -> tuple[_Share, Tensor]:
    """Join the parts of all batches, and return their description and their bytes."""
    rows = tuple(len(part) for part in parts)
    if isinstance(parts[0], Tensor):
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        data = whole.reshape(-1).view(torch.uint8)
        return _Share(rows, data.numel(), whole.dtype, tuple(whole.shape[1:])), data
    data = pickled([row for part in parts for row in part])
    return _Share(rows, data.numel()), data


def pickled(value: Any) -> Tensor:
    """Return the bytes of a value's pickle, (bytes,) uint8."""
    # A bytearray, as a tensor may be written into.
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)


def to_rank0(payload: Tensor | None, sizes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    """Send the bytes of ranks to rank 0, one after the other, where they are yielded.

    Args:
        payload: this rank's bytes, (bytes,) uint8 on the host; None if it sends none.
        sizes: (rank, bytes) of those that send, in their order, alike on every rank.
    """
    own = torch.distributed.get_rank()
    for sender, num_bytes in sizes:
        if own == sender == 0:
            assert payload is not None
            yield payload
        elif own == 0:
            yield _received(sender, num_bytes)
        elif own == sender:
            assert payload is not None
            for piece in torch.split(payload, _PIECE):
                if len(piece):
                    torch.distributed.send(piece.to(device()), dst=0)


def _received(sender: int, num_bytes: int) -> Tensor:
    """Receive bytes of a rank, piece by piece."""
    received = torch.empty(num_bytes, dtype=torch.uint8)
    for piece in torch.split(received, _PIECE):
        buffer = torch.empty_like(piece, device=device())
        if len(piece):
            torch.distributed.recv(buffer, src=sender)
        piece.copy_(buffer)
    return received


def _gathered(
    name: str,
    payloads: Mapping[str, Tensor],
    sources: Sequence[_Header],
    *,
    takes_turns: bool,
) -> Any:
    """Return the rows of all sources under one name, in the order of the data, on rank 0; empty on
    other ranks. Collective.
    """
    holders = [one for one in sources if name in one.shares]
    first = holders[0].shares[name]
    num_parts = holders[0].source.num_parts
    places = _places(name, holders, takes_turns=takes_turns)
    num_rows = sum(sum(one.shares[name].rows) for one in holders) // num_parts
    whole: Any = [[] for _ in range(num_rows)]
    if first.dtype is not None and torch.distributed.get_rank() == 0:
        shape = first.shape
        if num_parts > 1:
            shape = (num_parts * shape[0], *shape[1:])
        whole = torch.empty(num_rows, *shape, dtype=first.dtype)
    sizes = [(one.source.rank, one.shares[name].num_bytes) for one in holders]
    for one, payload in zip(holders, to_rank0(payloads.get(name), sizes), strict=False):
        share = one.shares[name]
        rows = _unpacked(share, payload)
        start = 0
        for batch, count in enumerate(share.rows):
            place = places[one.source.data_rank, batch]
            _put(rows[start : start + count], whole, place, one.source)
            start += count
    if first.dtype is None:
        return [_joined(parts) for parts in whole if parts]
    return whole


def _places(
    name: str, holders: Sequence[_Header], *, takes_turns: bool
) -> Mapping[tuple[int, int], int]:
    """Return the first row of every batch, by its data-parallel rank and its number there."""
    counts: dict[tuple[int, int], int] = {}
    for one in holders:
        for batch, count in enumerate(one.shares[name].rows):
            counts[one.source.data_rank, batch] = count
    order = sorted(counts)
    if takes_turns:
        order.sort(key=lambda key: (key[1], key[0]))
    starts = [0, *accumulate(counts[key] for key in order)]
    return dict(zip(order, starts, strict=False))


def _put(rows: Any, whole: Any, place: int, source: Source) -> None:
    """Put the rows of a batch, or this source's part of their positions, where they belong."""
    if isinstance(whole, list):
        for offset, row in enumerate(rows):
            whole[place + offset].append(row)
        return
    target = whole[place : place + len(rows)]
    if source.num_parts > 1:
        target = target.chunk(source.num_parts, dim=_POSITIONS)[source.part]
    target.copy_(rows)


def _unpacked(share: _Share, payload: Tensor) -> Any:
    if share.dtype is None:
        return pickle.loads(payload.numpy().data)
    return payload.view(share.dtype).view(sum(share.rows), *share.shape)


def _joined(parts: Sequence[Any]) -> Any:
    """Join one sample's row: the parts of its positions, of the ranks that share them."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return [item for part in parts for item in part]
