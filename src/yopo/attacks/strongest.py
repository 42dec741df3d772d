"""Keep, for each image, the strongest perturbation tried."""

from collections.abc import Callable

import torch
from torch import Tensor

from yopo.checks import check_targets
from yopo.frozen import Network

PerSample = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), labels (B,) -> (B,)


class Strongest:
    """A misclassified example beats a classified one; among equals the larger loss wins.

    The clean image is the first candidate.
    """

    def __init__(self, f: Network, x: Tensor, y: Tensor, loss: PerSample) -> None:
        self.f, self.x, self.y, self.loss = f, x, y, loss
        self._eta = torch.zeros_like(x)
        with torch.no_grad():
            logits = f(x.clone())
            check_targets(y, x, logits.shape[1])
            self._wrong = logits.argmax(1) != y
            self._value = loss(logits, y)

    def offer(self, eta: Tensor, logits: Tensor | None = None) -> None:
        """Compare eta (B, ...) with the best so far; logits (B, C) at x + eta if known."""
        with torch.no_grad():
            logits = self.f(self.x + eta) if logits is None else logits
            wrong, value = logits.argmax(1) != self.y, self.loss(logits, self.y)
        better = (wrong & ~self._wrong) | ((wrong == self._wrong) & (value > self._value))
        better &= ~logits.isnan().any(1)  # a NaN proves nothing
        each = better.view(-1, *[1] * (eta.dim() - 1))
        self._eta = torch.where(each, eta, self._eta)
        self._wrong = torch.where(better, wrong, self._wrong)
        self._value = torch.where(better, value, self._value)

    @property
    def images(self) -> Tensor:
        """x + eta of the best, (B, ...) in [0, 1]."""
        return self.x + self._eta
