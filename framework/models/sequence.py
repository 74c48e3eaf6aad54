"""Sequences with positions on several ranks: Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses").

All layers but attention work on each position alone, and so on this rank's part of them. Before
attention an all-to-all gives every rank all positions of its share of the heads, and another one
behind it gives back its share of positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
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
        rank: this process's rank in the group; its models see part `rank` of `size` equal parts.
        size: number of ranks in the group.
        group: their process group, in the order of their parts.
    """

    rank: int
    size: int
    group: Any = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Let the models of this process see this rank's part within the block.

        It is no context variable: the backward pass, which may run layers again, has threads of
        its own.
        """
        global _shared
        before = _shared
        _shared = self
        try:
            yield
        finally:
            _shared = before

    def counts_before(self, counts: Tensor) -> Tensor:
        """Add up the counts, (batch,) int64, of the ranks before this one. Collective."""
        counts_of_ranks = [torch.empty_like(counts) for _ in range(self.size)]
        torch.distributed.all_gather(counts_of_ranks, counts.contiguous(), group=self.group)
        return sum(counts_of_ranks[: self.rank], torch.zeros_like(counts))

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `parts` (size, ...) to rank i. Collective.

        Returns:
            The same shape; part i came from rank i.
        """
        received: Tensor = _ExchangeParts.apply(parts, self.group)
        return received


_shared: SequenceGroup | None = None


@contextmanager
def whole() -> Iterator[None]:
    """Let the models of this process see all positions within the block, also inside
    `SequenceGroup.shared`.
    """
    global _shared
    before = _shared
    _shared = None
    try:
        yield
    finally:
        _shared = before


class _ExchangeParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    torch.distributed.all_to_all_single(received, parts, group=group)
    return received


def is_shared() -> bool:
    """Check whether the models of this process see a part of the positions only."""
    return _shared is not None


def first_position(length: int) -> int:
    """Return the number, in its sequence, of the first of `length` positions that a model sees."""
    if _shared is None:
        return 0
    return _shared.rank * length


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute `scaled_dot_product_attention` over all positions of sequences, shared or not.

    Args:
        query: (batch, heads, positions of this rank, head size).
        key: the same, with as many heads or fewer; each serves equally many heads of the query.
        value: as `key`, with a head size of its own.
        attn_mask: over all positions of the sequences, the same for all heads: (batch or 1, 1,
            positions or 1, positions).
        options: further options of torch's function.

    Returns:
        The shape of the query, with the head size of the value.

    Raises:
        ConfigError: kind ``sequence-not-shared``, where the heads do not divide.
    """
    group = _shared
    if group is None:
        return own_attention(query, key, value, attn_mask, **options)
    if query.shape[1] % group.size:
        reason = f"the {query.shape[1]} heads of attention cannot be shared evenly"
        fix = f"set {_KEY}: {gcd(query.shape[1], group.size)}"
        raise ConfigError.of("sequence-not-shared", reason, fix, _KEY, group.size)
    # Fewer heads of keys than ranks: some ranks get the same head.
    repeats = group.size // gcd(group.size, key.shape[1])
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    query, key, value = _exchange_heads(group, (query, key, value))
    mixed = own_attention(query, key, value, attn_mask, **options)
    positions_of_ranks = torch.stack(mixed.chunk(group.size, dim=2))
    return group.exchange(positions_of_ranks).movedim(0, 1).flatten(1, 2)


def _exchange_heads(group: SequenceGroup, heads: Sequence[Tensor]) -> list[Tensor]:
    """Exchange all heads at this rank's positions for this rank's heads at all positions.

    Each tensor is (batch, heads, positions, size). One exchange carries all of them.
    """
    # (ranks, batch, heads of a rank, positions, size)
    stacks = [torch.stack(tensor.chunk(group.size, dim=1)) for tensor in heads]
    flat = group.exchange(torch.cat([stack.flatten(1) for stack in stacks], dim=1))
    flats = torch.split(flat, [stack[0].numel() for stack in stacks], dim=1)
    exchanged: list[Tensor] = []
    for received, stack in zip(flats, stacks, strict=True):
        exchanged.append(received.view(stack.shape).movedim(0, 2).flatten(2, 3))
    return exchanged


def own_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Tensor:
    """Compute `scaled_dot_product_attention` over the positions of this rank; arguments and result
    are as of `attend`.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and mask is not None:  # no fast kernel takes both
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        repeats = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=repeats > 1, **options
    )


def share_attention(model: nn.Module) -> None:
    """Let the attention of a model share sequences.

    This works for the GPT and BERT here, for modules that call `attend` and have the attribute
    ``shares_sequences = True``, and for models of transformers.

    Raises:
        ConfigError: kind ``sequence-needs-attention``: it is unknown which layers mix positions.
    """
    modules = list(model.modules())
    of_transformers = [module for module in modules if hasattr(module, "set_attn_implementation")]
    calls_attend = any(getattr(module, "shares_sequences", False) for module in modules)
    if not of_transformers and not calls_attend:
        reason = "its attention is not known, and would see this rank's positions alone"
        raise _refusal(
            model,
            reason,
            "call framework.models.sequence.attend in it, and set shares_sequences = True",
        )
    for module in of_transformers:
        _share_attention_of_transformers(module)


def _refusal(model: nn.Module, reason: str, fix: str = "") -> ConfigError:
    if fix:
        fix = f"{fix}; or set {_KEY}: 1"
    else:
        fix = f"set {_KEY}: 1"
    return ConfigError.of("sequence-needs-attention", reason, fix, "model", type(model).__name__)


# Models of transformers.

_ATTENTION_NAME: Final = "shared_sequences"  # of `attend`, registered with transformers
_NUMBERING: Final = "shared_numbering"  # attribute of transformers' modules
_ATTENTION_LAYER_TYPES: Final = frozenset(("full_attention", "sliding_attention"))
_MIXING: Final = (nn.Conv1d, nn.Conv2d, nn.RNNBase)
_UNKNOWN_OPTIONS: Final = ("softcap", "position_bias", "s_aux", "head_mask")


def _share_attention_of_transformers(model: Any) -> None:
    """Let a model of transformers (5.0 and later) call `attend`, in place, and number its positions
    before each forward pass (`Numbering`).

    Raises:
        ConfigError: kind ``sequence-needs-attention``.
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

    _refuse_mixed_positions(model)
    AttentionInterface.register(_ATTENTION_NAME, _attention_of_transformers)
    AttentionMaskInterface.register(_ATTENTION_NAME, whole_mask)
    model.set_attn_implementation(_ATTENTION_NAME)
    if model.config._attn_implementation != _ATTENTION_NAME:
        raise _refusal(
            model, "its attention cannot be replaced by another of transformers' AttentionInterface"
        )
    numbering = Numbering(model)
    vars(model)[_NUMBERING] = numbering
    model.register_forward_pre_hook(numbering, with_kwargs=True)


def _refuse_mixed_positions(model: Any) -> None:
    """Refuse a model of transformers in which positions meet elsewhere than in `attend`.

    Raises:
        ConfigError: kind ``sequence-needs-attention``.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise _refusal(
            model, "it takes no position_ids, and so would number this rank's positions from 0"
        )
    for module in model.modules():
        rope_type = str(getattr(module, "rope_type", ""))
        if "dynamic" in rope_type or "longrope" in rope_type:
            raise _refusal(
                model,
                "its rotary positions (dynamic, longrope) change with the longest one that a rank "
                "sees",
            )
    mixing_layers = set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYER_TYPES
    for module in model.modules():
        if isinstance(module, _MIXING):
            mixing_layers.add(type(module).__name__)
    if getattr(model.config, "is_encoder_decoder", False):
        mixing_layers.add("cross-attention")
    if mixing_layers:
        names = ", ".join(sorted(mixing_layers))
        raise _refusal(model, f"its layers ({names}) mix positions otherwise than attention does")


def _attention_of_transformers(
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
    mixed = attend(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=is_causal and attention_mask is None,
    )
    return mixed.transpose(1, 2).contiguous(), None


class Numbering:
    """Numbers the positions of a model of transformers, where ranks share sequences and its batch
    has no `position_ids`.

    Attributes:
        rule: how the model itself numbers positions, one of `RULES`; `engine.shared_positions`
            finds it.
    """

    IN_ORDER: Final = "in order"  # 0, 1, 2, ...
    # RoBERTa: from padding_idx + 1 on over tokens that are no padding
    OF_TOKENS: Final = "of tokens"
    OF_MASK: Final = "of the mask"  # OPT: over the positions where the attention mask is 1
    RULES: Final = (IN_ORDER, OF_TOKENS, OF_MASK)

    def __init__(self, model: Any) -> None:
        self.rule = self.IN_ORDER
        self.pad: int | None = None
        pad = getattr(model.config, "pad_token_id", None)
        if isinstance(pad, int):
            self.pad = pad

    def positions(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the numbers of the positions of this rank's part.

        Args:
            inputs: tokens (batch, positions of this rank), or their vectors.
            mask: attention mask over all positions.

        Returns:
            (batch or 1, positions of this rank) int64.
        """
        assert _shared is not None
        length = inputs.shape[1]
        first = first_position(length)
        in_order = torch.arange(first, first + length, device=inputs.device)[None]
        if self.rule == self.OF_TOKENS and self.pad is not None:
            if inputs.is_floating_point():
                return in_order + self.pad + 1
            is_token = (inputs != self.pad).long()
            before = _shared.counts_before(is_token.sum(1))
            return (is_token.cumsum(1) + before[:, None]) * is_token + self.pad
        if self.rule == self.OF_MASK and mask is not None and mask.ndim == 2:
            numbers = (mask.long().cumsum(1) - 1).clamp(min=0)
            return numbers.chunk(_shared.size, dim=1)[_shared.rank]
        return in_order

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Set `position_ids` before the model's forward pass (a forward pre-hook)."""
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        inputs = bound.arguments.get("input_ids")
        if inputs is None:
            inputs = bound.arguments.get("inputs_embeds")
        if _shared is not None and bound.arguments.get("labels") is not None:
            reason = "it shifts its labels within this rank's positions"
            raise _refusal(module, reason, "compute the loss in the task")
        if _shared is None or inputs is None or bound.arguments.get("position_ids") is not None:
            return None
        bound.arguments["position_ids"] = self.positions(
            inputs, bound.arguments.get("attention_mask")
        )
        # The cache of keys and values is for generation; training does not need it.
        if "use_cache" in inspect.signature(module.forward).parameters:
            bound.arguments.setdefault("use_cache", False)
        return bound.args, bound.kwargs


def numberings(model: nn.Module) -> dict[str, Numbering]:
    """Return the `Numbering` of the outermost modules of transformers that share sequences, by the
    module's name.
    """
    outermost: dict[str, Numbering] = {}
    for name, module in model.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer in outermost)
        numbering = vars(module).get(_NUMBERING)
        if isinstance(numbering, Numbering) and not is_inside:
            outermost[name] = numbering
    return outermost


def refused_positions(model: nn.Module, reason: str) -> ConfigError:
    """Return the error (``sequence-needs-attention``) of a model that gives other outputs where
    ranks share sequences than on one rank.
    """
    return _refusal(model, reason)
