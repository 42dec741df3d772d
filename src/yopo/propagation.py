"""One forward and backward pass, and what it costs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from yopo.frozen import Network

Objective = Callable[[Tensor], Tensor]  # logits (B, C) -> scalar

# Costs in units of one full propagation. A pass has three parts of about equal work: forward,
# backward to the activations, backward to the weights.
FORWARD = 1 / 3
ATTACK_ONLY = 2 / 3
FULL = 1.0


@dataclass(frozen=True, slots=True)
class Propagation:
    """What one pass at x found."""

    loss: Tensor  # ()
    logits: Tensor  # (B, C)
    grad: Tensor  # ∂loss/∂x, (B, ...)
    p: Tensor | None = None  # the co-state ∂loss/∂f0, where the inner loop needs it
    f0: Network | None = None  # f0 as it ran in this pass, dropout masks included; with p


def propagate(f: Network, x: Tensor, objective: Objective, *, weights: float | None) -> Propagation:
    """Propagate x (B, ...) forward through f, and objective(f(x)) back to x.

    `weights` times the weight gradient is added to .grad; None adds none (give a frozen f then, so
    that none is computed). ∂loss/∂x comes multiplied by `weights` too; the adversary uses its
    direction only.
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        logits = f(x.view_as(x))  # a view: autocast takes a leaf for a weight and keeps its cast
        loss = scalar(objective(logits))
        if weights is None:
            (grad,) = torch.autograd.grad(loss, x)
        else:
            (loss * weights).backward()
            assert x.grad is not None
            grad = x.grad
    return Propagation(loss.detach(), logits.detach(), grad)


def backpropagate(
    f: Network, x: Tensor, objective: Objective, *, weights: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add `weights` times ∂objective(f(x))/∂θ to .grad; return loss and logits."""
    with torch.enable_grad():
        logits = f(x)
        loss = scalar(objective(logits))
        (loss * weights).backward()
    return loss.detach(), logits.detach()


def scalar(loss: Tensor) -> Tensor:
    """Pass the loss on if it is one number."""
    if loss.dim() == 0:
        return loss
    raise ValueError(
        f"expected the loss to be one number, got shape {tuple(loss.shape)}; "
        "take the mean over the batch"
    )
