"""Sequences with positions on several ranks: Ulysses (Jacobs et al. 2023, "DeepSpeed Ulysses"),
and a ring around it where ranks are more than heads (`framework.models.ring`).

All layers but attention work on each position alone, and so on this rank's part of them. Before
attention an all-to-all gives every rank all positions of its share of the heads, and another one
after it gives back its share of positions. As many neighbouring ranks as divide the heads do so;
where the group has more of them, each such team gets a chunk of the positions alone, and the ranks
of all teams with the same heads are a ring (Fang and Zhao 2024, "USP: A Unified Sequence
Parallelism Approach for Long Context Generative AI").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from framework.errors import ConfigError

if TYPE_CHECKING:  # ranks that are no more than heads need none of it
    from framework.models.ring import Ring

_KEY: Final = "parallel.sequence"
# Queries, keys and values (batch, heads, positions, size) -> what attention makes of them; and the
# same at a chunk of the positions, with the ring that has the other chunks.
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
MixInRing = Callable[[Tensor, Tensor, Tensor, "Ring"], Tensor]


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

    def team_size(self, num_heads: int) -> int:
        """Return how many neighbouring ranks share this number of heads; the other ranks of the
        group are in other teams.
        """
        return gcd(num_heads, self.size)

    def ring_of(self, team_size: int) -> Ring:
        """Return the ring of the ranks that have the same place in their teams."""
        from framework.models.ring import Ring

        num_teams = self.size // team_size
        team, place = divmod(self.rank, team_size)

        def rank_in(number: int) -> int:
            member = number % num_teams * team_size + place
            if self.group is None:
                return member
            return torch.distributed.get_global_rank(self.group, member)

        return Ring(team, num_teams, rank_in(team - 1), rank_in(team + 1), self.group)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the ranks, of equal weight, without a gradient. Collective."""
        total = values.detach().clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total / self.size

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `parts` (team size, ...) to rank i of this rank's team. Collective.

        Returns:
            The same shape; part i came from rank i.
        """
        team_size = len(parts)
        counts: tuple[int, ...] | None = None
        if team_size < self.size:
            first = self.rank // team_size * team_size
            counts = tuple(int(first <= rank < first + team_size) for rank in range(self.size))
        received: Tensor = _ExchangeParts.apply(parts, counts, self.group)
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
    def forward(ctx: Any, parts: Tensor, counts: tuple[int, ...] | None, group: Any) -> Tensor:
        ctx.counts = counts
        ctx.group = group
        return _all_to_all(parts, counts, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(gradients[0], ctx.counts, ctx.group), None, None


def _all_to_all(parts: Tensor, counts: tuple[int, ...] | None, group: Any) -> Tensor:
    """Send the parts to the ranks of a group; `counts`: how many go to each, None: one."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    if counts is None:
        torch.distributed.all_to_all_single(received, parts, group=group)
    else:
        torch.distributed.all_to_all_single(
            received, parts, list(counts), list(counts), group=group
        )
    return received


def is_shared() -> bool:
    """Check whether the models of this process see a part of the positions only."""
    return _shared is not None


def sharing_group() -> SequenceGroup | None:
    """Return the ranks that share the positions which the models of this process see, or None."""
    return _shared


def num_parts() -> int:
    """Return the number of parts of the positions; the models of this process see one of them."""
    if _shared is None:
        return 1
    return _shared.size


def mean_over_parts(values: Tensor) -> Tensor:
    """Return the mean of a mean over positions, over all parts of their sequences, without a
    gradient. Collective where ranks share them.
    """
    if _shared is None:
        return values.detach()
    return _shared.mean(values)


def first_position(length: int) -> int:
    """Return the number, in its sequence, of the first of `length` positions that a model sees."""
    if _shared is None:
        return 0
    return _shared.rank * length


def own_positions(whole: Tensor, length: int) -> Tensor:
    """Return this rank's `length` positions of a tensor (batch, positions of all ranks).

    Raises:
        ValueError: it has another number of positions.
    """
    if _shared is None:
        return whole
    if whole.shape[1] != length * _shared.size:
        raise ValueError(
            f"places of {whole.shape[1]} tokens, where {_shared.size} ranks share sequences of "
            f"{length * _shared.size}: leave position_ids of packed rows whole in Task.share"
        )
    return whole.narrow(1, _shared.rank * length, length)


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
        ConfigError: kind ``sequence-not-shared``, for options that a ring has not.
    """
    return at_all_positions(
        query,
        key,
        value,
        partial(own_attention, mask=attn_mask, **options),
        partial(_attend_in_ring, mask=attn_mask, **options),
    )


def at_all_positions(
    query: Tensor, key: Tensor, value: Tensor, mix: Mix, mix_in_ring: MixInRing
) -> Tensor:
    """Apply `mix`, attention over what it gets, to all positions of sequences, shared or not.

    Args:
        query: (batch, heads, positions of this rank, head size).
        key: the same, with as many heads or fewer; each serves equally many heads of the query.
        value: as `key`, with a head size of its own.
        mix: gets the three with all positions, and where ranks share them with this rank's heads
            alone.
        mix_in_ring: gets the three with the positions of this rank's team, and this rank's heads
            alone, where ranks are more than heads.

    Returns:
        The shape of the query, with the head size of the value.
    """
    group = _shared
    if group is None:
        return mix(query, key, value)
    team_size = group.team_size(query.shape[1])
    # Fewer heads of keys than ranks: some ranks get the same head.
    repeats = team_size // gcd(team_size, key.shape[1])
    if repeats > 1:
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    if team_size > 1:
        query, key, value = _exchange_heads(group, team_size, (query, key, value))
    if team_size == group.size:
        mixed = mix(query, key, value)
    else:
        mixed = mix_in_ring(query, key, value, group.ring_of(team_size))
    if team_size == 1:
        return mixed
    positions_of_ranks = torch.stack(mixed.chunk(team_size, dim=2))
    return group.exchange(positions_of_ranks).movedim(0, 1).flatten(1, 2)


def _exchange_heads(group: SequenceGroup, team_size: int, heads: Sequence[Tensor]) -> list[Tensor]:
    """Exchange all heads at this rank's positions for this rank's heads at all positions of its
    team.

    Each tensor is (batch, heads, positions, size). One exchange carries all of them.
    """
    # (ranks, batch, heads of a rank, positions, size)
    stacks = [torch.stack(tensor.chunk(team_size, dim=1)) for tensor in heads]
    flat = group.exchange(torch.cat([stack.flatten(1) for stack in stacks], dim=1))
    flats = torch.split(flat, [stack[0].numel() for stack in stacks], dim=1)
    exchanged: list[Tensor] = []
    for received, stack in zip(flats, stacks, strict=True):
        exchanged.append(received.view(stack.shape).movedim(0, 2).flatten(2, 3))
    return exchanged


def own_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute `scaled_dot_product_attention` over the positions of this rank; arguments and result
    are as in `attend`.
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and mask is not None:  # no fast kernel takes both
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        repeats = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, enable_gqa=repeats > 1, **options
    )


def _attend_in_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ring: Ring,
    *,
    mask: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **options: Any,
) -> Tensor:
    """Compute `attend` of a team's positions over the positions of all teams.

    Raises:
        ConfigError: kind ``sequence-not-shared``, for a mask of numbers, and options of torch's
            attention that a ring has not.
    """
    from framework.models.ring import ring_attention, seen_pieces

    refused = [name for name, option in options.items() if option]
    if mask is not None and mask.dtype != torch.bool:
        refused.append(f"a mask of {mask.dtype}")
    if refused:
        reason = f"attention around a ring of {ring.size} ranks has no {', '.join(refused)}"
        fix = f"set {_KEY} to a divisor of the model's heads"
        raise ConfigError.of("sequence-not-shared", reason, fix, _KEY, ring.size)
    pieces = seen_pieces(ring, query.shape[2], mask, is_causal=is_causal)
    mixed: Tensor = ring_attention(query, key, value, ring, pieces, dropout=dropout_p, scale=scale)
    return mixed


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
PACKED_ROWS: Final = "packed_rows"  # the name of `framework.models.packed_transformers` there
_NUMBERING: Final = "shared_numbering"  # attribute of transformers' modules
_ATTENTION_LAYER_TYPES: Final = frozenset(("full_attention", "sliding_attention"))
_MIXING: Final = (nn.Conv1d, nn.Conv2d, nn.RNNBase)
_UNKNOWN_OPTIONS: Final = ("softcap", "position_bias", "s_aux", "head_mask")


def _share_attention_of_transformers(model: Any) -> None:
    """Let a model of transformers (5.0 and later) call `attend`, in place, and number its positions
    before each forward pass (`Numbering`). One that attends in packed rows shares them by itself.

    Raises:
        ConfigError: kind ``sequence-needs-attention``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    _refuse_mixed_positions(model)
    if model.config._attn_implementation != PACKED_ROWS:
        AttentionInterface.register(_ATTENTION_NAME, attention_of_transformers)
        AttentionMaskInterface.register(_ATTENTION_NAME, whole_mask)
        model.set_attn_implementation(_ATTENTION_NAME)
        if model.config._attn_implementation != _ATTENTION_NAME:
            reason = "its attention cannot be replaced by another of transformers'"
            raise _refusal(model, f"{reason} AttentionInterface")
    from framework.models.shared_routers import share_balance

    share_balance(model, sharing_group)
    numbering = Numbering(model)
    vars(model)[_NUMBERING] = numbering
    model.register_forward_pre_hook(numbering, with_kwargs=True)


def whole_mask(
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **options: Any
) -> Any:
    """Make transformers' mask of all pairs of positions, of whole sequences where ranks share
    them.

    Raises:
        ConfigError: kind ``sequence-needs-attention``: the model got a part of a mask.
    """
    from transformers.masking_utils import sdpa_mask

    if _shared is not None:
        kv_length = q_length = q_length * _shared.size
        if attention_mask is not None and attention_mask.shape[-1] != kv_length:
            raise ConfigError.of(
                "sequence-needs-attention",
                f"an attention_mask has {attention_mask.shape[-1]} positions, and sequences "
                f"{kv_length}",
                f"leave the mask whole in Task.share; or set {_KEY}: 1",
                "task",
                None,
            )
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, **options
    )


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


def attention_of_transformers(
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
    """Call `attend` with the arguments of transformers' attention functions.

    Raises:
        ConfigError: kind ``sequence-needs-attention``, for options that torch's attention has not.
    """
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
        if _shared is None or inputs is None:
            return None
        given = bound.arguments.get("position_ids")
        if given is None:
            given = self.positions(inputs, bound.arguments.get("attention_mask"))
        elif given.shape[1] == inputs.shape[1]:
            return None
        else:
            given = own_positions(given, inputs.shape[1])
        bound.arguments["position_ids"] = given
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
