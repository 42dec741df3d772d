"""The paper's loops written plainly, in the manner of the released code, for `yopo bench`.

Eager, float32 (TF32 convolutions where the device has them), NCHW, n real passes through the first
layer for each propagation, starts drawn on the host; TRADES predicts the clean images anew at each
step of its attack. Without the clean loss that the released PGD adds. For timing only.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from yopo.core.losses import consistency
from yopo.models.resnet import PreActResNet

Loop = Callable[[Tensor, Tensor], None]


def literal(
    spec: str,
    model: nn.Module,
    optimizer: Optimizer,
    eps: float,
    step: float,
    first_layer: str | None = None,
) -> Loop | None:
    """One training step of the method that `spec` names, or None if it has no literal form here."""
    words = spec.split("-")
    counts = [int(word) for word in words if word.isdigit()]
    name = "-".join(word for word in words if not word.isdigit())

    def start(x: Tensor) -> Tensor:
        return torch.empty(x.shape).uniform_(-eps, eps).to(x.device)

    def move(x: Tensor, eta: Tensor, grad: Tensor, size: float) -> Tensor:
        eta = (eta + size * grad.sign()).clamp(-eps, eps)
        return (x + eta).clamp(0, 1) - x

    def natural(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def pgd(x: Tensor, y: Tensor) -> None:
        model.eval()
        eta = start(x)
        for _ in range(counts[0]):
            eta.requires_grad_()
            loss = F.cross_entropy(model(x + eta), y)
            (grad,) = torch.autograd.grad(loss, eta)
            eta = move(x, eta.detach(), grad, step)
        model.train()
        optimizer.zero_grad()
        natural(x + eta, y)

    def free(x: Tensor, y: Tensor) -> None:
        eta = torch.zeros_like(x)
        for _ in range(counts[0]):
            eta.requires_grad_()
            F.cross_entropy(model(x + eta), y).backward()
            assert eta.grad is not None
            eta = move(x, eta.detach(), eta.grad, eps)
            optimizer.step()
            optimizer.zero_grad()

    @cache
    def parts() -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return _parts(model, first_layer)

    def inner(x: Tensor, eta: Tensor, p: Tensor) -> Tensor:
        f0, _ = parts()
        for _ in range(counts[1]):
            eta.requires_grad_()
            (grad,) = torch.autograd.grad((p * f0(x + eta)).sum(), eta)
            eta = move(x, eta.detach(), grad, step)
        return eta

    def costate(x: Tensor, y: Tensor, eta: Tensor) -> Tensor:
        """p; the pass adds weight gradients on its way."""
        f0, g = parts()
        h = f0(x + eta)
        h.retain_grad()
        F.cross_entropy(g(h), y).backward()
        assert h.grad is not None
        return h.grad

    def yopo_before(x: Tensor, y: Tensor) -> None:
        eta = start(x)
        for _ in range(counts[0]):
            eta = inner(x, eta, costate(x, y, eta))
        optimizer.step()
        optimizer.zero_grad()

    def yopo(x: Tensor, y: Tensor) -> None:
        f0, g = parts()
        eta = start(x)
        h = f0(x + eta)
        (p,) = torch.autograd.grad(F.cross_entropy(g(h), y), h)
        for _ in range(counts[0]):
            eta = inner(x, eta, p)
            p = costate(x, y, eta)
        optimizer.step()
        optimizer.zero_grad()

    def near(x: Tensor) -> Tensor:
        return 0.001 * torch.randn(x.shape).to(x.device)

    def trades_gradient(x: Tensor, y: Tensor, eta: Tensor) -> None:
        model.train()
        clean = model(x)
        (F.cross_entropy(clean, y) + consistency(model(x + eta), clean)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def trades(x: Tensor, y: Tensor) -> None:
        model.eval()
        eta = near(x)
        for _ in range(counts[0]):
            eta.requires_grad_()
            (grad,) = torch.autograd.grad(consistency(model(x + eta), model(x)), eta)
            eta = move(x, eta.detach(), grad, step)
        trades_gradient(x, y, eta)

    def trades_yopo(x: Tensor, y: Tensor) -> None:
        model.eval()
        f0, g = parts()
        eta, clean = near(x), model(x).detach()
        for _ in range(counts[0]):
            h = f0(x + eta)
            (p,) = torch.autograd.grad(consistency(g(h), clean), h)
            eta = inner(x, eta, p)
        trades_gradient(x, y, eta)

    loops = {"natural": (natural, 0), "pgd": (pgd, 1), "free": (free, 1), "yopo": (yopo, 2)}
    loops |= {"yopo-before": (yopo_before, 2), "trades": (trades, 1)}
    loops |= {"trades-yopo": (trades_yopo, 2)}
    loop, wanted = loops.get(name, (None, 0))
    return loop if len(counts) == wanted else None


def _parts(
    model: nn.Module, first_layer: str | None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """f0 and g, cut by hand."""
    if isinstance(model, PreActResNet):
        return model.conv1, model.rest
    assert isinstance(model, nn.Sequential)
    names, modules = zip(*model.named_children(), strict=True)
    end = 1 + names.index(first_layer or names[0])
    return nn.Sequential(*modules[:end]), nn.Sequential(*modules[end:])
