"""N-FGSM (de Jorge et al. 2022): strong noise, one step, and no projection on the ball."""

from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_choice, check_step
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import Loss
from yopo.core.propagation import ATTACK_ONLY, FULL, backpropagate, propagate
from yopo.core.threat import L2, Linf
from yopo.methods.base import AdversarialMethod, Step


class NFGSM(AdversarialMethod):
    """Noise uniform in the ball of radius noise·eps, one step of size eps (or `step`), then ∇θ.

    eta stays in the box but may leave the ball of radius eps; that is the method's point. A given
    eta takes the noise's place. attack_mode: as for `yopo.PGD`, but "train" by default.
    model, threat, loss, generator: as for `yopo.YOPO`.
    """

    def __init__(
        self,
        model: nn.Module,
        threat: Linf | L2,
        *,
        noise: float = 2.0,
        step: float | None = None,
        attack_mode: Literal["eval", "train"] = "train",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        if not isinstance(threat, Linf | L2):
            raise TypeError(f"expected yopo.Linf or yopo.L2, got {type(threat).__name__}")
        self.threat: Linf | L2 = threat
        if not 0 < noise < float("inf"):
            raise ValueError(
                f"expected noise > 0, got {noise}; without it give backward eta=torch.zeros_like(x)"
            )
        self.noise = noise
        self.step = None if step is None else check_step(step)
        check_choice("attack_mode", attack_mode, ("eval", "train"))
        self.attack_mode = attack_mode

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        objective = self._objective(y)
        eps = self.threat.eps
        step = self.step or eps
        # Noise and step together never leave `reach`, so only the box is left to project on.
        noise = self.threat.resized(self.noise * eps, step)
        reach = self.threat.resized(self.noise * eps + step, step)
        eta = noise.start(x, self.generator) if eta is None else noise.project(eta, x)
        with eval_mode(self.model, self.attack_mode == "eval"):
            at = propagate(Frozen(self.model), x + eta, objective, weights=None)
        eta = reach.ascend(eta, at.grad, x, step=step)
        loss, logits = backpropagate(self.model, x + eta, objective)
        return Step(loss, logits, eta, ATTACK_ONLY + FULL)
