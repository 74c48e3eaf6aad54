"""Layers that draw their own initial weights: linear layers, embeddings, and convolutions as ResNets want them.

Linear layers and embeddings that draw their own weights from a normal distribution, as transformers want them.

Under ZeRO-3 a module's weights are partitioned away when its constructor returns, so they are drawn in the constructor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

DEFAULT_STD = 0.02


class DrawnLinear(nn.Linear):
    """`nn.Linear` with weights from N(0, std^2), cut off at two standard deviations if `truncated`; bias zero."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        std: float = DEFAULT_STD,
        truncated: bool = False,
    ) -> None:
        self.std, self.truncated = std, truncated  # nn.Linear's constructor draws, and needs them
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weights, set the bias to zero."""
        draw(self.weight, std=self.std, truncated=self.truncated)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class DrawnEmbedding(nn.Embedding):
    """`nn.Embedding` with vectors from N(0, std^2), cut off at two standard deviations if `truncated`."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, std: float = DEFAULT_STD, truncated: bool = False
    ) -> None:
        self.std, self.truncated = std, truncated
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the vectors."""
        draw(self.weight, std=self.std, truncated=self.truncated)


class TokenEmbedding(DrawnEmbedding):
    """Tokens (..., ) int64 to vectors (..., hidden); `as_head`: vectors (..., hidden) to logits (..., vocabulary).

    One forward for both, because ZeRO-3 gathers weights when a module is called, and only then.
    """

    def forward(self, value: Tensor, *, as_head: bool = False) -> Tensor:
        """Vectors of tokens, or logits; shapes as in the class docstring."""
        return linear(value, self.weight) if as_head else super().forward(value)


def as_head(module: nn.Module, value: Tensor) -> Tensor:
    """Apply a tied `TokenEmbedding` as the output layer."""
    logits: Tensor = module(value, as_head=True)
    return logits


@torch.no_grad()
def draw(weight: Tensor, *, std: float, truncated: bool) -> None:
    """Fill with N(0, std^2); in float32 where the cut-off needs more places than half precision has."""
    if not truncated:
        weight.normal_(std=std)
        return
    drawn = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    weight.copy_(nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std))


# A convolution that draws its own weights as ResNets want them.


class HeConv2d(nn.Conv2d):
    """`nn.Conv2d` with He initialisation, fan-out mode (He et al. 2015, "Delving Deep into Rectifiers").

    The weights are drawn in `reset_parameters`, which the constructor calls, because under ZeRO-3 the parent module no
    longer sees them: `kaiming_normal_` on a partitioned (empty) weight only warns and leaves PyTorch's default.
    """

    def reset_parameters(self) -> None:
        """Draw the weights from N(0, 2 / (out_channels * kernel area)); set the bias, if any, to zero."""
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)
