"""Attention within the texts of packed rows: no text sees another, and no mask of all pairs of
positions is built.

A packed row holds several texts end to end, and the places of its tokens (``position_ids``) begin
at 0 with each of them. Where texts begin is found once for a batch, on the host, before its tensors
travel to the device (`note_texts`); every layer gets the same `PackedRows`. Attention is then
computed

- by torch's kernel for texts of different lengths, ``torch.nn.attention.varlen``, on a GPU in half
  precision: one launch for all texts of a batch;
- else text by text: as many launches as texts, in any precision, on any device;
- with a mask (batch, 1, sequence, sequence), `texts_mask`, where neither can work: within a graph
  of ``torch.compile`` without that kernel, as a graph would hold the lengths of one batch.

All three compute the same; work and memory of the first two grow with the squares, and the sum, of
the lengths of texts. Where ranks share sequences, each computes all texts of whole rows for its
share of the heads (`framework.models.sequence`).
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from framework.models.sequence import at_all_positions, own_attention, own_positions

_NOTED: Final = "noted_texts"  # attribute of a tensor of places: what `_texts_of` returns
_HALF: Final = (torch.float16, torch.bfloat16)
# Flash attention's limits: the largest head, and the number that its size is a multiple of.
_LARGEST_HEAD: Final = 256
_HEAD_MULTIPLE: Final = 8
_FIRST_CAPABILITY: Final = (8, 0)  # of GPUs with a kernel of flash attention (Ampere)
_DEVICES_WITH_KERNEL: Final = ["cuda"]


class PackedRows(NamedTuple):
    """Where the texts of a batch of rows begin.

    Attributes:
        places: of each token that the model sees in its text, (batch, sequence) int64.
        starts: of the texts, counted in tokens over all rows, row after row, and at last the number
            of all tokens: (texts + 1,) int32, on the device of the places.
        host_starts: the same in the host's memory.
        longest: tokens of the longest text.
        whole_places: of all tokens; `places` are this rank's alone where ranks share sequences.
    """

    places: Tensor
    starts: Tensor
    host_starts: Tensor
    longest: int
    whole_places: Tensor


class _Options(NamedTuple):
    """How attention is computed: the arguments of `attend_within_texts`."""

    dropout: float
    scale: float | None
    window: int | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Compute attention through a mask, or causal attention without one."""
        return own_attention(
            query,
            key,
            value,
            mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            scale=self.scale,
        )


def packed_rows(places: Tensor, *, length: int | None = None) -> PackedRows:
    """Return the texts of a batch by the places of its tokens, (batch, sequence), which begin at 0
    with each text; a row that begins with the rest of a text begins one.

    Where ranks share sequences the places are given of whole rows, and `length` is the number of
    positions that this rank sees of them; ValueError if the two do not fit.

    Where `note_texts` has not seen the batch on the host, and the places lie on a device, they are
    read from it: the one time that a forward pass waits for the device.
    """
    if places.device.type in _DEVICES_WITH_KERNEL:
        # Registers the kernel before the first layer: `kept_products` keeps its outputs.
        _kernel_parameters()
    noted = getattr(places, _NOTED, None)
    if noted is None:
        noted = _texts_of(places)
    host_starts, longest = noted
    starts = host_starts.to(places.device, non_blocking=True)
    own_places = places
    if length is not None:
        own_places = own_positions(places, length)
    return PackedRows(own_places, starts, host_starts, longest, places)


def note_texts(places: Tensor) -> None:
    """Find the texts of places that lie in the host's memory, and note them on the tensor, for
    `packed_rows` of its copy on a device (`DeviceBatches` carries the note there).
    """
    if places.ndim == 2 and places.device.type == "cpu":
        setattr(places, _NOTED, _texts_of(places))


def _texts_of(places: Tensor) -> tuple[Tensor, int]:
    """Return the starts of texts, (texts + 1,) int32 on the host, and the length of the longest."""
    begins = (places == 0).cpu()
    begins[:, :1] = True
    starts = begins.flatten().nonzero().flatten()
    host_starts = torch.cat((starts, torch.tensor([begins.numel()]))).to(torch.int32)
    longest = 0
    if begins.numel():
        longest = int(host_starts.diff().max())
    return host_starts, longest


def texts_mask(places: Tensor, *, window: int | None = None) -> Tensor:
    """Build the mask (batch, 1, sequence, sequence) of the positions that each position sees: in
    its own text, itself and before it, and at most the last `window` of them.
    """
    begins = places == 0
    texts = begins.cumsum(1)  # number of each position's text in its row
    mask = (texts[:, None, :, None] == texts[:, None, None, :]).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    return mask


def attend_within_texts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention in which a position sees its own text alone.

    Args:
        query: (batch, heads, sequence, head size).
        key: the same, with as many heads or fewer; each serves equally many heads of the query.
        value: as `key`, with a head size of its own.
        rows: where the texts begin.
        dropout: share of the attention weights that are set to zero.
        scale: of the scores; 1 / sqrt(head size) by default.
        window: how many positions a position sees at most, itself included; None: no limit.

    Returns:
        (batch, heads, sequence, head size of the value), in memory (batch, sequence, heads, size).
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    options = _Options(dropout, scale, window)
    return at_all_positions(
        query,
        key,
        value,
        partial(_mix, rows=rows, options=options),
        partial(_mix_in_ring, rows=rows, options=options),
    )


def _mix(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: _Options) -> Tensor:
    """Compute attention within the texts of whole rows in the way that is possible here."""
    if not why_no_kernel(query, value):
        return _by_kernel(query, key, value, rows, options)
    if torch.compiler.is_compiling():
        return _by_mask(query, key, value, rows, options)
    return _text_by_text(query, key, value, rows, options)


def _mix_in_ring(
    query: Tensor, key: Tensor, value: Tensor, ring: Any, rows: PackedRows, options: _Options
) -> Tensor:
    """Compute attention of a chunk of the positions within the texts of whole rows."""
    from framework.models.ring import ring_attention, text_pieces

    starts = rows.host_starts.tolist()
    pieces = text_pieces(ring, query.shape[2], starts, window=options.window, device=query.device)
    mixed: Tensor = ring_attention(
        query, key, value, ring, pieces, dropout=options.dropout, scale=options.scale
    )
    return mixed


def why_no_kernel(query: Tensor, value: Tensor) -> str:
    """Return why attention within texts cannot take torch's kernel for texts of different lengths;
    empty if it can.

    Args:
        query: (batch, heads, sequence, head size).
        value: the same of the values.
    """
    if query.device.type not in _DEVICES_WITH_KERNEL:
        return f"there is none for {query.device.type}"
    if query.dtype not in _HALF:
        return "it computes in bf16 and fp16 only"
    size = query.shape[-1]
    if size != value.shape[-1] or size > _LARGEST_HEAD or size % _HEAD_MULTIPLE:
        return f"heads of {size} are none that it takes"
    reason: str = _why_not_here(query.device.type, query.device.index)
    return reason


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_not_here(device_type: str, index: int | None) -> str:
    """Return why this torch, or this device, has no kernel for texts of different lengths."""
    if "window_size" not in _kernel_parameters():
        return "this torch has none (2.11 is the first)"
    if device_type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(index)
        if capability < _FIRST_CAPABILITY:
            return f"a GPU of compute capability {capability[0]}.{capability[1]} has none"
    return ""


_parameters: list[tuple[str, ...]] = []  # what `_kernel_parameters` has found; no cache of
# functools, through which torch.compile would warn that it looks


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _kernel_parameters() -> tuple[str, ...]:
    """Return the names of the parameters of torch's kernel; none where it has no such kernel."""
    if _parameters:
        return _parameters[0]
    names: tuple[str, ...] = ()
    with suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn

        names = tuple(inspect.signature(varlen_attn).parameters)
    _parameters.append(names)
    return names


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    options: _Options,
) -> Tensor:
    batch, heads, length, _ = query.shape
    seen = (-1, 0)  # positions before a position and after it; -1: all
    if options.window is not None:
        seen = (options.window - 1, 0)
    repeats = heads // key.shape[1]
    takes_groups = options.dropout > 0 or "enable_gqa" in _kernel_parameters()
    if repeats > 1 and not takes_groups:  # before torch 2.12
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        repeats = 1
    query = _flat(query)
    key = _flat(key)
    value = _flat(value)
    if options.dropout:
        mixed = _flash_attention(query, key, value, rows, options, seen)
    else:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.varlen import varlen_attn

        arguments: dict[str, Any] = {"scale": options.scale, "window_size": seen}
        if repeats > 1:
            arguments["enable_gqa"] = True
        # cuDNN, which later versions of torch prefer, plans anew for every number of texts.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mixed = varlen_attn(  # type: ignore[assignment]
                query,
                key,
                value,
                rows.starts,
                rows.starts,
                rows.longest,
                rows.longest,
                **arguments,
            )
    return mixed.view(batch, length, heads, -1).transpose(1, 2)


def _flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    options: _Options,
    seen: tuple[int, int],
) -> Tensor:
    """Call the operator under `varlen_attn`, which has no argument for dropout (torch 2.15), as
    torch's nested tensors do.
    """
    is_causal = seen == (-1, 0)
    made: tuple[Tensor, ...] = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        rows.starts,
        rows.starts,
        rows.longest,
        rows.longest,
        options.dropout,
        is_causal,
        False,  # no mask for debugging
        scale=options.scale,
        window_size_left=seen[0],
        window_size_right=seen[1],
    )
    return made[0]


def _text_by_text(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    options: _Options,
) -> Tensor:
    batch, heads, length, _ = query.shape
    window = options.window
    has_whole_rows = len(rows.host_starts) == batch + 1 or not query.numel()
    if has_whole_rows and (window is None or length <= window):  # a text in each row, or no tokens
        return options.attend(query, key, value, None)
    lengths = rows.host_starts.diff().tolist()
    # One backward pass for all texts: slices would each fill a gradient of the whole batch.
    all_queries = torch.split(_flat(query), lengths)
    all_keys = torch.split(_flat(key), lengths)
    all_values = torch.split(_flat(value), lengths)
    mixed: list[Tensor] = []
    for queries, keys, values in zip(all_queries, all_keys, all_values, strict=True):
        mask = None
        if window is not None and len(queries) > window:
            seen = torch.ones(len(queries), len(queries), dtype=torch.bool, device=query.device)
            mask = seen.tril().triu(1 - window)
        text = options.attend(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            mask,
        )
        mixed.append(text[0].transpose(0, 1))
    return torch.cat(mixed).view(batch, length, heads, -1).transpose(1, 2)


def _flat(tensor: Tensor) -> Tensor:
    """Turn (batch, heads, sequence, size) into (batch * sequence, heads, size)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _by_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: PackedRows,
    options: _Options,
) -> Tensor:
    mask = texts_mask(rows.whole_places, window=options.window)
    return options.attend(query, key, value, mask)
