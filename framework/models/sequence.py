"""Sequences whose positions several ranks share: Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses").

All layers but attention work on each position alone, and so on this rank's part of them. Before
attention an all-to-all gives every rank all positions of its share of the heads, and another one
behind it gives back its share of positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from framework.errors import ConfigError

_KEY: Final = "parallel.sequence"


@dataclass(frozen=True)
class SequenceGroup:
    """Ranks that share the positions of the same sequences.

    Attributes:
        rank: this one's, whose models see the part `rank` of `size` equal ones.
        size: ranks in the group.
        group: their process group, in the order of their parts.
    """

    rank: int
    size: int
    group: Any = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within this block the models of this process see this rank's part. Not a context
        variable: the backward pass, which may run layers again, has threads of its own.
        """
        global _shared
        before = _shared
        _shared = self
        try:
            yield
        finally:
            _shared = before

    def counts_before(self, counts: Tensor) -> Tensor:
        """Add up what the ranks before this one count, (batch,) int64 each. Collective."""
        rows = [torch.empty_like(counts) for _ in range(self.size)]
        torch.distributed.all_gather(rows, counts.contiguous(), group=self.group)
        return sum(rows[: self.rank], torch.zeros_like(counts))

    def exchange(self, parts: Tensor) -> Tensor:
        """Send the part number i of (size, ...) to rank i: what came from rank i is its part number
        i. Collective.
        """
        received: Tensor = _Exchange.apply(parts, self.group)
        return received


_shared: SequenceGroup | None = None


@contextmanager
def whole() -> Iterator[None]:
    """Within this block the models of this process see all positions, also inside of
    `SequenceGroup.shared`.
    """
    global _shared
    before = _shared
    _shared = None
    try:
        yield
    finally:
        _shared = before


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _sent(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sent(gradients[0], ctx.group), None


def _sent(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    return received


def first_position(length: int) -> int:
    """Number within its sequence of the first of `length` positions that a model sees."""
    return 0 if _shared is None else _shared.rank * length


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """`scaled_dot_product_attention` over all positions of sequences, however they are shared.

    Args:
        query: (batch, heads, positions of this rank, head size).
        key: the same, of as many heads or of fewer, each for as many heads of the query.
        value: as `key`, with a head size of its own.
        attn_mask: of whole sequences, alike for all heads: (batch or 1, 1, positions or 1,
            positions).
        options: further ones of torch's function.

    Returns:
        As the query, with the head size of the value.

    Raises:
        ConfigError: kind ``sequence-not-shared``, where the heads do not divide.
    """
    part = _shared
    if part is None:
        return _attention(query, key, value, attn_mask, options)
    if query.shape[1] % part.size:
        reason = f"the {query.shape[1]} heads of attention cannot be shared evenly"
        raise ConfigError.of(
            "sequence-not-shared",
            reason,
            f"set {_KEY}: {gcd(query.shape[1], part.size)}",
            _KEY,
            part.size,
        )
    # Fewer heads of keys than ranks: some ranks get the same one.
    repeats = part.size // gcd(part.size, key.shape[1])
    heads = (
        query,
        *(one.repeat_interleave(repeats, dim=1) if repeats > 1 else one for one in (key, value)),
    )
    # (ranks, batch, heads, positions, size)
    rows = [torch.stack(one.chunk(part.size, dim=1)) for one in heads]
    flat = part.exchange(torch.cat([row.flatten(1) for row in rows], dim=1))
    flats = torch.split(flat, [row[0].numel() for row in rows], dim=1)
    query, key, value = (
        one.view(row.shape).movedim(0, 2).flatten(2, 3)
        for one, row in zip(flats, rows, strict=True)
    )
    mixed = _attention(query, key, value, attn_mask, options)
    return part.exchange(torch.stack(mixed.chunk(part.size, dim=2))).movedim(0, 1).flatten(1, 2)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and mask is not None:  # no fast kernel takes both
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        repeats = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=repeats > 1, **options
    )


def share_attention(model: nn.Module) -> None:
    """Let the attention of a model share sequences: that of the GPT and BERT here, of modules with
    an attribute ``shares_sequences = True``, which call `attend`, and of transformers.

    Raises:
        ConfigError: kind ``sequence-needs-attention``: nobody knows which of its layers mix
            positions.
    """
    modules = list(model.modules())
    theirs = [module for module in modules if hasattr(module, "set_attn_implementation")]
    if not theirs and not any(getattr(module, "shares_sequences", False) for module in modules):
        reason = "its attention is not known, and would see this rank's positions alone"
        raise _refusal(
            model,
            reason,
            "call framework.models.sequence.attend in it, and set shares_sequences = True",
        )
    for module in theirs:
        _share_theirs(module)


def _refusal(model: nn.Module, reason: str, fix: str = "") -> ConfigError:
    if fix:
        fix = f"{fix}; or set {_KEY}: 1"
    else:
        fix = f"set {_KEY}: 1"
    return ConfigError.of("sequence-needs-attention", reason, fix, "model", type(model).__name__)


# Models of transformers.

_THEIR_NAME: Final = "shared_sequences"
_NUMBERING: Final = "shared_numbering"  # attribute of their modules
_OF_ATTENTION: Final = frozenset(("full_attention", "sliding_attention"))
_MIXING: Final = (nn.Conv1d, nn.Conv2d, nn.RNNBase)
_UNKNOWN_OPTIONS: Final = ("softcap", "position_bias", "s_aux", "head_mask")


def _share_theirs(model: Any) -> None:
    """Register `attend` with transformers (5.0 and later), and give the model the numbers of its
    positions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def whole_mask(
        *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **options: Any
    ) -> Any:
        if _shared is not None:
            kv_length = q_length = q_length * _shared.size
            if attention_mask is not None and attention_mask.shape[-1] != kv_length:
                reason = (
                    f"its attention_mask has {attention_mask.shape[-1]} positions, and "
                    f"sequences {kv_length}"
                )
                raise _refusal(model, reason, "leave the mask whole in Task.share")
        return sdpa_mask(
            q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options
        )

    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refusal(
            model, "it takes no position_ids, and so would number this rank's positions from 0"
        )
    if any(
        kind in str(getattr(one, "rope_type", ""))
        for one in model.modules()
        for kind in ("dynamic", "longrope")
    ):
        raise _refusal(
            model,
            "its rotary positions (dynamic, longrope) change with the longest one that a rank sees",
        )
    others = set(getattr(model.config, "layer_types", None) or ()) - _OF_ATTENTION
    others |= {type(module).__name__ for module in model.modules() if isinstance(module, _MIXING)}
    others |= {"cross-attention"} if getattr(model.config, "is_encoder_decoder", False) else set()
    if others:
        raise _refusal(
            model,
            f"its layers ({', '.join(sorted(others))}) mix positions otherwise than attention does",
        )
    AttentionInterface.register(_THEIR_NAME, _their_attention)
    AttentionMaskInterface.register(_THEIR_NAME, whole_mask)
    model.set_attn_implementation(_THEIR_NAME)
    if model.config._attn_implementation != _THEIR_NAME:
        raise _refusal(
            model, "its attention cannot be replaced by another of transformers' AttentionInterface"
        )
    numbering = Numbering(model)
    vars(model)[_NUMBERING] = numbering
    model.register_forward_pre_hook(numbering, with_kwargs=True)


def _their_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name in _UNKNOWN_OPTIONS if options.get(name) is not None]
    if unknown:
        raise _refusal(
            module, f"its attention has options that torch's has not: {', '.join(unknown)}"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    further = {
        "dropout_p": dropout,
        "scale": scaling,
        "is_causal": is_causal and attention_mask is None,
    }
    mixed = attend(query, key, value, attn_mask=attention_mask, **further)
    return mixed.transpose(1, 2).contiguous(), None


class Numbering:
    """Numbers the positions of a model of transformers that is given no `position_ids`, where ranks
    share them: by the `rule` that is the model's own.

    Attributes:
        rule: one of `RULES`; `engine.shared_positions` finds the one that a model has.
    """

    IN_ORDER: Final = "in order"  # 0, 1, 2, ...
    # RoBERTa: from padding_idx + 1 on over tokens that are no padding
    OF_TOKENS: Final = "of tokens"
    OF_MASK: Final = "of the mask"  # OPT: over what the attention mask leaves
    RULES: Final = (IN_ORDER, OF_TOKENS, OF_MASK)

    def __init__(self, model: Any) -> None:
        self.rule = self.IN_ORDER
        pad = getattr(model.config, "pad_token_id", None)
        self.pad = pad if isinstance(pad, int) else None

    def positions(self, given: Tensor, mask: Tensor | None) -> Tensor:
        """Positions (batch or 1, positions of this rank) int64 of tokens (batch, positions of this
        rank), or of their vectors, in this rank's part; `mask` is whole.
        """
        assert _shared is not None
        length = given.shape[1]
        in_order = torch.arange(
            first_position(length), first_position(length) + length, device=given.device
        )[None]
        if self.rule == self.OF_TOKENS and self.pad is not None:
            if given.is_floating_point():
                return in_order + self.pad + 1
            is_token = (given != self.pad).long()
            before = _shared.counts_before(is_token.sum(1))
            return (is_token.cumsum(1) + before[:, None]) * is_token + self.pad
        if self.rule == self.OF_MASK and mask is not None and mask.ndim == 2:
            numbers = (mask.long().cumsum(1) - 1).clamp(min=0)
            return numbers.chunk(_shared.size, dim=1)[_shared.rank]
        return in_order

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand before the model's forward."""
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        values = (bound.arguments.get(name) for name in ("input_ids", "inputs_embeds"))
        given = next((value for value in values if value is not None), None)
        if _shared is not None and bound.arguments.get("labels") is not None:
            reason = "it shifts its labels within this rank's positions"
            raise _refusal(module, reason, "compute the loss in the task")
        if _shared is None or given is None or bound.arguments.get("position_ids") is not None:
            return None
        bound.arguments["position_ids"] = self.positions(
            given, bound.arguments.get("attention_mask")
        )
        # of keys, which training has no use for
        if "use_cache" in inspect.signature(module.forward).parameters:
            bound.arguments.setdefault("use_cache", False)
        return bound.args, bound.kwargs


def numberings(model: nn.Module) -> dict[str, Numbering]:
    """Return what numbers positions, by the name of the outermost modules of transformers that
    share sequences.
    """
    found: dict[str, Numbering] = {}
    for name, module in model.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        numbering = vars(module).get(_NUMBERING)
        if isinstance(numbering, Numbering) and not is_inside:
            found[name] = numbering
    return found


def refused_positions(model: nn.Module, reason: str) -> ConfigError:
    """Return the refusal of a model whose outputs are others where ranks share sequences."""
    return _refusal(model, reason)
