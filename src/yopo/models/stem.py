"""The first convolution of an image network."""

from functools import reduce
from itertools import product

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
        (high, wide), channels = self.kernel_size, self.in_channels
        x = F.pad(x, [self.edge] * 4).permute(0, 2, 3, 1)  # as it lies in memory
        height, width = x.shape[1] - high + 1, x.shape[2] - wide + 1
        size = high * wide * channels
        columns = size + -size % 8  # the matrix units take eight at a time
        # A sum of padded pieces and not a stack of them: the compiler makes one kernel of it.
        rows = reduce(
            torch.add,
            [
                F.pad(x[:, i : i + height, j : j + width], (at, columns - channels - at))
                for at, (i, j) in zip(
                    range(0, size, channels), product(range(high), range(wide)), strict=True
                )
            ],
        )  # (B, H', W', columns)
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        out = F.linear(rows, F.pad(weight, (0, columns - size)), self.bias)
        return out.permute(0, 3, 1, 2)  # channels last in memory
