"""Networks whose training passes put other tensors in the place of their buffers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Changing(nn.Module):
    """Changes its buffers in one way in each training pass after so many; its output shows them."""

    calls: Tensor
    first: Tensor | None
    empty: Tensor | None
    last: Tensor
    hidden: Tensor | None

    def __init__(self, way: str, after: int = 0) -> None:
        super().__init__()
        self.way, self.after = way, after
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        for name, value in (("first", torch.ones(2)), ("empty", None), ("last", torch.ones(3))):
            self.register_buffer(name, value)
        self.register_buffer("hidden", None, persistent=False)
        self.other: Any = nn.Module()
        self.other.register_buffer("shared", self.first)  # also after the name of another

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.calls > self.after:
                WAYS[self.way](self, x.detach().abs().mean())
        seen = x.new_zeros(())
        for name in sorted(self._buffers):
            if (b := self._buffers[name]) is not None:
                seen = 0.9 * seen + b.to(x.dtype).mean()
        out: Tensor = x * (1 + seen / 100 + self.other.shared.mean() / 50)
        return out


def rebinds(m: Changing, z: Tensor) -> None:
    assert m.first is not None
    m.first = m.first + z  # no longer the one that is shared


def fills(m: Changing, z: Tensor) -> None:
    if m.empty is None:
        m.empty, m.hidden = z.clone(), 2 * z


def fills_and_empties(m: Changing, z: Tensor) -> None:
    m.empty = z.clone() if m.empty is None else None


def adds(m: Changing, z: Tensor) -> None:
    if "late" not in m._buffers:
        m.register_buffer("late", z.view(1))
        m.register_buffer("unseen", 2 * z, persistent=False)


def drops(m: Changing, _: Tensor) -> None:
    if "first" in m._buffers:
        del m.first


def drops_and_adds(m: Changing, z: Tensor) -> None:
    if "first" in m._buffers:
        del m.first
    else:
        m.register_buffer("first", z.view(1), persistent=False)


def empties(m: Changing, _: Tensor) -> None:
    m.first = None


def grows(m: Changing, z: Tensor) -> None:
    m.last = torch.cat([m.last, z.view(1)])


def shares(m: Changing, z: Tensor) -> None:
    assert m.first is not None
    m.last = m.other.shared = m.first + z


WAYS: dict[str, Callable[[Changing, Tensor], None]] = {
    way.__name__: way
    for way in (
        rebinds,
        fills,
        fills_and_empties,
        adds,
        drops,
        drops_and_adds,
        empties,
        grows,
        shares,
    )
}


def network(way: str, channels: int = 3, classes: int = 4, after: int = 0) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3),
        Changing(way, after),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, classes),
    )


def build_network(classes: int, way: str) -> nn.Module:
    """As a run names it."""
    return network(way, channels=1, classes=classes, after=3)


def buffers(model: nn.Module) -> dict[str, tuple[Tensor | None, bool]]:
    """All of them by all their names, and whether each is part of the state_dict."""
    return {
        f"{path}.{name}": (value, name not in module._non_persistent_buffers_set)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in module._buffers.items()
    }
