"""Keep, for each image, the strongest perturbation offered."""

import torch
from torch import Tensor


class Strongest:
    """A misclassified example beats a classified one; among equals the larger loss wins."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self._eta = torch.zeros_like(x)
        self._wrong = torch.zeros_like(y, dtype=torch.bool)
        self._loss = torch.full_like(y, float("-inf"), dtype=x.dtype)

    def offer(self, eta: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Compare eta (B, ...) with the best so far, by its logits (B, C) and losses (B,)."""
        wrong = logits.argmax(1) != self.y
        better = (wrong & ~self._wrong) | ((wrong == self._wrong) & (loss > self._loss))
        each = better.view(-1, *[1] * (eta.dim() - 1))
        self._eta = torch.where(each, eta, self._eta)
        self._wrong = torch.where(better, wrong, self._wrong)
        self._loss = torch.where(better, loss.to(self._loss), self._loss)

    @property
    def images(self) -> Tensor:
        """x + eta of the best, (B, ...) in [0, 1]."""
        return self.x + self._eta
