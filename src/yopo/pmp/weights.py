"""The weights of Algorithm 1: θ_t = argmax Σ_i H_t(x_t, p_{t+1}, θ_t). Signs as in yopo.pmp."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from yopo.core.frozen import RngState, forked_rng, untouched
from yopo.core.propagation import FULL
from yopo.core.undo import Undo
from yopo.pmp.dynamics import Dynamics, Trajectory, WeightDecay
from yopo.pmp.lbfgs import lbfgs


class Ascent:
    """One step of gradient ascent: −∇θ H_t in .grad, gathered while the rounds go by."""

    def __init__(self, dynamics: Dynamics) -> None:
        self.dynamics = dynamics

    def see(self, t: int, at: Trajectory, part: float) -> None:
        """Let H_t at the states and co-states of `at` count with the weight `part`."""
        for p, grad in zip(self.dynamics.layers.theta[t], at.ascent[t], strict=True):
            if grad is not None:
                p.grad = -part * grad if p.grad is None else p.grad.sub_(grad, alpha=part)

    def finish(self) -> float:
        """Propagations spent on top of the rounds' own."""
        return 0.0


class Argmax:
    """θ_t* that maximises the augmented Hamiltonian, the weighted sum over all that was seen of

        Σ_i H_t(x_i, p_i, θ) − rho/2·(1/B Σ_i ‖f_t(x_i, θ) − x_{i,t+1}‖² + ‖θ − θ_t‖²)

    with θ_t − θ_t* left in .grad: an SGD step of rate 1 lands on θ_t*, one of a smaller rate goes a
    part of the way.

    H_t alone is linear in a linear layer's weights and has no maximum; and p, which belongs to the
    present states, says nothing about weights that leave them far behind. The first added term is
    Li et al.'s (2017) for the states. Theirs for the co-states needs second derivatives; the
    proximal term stands in for it, since without either the steps of all layers together blow up.
    For a lone nn.Linear the maximum is a ridge regression; elsewhere n iterations of L-BFGS.
    """

    def __init__(self, dynamics: Dynamics, rho: float, n: int) -> None:
        self.dynamics, self.rho, self.n = dynamics, rho, n
        self.seen: list[list[Pair]] = [[] for _ in range(len(dynamics))]

    def see(self, t: int, at: Trajectory, part: float) -> None:
        """Let H_t at the states and co-states of `at` count with the weight `part`."""
        self.seen[t].append(Pair(part, at.x[t], at.p[t + 1], at.x[t + 1], at.rng[t], at.buffers))

    def finish(self) -> float:
        """Find the maxima, t = T−1 … 0; propagations spent on top of the rounds' own."""
        calls = [self._layer(t) for t in reversed(range(len(self.dynamics)))]
        searched = [c for c in calls if c]
        return FULL * sum(searched) / max(len(searched), 1)

    def _layer(self, t: int) -> int:
        """Fill .grad of θ_t; passes through f_t spent, each forward and back to the weights."""
        theta, pairs = self.dynamics.layers.theta[t], self.seen[t]
        linear, r = self.dynamics.layers.linear[t], self.dynamics.regulariser
        whole = linear is not None and len(theta) == len(list(linear.parameters()))
        if linear is not None and whole and (r is None or isinstance(r, WeightDecay)):
            ridge(linear, pairs, self.rho, 0.0 if r is None else r.weight)
            return 0
        return len(pairs) * self._search(t) if theta else 0

    def _search(self, t: int) -> int:
        theta = self.dynamics.layers.theta[t]
        before = [p.detach().clone() for p in theta]

        def loss() -> Tensor:
            torch.clear_autocast_cache()  # it holds casts of the weights before they moved
            return -self.augmented(t, before)

        def put_back() -> None:
            for p, b in zip(theta, before, strict=True):
                p.detach().copy_(b)
                p.grad = None
            torch.clear_autocast_cache()  # likewise

        with Undo(put_back):
            calls = untouched(self.dynamics.layers.model, lambda: lbfgs(theta, loss, self.n))
            moved = [b - p.detach() for b, p in zip(before, theta, strict=True)]
        for p, step in zip(theta, moved, strict=True):
            p.grad = step
        return calls

    def augmented(self, t: int, before: list[Tensor]) -> Tensor:
        """The augmented Hamiltonian of layer t at its present weights, `before` being θ_t."""
        theta = self.dynamics.layers.theta[t]
        moved = [(p - b).square().sum() for p, b in zip(theta, before, strict=True)]
        weight = sum(pair.part for pair in self.seen[t])
        total = -weight * self.rho / 2 * torch.stack(moved).sum()
        for pair in self.seen[t]:
            out = self._f(t, pair)
            h = (pair.p * out).sum() - self.dynamics.r(t, pair.x)
            distance = (out - pair.out).square().sum() / len(out)
            total = total + pair.part * (h - self.rho / 2 * distance)
        return total

    def _f(self, t: int, pair: "Pair") -> Tensor:
        """f_t(x_t) as it ran there: same dropout masks and buffers."""
        layers = self.dynamics.layers
        with forked_rng(pair.x, pair.rng):
            if not pair.buffers:
                return layers.f(t, pair.x)
            return untouched(layers.model, lambda: layers.f(t, pair.x), pair.buffers)


@dataclass(frozen=True, slots=True)
class Pair:
    """Where one layer's Hamiltonian is taken, and with what weight."""

    part: float
    x: Tensor  # x_t
    p: Tensor  # p_{t+1}
    out: Tensor  # x_{t+1} = f_t(x_t, θ_t) at the present weights
    rng: RngState
    buffers: Mapping[str, Tensor]  # that move from pass to pass, as they were before this one


def ridge(linear: nn.Linear, pairs: list[Pair], rho: float, decay: float) -> None:
    """Regress the outputs' shift B·p/rho on the inputs, the weights' step being the penalty."""
    w, bias = linear.weight, linear.bias
    with torch.no_grad(), torch.autocast(w.device.type, enabled=False):
        theta = w if bias is None else torch.cat([w, bias[:, None]], 1)
        theta = theta.to(torch.promote_types(w.dtype, torch.float32))
        gram = torch.zeros(theta.shape[1], theta.shape[1]).to(theta)
        right, one = torch.zeros_like(theta.T), torch.eye(theta.shape[1]).to(theta)
        for pair in pairs:
            x, p = pair.x.to(theta).flatten(0, -2), pair.p.to(theta).flatten(0, -2)
            if bias is not None:
                x = torch.cat([x, x.new_ones(len(x), 1)], 1)
            gram += pair.part * (x.T @ x / len(pair.x) + (1 + decay / rho) * one)
            right += pair.part / rho * (x.T @ p - decay * theta.T)
        step = torch.linalg.solve(gram, right).T.to(w)
        w.grad = -step[:, : w.shape[1]].contiguous()
        if bias is not None:
            bias.grad = -step[:, -1].contiguous()


def moved(dynamics: Dynamics, at: Trajectory, x: Tensor) -> Trajectory:
    """The same co-states, with H_0 taken at another x_0 = x (B, ...)."""

    def work() -> tuple[Tensor, list[Tensor | None]]:
        with torch.enable_grad(), forked_rng(x, at.rng[0]):
            out = dynamics.layers.f(0, x)
            h = (at.p[1] * out).sum() - dynamics.r(0, x)
            return out.detach(), dynamics.ascent(0, [h], [torch.ones_like(h)])[1]

    out, ascent = untouched(dynamics.layers.model, work, at.buffers)
    return replace(at, x=[x, out, *at.x[2:]], ascent=[ascent, *at.ascent[1:]])
