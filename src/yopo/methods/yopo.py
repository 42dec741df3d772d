"""YOPO-m-n: section 2.2 of the paper, second box."""

from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_choice
from yopo.core.first_layer import Split
from yopo.core.hamiltonian import ascend
from yopo.core.losses import Loss
from yopo.core.parallel import unexchanged
from yopo.core.propagation import ATTACK_ONLY, FULL, Objective, backpropagate
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step


class YOPO(AdversarialMethod):
    """Adversarial training with m propagations through the whole network for a batch, or m + 1.

    It trains on images to which an adversary has added a small perturbation eta, so that the
    network holds under attack. Finding a good eta takes many small steps up the loss, and each
    would cost a pass forward and back. Here the network is cut in two, g after f0, its first
    layer: m full propagations, each followed by n adversary steps on the first layer alone, with
    the gradient that arrives behind it (the co-state p) kept as it was.

        method = yopo.YOPO(model, yopo.Linf(eps=8 / 255, step=2 / 255), m=5, n=3)
        for x, y in loader:  # images in [0, 1], class indices
            out = method.backward(x, y)  # fills .grad, as loss.backward() does
            optimizer.step()
            optimizer.zero_grad()

    model: any module that makes logits from images in [0, 1]; normalisation belongs inside it.
    threat: what the adversary may do, `yopo.Linf` (each pixel by eps at most) or `yopo.L2`; its
    step is the size of one adversary step. n·m steps should reach beyond eps.
    m: full propagations for each batch; nearly all of the time, and so of the strength. 3 to 5.
    n: steps after each, nearly free; 3 to 5. Where the first layer is a bare convolution its
    gradient stays the same, so that n steps are one step of n·step.
    loss: a function of (logits, targets); cross entropy by default.
    generator: for the random start; torch's own by default.
    first_layer: name of the module where f0 ends ("conv1", "layer1"); found when None.
    grad_at: "after" takes each weight gradient at eta^{j,n}, as the paper's formula does, for one
    more (attack-only) propagation. "before" takes it at eta^{j,0}, as the released code does.
    "last" takes one, at eta^{m,n}, as TRADES-YOPO does; the m propagations are attack-only then.
    All passes run with the model's own training flags; only those that give weight gradients move
    BatchNorm's running statistics. The weight gradients are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        m: int = 5,
        n: int = 3,
        first_layer: str | None = None,
        grad_at: Literal["after", "before", "last"] = "after",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        check_at_least("m", m, 1)
        check_at_least("n", n, 0)
        check_choice("grad_at", grad_at, ("after", "before", "last"))
        self.m = m
        self.n = n
        self.grad_at = grad_at
        self.split: Split = Split(model, first_layer)

    def _weight_passes(self) -> int:
        return 1 if self.grad_at == "last" else self.m

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        run = {"after": self._after, "before": self._before, "last": self._last}[self.grad_at]
        with self.split.still(x):
            return run(x, y, self._start(x, eta))

    def _after(self, x: Tensor, y: Tensor, eta: Tensor) -> Step:
        """U = 1/m Σ_j ∇θ loss(x + eta^{j,n}); the pass that gives it gives the next p as well."""
        objective, total = self._objective(y), torch.zeros((), device=x.device)
        with unexchanged(self.model):
            eta, _, _ = self._round(x, eta, objective, weights=None)  # eta^{1,n}
            for _ in range(self.m - 1):
                eta, loss, _ = self._round(x, eta, objective, weights=1 / self.m)  # ∇θ at eta^{j,n}
                total = total + loss
        loss, logits = backpropagate(self.model, x + eta, objective, weights=1 / self.m)
        return Step((total + loss) / self.m, logits, eta, ATTACK_ONLY + self.m * FULL)

    def _before(self, x: Tensor, y: Tensor, eta: Tensor) -> Step:
        """U = 1/m Σ_j ∇θ loss(x + eta^{j,0}), from the very passes that give p."""
        objective, total = self._objective(y), torch.zeros((), device=x.device)
        for j in range(self.m):
            with unexchanged(self.model, j < self.m - 1):
                eta, loss, logits = self._round(x, eta, objective, weights=1 / self.m)
            total = total + loss
        return Step(total / self.m, logits, eta, self.m * FULL)

    def _last(self, x: Tensor, y: Tensor, eta: Tensor) -> Step:
        """U = ∇θ loss(x + eta^{m,n}); for affine f0 and L∞ PGD-m with steps of n·α₁, train mode."""
        objective = self._objective(y)
        for _ in range(self.m):
            eta, _, _ = self._round(x, eta, objective, weights=None)
        loss, logits = backpropagate(self.model, x + eta, objective)
        return Step(loss, logits, eta, self.m * ATTACK_ONLY + FULL)

    def _round(
        self, x: Tensor, eta: Tensor, objective: Objective, weights: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Propagate at eta^{j,0} for p (and ∇θ), then climb to eta^{j,n} with p frozen."""
        at = self.split.propagate(x + eta, objective, weights=weights)
        return ascend(self.threat, x, eta, at, self.n), at.loss, at.logits
