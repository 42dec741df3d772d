"""Training without an adversary."""

import torch
from torch import Tensor, nn

from yopo.core.losses import Loss
from yopo.core.propagation import FULL, backpropagate
from yopo.methods.base import Method, Step


class Natural(Method):
    """Plain backprop at x: the baseline. model, loss: as for `yopo.YOPO`."""

    def __init__(self, model: nn.Module, *, loss: Loss | None = None) -> None:
        super().__init__(model, loss=loss)

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        if eta is not None:
            raise ValueError("Natural has no adversary; leave eta out")
        # A copy: the model may write into its input.
        loss, logits = backpropagate(self.model, x.clone(), self._objective(y))
        return Step(loss, logits, torch.zeros_like(x), FULL)
