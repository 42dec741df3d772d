"""TRADES (Zhang et al. 2019): classify clean images, and predict the same under attack."""

from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_choice
from yopo.core.frozen import Forward, Frozen, eval_mode
from yopo.core.losses import Loss, consistency
from yopo.core.parallel import unexchanged
from yopo.core.propagation import (
    ATTACK_ONLY,
    FORWARD,
    FULL,
    Objective,
    differentiate,
    propagate,
    scalar,
    tensor,
)
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step


class TRADES(AdversarialMethod):
    """TRADES-r: r = `steps` ascent steps on 𝓛(f(x), f(x + eta)), then ∇θ [loss + beta·𝓛].

    𝓛 is KL(f(x) ‖ f(x + eta)) and beta is the paper's 1/λ. eta starts uniform in the ball: at
    eta = 0 the gradient of 𝓛 vanishes. attack_mode: as for `yopo.PGD`. loss: of the clean images.
    model, threat, generator: as for `yopo.YOPO`.
    """

    compares_classes = True

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        steps: int = 10,
        beta: float = 6.0,
        attack_mode: Literal["eval", "train"] = "eval",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        check_at_least("steps", steps, 1)
        check_beta(beta)
        check_choice("attack_mode", attack_mode, ("eval", "train"))
        self.steps = steps
        self.beta = beta
        self.attack_mode = attack_mode

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        eta = self._start(x, eta)
        with eval_mode(self.model, self.attack_mode == "eval"):
            f = Frozen(self.model)
            objective = consistency_with(f, x)
            for _ in range(self.steps):
                at = propagate(f, x + eta, objective, weights=None)
                eta = self.threat.ascend(eta, at.grad, x)
        loss, logits = trades_gradient(self.model, x, y, eta, self.loss, self.beta)
        return Step(loss, logits, eta, FORWARD + self.steps * ATTACK_ONLY + 2 * FULL)


def consistency_with(f: Forward, x: Tensor) -> Objective:
    """𝓛(f(x), ·) with the clean predictions held fixed."""
    with torch.no_grad():
        clean = f(x.clone())  # a copy: see propagate
    return lambda logits: consistency(logits, clean)


def trades_gradient(
    model: nn.Module, x: Tensor, y: Tensor, eta: Tensor, loss: Loss, beta: float
) -> tuple[Tensor, Tensor]:
    """Add ∇θ [loss(f(x), y) + beta·𝓛(f(x), f(x + eta))] to .grad; return it and f(x + eta)."""
    with torch.enable_grad():
        with unexchanged(model):  # the backward pass of both is the second one's
            clean = tensor(model(x.clone()))
        natural = scalar(loss(clean, y))  # now: it may read what the model kept of this pass
        logits = tensor(model(x + eta))
        total = natural + beta * consistency(logits, clean)
        differentiate(model, total)
    return total.detach(), logits.detach()


def check_beta(beta: float) -> None:
    """The weight of 𝓛 is a finite number, not negative."""
    if not 0 <= beta < float("inf"):
        raise ValueError(f"expected beta >= 0 (the paper's 1/λ), got {beta}")
