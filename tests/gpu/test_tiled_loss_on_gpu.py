"""The loss in tiles of half precision on a CUDA device is that of whole logits in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from framework.models.tiled_loss import TileKernels, tiled_loss, use_kernels, wanting_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

POSITIONS, SIZE, TOKENS, TILE = 500, 64, 1003, 128


@pytest.mark.parametrize("backend", ["", "inductor"], ids=["as written", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(dtype: torch.dtype, backend: str) -> None:
    kernels = TileKernels(backend) if backend else None
    use_kernels(kernels)
    source = torch.Generator("cuda").manual_seed(0)
    drawn = [
        torch.randn(rows, SIZE, device="cuda", generator=source) for rows in (POSITIONS, TOKENS)
    ]
    hidden, weight = ((values / 4).to(dtype).requires_grad_() for values in drawn)
    targets = torch.randint(0, TOKENS, (POSITIONS,), device="cuda", generator=source)
    targets[::7] = -100
    with wanting_loss(targets, TILE, None):
        loss = tiled_loss(hidden, weight)
    assert loss is not None
    use_kernels(None)
    assert kernels is None or kernels.is_used
    gradients = torch.autograd.grad(loss.nats / POSITIONS, (hidden, weight))
    exact = [values.detach().double().requires_grad_() for values in (hidden, weight)]
    expected = cross_entropy(linear(*exact), targets, reduction="sum")
    assert loss.nats.item() == pytest.approx(expected.item(), rel=2e-3)
    for gradient, other in zip(
        gradients, torch.autograd.grad(expected / POSITIONS, exact), strict=True
    ):
        assert float((gradient.double() - other).abs().max()) < 0.02 * float(other.abs().max())
