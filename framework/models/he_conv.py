"""A convolution that draws its own weights as ResNets want them."""

from __future__ import annotations

from torch import nn


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
