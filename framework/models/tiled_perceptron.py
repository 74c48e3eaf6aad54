"""The perceptron of a block in tiles of positions (`training.mlp_tile`), so that its inner values
of all positions never exist at once.

A tile runs in the forward pass without a graph, and again in the backward pass, where its gradients
are computed before the next tile runs; of all tiles the inputs alone are kept (Bekman et al. 2025,
"Arctic Long Sequence Training"). Gradients of weights are summed over tiles in fp32, and each
weight gets its gradient once, as from a single product: hooks of ZeRO see no tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from framework.errors import ConfigError
from framework.models.layers import keeping_nothing

# Modules of the perceptron of Llama, and of the many that transformers derives from it.
_LLAMA_MODULES: Final = frozenset({"gate_proj", "up_proj", "down_proj"})
RandomStates = list[Tensor]


def tile_perceptrons(model: nn.Module, tile: int) -> None:
    """Let the perceptrons of a model's blocks compute `tile` positions at once, by another class
    with the same name.

    At ZeRO stage 3 DeepSpeed gathers the weights of each perceptron as a whole (a leaf module), and
    not the weights of a linear layer for each tile: ranks with sequences of other lengths have
    other numbers of tiles.

    Raises:
        ConfigError: kind ``mlp-not-tiled``: it has none that is known to take each position by
            itself.
    """
    perceptrons = list(_perceptrons(model))
    if not perceptrons:
        raise no_perceptrons(model, tile)
    for module in perceptrons:
        kind = type(module)
        module.__class__ = type(kind.__name__, (_Tiled, kind), {})
        vars(module)["mlp_tile"] = tile
        vars(module)["_z3_leaf"] = True


def has_perceptrons(model: nn.Module) -> bool:
    """Check whether `tile_perceptrons` finds any."""
    return any(True for _ in _perceptrons(model))


def no_perceptrons(model: nn.Module, tile: int) -> ConfigError:
    """Return the error of a model without such perceptrons."""
    reason = (
        f"{type(model).__name__} has no perceptron that is known to take each position by "
        "itself, as gpt has them, and as modules *MLP with gate_proj, up_proj and down_proj are"
    )
    fix = "set training.mlp_tile: 0"
    return ConfigError.of("mlp-not-tiled", reason, fix, "training.mlp_tile", tile)


def _perceptrons(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the perceptrons in a module, without experts: these get rows of many texts."""
    for child in module.children():
        names = {name for name, _ in child.named_children()}
        is_llama = names >= _LLAMA_MODULES and type(child).__name__.endswith("MLP")
        if getattr(child, "takes_positions_apart", False) or is_llama:
            yield child
        elif "experts" not in names:
            yield from _perceptrons(child)


class _Tiled:
    """A perceptron that computes its positions in tiles."""

    mlp_tile: int

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden: Tensor) -> Any:
        run: Callable[[Tensor], Any] = super().forward  # type: ignore[misc]
        rows = hidden.flatten(0, -2)
        if len(rows) <= self.mlp_tile:
            return run(hidden)
        module: Any = self
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        with keeping_nothing():
            outputs: Tensor = _Tiles.apply(rows, run, self.mlp_tile, *weights)
        return outputs.view(hidden.shape[:-1] + outputs.shape[-1:])


class _Tiles(torch.autograd.Function):
    """Rows of a function that takes each row by itself, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, run: Callable[[Tensor], Tensor], tile: int, *weights: Tensor
    ) -> Tensor:
        """Compute the outputs of all rows.

        Args:
            ctx: keeps the rows for `backward`.
            rows: (all positions, size).
            run: maps (positions, size) to (positions, size of outputs).
            tile: positions of a tile.
            weights: of `run`, those with a gradient.
        """
        kind = rows.device.type
        ctx.save_for_backward(rows)
        ctx.run = run
        ctx.tile = tile
        ctx.weights = weights
        ctx.random_states = _random_states(rows.device)
        ctx.autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        outputs: Tensor | None = None
        for start in range(0, len(rows), tile):
            made = run(rows[start : start + tile])
            if outputs is None:
                outputs = made.new_empty(len(rows), made.shape[-1])
            outputs[start : start + tile] = made
            del made  # before the next tile's values are computed
        assert outputs is not None
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        weights = [
            weight
            for weight, is_needed in zip(ctx.weights, ctx.needs_input_grad[3:], strict=True)
            if is_needed
        ]
        sums = [torch.zeros(weight.shape, device=rows.device) for weight in weights]
        rows_gradient: Tensor | None = None
        if ctx.needs_input_grad[0]:
            rows_gradient = torch.empty_like(rows)
        is_autocast, dtype = ctx.autocast
        with (
            torch.enable_grad(),
            _at_random_states(ctx.random_states, rows.device),
            torch.autocast(rows.device.type, dtype=dtype, enabled=is_autocast, cache_enabled=False),
        ):
            for start in range(0, len(rows), ctx.tile):
                tile = slice(start, start + ctx.tile)
                tile_rows = rows[tile].detach().requires_grad_(rows_gradient is not None)
                inputs = [tile_rows] if rows_gradient is not None else []
                made = torch.autograd.grad(
                    ctx.run(tile_rows), inputs + weights, gradient[tile], allow_unused=True
                )
                if rows_gradient is not None:
                    rows_gradient[tile] = made[0]
                _add_parts(sums, made[len(inputs) :])
                del made  # before the next tile's gradients are computed
        found = {
            id(weight): total.to(weight.dtype) for weight, total in zip(weights, sums, strict=True)
        }
        gradients = [rows_gradient, None, None]
        gradients += [found.get(id(weight)) for weight in ctx.weights]
        return tuple(gradients)


def _add_parts(sums: Sequence[Tensor], parts: Sequence[Tensor | None]) -> None:
    """Add what a tile gives to the gradient of each weight; None adds nothing."""
    for total, part in zip(sums, parts, strict=True):
        if part is not None:
            total.add_(part)


def _random_states(device: torch.device) -> RandomStates:
    """Return the states of the generators that a tile may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


@contextmanager
def _at_random_states(states: RandomStates, device: torch.device) -> Iterator[None]:
    """Draw within the block what was drawn from these states on, and go on as before it."""
    before = _random_states(device)
    _set_random_states(states, device)
    try:
        yield
    finally:
        _set_random_states(before, device)


def _set_random_states(states: RandomStates, device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)
