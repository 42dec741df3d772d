"""FGSM-RS ("fast is better than free", Wong et al. 2020): one large step from a random start."""

from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_choice, check_step
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.losses import Loss
from yopo.core.propagation import ATTACK_ONLY, FULL, backpropagate, propagate
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step


class Fast(AdversarialMethod):
    """One ascent step of size 1.25·eps (or `step`) from a uniform start, then ∇θ.

    attack_mode: as for `yopo.PGD`, but "train" by default, as its authors do.
    model, threat, loss, generator: as for `yopo.YOPO`.
    """

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        step: float | None = None,
        attack_mode: Literal["eval", "train"] = "train",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        check_choice("attack_mode", attack_mode, ("eval", "train"))
        self.step = None if step is None else check_step(step)
        self.attack_mode = attack_mode

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        objective = self._objective(y)
        eta = self._start(x, eta)
        with eval_mode(self.model, self.attack_mode == "eval"):
            at = propagate(Frozen(self.model), x + eta, objective, weights=None)
        eta = self.threat.ascend(eta, at.grad, x, step=self.step or 1.25 * self.threat.eps)
        loss, logits = backpropagate(self.model, x + eta, objective)
        return Step(loss, logits, eta, ATTACK_ONLY + FULL)
