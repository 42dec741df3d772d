"""The passes that methods are made of, and what they cost."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from yopo.core.frozen import Forward, Frozen
from yopo.core.threat import Threat

Objective = Callable[[Tensor], Tensor]  # logits (B, C) -> scalar

NO_WAY_BACK = "the model's output does not depend on its input; nothing to attack"
NO_GRADIENT = "the loss does not depend on the model's output; it should not detach it"

# Costs in units of one full propagation. A pass has three parts of about equal work: forward,
# backward to the activations, backward to the weights.
FORWARD = 1 / 3  #: a pass forward, nothing else
ATTACK_ONLY = 2 / 3  #: forward and back to the image, without weight gradients
FULL = 1.0  #: forward and back, weight gradients included


class OtherWayError(ValueError):
    """A pass did not come through the module at which f0 ends."""


class Prefix(Protocol):
    """f0 alone, as it ran in one propagation: same weights, same dropout masks."""

    def __call__(self, x: Tensor) -> Tensor:
        """f0(x)."""

    def pull_back(self, p: Tensor, x: Tensor) -> Tensor:
        """∇x p·f0(x)."""


class Passes(ABC):
    """What a pass does after the network's forward. `Plain` does it as PyTorch would.

    A network that is `Passes` itself, as the engine's compiled one, does it in its own way.
    """

    @abstractmethod
    def attack_pass(self, loss: Tensor, x: Tensor) -> Tensor:
        """∂loss/∂x, and no weight gradient."""

    @abstractmethod
    def weight_pass(self, loss: Tensor, x: Tensor | None) -> None:
        """Add ∂loss/∂θ to .grad, and ∂loss/∂x to x.grad."""

    @abstractmethod
    def inner_loop(
        self, threat: Threat, x: Tensor, eta: Tensor, at: "Propagation", n: int
    ) -> Tensor:
        """Take n steps of eta up p·f0(x + eta), p frozen at the propagation `at`."""


class Plain(Passes):
    """As PyTorch would."""

    def attack_pass(self, loss: Tensor, x: Tensor) -> Tensor:
        """∂loss/∂x, and no weight gradient."""
        return torch.autograd.grad(loss, x)[0]

    def weight_pass(self, loss: Tensor, x: Tensor | None) -> None:
        """The usual backward pass; x is one of its leaves."""
        loss.backward()

    def inner_loop(
        self, threat: Threat, x: Tensor, eta: Tensor, at: "Propagation", n: int
    ) -> Tensor:
        """The first step's gradient is the propagation's own; later ones are pulled through f0."""
        assert at.p is not None
        assert at.f0 is not None
        grad = at.grad
        for s in range(n):
            if s > 0:
                grad = at.f0.pull_back(at.p, x + eta)
            eta = threat.ascend(eta, grad, x)
        return eta


PLAIN = Plain()


@dataclass(frozen=True, slots=True)
class Propagation:
    """What one pass at x found."""

    loss: Tensor  # ()
    logits: Tensor  # (B, C)
    grad: Tensor  # ∂loss/∂x, (B, ...)
    passes: Passes = PLAIN  # of the network that was propagated
    p: Tensor | None = None  # the co-state ∂loss/∂f0, where the inner loop needs it
    f0: Prefix | None = None  # with p


def propagate(f: Forward, x: Tensor, objective: Objective, *, weights: float | None) -> Propagation:
    """Propagate x (B, ...) forward through f, and objective(f(x)) back to x.

    `weights` times the weight gradient is added to .grad; None, with a frozen f, computes none.
    ∂loss/∂x comes multiplied by `weights` too; the adversary uses its direction only.
    """
    x = x.detach().requires_grad_()

    def work(network: Forward) -> Propagation:
        with torch.enable_grad():
            # A copy: the model may write into its input, and autocast would take a leaf for a
            # weight and keep its cast.
            logits = network(x.clone())
            loss = scalar(objective(tensor(logits)))
            if not loss.requires_grad:
                raise ValueError(NO_GRADIENT if logits.requires_grad else NO_WAY_BACK)
            passes = passes_of(network)
            if weights is None:
                grad = passes.attack_pass(loss, x)
            else:
                passes.weight_pass(loss * weights, x)
                if x.grad is None:
                    raise ValueError(NO_WAY_BACK)
                grad = x.grad
        return Propagation(loss.detach(), logits.detach(), grad, passes)

    return f.run(work) if isinstance(f, Frozen) else work(f)


def backpropagate(
    f: Forward, x: Tensor, objective: Objective, *, weights: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Add `weights` times ∂objective(f(x))/∂θ to .grad; return loss and logits."""
    with torch.enable_grad():
        logits = tensor(f(x))
        loss = scalar(objective(logits))
        differentiate(f, loss * weights)
    return loss.detach(), logits.detach()


def differentiate(f: Forward, loss: Tensor) -> None:
    """Add ∂loss/∂θ to .grad, as the network does it."""
    passes_of(f).weight_pass(loss, None)


def passes_of(f: Forward) -> Passes:
    """The network's own passes if it has some."""
    return f if isinstance(f, Passes) else PLAIN


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
