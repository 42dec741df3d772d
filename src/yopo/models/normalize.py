"""Normalisation as the first module, so that attacks act on pixels in [0, 1]."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalize(nn.Module):
    """(x − mean) / std, per channel of (B, C, H, W), or with one number for inputs of any shape.

    Both are saved with the model.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            tensor = torch.as_tensor(value, dtype=torch.get_default_dtype())
            if tensor.dim() > 1:
                raise ValueError(
                    f"expected {name} as one number or one for each channel, got shape "
                    f"{tuple(tensor.shape)}"
                )
            self.register_buffer(name, tensor[:, None, None] if tensor.dim() else tensor)
        if not bool((self.std > 0).all()):
            raise ValueError(f"expected std > 0, got {std}")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x."""
        if self.mean.dim() and x.dim() != 4:
            raise ValueError(
                f"expected images (B, C, H, W) for a mean of each channel, got {tuple(x.shape)}; "
                "for other inputs give one number"
            )
        return (x - self.mean) / self.std
