"""The paper's loops written plainly, in the manner of the released code, for `yopo bench`.

Eager, float32 (TF32 convolutions where the device has them), NCHW, n real passes through the first
layer for each propagation, starts drawn on the host; TRADES predicts the clean images anew at each
step of its attack. Without the clean loss that the released PGD adds. For timing only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from yopo.core.losses import consistency
from yopo.methods import registry
from yopo.models.resnet import PreActResNet

Loop = Callable[[Tensor, Tensor], None]
HalfPass = Callable[[Tensor], Tensor]


def literal_loop(
    spec: str,
    model: nn.Module,
    optimizer: Optimizer,
    eps: float,
    step: float,
    first_layer: str | None = None,
) -> Loop | None:
    """One training step of the method that `spec` names, or None if it has no literal form here."""
    entry, given = registry.read(spec)
    counts = {name: given.pop(name) for name in entry.numbers if name in given}
    loop = _LOOPS.get("-".join([entry.name, *given.values()]))
    if loop is None or len(counts) < len(entry.numbers):
        return None
    return partial(loop, _Setup(model, optimizer, eps, step, first_layer), **counts)


@dataclass
class _Setup:
    """What the loops share."""

    model: nn.Module
    optimizer: Optimizer
    eps: float
    step: float
    first_layer: str | None

    @cached_property
    def parts(self) -> tuple[HalfPass, HalfPass]:
        """f0 and g, cut by hand."""
        if isinstance(self.model, PreActResNet):
            return self.model.conv1, self.model.rest
        assert isinstance(self.model, nn.Sequential)
        names, modules = zip(*self.model.named_children(), strict=True)
        end = 1 + names.index(self.first_layer or names[0])
        return nn.Sequential(*modules[:end]), nn.Sequential(*modules[end:])

    def start(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape).uniform_(-self.eps, self.eps).to(x.device)

    def near(self, x: Tensor) -> Tensor:
        """TRADES' start."""
        return 0.001 * torch.randn(x.shape).to(x.device)

    def move(self, x: Tensor, eta: Tensor, grad: Tensor, step: float) -> Tensor:
        eta = (eta + step * grad.sign()).clamp(-self.eps, self.eps)
        return (x + eta).clamp(0, 1) - x

    def inner(self, x: Tensor, eta: Tensor, p: Tensor, n: int) -> Tensor:
        f0, _ = self.parts
        for _ in range(n):
            eta.requires_grad_()
            (grad,) = torch.autograd.grad((p * f0(x + eta)).sum(), eta)
            eta = self.move(x, eta.detach(), grad, self.step)
        return eta

    def costate(self, x: Tensor, y: Tensor, eta: Tensor) -> Tensor:
        """p; the pass adds weight gradients on its way."""
        f0, g = self.parts
        h = f0(x + eta)
        h.retain_grad()
        F.cross_entropy(g(h), y).backward()
        assert h.grad is not None
        return h.grad

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _natural(s: _Setup, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(s.model(x), y).backward()
    s.update()


def _pgd(s: _Setup, x: Tensor, y: Tensor, steps: int) -> None:
    s.model.eval()
    eta = s.start(x)
    for _ in range(steps):
        eta.requires_grad_()
        loss = F.cross_entropy(s.model(x + eta), y)
        (grad,) = torch.autograd.grad(loss, eta)
        eta = s.move(x, eta.detach(), grad, s.step)
    s.model.train()
    s.optimizer.zero_grad()
    _natural(s, x + eta, y)


def _free(s: _Setup, x: Tensor, y: Tensor, m: int) -> None:
    eta = torch.zeros_like(x)
    for _ in range(m):
        eta.requires_grad_()
        F.cross_entropy(s.model(x + eta), y).backward()
        assert eta.grad is not None
        eta = s.move(x, eta.detach(), eta.grad, s.eps)
        s.update()


def _yopo(s: _Setup, x: Tensor, y: Tensor, m: int, n: int) -> None:
    f0, g = s.parts
    eta = s.start(x)
    h = f0(x + eta)
    (p,) = torch.autograd.grad(F.cross_entropy(g(h), y), h)
    for _ in range(m):
        eta = s.inner(x, eta, p, n)
        p = s.costate(x, y, eta)
    s.update()


def _yopo_before(s: _Setup, x: Tensor, y: Tensor, m: int, n: int) -> None:
    eta = s.start(x)
    for _ in range(m):
        eta = s.inner(x, eta, s.costate(x, y, eta), n)
    s.update()


def _trades(s: _Setup, x: Tensor, y: Tensor, steps: int) -> None:
    s.model.eval()
    eta = s.near(x)
    for _ in range(steps):
        eta.requires_grad_()
        (grad,) = torch.autograd.grad(consistency(s.model(x + eta), s.model(x)), eta)
        eta = s.move(x, eta.detach(), grad, s.step)
    _trades_gradient(s, x, y, eta)


def _trades_yopo(s: _Setup, x: Tensor, y: Tensor, m: int, n: int) -> None:
    s.model.eval()
    f0, g = s.parts
    eta, clean = s.near(x), s.model(x).detach()
    for _ in range(m):
        h = f0(x + eta)
        (p,) = torch.autograd.grad(consistency(g(h), clean), h)
        eta = s.inner(x, eta, p, n)
    _trades_gradient(s, x, y, eta)


def _trades_gradient(s: _Setup, x: Tensor, y: Tensor, eta: Tensor) -> None:
    s.model.train()
    clean = s.model(x)
    (F.cross_entropy(clean, y) + consistency(s.model(x + eta), clean)).backward()
    s.update()


# By the method's name, and what else its spec says but numbers.
_LOOPS: dict[str, Callable[..., None]] = {
    "natural": _natural,
    "pgd": _pgd,
    "free": _free,
    "yopo": _yopo,
    "yopo-before": _yopo_before,
    "trades": _trades,
    "trades-yopo": _trades_yopo,
}
