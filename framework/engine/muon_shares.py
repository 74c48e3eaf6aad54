"""Muon where every rank has a share of the weights: ZeRO 1, 2 and 3, and tensor groups.

Momentum is kept number by number, so that each rank moves that of its own share. What Muon makes
orthogonal is a whole matrix: its pieces are sent in bf16 to one of the ranks that hold them, which
computes as torch's Muon does, and sends the pieces of the result back. torch rounds a matrix to
bf16 before it multiplies anything, and so is its result: nothing is lost on the way, and the same
gradients give torch's step.

At stages 1 and 2 a matrix is sent only where the border between two ranks' shares runs through it.
At stage 3 every rank has a piece of every matrix: it sends 2 bytes for each number of its share,
and gets as many back.

Ranks of a tensor group hold parts of a matrix. The ranks that compute the parts of one matrix are
of one tensor group, since their shares are alike: they join the parts, make the whole orthogonal,
each by itself, and keep their own part of it.

DeepSpeed's own Muon (0.19.8, runtime/zero/stage_1_and_2.py `_get_flat_partition` and `step`,
stage3.py `step`) takes the gradient norm after it has made matrices orthogonal, and clips what is
orthogonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple

import deepspeed
import torch
import torch.distributed
from torch import Tensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from framework.checkpoint.state.tensor_split import Split
from framework.checkpoint.state.weight_names import stepped_groups
from framework.checkpoint.state.weight_parts import split_of
from framework.engine.flat_groups import flat_groups
from framework.errors import ConfigError
from framework.models.split import TensorPart, part_of

ROUND_NUMBERS: Final = 2**24
"""Most numbers of the matrices that a rank computes in one exchange, 32 MiB in bf16; of a larger
matrix it is that one alone.
"""


class Piece(NamedTuple):
    """Numbers of one matrix in one rank's share.

    Attributes:
        rank: in the process group.
        start: where they begin in the flattened matrix.
        offset: where they begin in the share.
        num: how many they are.
    """

    rank: int
    start: int
    offset: int
    num: int


@dataclass(frozen=True)
class DividedMatrix:
    """A matrix, or a tensor rank's part of one, and the ranks that hold it: its pieces are in the
    order of its numbers.

    Attributes:
        shape: of the matrix, or of the part.
        pieces: of each rank that holds some of it.
        split: how a tensor group divides the matrix; None: this is the whole of it.
    """

    shape: torch.Size
    pieces: tuple[Piece, ...]
    split: Split | None = None

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole matrix."""
        if self.split is None:
            return self.shape
        return self.split.whole_shape(self.shape)

    @property
    def work(self) -> int:
        """Count the multiplications of its product with itself."""
        return prod(self.shape) * min(self.shape)


def in_a_row(
    shapes_and_offsets: Sequence[tuple[torch.Size, int]], *, share_size: int, num_ranks: int
) -> list[DividedMatrix]:
    """Return the matrices of a flat vector that is cut into equal shares (ZeRO 1 and 2).

    Args:
        shapes_and_offsets: each matrix, and where it begins in the vector.
        share_size: numbers of each rank's share.
        num_ranks: number of the shares.
    """
    matrices = []
    for shape, begin in shapes_and_offsets:
        pieces = []
        end = begin + shape.numel()
        for rank in range(begin // share_size, num_ranks):
            first = max(begin, rank * share_size)
            stop = min(end, (rank + 1) * share_size)
            if first >= stop:
                break
            pieces.append(Piece(rank, first - begin, first - rank * share_size, stop - first))
        matrices.append(DividedMatrix(shape, tuple(pieces)))
    return matrices


def each_cut(
    shapes_and_sizes: Sequence[tuple[torch.Size, int]], *, num_ranks: int
) -> list[DividedMatrix]:
    """Return matrices of which each is cut into equal pieces, the last one padded; a share has a
    piece of each of them (ZeRO 3).

    Args:
        shapes_and_sizes: each matrix, and the numbers of a piece with its padding.
        num_ranks: number of the pieces.
    """
    matrices = []
    offset = 0
    for shape, size in shapes_and_sizes:
        pieces = []
        for rank in range(num_ranks):
            num = min(size, shape.numel() - rank * size)
            if num > 0:
                pieces.append(Piece(rank, rank * size, offset, num))
        matrices.append(DividedMatrix(shape, tuple(pieces)))
        offset += size
    return matrices


def of_stack(stack: DividedMatrix) -> list[DividedMatrix]:
    """Return the matrix of each expert in a packed weight, in order; of a weight of two dimensions
    that one alone.
    """
    if len(stack.shape) == 2:
        return [stack]
    matrices = []
    shape = stack.shape[-2:]
    for first in range(0, stack.shape.numel(), shape.numel()):
        stop = first + shape.numel()
        pieces = []
        for piece in stack.pieces:
            begin = max(piece.start, first)
            end = min(piece.start + piece.num, stop)
            if begin < end:
                offset = piece.offset + begin - piece.start
                pieces.append(Piece(piece.rank, begin - first, offset, end - begin))
        matrices.append(DividedMatrix(shape, tuple(pieces), stack.split))
    return matrices


def owners_of(matrices: Sequence[DividedMatrix], num_ranks: int) -> list[int]:
    """Return the rank that computes each matrix: one that holds a piece of it and has least to do.

    Matrices that only one rank holds come first, since they leave no choice; then large ones.
    """

    def largest_first(number: int) -> tuple[bool, int, int]:
        matrix = matrices[number]
        return len(matrix.pieces) > 1, -matrix.work, number

    done = [0 for _ in range(num_ranks)]
    owners = [0 for _ in matrices]
    for number in sorted(range(len(matrices)), key=largest_first):
        holders = [piece.rank for piece in matrices[number].pieces]
        owner = min(holders, key=lambda rank: (done[rank], rank))
        owners[number] = owner
        done[owner] += matrices[number].work
    return owners


def rounds_of(
    sizes: Mapping[int, int], owners: Sequence[int], *, most: int = ROUND_NUMBERS
) -> list[list[int]]:
    """Divide matrices into rounds, in each of which a rank computes at most `most` numbers, or one
    matrix.

    Args:
        sizes: number of a matrix that is sent -> how many numbers it has.
        owners: the rank that computes each matrix.
        most: numbers of a rank in a round.
    """
    rounds: list[list[int]] = []
    current: dict[int, tuple[int, int]] = {}  # rank -> its round, and numbers in it
    for number, size in sizes.items():
        round_number, filled = current.get(owners[number], (0, 0))
        if filled and filled + size > most:
            round_number += 1
            filled = 0
        current[owners[number]] = (round_number, filled + size)
        while len(rounds) <= round_number:
            rounds.append([])
        rounds[round_number].append(number)
    return rounds


class _Stretch(NamedTuple):
    """Numbers that are sent: of which matrix, and which of its pieces."""

    matrix: int
    piece: Piece


class _Sent(NamedTuple):
    """Pieces on their way: what was sent, what comes, and the work to wait for."""

    outgoing: Tensor
    incoming: Tensor
    work: Any


class MatrixShares:
    """One rank's share of the matrices that are stepped together, and the ranks with the others.

    Every method is collective.
    """

    def __init__(
        self,
        matrices: Sequence[DividedMatrix],
        *,
        process_group: Any,
        device: torch.device,
        most: int = ROUND_NUMBERS,
        tensor: TensorPart | None = None,
    ) -> None:
        """Take the layout that all ranks of a process group have alike.

        Args:
            matrices: of the flat tensor of which this rank has a share.
            process_group: the ranks with the shares; None: this rank has all of them.
            device: where matrices are computed and sent; a share may lie on the host.
            most: numbers that a rank computes in a round.
            tensor: this rank's place in the tensor group that divides some of the matrices.
        """
        self.matrices = matrices
        self._group = process_group
        self._device = device
        self._tensor = tensor
        self._rank = 0
        self._num_ranks = 1
        if process_group is not None:
            self._rank = torch.distributed.get_rank(process_group)
            self._num_ranks = torch.distributed.get_world_size(process_group)
        self._owners = owners_of(matrices, self._num_ranks)
        self.whole = []
        sizes: dict[int, int] = {}
        for number, matrix in enumerate(matrices):
            if len(matrix.pieces) > 1:
                sizes[number] = matrix.shape.numel()
            elif self._owners[number] == self._rank:
                self.whole.append(number)
        self.rounds = rounds_of(sizes, self._owners, most=most)
        self.own = [self._own_piece(matrix) for matrix in matrices]
        numbers = range(len(self.rounds))
        self._outgoing = [self._outgoing_in(number) for number in numbers]
        self._incoming = [self._incoming_in(number) for number in numbers]

    def _own_piece(self, matrix: DividedMatrix) -> Piece | None:
        for piece in matrix.pieces:
            if piece.rank == self._rank:
                return piece
        return None

    def orthogonalize(self, update: Tensor, options: Mapping[str, Any]) -> None:
        """Make each matrix orthogonal, in place.

        The next round's pieces are on their way while a round is computed, the first round's while
        this rank computes the matrices that it has whole.

        Args:
            update: this rank's share, bf16, one-dimensional.
            options: of the parameter group, as torch's Muon keeps them.
        """
        coming = self._send_round(update, 0)
        for number in self.whole:
            piece = self.own[number]
            assert piece is not None
            values = update.narrow(0, piece.offset, piece.num)
            values.copy_(self._orthogonal(values.to(self._device), number, options))
        returning: _Sent | None = None
        for number in range(len(self.rounds)):
            following = self._send_round(update, number + 1)
            assert coming is not None
            coming.work.wait()
            self._compute_round(number, coming.incoming, options)
            computed = self._send_back(number, coming)
            self._take_back(update, number - 1, returning)
            returning = computed
            coming = following
        self._take_back(update, len(self.rounds) - 1, returning)

    def _orthogonal(self, values: Tensor, number: int, options: Mapping[str, Any]) -> Tensor:
        """Return a matrix made orthogonal, flattened; of one that the tensor group divides this
        rank's part.
        """
        matrix = self.matrices[number]
        whole = values.view(matrix.shape)
        if matrix.split is not None:
            whole = self._joined(whole, matrix.split)
        result = _zeropower_via_newtonschulz(
            whole, options["ns_coefficients"], options["ns_steps"], options["eps"]
        )
        if matrix.split is not None and self._tensor is not None:
            result = matrix.split.part(result, self._tensor.rank, self._tensor.size)
        return result.reshape(-1)

    def _joined(self, part: Tensor, split: Split) -> Tensor:
        """Return the whole of a matrix that the tensor group divides, bf16."""
        assert self._tensor is not None
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._tensor.size)]
        # as bytes: gloo sends no bf16
        torch.distributed.all_gather(
            [one.view(torch.uint8) for one in parts],
            part.view(torch.uint8),
            group=self._tensor.group,
        )
        return split.whole(parts)

    def _outgoing_in(self, number: int) -> list[list[_Stretch]]:
        """Return what this rank sends in a round, for each rank that computes a matrix of it."""
        stretches: list[list[_Stretch]] = [[] for _ in range(self._num_ranks)]
        for matrix in self.rounds[number]:
            piece = self.own[matrix]
            if piece is not None:
                stretches[self._owners[matrix]].append(_Stretch(matrix, piece))
        return stretches

    def _incoming_in(self, number: int) -> list[list[_Stretch]]:
        """Return what comes to this rank in a round, from each rank that holds a piece."""
        stretches: list[list[_Stretch]] = [[] for _ in range(self._num_ranks)]
        for matrix in self.rounds[number]:
            if self._owners[matrix] != self._rank:
                continue
            for piece in self.matrices[matrix].pieces:
                stretches[piece.rank].append(_Stretch(matrix, piece))
        return stretches

    def _send_round(self, update: Tensor, number: int) -> _Sent | None:
        """Begin to send the pieces of a round to the ranks that compute; None after the last."""
        if number >= len(self.rounds):
            return None
        outgoing = self._outgoing[number]
        pieces = [update[:0]]
        for stretches in outgoing:
            for _, piece in stretches:
                pieces.append(update.narrow(0, piece.offset, piece.num))
        buffer = torch.cat(pieces).to(self._device)
        return self._exchange(buffer, _nums(outgoing), _nums(self._incoming[number]))

    def _send_back(self, number: int, sent: _Sent) -> _Sent:
        """Begin to return the pieces of a round to the ranks that hold them."""
        incoming = _nums(self._incoming[number])
        return self._exchange(sent.incoming, incoming, _nums(self._outgoing[number]))

    def _exchange(self, buffer: Tensor, sent: Sequence[int], coming: Sequence[int]) -> _Sent:
        """Send `sent[r]` numbers to each rank r; `coming[r]` numbers come from it."""
        result = buffer.new_empty(sum(coming))
        # as bytes: gloo sends no bf16
        work = torch.distributed.all_to_all_single(
            result.view(torch.uint8),
            buffer.view(torch.uint8),
            [2 * num for num in coming],
            [2 * num for num in sent],
            group=self._group,
            async_op=True,
        )
        return _Sent(buffer, result, work)

    def _compute_round(self, number: int, buffer: Tensor, options: Mapping[str, Any]) -> None:
        """Make the matrices of a round orthogonal that this rank computes, in the buffer in which
        their pieces came.
        """
        places: dict[int, list[tuple[Piece, Tensor]]] = {}
        offset = 0
        for stretches in self._incoming[number]:
            for matrix, piece in stretches:
                place = buffer.narrow(0, offset, piece.num)
                places.setdefault(matrix, []).append((piece, place))
                offset += piece.num
        for matrix, pieces in places.items():
            whole = torch.cat([place for _, place in pieces])
            result = self._orthogonal(whole, matrix, options)
            for piece, place in pieces:
                place.copy_(result.narrow(0, piece.start, piece.num))

    def _take_back(self, update: Tensor, number: int, sent: _Sent | None) -> None:
        """Put the pieces that come back from a round into this rank's share; nothing for None."""
        if sent is None:
            return
        sent.work.wait()
        offset = 0
        for stretches in self._outgoing[number]:
            for _, piece in stretches:
                values = sent.incoming.narrow(0, offset, piece.num)
                update.narrow(0, piece.offset, piece.num).copy_(values)
                offset += piece.num


def _nums(stretches_of_ranks: Sequence[Sequence[_Stretch]]) -> list[int]:
    return [sum(piece.num for _, piece in stretches) for stretches in stretches_of_ranks]


class MuonOfShares(torch.optim.Optimizer):
    """torch's Muon for shares of matrices, with the same options and the same state.

    Attributes:
        shares: a share that is stepped, flat or one weight -> its matrices; set when ZeRO has
            divided the weights.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr_fn: str,
    ) -> None:
        """Take groups with `lr` and `weight_decay`; the rest is as in torch.optim.Muon."""
        options = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": (DEFAULT_A, DEFAULT_B, DEFAULT_C),
            "eps": EPS,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(groups, options)
        self.shares: dict[Tensor, MatrixShares] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the shares of all groups, in the same order on all ranks. Collective."""
        for group in self.param_groups:
            for share in group["params"]:
                # At ZeRO 0 code of the run may have frozen a weight, on all ranks.
                if share.grad is not None:
                    self._step_share(share, share.grad, group)

    def _step_share(self, share: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[share]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(share)
        mean = state["momentum_buffer"]
        mean.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            update = gradient.lerp(mean, group["momentum"]).to(torch.bfloat16).reshape(-1)
        else:
            update = mean.to(torch.bfloat16).reshape(-1)
        shares = self.shares[share]
        shares.orthogonalize(update, group)
        rate = float(group["lr"])
        share.mul_(1 - rate * group["weight_decay"])
        numbers = share.view(-1)
        for matrix, piece in zip(shares.matrices, shares.own, strict=True):
            if piece is not None:
                values = update.narrow(0, piece.offset, piece.num)
                by_shape = _adjust_lr(rate, group["adjust_lr_fn"], matrix.whole_shape)
                numbers.narrow(0, piece.offset, piece.num).add_(values, alpha=-by_shape)


def matrix_shares(
    engine: deepspeed.DeepSpeedEngine, optimizer: torch.optim.Optimizer, is_stepped: Sequence[bool]
) -> dict[Tensor, MatrixShares]:
    """Return the shares of this rank that Muon steps, with their matrices.

    Args:
        engine: built, with its weights divided.
        optimizer: the one that steps the shares.
        is_stepped: whether Muon steps it, for each parameter group.

    Raises:
        ConfigError: kind ``not-with-tensor``, of matrices that a tensor group divides unevenly.
    """
    zero = engine.optimizer
    tensor = part_of(engine.module)
    shares_of = partial(MatrixShares, device=engine.device, tensor=tensor)
    shares: dict[Tensor, MatrixShares] = {}
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        for number, share in enumerate(zero.fp32_partitioned_groups_flat):
            if is_stepped[zero.sub_group_to_group_id[number]]:
                weights = zero.fp16_groups[number]
                # experts are spread over fewer ranks than other weights
                group = weights[0].ds_process_group
                num_ranks = torch.distributed.get_world_size(group)
                sizes = [(weight.ds_shape, weight.partition_numel()) for weight in weights]
                matrices = each_cut(sizes, num_ranks=num_ranks)
                matrices = _with_splits(matrices, weights, tensor)
                shares[share] = shares_of(matrices, process_group=group)
        return shares
    flat = flat_groups(zero)
    if not flat:  # ZeRO 0, in a tensor group
        groups = zip(is_stepped, stepped_groups(zero), optimizer.param_groups, strict=True)
        for is_muon, weights, group in groups:
            if not is_muon:
                continue
            # in half precision the optimizer steps fp32 copies
            for weight, stepped in zip(weights, group["params"], strict=True):
                matrices = in_a_row([(weight.shape, 0)], share_size=weight.numel(), num_ranks=1)
                matrices = _with_splits(matrices, [weight], tensor)
                shares[stepped] = shares_of(matrices, process_group=None)
        return shares
    for is_muon, flat_group in zip(is_stepped, flat, strict=True):
        if is_muon:
            share = flat_group.copy()
            offsets = [(shape, offset) for _, shape, offset in flat_group.members]
            matrices = in_a_row(offsets, share_size=share.numel(), num_ranks=flat_group.ranks)
            weights = [weight for weight, _, _ in flat_group.members]
            matrices = _with_splits(matrices, weights, tensor)
            shares[share] = shares_of(matrices, process_group=flat_group.process_group)
    return shares


def _with_splits(
    matrices: Sequence[DividedMatrix], weights: Sequence[Tensor], tensor: TensorPart | None
) -> list[DividedMatrix]:
    """Return the matrices of weights, of packed experts each one's, with the splits that a tensor
    group has made. Ranks of a tensor group have whole experts of a packed weight.

    Raises:
        ConfigError: kind ``not-with-tensor``, of parts of different sizes: ranks of the group would
            have shares that are not alike.
    """
    found = []
    for matrix, weight in zip(matrices, weights, strict=True):
        split = None
        if tensor is not None and len(matrix.shape) == 2:
            split = split_of(weight)
            if split is not None:
                _refuse_uneven(split, matrix.shape, tensor)
        found += of_stack(replace(matrix, split=split))
    return found


def _refuse_uneven(split: Split, part: torch.Size, tensor: TensorPart) -> None:
    if any(section % tensor.size for section in split.sections):
        raise ConfigError.of(
            "not-with-tensor",
            f"Muon steps a matrix of {tuple(split.whole_shape(part))} that the "
            f"{tensor.size} ranks of a tensor group share unevenly",
            "leave it out of optimizer.matrices",
            "optimizer.matrices",
            None,
        )
