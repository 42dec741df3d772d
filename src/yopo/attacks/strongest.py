"""Keep, for each image, the strongest perturbation tried."""

from collections.abc import Callable

import torch
from torch import Tensor

from yopo.core.checks import check_targets
from yopo.core.frozen import Forward
from yopo.core.propagation import no_logits, tensor

HALVES = (torch.float16, torch.bfloat16)
GRAIN = 32  # images: a GPU's libraries choose kernels anew, at length, for every size of a batch
PerSample = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), labels (B,) -> (B,)


class Strongest:
    """A misclassified example beats a classified one; among equals the larger loss wins.

    The clean image is the first candidate; `clean` are its logits (B, C) if known. Half types are
    too coarse for eta, for Adam and for losses: there x, eta and logits are float32, and the model
    gets images of its own type.
    """

    def __init__(
        self, f: Forward, x: Tensor, y: Tensor, loss: PerSample, clean: Tensor | None = None
    ) -> None:
        self.dtype, self.y, self.loss = x.dtype, y, loss
        self.f = _of_halves(f, x.dtype) if x.dtype in HALVES else f
        self.x = x = x.float() if x.dtype in HALVES else x
        self.grain = GRAIN if x.is_cuda else 1
        self._eta = torch.zeros_like(x)
        with torch.no_grad():
            logits = tensor(self.f(x.clone())) if clean is None else clean
            if logits.dim() != 2:
                raise ValueError(no_logits(logits))
            check_targets(y, x, logits.shape[1])
            self.wrong = logits.argmax(1) != y  # (B,)
            self._value = loss(logits, y)

    def offer(self, eta: Tensor, logits: Tensor | None = None, rows: Tensor | None = None) -> None:
        """Compare eta with the best so far; logits at `at(eta, rows)` if known.

        rows (b,): the images that eta (b, ...) belongs to, if not all.
        """
        at = slice(None) if rows is None else rows
        y, had, value_had = self.y[at], self.wrong[at], self._value[at]
        with torch.no_grad():
            logits = self.f(self.at(eta, rows)) if logits is None else logits
            wrong, value = logits.argmax(1) != y, self.loss(logits, y)
        better = (wrong & ~had) | ((wrong == had) & (value > value_had))
        better &= ~logits.isnan().any(1)  # a NaN proves nothing
        each = better.view(-1, *[1] * (eta.dim() - 1))
        self._eta[at] = torch.where(each, eta, self._eta[at])
        self.wrong[at] = torch.where(better, wrong, had)
        self._value[at] = torch.where(better, value, value_had)

    def standing(self, rows: Tensor | None) -> Tensor | None:
        """Positions in `rows` (all images if None) of those still classified; None for all.

        On a GPU some others stay with them, up to a multiple of GRAIN: they stay misclassified.
        """
        wrong = self.wrong if rows is None else self.wrong[rows]
        left = int((~wrong).sum())  # waits for the device
        size = -(-left // self.grain) * self.grain
        return None if size >= len(wrong) else wrong.byte().argsort(stable=True)[:size]

    def at(self, eta: Tensor, rows: Tensor | None = None) -> Tensor:
        """x + eta (b, ...), a candidate as the model gets it; gradients are those of x + eta."""
        x = self.x if rows is None else self.x[rows]
        z = x + eta
        if self.dtype not in HALVES:
            return z
        near = towards(x, z.detach(), self.dtype).float()
        return z + (near - z.detach())

    @property
    def images(self) -> Tensor:
        """`at` of the best, (B, ...) in [0, 1]."""
        return self.at(self._eta).to(self.dtype)


def towards(x: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    """z (float32, not negative) in a half type, rounded towards x, which is exact in that type.

    So each pixel moves at most as far as in z, and no ball is left; rounding to the nearest may
    leave it. Less than one step of the type's grid is no move at all, which costs L2 most.
    """
    near = z.to(dtype)
    above, below = (near > z) & (z > x), (near < z) & (z < x)
    # The bits of numbers that are not negative, as integers, count through the type's grid.
    return (near.view(torch.int16) - above.short() + below.short()).view(dtype)


def _of_halves(f: Forward, dtype: torch.dtype) -> Forward:
    return lambda z: tensor(f(z.to(dtype))).float()
