"""Packed rows in models of transformers (5.0 and later): attention within texts, in place of the
mask of all pairs of positions that transformers builds from ``position_ids``.

Transformers' own `sdpa` is replaced in its `AttentionInterface`. Before each forward pass a hook
finds the texts of the batch; where transformers would build a mask it gets a `TextsMask` instead,
which every layer is handed as its ``attention_mask``, also where it is recomputed. A pass without
``position_ids``, with an attention mask of its own, or with a cache goes the way it always went.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from framework.models import sequence
from framework.models.packed_attention import (
    PackedRows,
    attend_within_texts,
    packed_rows,
    texts_mask,
)

_ATTENTION_NAME: Final = sequence.PACKED_ROWS  # of our attention, registered with transformers
_REPLACED: Final = "sdpa"
_LAYER_TYPES: Final = frozenset(("full_attention", "sliding_attention"))
_UNKNOWN_OPTIONS: Final = ("softcap", "position_bias", "s_aux", "head_mask", "cache")


class TextsMask(NamedTuple):
    """Stands for the mask of a batch of packed rows.

    Attributes:
        rows: where the texts begin.
        window: how many positions a position sees at most, itself included; None: no limit.
    """

    rows: PackedRows
    window: int | None


_rows: PackedRows | None = None  # of the forward pass that runs
_is_dense = False


@contextmanager
def dense_masks() -> Iterator[None]:
    """Let models build transformers' own masks within the block."""
    global _is_dense
    _is_dense = True
    try:
        yield
    finally:
        _is_dense = False


def attend_in_packed_rows(model: nn.Module) -> None:
    """Let the models of transformers within a model attend within texts, in place, where they
    can.
    """
    for _, module in _outermost(model):
        if not _why_kept(module):
            _replace_attention(module)


def kept_masks(model: nn.Module) -> list[str]:
    """Return why models of transformers within a model keep their mask of all pairs, one reason
    each; empty where all attend within texts.
    """
    reasons: list[str] = []
    for name, module in _outermost(model):
        if module.config._attn_implementation != _ATTENTION_NAME:
            reason = (
                _why_kept(module) or "its attention is none of transformers' AttentionInterface"
            )
            reasons.append(f"{name or type(module).__name__}: {reason}")
    return reasons


def keep_masks(model: nn.Module) -> None:
    """Take back what `attend_in_packed_rows` has done."""
    for _, module in _outermost(model):
        if module.config._attn_implementation == _ATTENTION_NAME:
            module.set_attn_implementation(_REPLACED)


def attends_in_packed_rows(model: nn.Module) -> bool:
    """Check whether `attend_in_packed_rows` has changed any part of a model."""
    parts = list(_outermost(model))
    return any(part.config._attn_implementation == _ATTENTION_NAME for _, part in parts)


def _outermost(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the outermost modules of transformers, with their names in the model."""
    found: list[tuple[str, Any]] = []
    for name, module in model.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        if not is_inside and hasattr(module, "set_attn_implementation"):
            found.append((name, module))
    return found


def _why_kept(model: Any) -> str:
    """Return why a model of transformers keeps its own masks; empty if it need not."""
    implementation = model.config._attn_implementation
    if implementation != _REPLACED:
        return f"its attn_implementation is {implementation}"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it takes no position_ids"
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has cross-attention"
    others = set(getattr(model.config, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        return f"its layers ({', '.join(sorted(others))}) are no causal or sliding attention"
    return ""


def _replace_attention(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(_ATTENTION_NAME, _mask)
    model.set_attn_implementation(_ATTENTION_NAME)
    find_texts(model)


def find_texts(model: nn.Module) -> None:
    """Have a model of transformers find the texts of its batch before each forward pass, and
    before ranks that share sequences take their part of the places of tokens.
    """
    model.register_forward_pre_hook(_TextFinder(model), with_kwargs=True, prepend=True)
    model.register_forward_hook(_forget_texts, always_call=True)


class _TextFinder:
    """Finds the texts of a batch before a model's forward pass (a forward pre-hook)."""

    def __init__(self, model: Any) -> None:
        self._signature = inspect.signature(model.forward)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        global _rows
        _rows = None
        if _is_dense or module.config._attn_implementation != _ATTENTION_NAME:
            return None
        bound = self._signature.bind_partial(*args, **kwargs)
        given = bound.arguments
        inputs = given.get("input_ids")
        if inputs is None:
            inputs = given.get("inputs_embeds")
        places = given.get("position_ids")
        has_cache = given.get("past_key_values") is not None or given.get("use_cache")
        if inputs is None or places is None or has_cache or given.get("attention_mask") is not None:
            return None
        length = inputs.shape[1]
        if places.shape != (len(inputs), length * sequence.num_parts()):
            return None
        _rows = packed_rows(places, length=length)
        if sequence.is_shared():
            given["position_ids"] = _rows.places
        if "attention_mask" in self._signature.parameters:
            # Without a mask transformers would compare the places on the device, and wait for it,
            # once for every mask; this one masks nothing.
            given["attention_mask"] = torch.ones_like(_rows.places, dtype=torch.bool)
        return bound.args, bound.kwargs


def _forget_texts(module: nn.Module, args: Any, outputs: Any) -> None:
    global _rows
    _rows = None


def _mask(*, q_length: int, kv_length: int, **options: Any) -> Any:
    """Return what stands for the mask of a forward pass, or transformers' own mask."""
    is_causal = "allow_is_bidirectional_skip" not in options and not options.get("use_vmap")
    if _rows is None:
        return sequence.whole_mask(q_length=q_length, kv_length=kv_length, **options)
    is_of_rows = q_length == kv_length == _rows.places.shape[1]
    if is_causal and is_of_rows:
        return TextsMask(_rows, options.get("local_size"))
    raise NotImplementedError("its mask is none of causal or sliding attention")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, TextsMask):
        return _through_mask(module, query, key, value, attention_mask, dropout, scaling, **options)
    unknown = [name for name in _UNKNOWN_OPTIONS if options.get(name) is not None]
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if unknown or not is_causal or query.shape[2] != key.shape[2]:
        mask = texts_mask(attention_mask.rows.whole_places, window=attention_mask.window)
        return _through_mask(module, query, key, value, mask, dropout, scaling, **options)
    mixed = attend_within_texts(
        query,
        key,
        value,
        attention_mask.rows,
        dropout=dropout,
        scale=scaling,
        window=attention_mask.window,
    )
    return mixed.transpose(1, 2).contiguous(), None


def _through_mask(module: nn.Module, *given: Any, **options: Any) -> tuple[Tensor, None]:
    """Compute transformers' own attention through a mask of its own, over all positions where
    ranks share sequences.
    """
    if sequence.is_shared():
        return sequence.attention_of_transformers(module, *given, **options)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mixed, _ = sdpa_attention_forward(module, *given, **options)
    return mixed, None
