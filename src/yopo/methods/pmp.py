"""YOPO in its general form: Algorithm 1 of the paper."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_choice, check_positive
from yopo.core.losses import Loss
from yopo.core.parallel import is_spread, parallel
from yopo.core.propagation import ATTACK_ONLY, FULL
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step
from yopo.pmp.adversary import FirstLayer, descend, exact_argmin, lbfgs_argmin
from yopo.pmp.dynamics import Dynamics, Regulariser, Studied, Trajectory
from yopo.pmp.weights import Argmax, Ascent, moved


class PMP(AdversarialMethod):
    """m rounds of: states forward, co-states backward, η = argmin H_0. Then θ_t = argmax Σ_i H_t.

    adversary: "exact" is the closed form for an affine f0, "gradient" n projected gradient steps,
    "lbfgs" n iterations of L-BFGS (L∞ only). weights: "gradient" leaves −∇θ H in .grad, "argmax"
    leaves θ − θ*, where θ* maximises the Hamiltonian augmented by rho (`yopo.pmp.weights`; `steps`
    iterations of L-BFGS where it has no closed form): an optimizer step of rate 1 lands on θ*.
    layers: names of the modules where f_0, f_1, … end; found when None. regulariser: R_t.
    loss: of the logits and targets alone; parameters of its own are not trained. model, threat,
    generator: as for `yopo.YOPO`.
    weights_at: "after" and "before" as YOPO's grad_at, for every layer the mean over the m rounds;
    with both players on "gradient" this is YOPO. "algorithm1" is Algorithm 1 to the letter: θ_0 as
    the mean over the m perturbations after the argmin, p_1 from before it; the other layers at the
    last round's states alone.
    """

    layer_by_layer = True

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        m: int = 5,
        adversary: Literal["exact", "gradient", "lbfgs"] = "exact",
        n: int = 10,
        weights: Literal["gradient", "argmax"] = "gradient",
        rho: float = 0.3,
        steps: int = 5,
        layers: Sequence[str] | None = None,
        regulariser: Regulariser | None = None,
        weights_at: Literal["after", "before", "algorithm1"] = "after",
        loss: Loss | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=generator)
        if parallel(model):
            raise ValueError(
                "PMP fills .grad itself, so DistributedDataParallel would exchange nothing; give "
                "it model.module, and average .grad over the processes before optimizer.step()"
            )
        if is_spread(model):
            raise ValueError(
                "PMP fills .grad itself, which weights spread by fully_shard or tensor parallelism "
                "do not take; give it a network that each process has whole"
            )
        check_at_least("m", m, 1)
        check_at_least("n", n, 1)
        check_at_least("steps", steps, 1)
        check_positive("rho", rho)
        check_choice("adversary", adversary, ("exact", "gradient", "lbfgs"))
        check_choice("weights", weights, ("gradient", "argmax"))
        check_choice("weights_at", weights_at, ("after", "before", "algorithm1"))
        self.m = m
        self.adversary = adversary
        self.n = n
        self.weights = weights
        self.rho = rho
        self.steps = steps
        self.weights_at = weights_at
        self.dynamics = Studied(model, layers, regulariser)

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        game, printed = self.dynamics.on(x), self.weights_at == "algorithm1"
        weights = Ascent(game) if self.weights == "gradient" else Argmax(game, self.rho, self.steps)
        eta, total, spent = self._start(x, eta), torch.zeros((), device=x.device), 0.0
        if self.weights_at == "after":  # the pass before η^1 gives the weights nothing
            at = game.propagate(x + eta, y, self.loss, weights=False)
            eta, spent = self._argmin(game, x, eta, at), ATTACK_ONLY
        for j in range(1, self.m + 1):
            used = not printed or j == self.m
            at = game.propagate(x + eta, y, self.loss, weights=used)  # ∇_p H_t, then ∇_x H_t
            if self.weights_at != "after" or j < self.m:
                eta = self._argmin(game, x, eta, at)  # η^j = argmin H_0(x + η, p_1, θ_0)
            if printed:
                weights.see(0, moved(game, at, x + eta), 1 / self.m)
            for t in range(printed, len(game) if used else 0):
                weights.see(t, at, 1.0 if printed else 1 / self.m)
            total, spent = total + at.payoff / self.m, spent + (FULL if used else ATTACK_ONLY)
        spent += weights.finish()  # θ_t = argmax Σ_i H_t, t = T−1 … 0
        return Step(total, at.x[-1], eta, spent)

    def _argmin(self, game: Dynamics, x: Tensor, eta: Tensor, at: Trajectory) -> Tensor:
        h0 = FirstLayer(game, x, at)
        if self.adversary == "gradient":
            return descend(h0, self.threat, eta, self.n)
        if self.adversary == "lbfgs":
            return lbfgs_argmin(h0, self.threat, self.n)
        return exact_argmin(h0, self.threat)
