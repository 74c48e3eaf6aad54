"""Muon on shares of matrices takes the steps of torch's Muon on whole ones, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed

from framework.engine.muon_shares import (
    DividedMatrix,
    MatrixShares,
    MuonOfShares,
    each_cut,
    in_a_row,
    owners_of,
    rounds_of,
)

SHAPES = [torch.Size(shape) for shape in ((8, 6), (3, 17), (40, 12), (2, 2), (5, 40), (16, 16))]
OPTIONS: dict[str, Any] = {
    "momentum": 0.9,
    "nesterov": True,
    "ns_steps": 5,
    "adjust_lr_fn": "original",
}


class Threads:
    """A process group whose ranks are threads. It notes the bytes that leave each rank for others
    in each exchange.
    """

    def __init__(self, num_ranks: int) -> None:
        self.size = num_ranks
        self.own = threading.local()
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.board: dict[int, list[torch.Tensor]] = {}
        self.sent: list[int] = []

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work` with the rank on every rank, and return what they return."""
        results: list[Any] = [None for _ in range(self.size)]
        errors: list[BaseException] = []

        def on_rank(rank: int) -> None:
            self.own.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:  # shown by the test's own thread
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def exchange(
        self, output: torch.Tensor, given: torch.Tensor, out: list[int], into: list[int], **_: Any
    ) -> Any:
        rank = self.own.rank
        parts = list(given.clone().split(into))
        self.board[rank] = parts
        self.sent.append(sum(part.numel() for to, part in enumerate(parts) if to != rank))
        self.barrier.wait()
        come = [self.board[source][rank] for source in range(self.size)]
        assert [part.numel() for part in come] == out
        output.copy_(torch.cat(come))
        self.barrier.wait()
        return Done()


class Done:
    def wait(self) -> None:
        """What was exchanged is there."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Threads]:
    def of(num_ranks: int) -> Threads:
        group = Threads(num_ranks)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.own.rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
        monkeypatch.setattr(
            torch.distributed,
            "all_to_all_single",
            lambda *tensors, group, **options: group.exchange(*tensors, **options),
        )
        return group

    return of


def layout(stage: int, num_ranks: int) -> tuple[list[DividedMatrix], int]:
    """Matrices as a stage divides them, and the numbers of a share."""
    if stage == 3:
        sizes = [(shape, -(-shape.numel() // num_ranks)) for shape in SHAPES]
        return each_cut(sizes, num_ranks=num_ranks), sum(size for _, size in sizes)
    offset = 0
    offsets = []
    for shape in SHAPES:
        offsets.append((shape, offset))
        offset += shape.numel()
    share_size = -(-offset // num_ranks) + 3  # with padding
    return in_a_row(offsets, share_size=share_size, num_ranks=num_ranks), share_size


def share_of(tensors: Sequence[torch.Tensor], matrices: Any, rank: int, size: int) -> torch.Tensor:
    share = torch.zeros(size)
    for tensor, matrix in zip(tensors, matrices, strict=True):
        for piece in matrix.pieces:
            if piece.rank == rank:
                numbers = tensor.detach().flatten()[piece.start : piece.start + piece.num]
                share[piece.offset : piece.offset + piece.num] = numbers
    return share


@pytest.mark.parametrize("most", [1, 300, 10_000])
@pytest.mark.parametrize(
    ("stage", "num_ranks"), [(1, 1), (1, 2), (1, 3), (1, 7), (3, 1), (3, 2), (3, 5)]
)
def test_shares_take_torchs_steps(
    threads: Callable[[int], Threads], stage: int, num_ranks: int, most: int
) -> None:
    options = OPTIONS | (
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False} if most == 1 else {}
    )
    generator = torch.Generator().manual_seed(7)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    steps = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)]
    matrices, size = layout(stage, num_ranks)
    group = threads(num_ranks)
    start = [weight.detach().clone() for weight in weights]

    def on_rank(rank: int) -> torch.Tensor:
        share = torch.nn.Parameter(share_of(start, matrices, rank, size))
        muon = MuonOfShares([{"params": [share], "lr": 0.02, "weight_decay": 0.1}], **options)
        muon.shares[share] = MatrixShares(
            matrices, process_group=group, device=torch.device("cpu"), most=most
        )
        for gradients in steps:
            share.grad = share_of(gradients, matrices, rank, size)
            muon.step()
        return share.detach()

    shares = group.run(on_rank)
    plain = torch.optim.Muon(weights, lr=0.02, weight_decay=0.1, **options)
    for gradients in steps:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        plain.step()
    for rank, share in enumerate(shares):
        assert torch.equal(share, share_of(weights, matrices, rank, size))


def test_a_weight_without_a_gradient_is_left_out_as_by_torch() -> None:
    """As at ZeRO 0 in a tensor group, where each share is a weight."""
    wholes = [torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(3, 3))]
    weights = [torch.nn.Parameter(whole.detach().clone()) for whole in wholes]
    gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    wholes[0].grad = gradient.clone()
    weights[0].grad = gradient.clone()
    options = {"lr": 0.1, "weight_decay": 0.1}
    torch.optim.Muon([{"params": wholes, **options}], **OPTIONS).step()
    muon = MuonOfShares([{"params": weights, **options}], **OPTIONS)
    for weight in weights:
        matrices = in_a_row([(weight.shape, 0)], share_size=weight.numel(), num_ranks=1)
        muon.shares[weight] = MatrixShares(matrices, process_group=None, device=weight.device)
    muon.step()
    for weight, whole in zip(weights, wholes, strict=True):
        assert torch.equal(weight, whole)


def test_only_matrices_across_a_border_are_sent(threads: Callable[[int], Threads]) -> None:
    """Of two matrices in three shares the first lies in one share, the second in two."""
    shapes = [(torch.Size((4, 4)), 0), (torch.Size((2, 6)), 18)]
    matrices = in_a_row(shapes, share_size=20, num_ranks=3)
    group = threads(3)

    def on_rank(rank: int) -> MatrixShares:
        shares = MatrixShares(matrices, process_group=group, device=torch.device("cpu"))
        options = {"ns_coefficients": (1.0, 0.0, 0.0), "ns_steps": 1, "eps": 1e-7}
        shares.orthogonalize(torch.ones(20, dtype=torch.bfloat16), options)
        return shares

    shares = group.run(on_rank)
    assert [each.whole for each in shares] == [[0], [], []]
    assert [each.rounds for each in shares] == [[[1]], [[1]], [[1]]]
    # rank 1 has less to do, and gets the two numbers of rank 0: 4 bytes there and back
    assert sorted(group.sent) == [0, 0, 0, 0, 4, 4]


def test_work_is_shared_evenly_and_rounds_are_bounded() -> None:
    matrices = each_cut([(torch.Size((64, 64)), 1024) for _ in range(8)], num_ranks=4)
    owners = owners_of(matrices, 4)
    assert [owners.count(rank) for rank in range(4)] == [2, 2, 2, 2]
    sizes = dict.fromkeys(range(8), 4096)
    assert rounds_of(sizes, owners, most=4096) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rounds_of(sizes, owners, most=8192) == [list(range(8))]


def test_small_matrices_leave_the_last_ranks_without_a_piece() -> None:
    (matrix,) = each_cut([(torch.Size((1, 3)), 1)], num_ranks=5)
    assert [(piece.rank, piece.start) for piece in matrix.pieces] == [(0, 0), (1, 1), (2, 2)]
    assert owners_of([matrix], 5) == [0]
