"""Measure a network at a few images: its steepest slopes, and where plain walks end."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from yopo.attacks.steps import step_size
from yopo.attacks.strongest import PerSample
from yopo.core.frozen import Frozen, eval_mode, forked_rng
from yopo.core.losses import margin
from yopo.core.propagation import propagate
from yopo.core.threat import Threat
from yopo.core.undo import Undo

STEPS = 20  # of the probes' own attacks, whatever the user's are


@contextmanager
def untouched(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Eval mode in the block, then every flag and every global random stream as before."""
    python, numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    with Undo(put_back), torch.inference_mode(False), eval_mode(model), forked_rng(x):
        yield


def steepest(f: Frozen, x: Tensor, y: Tensor, loss: PerSample) -> tuple[Tensor, Tensor]:
    """The loss (B,) and the largest entry (B,) of its gradient at x; 0 where there is none."""
    x = x.clone().requires_grad_()

    def work(network: nn.Module) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            value = loss(network(x.clone()), y)
            grad: Tensor | None = None
            if value.requires_grad:  # not so if the model leaves autograd on its way
                (grad,) = torch.autograd.grad(value.sum(), x, allow_unused=True)
        grad = torch.zeros_like(x) if grad is None else grad.nan_to_num(0, 0, 0)
        return value.detach(), grad.flatten(1).abs().amax(1)

    return f.run(work)


def answers(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Margins and slopes (2B,) at x, the same again for the same network, random or not."""
    with untouched(model, x):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        measured = steepest(Frozen(model), x, y, margin)
    return torch.cat(measured).double().cpu().nan_to_num(0, 0, 0)


def falls(f: Frozen, x: Tensor, y: Tensor, threat: Threat) -> Tensor:
    """Where (B,) a step of a tenth of eps, up the margin's gradient at x, lowers the margin."""
    at = propagate(f, x, lambda z: margin(z, y).sum(), weights=None)
    eta = threat.ascend(torch.zeros_like(x), at.grad, x, step=threat.eps / 10)
    with torch.no_grad():
        return margin(f(x + eta), y) < margin(at.logits, y)


def withstands(
    f: Frozen,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    one_step: bool,
    loss: PerSample = margin,
) -> Tensor:
    """Which images (B,) are classified as y at the end of a walk up the loss from x.

    One step of size eps, or STEPS smaller ones. Unlike `pgd`, which keeps the best point it met
    and so can only gain from more steps, this counts the last point alone.
    """
    eta, step = torch.zeros_like(x), threat.eps if one_step else step_size(threat, STEPS)
    for _ in range(1 if one_step else STEPS):
        at = propagate(f, x + eta, lambda z: loss(z, y).sum(), weights=None)
        eta = threat.ascend(eta, at.grad, x, step=step)
    with torch.no_grad():
        return f(x + eta).argmax(1) == y
