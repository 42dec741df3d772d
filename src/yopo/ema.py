"""An exponential average of the weights, with an average of the BatchNorm statistics."""

import copy

import torch
from torch import Tensor, nn


class EMA:
    """`model` is a copy of the network that follows it slowly.

    The decay grows to its full value over the first steps, so that the initial weights are soon
    forgotten. Averaged buffers are the copy's own BatchNorm statistics.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._pairs = list(zip(_floats(self.model), _floats(model), strict=True))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the network after its step number `step` (from 0)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, values = zip(*self._pairs, strict=True)
        torch._foreach_lerp_(averages, values, 1 - decay)


def _floats(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return [t.detach() for t in tensors if t.is_floating_point()]
