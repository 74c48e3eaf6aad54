"""Rank r of two normalises its part of a batch; what comes out is compared with one batch norm over
the joined batch.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from framework.models.sync_batch_norm import with_sync_batch_norm

SIZES = {"equal": (3, 3), "unequal": (1, 6), "one rank has nothing": (0, 4)}


def network(kind: type[nn.Module], momentum: float | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), kind(4, momentum=momentum), nn.ReLU(), nn.Conv2d(4, 3, 1), kind(3)
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def check(sizes: tuple[int, ...], momentum: float | None) -> None:
    rank, total = distributed.get_rank(), sum(sizes)
    generator = torch.Generator().manual_seed(1)
    parts = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    joined, ours = (
        network(nn.BatchNorm2d, momentum),
        with_sync_batch_norm(network(nn.BatchNorm2d, momentum)),
    )
    for _ in range(2):
        # A mean far from zero, where sums of squares would lose places of the variance.
        images = 3 * torch.randn(total, 2, 6, 6, dtype=torch.float64, generator=generator) + 100
        weights = torch.randn(total, 3, 4, 4, dtype=torch.float64, generator=generator)
        whole, part = images.clone().requires_grad_(), images[parts].clone().requires_grad_()
        expected, output = joined(whole), ours(part)
        (expected * weights).sum().backward()
        (output * weights[parts]).sum().backward()
        same(output, expected[parts])
        assert whole.grad is not None
        assert part.grad is not None
        same(part.grad, whole.grad[parts])
    for (name, parameter), reference in zip(
        ours.named_parameters(), joined.parameters(), strict=True
    ):
        gradient: Any = parameter.grad
        distributed.all_reduce(gradient)  # as data parallelism would
        assert reference.grad is not None, name
        same(gradient, reference.grad)
    for (name, buffer), reference in zip(ours.named_buffers(), joined.buffers(), strict=True):
        assert buffer.dtype == reference.dtype, name
        same(buffer, reference)
    same(ours.eval()(images[parts]), joined.eval()(images[parts]))


def check_alone() -> None:
    """Compare a group of one rank with torch's ordinary batch norm."""
    groups = [distributed.new_group([rank]) for rank in range(2)]
    group = groups[distributed.get_rank()]
    ours = with_sync_batch_norm(nn.BatchNorm1d(3), process_group=group)
    values = torch.randn(8, 3)
    assert torch.equal(ours(values), nn.BatchNorm1d(3)(values))
    with pytest.raises(ValueError, match="more than 1 value"):  # it has no variance
        ours(values[:1])


def same(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8)


def main() -> None:
    distributed.init_process_group("gloo")
    for name, sizes in SIZES.items():
        for momentum in (0.1, None):
            check(sizes, momentum)
            print(f"rank {distributed.get_rank()}: {name}, momentum {momentum}: same", flush=True)
    check_alone()
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
