"""Layers whose weights are divided over the ranks of a tensor group (Shoeybi et al. 2019,
"Megatron-LM", section 3).

A column layer has some of its outputs, a row layer some of its inputs: after column layers and a
row layer every rank has the same sum, for one all-reduce in the forward pass (of the row layer's
outputs) and one in the backward pass (of the gradient of what the column layers read, which is
copied once for all of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad


class _Copy(torch.autograd.Function):
    """Passes a tensor on, and adds up its gradient over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A copy: another branch of the graph may have been handed the same tensor; contiguous, or
        # nothing is added.
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Adds up a tensor over the group, and passes its gradient on."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Joined(torch.autograd.Function):
    """Joins the ranks' parts of the last dimension, for what is computed on all ranks alike."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, widths: Sequence[int]) -> Tensor:
        rank = torch.distributed.get_rank(group)
        ctx.place = sum(widths[:rank]), widths[rank]
        padded = pad(tensor, (0, max(widths) - widths[rank])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat(
            [part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(-1, *ctx.place), None, None


class TensorPart:
    """This rank's place in a tensor group, and what its layers share within a pass.

    Between a column layer and its row layer ranks compute different things: there each draws its
    own random numbers, from a seed that all draw from the common stream. That stream alone is a
    run's state, saved and computed again as it always was.

    Attributes:
        group: process group.
        rank, size: place in it, number of its ranks.
        has_draws: whether a layer may draw random numbers.
    """

    def __init__(self, group: Any, *, has_draws: bool = True) -> None:
        self.group = group
        self.has_draws = has_draws
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)
        self._copied: tuple[Tensor, Tensor] | None = None
        self._common: list[Tensor] | None = None  # states of the generators

    def copy(self, tensor: Tensor) -> Tensor:
        """The same tensor, whose gradient is the sum over ranks."""
        copied: Tensor = _Copy.apply(tensor, self.group)
        return copied

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor, whose gradient every rank has whole."""
        total: Tensor = _Sum.apply(tensor, self.group)
        return total

    def join(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """The whole of a tensor whose last dimension is divided, `widths` over the ranks."""
        joined: Tensor = _Joined.apply(tensor, self.group, widths)
        return joined

    def copy_once(self, tensor: Tensor) -> Tensor:
        """`copy`, once for the column layers that read the same tensor one after the other."""
        if self._copied is None or self._copied[0] is not tensor:
            self._copied = tensor, self.copy(tensor)
        return self._copied[1]

    def begin(self, *, draws: bool) -> None:
        """After a column layer: until `end` this rank draws random numbers of its own."""
        if not draws or not self.has_draws or self._common is not None:
            return
        seed = int(torch.randint(2**31, ()))
        self._common = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._common.append(torch.cuda.get_rng_state())
        torch.manual_seed(seed * self.size + self.rank)

    def end(self, *_: Any) -> None:
        """Before a row layer, and in any case when the module around both has run."""
        self._copied = None
        if self._common is not None:
            torch.set_rng_state(self._common[0])
            for state in self._common[1:]:
                torch.cuda.set_rng_state(state)
            self._common = None


class ColumnLinear(nn.Linear):
    """`nn.Linear` with this rank's part of the outputs: (..., in_features) to (..., part of
    out_features).

    Attributes:
        copies: whether it copies its input itself; a module around it may have done so for all
            column layers.
        widths: of all ranks, where the parts are joined to (..., out_features); None where they
            stay apart.
        is_last: no row layer follows: what it returns is the model's.
    """

    part: TensorPart
    copies = True
    widths: Sequence[int] | None = None
    is_last = False

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        part = self.part
        if self.is_last:
            output = linear(part.copy(input), self.weight, self.bias)
            if self.widths is None:
                return output
            return part.join(output, self.widths)
        output = linear(part.copy_once(input) if self.copies else input, self.weight, self.bias)
        part.begin(draws=self.training)
        return output


class RowLinear(nn.Linear):
    """`nn.Linear` with this rank's part of the inputs: (..., part of in_features) to (...,
    out_features), summed.
    """

    part: TensorPart

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        self.part.end()
        output = self.part.sum(linear(input, self.weight))
        return output if self.bias is None else output + self.bias.to(output.dtype)


class VocabularyPart:
    """This rank's part of a vocabulary: tokens from `first` on; see `TensorPart` for the group.

    Attributes:
        part: place in the group; None: this rank has all tokens.
        widths: number of tokens of every rank.
        joins: whether logits are joined for a loss that reads all of them.
    """

    def __init__(self, part: TensorPart | None, widths: Sequence[int], *, joins: bool) -> None:
        self.part = part
        self.widths = widths
        self.joins = joins
        rank = 0 if part is None else part.rank
        self.first = sum(widths[:rank])
        self.size = widths[rank]

    def look_up(self, tokens: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
        """Vectors (..., hidden) of tokens (...,) int64 of the whole vocabulary; `weight` (own
        tokens, hidden).
        """
        assert self.part is not None
        local, outside = self.own(tokens)
        padding = None if padding_idx is None else padding_idx - self.first
        if padding is not None and not 0 <= padding < self.size:
            padding = None
        vectors = embedding(local, weight, padding).masked_fill(outside.unsqueeze(-1), 0.0)
        return self.part.sum(vectors)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Logits of hidden (..., hidden): (..., own tokens), or joined."""
        assert self.part is not None
        logits = linear(self.part.copy(hidden), weight)
        if self.joins:
            return self.part.join(logits, self.widths)
        return logits

    def nats(self, logits: Tensor, targets: Tensor, *, ignore_index: int) -> Tensor:
        """Cross-entropy (positions,) float32 of logits (positions, own tokens) and targets
        (positions,) int64, 0 where the target is `ignore_index`: log sum exp(x - m) - (x_target -
        m) with the largest logit m of any rank (as Megatron-LM's `vocab_parallel_cross_entropy`).
        Two small all-reduces.
        """
        nats: Tensor = _Nats.apply(logits, *self.own(targets), self)
        return nats.masked_fill(targets == ignore_index, 0.0)

    def guesses(self, logits: Tensor) -> Tensor:
        """The token (positions,) int64 with the largest logit of logits (positions, own tokens);
        the first of several. Two small all-reduces.
        """
        largest, token = logits.max(dim=-1)
        if self.part is None:
            return token
        token = (token + self.first).masked_fill_(largest < self._largest(logits), sum(self.widths))
        torch.distributed.all_reduce(token, torch.distributed.ReduceOp.MIN, group=self.part.group)
        return token

    def shares(self, logits: Tensor, local: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (positions, own tokens), in the memory of logits (positions, own tokens)
        float32, and the cross-entropy (positions,); `local` and `outside` are `own` of the targets.
        Two small all-reduces.
        """
        exponentials, sums, nats = self.exponentials(logits, local, outside)
        return exponentials.div_(sums.unsqueeze(-1)), nats

    def exponentials(
        self, logits: Tensor, local: Tensor, outside: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """exp(logits - the largest of a position) (positions, own tokens) float32, in the memory of
        logits that are float32; their sums over all tokens (positions,), and the cross-entropy
        (positions,). As `shares`.
        """
        largest = self._largest(logits).unsqueeze(-1)
        if logits.dtype == torch.float32:
            found = logits.sub_(largest)
        else:
            found = torch.sub(logits, largest)
        target = found.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        sums = found.exp_().sum(-1)
        if self.part is not None:
            sums, target = self.part.sum(torch.stack((sums, target)))
        return found, sums, sums.log() - target

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens as rows of this rank's weight, 0 for those of others, and whether they are
        others'.
        """
        local = tokens - self.first
        outside = (local < 0) | (local >= self.size)
        return local.masked_fill(outside, 0), outside

    def _largest(self, logits: Tensor) -> Tensor:
        largest = logits.amax(dim=-1).float()
        if self.part is not None:
            torch.distributed.all_reduce(
                largest, torch.distributed.ReduceOp.MAX, group=self.part.group
            )
        return largest


class _Nats(torch.autograd.Function):
    """Keeps this rank's probabilities alone, and makes them the gradient in place: of logits these
    are many bytes.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local: Tensor, outside: Tensor, vocabulary: VocabularyPart
    ) -> Tensor:
        shares, nats = vocabulary.shares(logits.to(torch.float32, copy=True), local, outside)
        ctx.save_for_backward(shares, local, outside)
        ctx.dtype = logits.dtype
        return nats

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, local, outside = ctx.saved_tensors
        shares.scatter_add_(-1, local.unsqueeze(-1), outside.unsqueeze(-1).float() - 1)
        return shares.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


class VocabularyEmbedding(nn.Embedding):
    """`nn.Embedding` with this rank's part of the vectors: tokens (...,) int64 to (..., hidden)."""

    vocabulary: VocabularyPart

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        return self.vocabulary.look_up(input, self.weight, padding_idx=self.padding_idx)
