"""Losses in tiles against torch's cross-entropy of whole logits: values, gradients, guesses, and
what is ever alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.config.training import positions_of_tile
from framework.models import tiled_loss as tiled_loss_module
from framework.models.tiled_loss import (
    TiledLoss,
    TileKernels,
    _half_precision_gradient,
    output_head,
    tiled_loss,
    use_kernels,
    wanting_loss,
)
from framework.recipes.language_models.bert import BERT
from framework.recipes.language_models.gpt import GPT
from tests.launched import NO_COMPILE

TOKENS, POSITIONS, TILE = 99, (3, 37), 10
SCALE = 0.37  # of the loss in a step
# Largest error relative to the largest number: of a sum of many roundings.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def drawn(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Hidden, weight and bias; targets, of which some are left out."""
    source = torch.Generator().manual_seed(0)
    shapes = ((*POSITIONS, 16), (TOKENS, 16), (TOKENS,))
    targets = torch.randint(0, TOKENS, POSITIONS, generator=source)
    targets[0, :9] = targets[2] = -100
    return [
        torch.randn(shape, generator=source).to(dtype).requires_grad_() for shape in shapes
    ], targets


def in_tiles(given: list[Tensor], targets: Tensor) -> TiledLoss:
    with wanting_loss(targets, TILE, None):
        found = tiled_loss(*given)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_loss_and_gradients_are_those_of_whole_logits(dtype: torch.dtype) -> None:
    given, targets = drawn(dtype)
    found = in_tiles(given, targets)
    gradients = torch.autograd.grad(found.nats * SCALE, given)
    exact = [one.detach().double().requires_grad_() for one in given]
    expected = cross_entropy(linear(*exact).flatten(0, 1), targets.flatten(), reduction="sum")
    assert found.nats.dtype == torch.float32
    assert found.nats.item() == pytest.approx(expected.item(), rel=BOUNDS[dtype])
    for one, other in zip(gradients, torch.autograd.grad(expected * SCALE, exact), strict=True):
        assert one.dtype == dtype
        assert float((one.double() - other).abs().max()) < BOUNDS[dtype] * float(other.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_passes_over_logits_in_half_precision_give_the_gradient(dtype: torch.dtype) -> None:
    """What CUDA devices take in the place of the passes in fp32."""
    source = torch.Generator().manual_seed(1)
    logits = 8 * torch.randn(40, TOKENS, generator=source).to(dtype)
    targets = torch.randint(0, TOKENS, (40,), generator=source)
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    gradient_of_logits, nats = _half_precision_gradient(logits, targets)
    assert nats.dtype == torch.float32
    assert gradient_of_logits.data_ptr() == logits.data_ptr(), "in the memory of the logits"
    assert (nats.double() - expected).abs().max() < 1e-5 * expected.abs().max()
    assert float((gradient_of_logits.double() - gradient).abs().max()) < torch.finfo(dtype).eps


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], TileKernels]]:
    """Let tiles be computed on processors with the kernels that CUDA devices have."""
    monkeypatch.setattr(tiled_loss_module, "_DEVICES_WITH_KERNELS", {"cpu"})
    monkeypatch.delenv(NO_COMPILE)

    def use(backend: str) -> TileKernels:
        made = TileKernels(backend)
        use_kernels(made)
        return made

    with torch._dynamo.config.patch(disable=False):
        yield use
    use_kernels(None)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dtype", "numbers"),
    [
        ("eager", torch.bfloat16, (3, 2)),
        ("aot_eager", torch.float16, (3, 2)),
        ("inductor", torch.bfloat16, (3,)),
    ],
    ids=str,
)
def test_compiled_tiles_are_those_as_written(
    kernels: Callable[[str], TileKernels],
    backend: str,
    dtype: torch.dtype,
    numbers: tuple[int, ...],
) -> None:
    """With a bias and without; vocabulary and last tile are filled up, or smaller."""
    given, targets = drawn(dtype)
    for number in numbers:
        made = kernels(backend)
        parts = given[:number]
        found = in_tiles(parts, targets)
        gradients = torch.autograd.grad(found.nats * SCALE, parts)
        assert made.is_used
        use_kernels(None)
        plain = in_tiles(parts, targets)
        assert found.nats.item() == pytest.approx(plain.nats.item(), rel=BOUNDS[dtype] / 10)
        exact = [one.detach().double().requires_grad_() for one in parts]
        expected = cross_entropy(linear(*exact).flatten(0, 1), targets.flatten(), reduction="sum")
        assert found.nats.item() == pytest.approx(expected.item(), rel=BOUNDS[dtype])
        for one, other in zip(gradients, torch.autograd.grad(expected * SCALE, exact), strict=True):
            assert one.dtype == dtype
            largest = float(other.abs().max())
            assert float((one.double() - other).abs().max()) < BOUNDS[dtype] * largest


@pytest.mark.slow
def test_where_tiles_are_computed_as_written(kernels: Callable[[str], TileKernels]) -> None:
    made = kernels("eager")
    given, targets = drawn()
    in_tiles(given, targets)
    assert not made.is_used, "fp32"
    given, targets = drawn(torch.bfloat16)
    with torch.no_grad():
        assert in_tiles(given, targets).guesses is not None
    assert not made.is_used, "an evaluation"
    torch.compile(lambda: in_tiles(given, targets).nats, backend="eager")()
    assert not made.is_used, "inside of a compiled model"
    in_tiles(given, targets)
    assert made.is_used


def test_evaluation_knows_the_best_token_of_every_position() -> None:
    given, targets = drawn()
    with torch.no_grad():
        found = in_tiles(given, targets)
    assert found.guesses is not None
    assert torch.equal(found.guesses, linear(*given).argmax(-1))
    assert in_tiles(given, targets).guesses is None


def test_a_frozen_weight_costs_no_gradient() -> None:
    given, targets = drawn()
    given[1].requires_grad_(False)
    loss = in_tiles([given[0], given[1]], targets).nats
    assert loss.grad_fn is not None
    assert [None if one is None else one.shape for one in loss.grad_fn.gradients] == [
        (111, 16),
        None,
        None,
    ]
    loss.backward()
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.most = max(
            self.most, *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)), 0
        )
        return made


def test_no_tensor_has_more_than_the_logits_of_a_tile() -> None:
    given, targets = drawn()
    with Largest() as largest:
        in_tiles(given, targets).nats.backward()
    assert largest.most == max(TILE * TOKENS, given[0].numel(), given[1].numel())


@pytest.mark.parametrize(
    ("asked", "positions", "tokens", "tile"),
    [
        (0, 10**9, 10**6, 0),
        (64, 10, 10, 10),
        (64, 100, 10, 64),
        ("auto", 8192, 32768, 0),
        ("auto", 8193, 32768, 2048),
        ("auto", 32768, 50257, 1280),
        ("auto", 10, 2**27, 1),
    ],
)
def test_auto_is_what_the_setting_states(
    asked: Any, positions: int, tokens: int, tile: int
) -> None:
    assert positions_of_tile(asked, positions, tokens, is_half=False) == tile


@pytest.mark.parametrize(
    ("asked", "positions", "tokens", "tile"),
    [
        (0, 10, 99, 0),
        ("auto", 64, 99, 64),
        ("auto", 64, 104, 0),
        ("auto", 32768, 50257, 5312),
        ("auto", 30, 2**25 + 1, 7),
    ],
)
def test_auto_takes_tiles_where_rows_of_half_precision_are_slow(
    asked: Any, positions: int, tokens: int, tile: int
) -> None:
    assert positions_of_tile(asked, positions, tokens, is_half=True) == tile


SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_size": 32,
    "max_positions": 37,
}


def test_output_layers_of_our_models_are_found() -> None:
    own = GPT.of(vocab_size=TOKENS, num_kv_heads=2, tie_embeddings=False, **SHAPE)
    tied, bert = (
        GPT.of(vocab_size=TOKENS, num_kv_heads=2, **SHAPE),
        BERT.of(vocab_size=TOKENS, **SHAPE),
    )
    names = [*bert.state_dict()]
    assert [output_head(model) for model in (own, tied, bert)] == [own.head, tied.embed, bert.embed]
    assert [*bert.state_dict()] == names, "the bias stays that of its own module"
    assert output_head(nn.Linear(2, 2)) is None
    own.head = nn.Sequential(nn.Linear(16, TOKENS))  # as an adapter wraps it
    assert output_head(own) is None
