"""The first convolution of an image network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stem(nn.Conv2d):
    """A 3x3 convolution from one or three channels; compiled for a GPU, it is one matrix product.

    The kernels for convolutions want many channels and are slow with so few. Weights and result
    are those of a plain convolution.
    """

    def __init__(self, channels: int, out: int, *, padding: int = 0, bias: bool = True) -> None:
        super().__init__(channels, out, 3, padding=padding, bias=bias)
        self.edge = padding

    def forward(self, x: Tensor) -> Tensor:  # (B, channels, H, W)
        """Convolve."""
        if x.is_cuda and torch.compiler.is_compiling():
            return self._as_product(x)
        return super().forward(x)

    def _as_product(self, x: Tensor) -> Tensor:
        """Each pixel's neighbourhood as a row, times the weights."""
        high, wide = self.kernel_size
        x = F.pad(x, [self.edge] * 4)
        height, width = x.shape[2] - high + 1, x.shape[3] - wide + 1
        # Nested, so that the compiler makes one kernel of it.
        rows = torch.stack(
            [
                torch.stack([x[..., i : i + height, j : j + width] for j in range(wide)], -1)
                for i in range(high)
            ],
            -2,
        )  # (B, channels, H', W', high, wide)
        rows = rows.permute(0, 2, 3, 1, 4, 5).flatten(3)
        missing = (0, -rows.shape[3] % 8)  # the matrix units take eight columns at a time
        out = F.linear(F.pad(rows, missing), F.pad(self.weight.flatten(1), missing), self.bias)
        return out.permute(0, 3, 1, 2)  # channels last in memory
