"""What the fast path was made for, and whether that is still so."""

from operator import is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from yopo.methods.base import Method


class Watched:
    """A method's parts and settings, its network's make and flags, and the shape of its batches."""

    def __init__(self, method: Method, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        self._method, self._optimizer = method, optimizer
        self._parts = method.threat, method.loss
        self._settings = method.settings()
        self._parameters = list(method.model.parameters())
        self._modules = list(method.model.modules())
        self._flags, self._make = self._read_flags(), self._read_make()
        self._places = self._read_places()
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

    def what_changed(self, *, fast: bool, captured: bool) -> str:
        """What the fast path, if there is one, does not know of the network; "" if nothing."""
        if self._read_flags() != self._flags:
            return "train() or requires_grad of the network changed"
        if fast and not _same(self._read_make(), self._make):
            return "layers or parameters of the network, or of the optimizer, were exchanged"
        if captured and self._read_places() != self._places:
            return "weights or buffers of the network moved to other memory"
        return ""

    def _read_flags(self) -> list[bool]:
        return [
            *(p.requires_grad for p in self._parameters),
            *(m.training for m in self._modules),
        ]

    def _read_make(self) -> list[object]:
        """What each module and each group has: while these are the same, so is the whole."""
        held: list[object] = []
        for module in self._modules:
            held += [module, *module._modules.values(), *module._parameters.values()]
        for group in self._optimizer.param_groups:  # load_state_dict makes it anew, not these
            held += [self._optimizer, *group["params"]]
        return held

    def _read_places(self) -> list[int]:
        """Where the captured step reads and writes."""
        buffers = (b for m in self._modules for b in m._buffers.values() if b is not None)
        trained = (p for group in self._optimizer.param_groups for p in group["params"])
        return [_place(t) for t in (*self._parameters, *trained, *buffers)]


def _batch(x: Tensor, y: Tensor) -> tuple[torch.Size, torch.Size, torch.dtype]:
    return x.shape, y.shape, y.dtype


def _same(a: list[object], b: list[object]) -> bool:
    """Whether these are the same objects; tensors have a == of their own."""
    return len(a) == len(b) and all(map(is_, a, b))


def _place(t: Tensor) -> int:
    """Of a tensor's values in memory; some kinds have none of their own."""
    return t.data_ptr() if type(t) in (Tensor, nn.Parameter) else id(t)
