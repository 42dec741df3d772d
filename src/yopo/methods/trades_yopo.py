"""TRADES-YOPO-m-n: Algorithm 2 of the paper."""

from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_choice
from yopo.core.first_layer import Cut, Split
from yopo.core.frozen import Frozen, eval_mode
from yopo.core.hamiltonian import ascend
from yopo.core.losses import Loss
from yopo.core.propagation import ATTACK_ONLY, FORWARD, FULL
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step
from yopo.methods.trades import check_beta, consistency_with, trades_gradient


class TRADESYOPO(AdversarialMethod):
    """YOPO's m·n adversary steps on 𝓛(f(x), f(x + eta)), then TRADES' gradient at eta^{m,n}.

    Only the last perturbation gives a weight gradient, so all m propagations are attack-only.
    model, threat, m, n, first_layer, generator: as for `yopo.YOPO`. beta, attack_mode, loss: as for
    `yopo.TRADES`.
    """

    compares_classes = True

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        m: int = 3,
        n: int = 4,
        beta: float = 6.0,
        first_layer: str | None = None,
        attack_mode: Literal["eval", "train"] = "eval",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        check_at_least("m", m, 1)
        check_at_least("n", n, 0)
        check_beta(beta)
        check_choice("attack_mode", attack_mode, ("eval", "train"))
        self.m = m
        self.n = n
        self.beta = beta
        self.attack_mode = attack_mode
        self.split: Split = Split(model, first_layer)

    def cut(self, x: Tensor) -> Cut:
        """As the attack passes see the network."""
        with eval_mode(self.model, self.attack_mode == "eval"):
            return self.split.cut(x)

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        eta = self._start(x, eta)  # eta^{1,0}
        with eval_mode(self.model, self.attack_mode == "eval"), self.split.still(x):
            objective = consistency_with(Frozen(self.model), x)
            for _ in range(self.m):
                at = self.split.propagate(x + eta, objective, weights=None)  # p
                eta = ascend(self.threat, x, eta, at, self.n)  # eta^{j,n} = eta^{j+1,0}
        loss, logits = trades_gradient(self.model, x, y, eta, self.loss, self.beta)
        return Step(loss, logits, eta, FORWARD + self.m * ATTACK_ONLY + 2 * FULL)
