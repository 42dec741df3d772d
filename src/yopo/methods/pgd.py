"""PGD adversarial training (Madry et al. 2018); section 2.2 of the paper, first box."""

from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_choice
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import Loss
from yopo.core.propagation import ATTACK_ONLY, FULL, backpropagate, propagate
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step


class PGD(AdversarialMethod):
    """PGD-r: r = `steps` ascent steps, each a pass through the whole network, then ∇θ.

    attack_mode: "eval" runs the attack passes in eval mode (BatchNorm with running statistics);
    "train" runs them with the model's own flags. Neither moves a running statistic.
    model, threat, loss, generator: as for `yopo.YOPO`.
    """

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        steps: int = 10,
        attack_mode: Literal["eval", "train"] = "eval",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        check_at_least("steps", steps, 1)
        check_choice("attack_mode", attack_mode, ("eval", "train"))
        self.steps = steps
        self.attack_mode = attack_mode

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        objective = self._objective(y)
        eta = self._start(x, eta)
        with eval_mode(self.model, self.attack_mode == "eval"):
            f = Frozen(self.model)
            for _ in range(self.steps):  # eta^{s+1} = Π(eta^s + α₁ sign ∇eta loss)
                at = propagate(f, x + eta, objective, weights=None)
                eta = self.threat.ascend(eta, at.grad, x)
        loss, logits = backpropagate(self.model, x + eta, objective)
        return Step(loss, logits, eta, self.steps * ATTACK_ONLY + FULL)
