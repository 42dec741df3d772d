"""An exponential average of the weights, with an average of the BatchNorm statistics."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from yopo.core.parallel import fsdp, part


class EMA:
    """`model` is a copy of the network that follows it slowly.

    The decay grows to its full value over the first steps, so that the initial weights are soon
    forgotten. BatchNorm's statistics are averaged too; other buffers are those of the network. For
    a network that `fully_shard` is to spread, make this first, and spread `model` in the same way.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if fsdp(model.modules()):
            raise ValueError(
                "fully_shard has spread the network, and what it spread cannot be copied; make the "
                "EMA before it, and give its .model to fully_shard in the same way"
            )
        self.decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._of = model
        self.pair()

    def __repr__(self) -> str:
        """As EMA(ResNet, decay=0.998)."""
        return f"EMA({type(self.model).__name__}, decay={self.decay:g})"

    def update(self, step: int) -> None:
        """Move towards the network after its step number `step` (from 0)."""
        self.pair()
        self.move(self.weight(step))

    def state_dict(self) -> dict[str, Any]:
        """The average, as the network's own state_dict: a network like it can load it."""
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this average."""
        self.model.load_state_dict(state)

    def pair(self) -> None:
        """Look for the network's tensors anew: model.to(...) gives it others."""
        for module in fsdp([*self.model.modules(), *self._of.modules()]):
            module.reshard()  # a forward pass may have left weights of the one whole
        averages, copies = _tensors(self.model)
        values, others = _tensors(self._of)
        self._pairs = list(zip(averages, values, strict=True))
        self._copied = list(zip(copies, others, strict=True))

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
        if self._copied:
            copies, others = zip(*self._copied, strict=True)
            torch._foreach_copy_(copies, others)


def _tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """What is averaged, and what is copied: a mask of -inf or a count has no average."""
    norms = (m for m in model.modules() if isinstance(m, _NormBase))
    buffers = (b for m in norms for b in m.buffers(recurse=False))
    statistics = {id(b) for b in buffers if b.is_floating_point()}
    averaged = [*model.parameters(), *(b for b in model.buffers() if id(b) in statistics)]
    averaged = [part(t.detach()) for t in averaged if t.is_floating_point() or t.is_complex()]
    return averaged, [b for b in model.buffers() if id(b) not in statistics]
