"""One forward and backward pass, and what it costs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from yopo.core.frozen import Frozen, Network
from yopo.core.threat import Threat

Objective = Callable[[Tensor], Tensor]  # logits (B, C) -> scalar

NO_WAY_BACK = "the model's output does not depend on its input; nothing to attack"
NO_GRADIENT = "the loss does not depend on the model's output; it should not detach it"

# Costs in units of one full propagation. A pass has three parts of about equal work: forward,
# backward to the activations, backward to the weights.
FORWARD = 1 / 3
ATTACK_ONLY = 2 / 3
FULL = 1.0


class FirstLayer(Protocol):
    """f0 alone, as it ran in one propagation: same weights, same dropout masks."""

    def __call__(self, x: Tensor) -> Tensor:
        """f0(x)."""

    def pull_back(self, p: Tensor, x: Tensor) -> Tensor:
        """∇x p·f0(x)."""


@dataclass(frozen=True, slots=True)
class Propagation:
    """What one pass at x found."""

    loss: Tensor  # ()
    logits: Tensor  # (B, C)
    grad: Tensor  # ∂loss/∂x, (B, ...)
    p: Tensor | None = None  # the co-state ∂loss/∂f0, where the inner loop needs it
    f0: FirstLayer | None = None  # with p
    climb: Callable[[Threat, Tensor, Tensor, int], Tensor] | None = None  # a faster inner loop


def propagate(f: Network, x: Tensor, objective: Objective, *, weights: float | None) -> Propagation:
    """Propagate x (B, ...) forward through f, and objective(f(x)) back to x.

    `weights` times the weight gradient is added to .grad; None, with a frozen f, computes none.
    ∂loss/∂x comes multiplied by `weights` too; the adversary uses its direction only.
    """
    x = x.detach().requires_grad_()

    def work(network: Network) -> Propagation:
        with torch.enable_grad():
            # A copy: the model may write into its input, and autocast would take a leaf for a
            # weight and keep its cast.
            logits = network(x.clone())
            loss = scalar(objective(tensor(logits)))
            if not loss.requires_grad:
                raise ValueError(NO_GRADIENT if logits.requires_grad else NO_WAY_BACK)
            if weights is None:
                (grad,) = torch.autograd.grad(loss, x)
            else:
                differentiate(network, loss * weights, x)
                if x.grad is None:
                    raise ValueError(NO_WAY_BACK)
                grad = x.grad
        return Propagation(loss.detach(), logits.detach(), grad)

    return f.run(work) if isinstance(f, Frozen) else work(f)


def backpropagate(
    f: Network, x: Tensor, objective: Objective, *, weights: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add `weights` times ∂objective(f(x))/∂θ to .grad; return loss and logits."""
    with torch.enable_grad():
        logits = tensor(f(x))
        loss = scalar(objective(logits))
        differentiate(f, loss * weights)
    return loss.detach(), logits.detach()


def differentiate(f: Network, loss: Tensor, x: Tensor | None = None) -> None:
    """Add ∂loss/∂θ to .grad, and ∂loss/∂x to x.grad, in the network's own way if it has one."""
    own = getattr(f, "differentiate", None)
    if own is None:
        loss.backward()
    else:
        own(loss, x)


def scalar(loss: Tensor) -> Tensor:
    """Pass the loss on if it is one number."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"expected the loss as a tensor of one number, got {type(loss).__name__}")
    if loss.dim() == 0:
        return loss
    raise ValueError(
        f"expected the loss to be one number, got shape {tuple(loss.shape)}; "
        "take the mean over the batch"
    )


def tensor(logits: Tensor) -> Tensor:
    """Pass the model's output on if it is a tensor."""
    if isinstance(logits, Tensor):
        return logits
    raise ValueError(no_logits(logits))


def no_logits(output: object) -> str:
    """What to say of a model's output that is no logits."""
    if isinstance(output, Tensor):
        got, fix = str(tuple(output.shape)), "flatten or unsqueeze(1) what it returns"
    else:
        got, fix = type(output).__name__, "wrap it so that it returns the logits alone"
    return f"expected logits (batch, classes) from the model ({fix}), got {got}"
