"""Attention around a ring of ranks, each with a chunk of the positions (Liu et al. 2023, "Ring
Attention with Blockwise Transformers").

Every rank has the queries of its chunk. Keys and values go from rank to rank until each rank has
seen all chunks; what attention makes of one chunk is added to what it made of earlier ones by the
logarithms of both softmaxes' sums, as in flash attention. Backward, keys and values go around once
more, and their gradients with them, until each comes home with all parts. Nothing is approximated:
only the order of sums differs from attention on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from framework.models.attention_blocks import block_backward, block_forward

_KEYS = 0  # tags of messages, for backends that have them
_GRADIENTS = 1


class Ring(NamedTuple):
    """Ranks in a circle, each with an equal chunk of the positions, in order.

    Attributes:
        place: of this rank; its chunk is the one of that number.
        size: number of ranks.
        before: the rank, in the whole job, that sends to this one.
        after: the rank, in the whole job, that this one sends to.
        group: a process group that has them all.
    """

    place: int
    size: int
    before: int
    after: int
    group: Any


class Piece(NamedTuple):
    """A part of the queries of this rank that sees a part of the keys of a chunk.

    Attributes:
        rows: of the batch.
        queries: positions in this rank's chunk.
        keys: positions in the chunk of the keys.
        is_causal: a query sees the keys up to its own place in the piece; else all of them.
        mask: bool, for (rows, heads, queries, keys) or what is broadcast to it; None: all is seen.
    """

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None = None


# Number of a chunk of keys -> what this rank's queries see of it.
Pieces = Callable[[int], Sequence[Piece]]
_WHOLE = slice(None)


def seen_pieces(ring: Ring, length: int, mask: Tensor | None, *, is_causal: bool) -> Pieces:
    """Return what this rank's queries see where all rows of a batch are alike, or by a mask.

    Args:
        ring: the ranks.
        length: positions of a chunk.
        mask: bool over all positions, (batch or 1, heads or 1, positions or 1, positions).
        is_causal: a position sees no later one.
    """

    def pieces(source: int) -> Sequence[Piece]:
        if is_causal and source > ring.place:
            return ()
        part = None
        if mask is not None:
            part = mask[..., source * length : (source + 1) * length]
            if mask.shape[2] > 1:
                part = part[:, :, ring.place * length : (ring.place + 1) * length]
        is_own = is_causal and source == ring.place
        return (Piece(_WHOLE, _WHOLE, _WHOLE, is_own, part),)

    return pieces


def text_pieces(
    ring: Ring,
    length: int,
    starts: Sequence[int],
    *,
    window: int | None = None,
    device: torch.device | None = None,
) -> Pieces:
    """Return what this rank's queries see in packed rows: their own text, up to their own place.

    Args:
        ring: the ranks.
        length: positions of a chunk.
        starts: of the texts, counted in tokens over all rows, and at last the number of tokens.
        window: how many positions a position sees at most, itself included; None: no limit.
        device: of masks.
    """
    row_length = length * ring.size
    own_first = ring.place * length
    texts: list[tuple[int, int, int]] = []  # row, and where a text begins and ends in it
    for start, end in pairwise(starts):
        row, first = divmod(start, row_length)
        last = first + end - start
        if first < own_first + length and last > own_first:
            texts.append((row, first, last))

    def pieces(source: int) -> Sequence[Piece]:
        found: list[Piece] = []
        if source > ring.place:
            return found
        chunk_first = source * length
        for row, first, last in texts:
            queries = _overlap(first, last, own_first, length)
            keys = _overlap(first, last, chunk_first, length)
            if keys.stop <= keys.start:
                continue
            is_causal = source == ring.place
            mask = None
            if window is not None:
                mask = _window_mask(queries, keys, own_first - chunk_first, window, device)
            if mask is not None and is_causal:
                mask = mask.tril()
                is_causal = False
            found.append(Piece(slice(row, row + 1), queries, keys, is_causal, mask))
        return found

    return pieces


def _overlap(first: int, last: int, chunk_first: int, length: int) -> slice:
    """Return the positions of a text, from `first` up to `last`, in a chunk that begins at
    `chunk_first`, counted from its begin.
    """
    return slice(max(first - chunk_first, 0), min(last - chunk_first, length))


def _window_mask(
    queries: slice, keys: slice, apart: int, window: int, device: torch.device | None
) -> Tensor | None:
    """Return the pairs (queries, keys) that are less than `window` apart; None where all are.

    `apart`: positions from the begin of the keys' chunk to that of the queries'.
    """
    if apart + queries.stop - 1 - keys.start < window:
        return None
    places = torch.arange(queries.start, queries.stop, device=device) + apart
    others = torch.arange(keys.start, keys.stop, device=device)
    return (places[:, None] - others < window)[None, None]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks meet in it
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Ring,
    pieces: Pieces,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of this rank's chunk over the positions of all. Collective.

    Args:
        query: (batch, heads, positions of a chunk, head size).
        key: the same, with as many heads or fewer; each serves equally many heads of the query.
        value: as `key`, with a head size of its own.
        ring: the ranks.
        pieces: what this rank's queries see of each chunk.
        dropout: share of the attention weights that are set to zero.
        scale: of the scores; 1 / sqrt(head size) by default.

    Returns:
        The shape of the query, with the head size of the value; 0 for queries that see nothing.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    mixed: Tensor = _RingAttention.apply(query, key, value, ring, pieces, dropout, scale)
    return mixed


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ring: Ring,
        pieces: Pieces,
        dropout: float,
        scale: float,
    ) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        mixed = query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=wide)
        sums = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
        held = _Travelling((key, value), ring, tag=_KEYS)
        states: list[Any] = []
        with torch.autocast(query.device.type, enabled=False):
            for step in range(ring.size):
                keys, values = held.parts
                if step + 1 < ring.size:
                    held.send()
                for piece in pieces((ring.place - step) % ring.size):
                    rows, queries = piece.rows, piece.queries
                    made, made_sums, state = block_forward(
                        query[rows, :, queries],
                        _for_queries(keys[rows, :, piece.keys], query),
                        _for_queries(values[rows, :, piece.keys], query),
                        piece.mask,
                        is_causal=piece.is_causal,
                        dropout=dropout,
                        scale=scale,
                    )
                    states.append(state)
                    add_chunk(mixed[rows, :, queries], sums[rows, :, queries], made, made_sums)
                if step + 1 < ring.size:
                    held.receive()
        mixed = mixed.to(query.dtype)
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.how = ring, pieces, dropout, scale
        ctx.states = states
        return mixed

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, mixed, sums = ctx.saved_tensors
        ring, pieces, dropout, scale = ctx.how
        gradient = gradient.contiguous()
        states = iter(ctx.states)
        # Queries that see nothing: their weights, exp(-inf - 0), are 0.
        sums = sums.masked_fill(sums == -torch.inf, 0.0)
        query_gradient = torch.zeros_like(query, dtype=sums.dtype)
        held = _Travelling((key, value), ring, tag=_KEYS)
        shapes = (
            torch.zeros_like(key, dtype=sums.dtype),
            torch.zeros_like(value, dtype=sums.dtype),
        )
        gradients = _Travelling(shapes, ring, tag=_GRADIENTS)
        for step in range(ring.size):
            keys, values = held.parts
            if step + 1 < ring.size:
                held.send()
            if step:
                gradients.receive()  # of these keys and values, with the parts of the ranks before
            key_gradient, value_gradient = gradients.parts
            for piece in pieces((ring.place - step) % ring.size):
                rows, queries = piece.rows, piece.queries
                made = block_backward(
                    gradient[rows, :, queries],
                    query[rows, :, queries],
                    _for_queries(keys[rows, :, piece.keys], query),
                    _for_queries(values[rows, :, piece.keys], query),
                    mixed[rows, :, queries],
                    sums[rows, :, queries],
                    piece.mask,
                    next(states),
                    is_causal=piece.is_causal,
                    dropout=dropout,
                    scale=scale,
                )
                query_gradient[rows, :, queries] += made[0]
                key_gradient[rows, :, piece.keys] += _of_keys(made[1], key)
                value_gradient[rows, :, piece.keys] += _of_keys(made[2], value)
            gradients.send()
            if step + 1 < ring.size:
                held.receive()
        gradients.receive()  # home
        key_gradient, value_gradient = gradients.parts
        return (
            query_gradient.to(query.dtype),
            key_gradient.to(key.dtype),
            value_gradient.to(value.dtype),
            None,
            None,
            None,
            None,
        )


def add_chunk(mixed: Tensor, sums: Tensor, made: Tensor, made_sums: Tensor) -> None:
    """Add what attention made of further keys, in place.

    Args:
        mixed: weighted values so far, (rows, heads, queries, head size).
        sums: logarithms of the sums of their softmax, (rows, heads, queries); -inf: nothing yet.
        made: of the further keys, as `mixed`.
        made_sums: of the further keys, as `sums`.
    """
    both = torch.logaddexp(sums, made_sums.to(sums.dtype))
    safe = both.masked_fill(both == -torch.inf, 0.0)
    mixed.mul_((sums - safe).exp().unsqueeze(-1))
    mixed.addcmul_(made.to(mixed.dtype), (made_sums - safe).exp().unsqueeze(-1))
    sums.copy_(both)


def _for_queries(heads: Tensor, query: Tensor) -> Tensor:
    """Repeat heads of keys or values for the heads of queries that they serve."""
    repeats = query.shape[1] // heads.shape[1]
    if repeats == 1:
        return heads
    return heads.repeat_interleave(repeats, 1)


def _of_keys(gradient: Tensor, heads: Tensor) -> Tensor:
    """Sum a gradient of repeated heads, (rows, heads of queries, positions, size), over those that
    each head serves.
    """
    if gradient.shape[1] == heads.shape[1]:
        return gradient
    rows, repeated, length, size = gradient.shape
    num_heads = heads.shape[1]
    return gradient.reshape(rows, num_heads, repeated // num_heads, length, size).sum(2)


class _Travelling:
    """Tensors that go from rank to rank in one message.

    Attributes:
        parts: the tensors that are here.
    """

    def __init__(self, parts: Sequence[Tensor], ring: Ring, *, tag: int) -> None:
        self.parts = tuple(parts)
        self._ring = ring
        self._tag = tag
        self._shapes = [part.shape for part in parts]
        self._sent: Tensor | None = None
        self._coming: Tensor | None = None
        self._requests: list[Any] = []

    def send(self) -> None:
        """Begin to send the parts to the rank behind, and to receive what the rank before
        sends. Collective.
        """
        ring = self._ring
        self._sent = torch.cat([part.flatten() for part in self.parts])
        self._coming = torch.empty_like(self._sent)
        of = torch.distributed
        self._requests = of.batch_isend_irecv(
            [
                of.P2POp(of.isend, self._sent, ring.after, ring.group, self._tag),
                of.P2POp(of.irecv, self._coming, ring.before, ring.group, self._tag),
            ]
        )

    def receive(self) -> None:
        """Wait for what `send` began: `parts` came from the rank before."""
        assert self._coming is not None
        for request in self._requests:
            request.wait()
        sizes = [shape.numel() for shape in self._shapes]
        flats = torch.split(self._coming, sizes)
        self.parts = tuple(
            flat.view(shape) for flat, shape in zip(flats, self._shapes, strict=True)
        )
        self._sent = None
        self._coming = None
