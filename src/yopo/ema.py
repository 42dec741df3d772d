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
        self._of = model
        self.pair()

    def update(self, step: int) -> None:
        """Move towards the network after its step number `step` (from 0)."""
        self.pair()
        self.move(self.weight(step))

    def pair(self) -> None:
        """Look for the network's tensors anew: model.to(...) gives it others."""
        self._pairs = list(zip(_floats(self.model), _floats(self._of), strict=True))

    def weight(self, step: int) -> float:
        """How far the average moves: 1 - decay."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def move(self, weight: float | Tensor) -> None:
        """Go this part of the way to the network."""
        averages, values = zip(*self._pairs, strict=True)
        if isinstance(weight, Tensor):  # which lerp does not take
            way = torch._foreach_sub(values, averages)
            torch._foreach_mul_(way, weight)
            torch._foreach_add_(averages, way)
        else:
            torch._foreach_lerp_(averages, values, weight)


def _floats(model: nn.Module) -> list[Tensor]:
    tensors = [*model.parameters(), *model.buffers()]
    return [t.detach() for t in tensors if t.is_floating_point()]
