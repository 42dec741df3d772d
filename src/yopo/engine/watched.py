"""What the fast path was made for, and whether that is still so."""

import torch
from torch import Tensor

from yopo.methods.base import Method


class Watched:
    """A method's parts and settings, its network's flags, and the shape of its batches."""

    def __init__(self, method: Method, x: Tensor, y: Tensor) -> None:
        self._method = method
        self._parts = method.threat, method.loss
        self._settings = method.settings()
        self._parameters = list(method.model.parameters())
        self._modules = list(method.model.modules())
        self._flags = self._read_flags()
        self._batch = _batch(x, y)

    def check(self) -> None:
        """Refuse what the fast path would not see."""
        threat, loss = self._parts
        if self._method.threat is not threat or self._method.loss is not loss:
            raise ValueError(
                "the method's threat or loss was exchanged after the first step; make a new "
                "Engine, or let the radius grow with step(..., part=)"
            )
        for name, value in self._settings.items():
            if (now := getattr(self._method, name)) != value:
                raise ValueError(
                    f"the method's {name} was {value} at the first step and is {now} now; make a "
                    "new Engine"
                )

    def is_for(self, x: Tensor, y: Tensor) -> bool:
        """Whether the batch is like the first."""
        return _batch(x, y) == self._batch

    def has_other_flags(self) -> bool:
        """Whether train() or requires_grad of the network changed."""
        return self._read_flags() != self._flags

    def _read_flags(self) -> list[bool]:
        return [
            *(p.requires_grad for p in self._parameters),
            *(m.training for m in self._modules),
        ]


def _batch(x: Tensor, y: Tensor) -> tuple[torch.Size, torch.Size, torch.dtype]:
    return x.shape, y.shape, y.dtype
