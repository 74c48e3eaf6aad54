"""Layers with weights that are divided over the ranks of a tensor group (Shoeybi et al. 2019,
"Megatron-LM", section 3).

On each rank a column layer has some of its outputs, a row layer some of its inputs. After column
layers and a row layer every rank has the same sum. This costs one all-reduce in the forward pass,
of the row layer's outputs, and one in the backward pass, of the gradient of the column layers'
input, which is copied once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from framework.models.filled_rows import logits_of


class _Copy(torch.autograd.Function):
    """Passes a tensor on, and adds up its gradient over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A clone, because another branch of the graph may hold the same tensor. It is contiguous,
        # because all_reduce adds nothing up in other tensors.
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


class _Join(torch.autograd.Function):
    """Joins the ranks' parts of the last dimension; what follows is computed on all ranks alike."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, widths: Sequence[int]) -> Tensor:
        rank = torch.distributed.get_rank(group)
        ctx.start = sum(widths[:rank])
        ctx.width = widths[rank]
        padded = pad(tensor, (0, max(widths) - widths[rank])).contiguous()
        padded_parts = [torch.empty_like(padded) for _ in widths]
        torch.distributed.all_gather(padded_parts, padded, group=group)
        pairs = zip(padded_parts, widths, strict=True)
        return torch.cat([part[..., :width] for part, width in pairs], dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(-1, ctx.start, ctx.width), None, None


class TensorPart:
    """This rank's place in a tensor group, and the state that its layers share within a pass.

    Between a column layer and its row layer ranks compute different things. There each rank draws
    its own random numbers, from a seed that all ranks draw from their common stream. Only that
    stream is a run's state, to be saved and recomputed as without a tensor group.

    Attributes:
        group: process group.
        rank: this rank's number in the group.
        size: number of ranks in the group.
        may_draw: whether a layer may draw random numbers.
    """

    _copied: tuple[Tensor, Tensor] | None
    """The last input of `copy_once`, and its copy."""
    _common: list[Tensor] | None
    """Between `begin` and `end`: states of the common stream's generators, the CPU's first."""

    def __init__(self, group: Any, *, may_draw: bool = True) -> None:
        self.group = group
        self.may_draw = may_draw
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)
        self._copied = None
        self._common = None

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the same tensor; its gradient is the sum of the ranks' gradients."""
        copied: Tensor = _Copy.apply(tensor, self.group)
        return copied

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks; every rank has the whole gradient of it."""
        total: Tensor = _Sum.apply(tensor, self.group)
        return total

    def join(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the whole of a tensor with its last dimension divided over the ranks.

        `widths` are the sizes of the ranks' parts.
        """
        joined: Tensor = _Join.apply(tensor, self.group, widths)
        return joined

    def copy_once(self, tensor: Tensor) -> Tensor:
        """`copy` a tensor, once for the column layers that read it one after the other."""
        if self._copied is None or self._copied[0] is not tensor:
            self._copied = (tensor, self.copy(tensor))
        return self._copied[1]

    def begin(self, *, draws: bool) -> None:
        """Let this rank draw random numbers of its own, after a column layer and until `end`.

        Its seed is one draw from the common stream, alike on all ranks. Nothing happens without
        `draws` or `may_draw`, and if it has begun already.
        """
        if draws and self.may_draw and self._common is None:
            self._leave_common()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let this rank draw random numbers of its own within the block."""
        if self._common is not None:
            yield
            return
        self._leave_common()
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let all ranks draw the same random numbers within the block, also after `begin`."""
        if self._common is None:
            yield
            return
        own = _generator_states()
        _put_generator_states(self._common)
        try:
            yield
        finally:
            self._common = _generator_states()
            _put_generator_states(own)

    def _leave_common(self) -> None:
        seed = int(torch.randint(2**31, ()))
        self._common = _generator_states()
        torch.manual_seed(seed * self.size + self.rank)

    def end(self, *_: Any) -> None:
        """Put the generators back to the common stream, and drop the input that `copy_once` keeps.

        A row layer calls it first, and so does a forward hook of the module around both layers
        (hence the arguments, which it ignores). Without `begin` only the input is dropped.
        """
        self._copied = None
        if self._common is not None:
            _put_generator_states(self._common)
            self._common = None


def _generator_states() -> list[Tensor]:
    """Return the states of the generators that layers draw from, the CPU's first."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _put_generator_states(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


class DividedLayer(nn.Module):
    """A layer with a rank's part of a matrix.

    Attributes:
        part: this rank's place in the tensor group.
        weight: the part.
        bias: of its outputs, or None.
    """

    part: TensorPart
    weight: Any
    bias: Any

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with this rank's part, (..., its inputs) to (..., its outputs)."""
        raise NotImplementedError


class DividedLinear(DividedLayer, nn.Linear):
    """`nn.Linear` with a rank's part of its matrix."""

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply with this rank's part, (..., its inputs) to (..., its outputs)."""
        return linear(input, self.weight, bias)


class SumsTogether(nn.Module):
    """A module that copies what its column layers read, and sums what its row layers make, by
    itself: once for all of them, and beside layers that are whole.

    Attributes:
        part: this rank's place in the tensor group; None: nothing is divided.
    """

    part: TensorPart | None = None


class ColumnLayer(DividedLayer):
    """A layer with this rank's part of the outputs: (..., inputs) to (..., part of the outputs).

    Attributes:
        copies: whether it copies its input itself; a module around it may have done so for all
            column layers.
        widths: sizes of all ranks' parts, to join them to (..., outputs); None to leave them apart.
        is_last: no row layer follows: its output is the model's.
    """

    copies = True
    widths: Sequence[int] | None = None
    is_last = False

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        part = self.part
        if self.is_last:
            output = self.product(part.copy(input), self.bias)
            if self.widths is None:
                return output
            return part.join(output, self.widths)
        if self.copies:
            input = part.copy_once(input)
        output = self.product(input, self.bias)
        part.begin(draws=self.training)
        return output


class RowLayer(DividedLayer):
    """A layer with this rank's part of the inputs: (..., part of the inputs) to (..., outputs),
    summed.

    Attributes:
        sums: whether it sums its output itself; a module around it may do so for several row
            layers.
    """

    sums = True

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        self.part.end()
        if not self.sums:
            part_of_bias = None if self.bias is None else self._bias_to_sum()
            return self.product(input, part_of_bias)
        output = self.part.sum(self.product(input, None))
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _bias_to_sum(self) -> Tensor:
        """Return a part of the bias: the ranks' parts add up to it, and each rank has the gradient
        of the whole bias.
        """
        part: Tensor = self.bias - self.bias.detach() * (1 - 1 / self.part.size)
        return part


class ColumnLinear(ColumnLayer, DividedLinear):
    """`nn.Linear` with this rank's part of the outputs."""


class RowLinear(RowLayer, DividedLinear):
    """`nn.Linear` with this rank's part of the inputs."""


def part_of(model: nn.Module) -> TensorPart | None:
    """Return this rank's place in the tensor group that divides a model; None: none does."""
    for module in model.modules():
        part = vars(module).get("part")
        if isinstance(part, TensorPart):
            return part
        if isinstance(module, VocabularyEmbedding) and module.vocabulary.part is not None:
            return module.vocabulary.part
    return None


class VocabularyPart:
    """This rank's part of a vocabulary.

    Attributes:
        part: place in the tensor group; None: this rank has all tokens.
        widths: number of tokens of every rank.
        joins: whether logits are joined for a loss that reads all of them.
        first: this rank's first token.
        size: number of this rank's tokens.
    """

    def __init__(self, part: TensorPart | None, widths: Sequence[int], *, joins: bool) -> None:
        self.part = part
        self.widths = widths
        self.joins = joins
        rank = 0 if part is None else part.rank
        self.first = sum(widths[:rank])
        self.size = widths[rank]

    def look_up(self, tokens: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
        """Return the vectors (..., hidden) of tokens (...,) int64 of the whole vocabulary.

        `weight` (own tokens, hidden) has this rank's vectors.
        """
        assert self.part is not None
        local, outside = self.own(tokens)
        local_padding: int | None = None
        if padding_idx is not None and 0 <= padding_idx - self.first < self.size:
            local_padding = padding_idx - self.first
        vectors = embedding(local, weight, local_padding).masked_fill(outside.unsqueeze(-1), 0.0)
        return self.part.sum(vectors)

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute logits (..., own tokens), or joined ones, of vectors (..., hidden)."""
        assert self.part is not None
        logits = logits_of(self.part.copy(hidden), weight)
        if self.joins:
            return self.part.join(logits, self.widths)
        return logits

    def nats(self, logits: Tensor, targets: Tensor, *, ignore_index: int) -> Tensor:
        """Compute the cross-entropy of targets, 0 where a target is `ignore_index`.

        It is log sum exp(x - m) - (x_target - m), with the largest logit m of any rank (as
        Megatron-LM's `vocab_parallel_cross_entropy`). It takes two small all-reduces.

        Args:
            logits: (positions, own tokens).
            targets: (positions,) int64.
            ignore_index: the target that does not count.

        Returns:
            (positions,) float32.
        """
        local, outside = self.own(targets)
        nats: Tensor = _CrossEntropy.apply(logits, local, outside, self)
        return nats.masked_fill(targets == ignore_index, 0.0)

    def guesses(self, logits: Tensor) -> Tensor:
        """Return the tokens (positions,) int64 with the largest of logits (positions, own tokens).

        It is the first of several with the same logit. It takes two small all-reduces.
        """
        # A rank without the largest logit takes part with a number beyond all tokens.
        largest, token = logits.max(dim=-1)
        if self.part is None:
            return token
        token = (token + self.first).masked_fill_(largest < self._largest(logits), sum(self.widths))
        torch.distributed.all_reduce(token, torch.distributed.ReduceOp.MIN, group=self.part.group)
        return token

    def shares(self, logits: Tensor, local: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
        """Compute probabilities and the cross-entropy, in two small all-reduces.

        Args:
            logits: (positions, own tokens) float32; their memory takes the probabilities.
            local: the first result of `own` for the targets.
            outside: its second result.

        Returns:
            The probabilities (positions, own tokens) and the cross-entropy (positions,).
        """
        exponentials, sums, nats = self.exponentials(logits, local, outside)
        return exponentials.div_(sums.unsqueeze(-1)), nats

    def exponentials(
        self, logits: Tensor, local: Tensor, outside: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the probabilities' numerators, their denominators and the cross-entropy.

        It takes the arguments of `shares`, and also logits in half precision.

        Returns:
            exp(logits - the position's largest logit) (positions, own tokens) float32, in the
            memory of float32 logits; their sums over all tokens (positions,); and the cross-entropy
            (positions,).
        """
        largest = self._largest(logits).unsqueeze(-1)
        if logits.dtype == torch.float32:
            shifted = logits.sub_(largest)
        else:
            shifted = torch.sub(logits, largest)
        target = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        exponentials = shifted.exp_()
        sums = exponentials.sum(-1)
        if self.part is not None:
            sums, target = self.part.sum(torch.stack((sums, target)))
        return exponentials, sums, sums.log() - target

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens as rows of this rank's weight, and whether they are other ranks' tokens.

        Other ranks' tokens have the row 0.
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


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that keeps this rank's probabilities alone, and turns them into the gradient in
    place: tensors of the size of the logits take much memory.
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
        # Probabilities less one at the target, on the rank that has it.
        shares.scatter_add_(-1, local.unsqueeze(-1), outside.unsqueeze(-1).float() - 1)
        return shares.mul_(gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None


class VocabularyEmbedding(nn.Embedding):
    """`nn.Embedding` with this rank's part of the vectors: tokens (...,) int64 to (..., hidden)."""

    vocabulary: VocabularyPart

    def forward(self, input: Tensor) -> Tensor:
        """Shapes as in the class docstring."""
        return self.vocabulary.look_up(input, self.weight, padding_idx=self.padding_idx)
