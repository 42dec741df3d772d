"""The adversary of Algorithm 1: η = argmin H_0(x + η, p_1, θ_0). Signs as in yopo.pmp.dynamics."""

from dataclasses import dataclass

import torch
from torch import Tensor

from yopo.core.frozen import forked_rng, untouched
from yopo.core.threat import L2, Linf, Threat
from yopo.pmp.dynamics import Dynamics, Trajectory
from yopo.pmp.lbfgs import lbfgs


def linear_argmin(threat: Threat, p: Tensor, x: Tensor) -> Tensor:
    """The eta in ball and box with the smallest p·eta, for each of x (B, ...).

    L∞: a vertex. L2: −s·p clipped to the box, with the s ≥ 0 at which it leaves the ball; the norm
    grows with s and bends only where a pixel meets its bound, so s follows from sorting those.
    """
    if isinstance(threat, Linf):
        return threat.project(-2 * threat.eps * p.sign(), x)
    if not isinstance(threat, L2):
        raise ValueError(
            f"expected yopo.Linf or yopo.L2 for an exact adversary, got {type(threat).__name__}; "
            "use adversary='gradient'"
        )
    direction, low, high = -p.flatten(1), -x.flatten(1), (1 - x).flatten(1)
    size = direction.abs()
    size = size / size.amax(1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    room = torch.where(direction > 0, high, -low) * (size > 0)  # way to the bound
    meets = torch.where(size > 0, room / size, torch.inf)  # the s at which a pixel gets there
    meets, order = meets.sort(1)
    size_, room_ = size.gather(1, order), room.gather(1, order)
    inside = (size_**2).flip(1).cumsum(1).flip(1)  # Σ size² of this pixel and all later ones
    clipped = (room_**2).cumsum(1) - room_**2  # Σ room² of all earlier ones
    norm2 = clipped + meets.clamp(max=torch.finfo(p.dtype).max ** 0.5) ** 2 * inside
    leaves = norm2 >= threat.eps**2
    k = leaves.int().argmax(1, keepdim=True)  # the first bound met outside the ball
    left = (threat.eps**2 - clipped.gather(1, k)).clamp(min=0)
    s = (left / inside.gather(1, k).clamp(min=torch.finfo(p.dtype).tiny)).sqrt()
    s = torch.where(leaves.any(1, keepdim=True), s, torch.inf)  # the whole box is in the ball
    eta = torch.minimum(torch.where(size > 0, s * size, 0.0), room) * direction.sign()
    return threat.project(eta.view_as(x), x)


@dataclass(frozen=True, slots=True)
class FirstLayer:
    """H_0 as a function of eta, the co-state p_1 frozen at one propagation.

    f_0 is evaluated as it ran there: same dropout masks and buffers, no running statistic moved.
    """

    dynamics: Dynamics
    x: Tensor  # (B, ...)
    at: Trajectory

    def is_affine(self) -> bool:
        """Whether ∇_eta H_0 is the same for every eta, namely p_0."""
        x = self.x.detach().requires_grad_()
        with torch.enable_grad():
            r = self.dynamics.r(0, x)
        seen = r.requires_grad and torch.autograd.grad(r, x, allow_unused=True)[0] is not None
        return self.dynamics.affine and not seen

    def hamiltonian(self, eta: Tensor) -> Tensor:
        """Σ_i H_0(x_i + eta_i, p_1, θ_0)."""

        def work() -> Tensor:
            with forked_rng(self.x, self.at.rng[0]):
                return self.dynamics.hamiltonian(0, self.x + eta, self.at.p[1])

        # Each time with the same buffers, where they move.
        model, buffers = self.dynamics.layers.model, self.at.buffers
        return untouched(model, work, buffers) if buffers else work()

    def gradient(self, eta: Tensor) -> Tensor:
        """∇_eta H_0; at the propagation's own eta this is p_0."""
        eta = eta.detach().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(self.hamiltonian(eta), eta)
        return grad


def descend(h0: FirstLayer, threat: Threat, eta: Tensor, n: int) -> Tensor:
    """Take n projected gradient steps of eta down H_0, from where p was computed."""
    if h0.is_affine():
        return threat.ascend(eta, -h0.at.p[0], h0.x, n=n)

    def work() -> Tensor:
        now = eta
        for s in range(n):
            grad = h0.gradient(now) if s > 0 else h0.at.p[0]
            now = threat.ascend(now, -grad, h0.x)
        return now

    return untouched(h0.dynamics.layers.model, work)


def lbfgs_argmin(h0: FirstLayer, threat: Threat, n: int) -> Tensor:
    """Minimise H_0 on the box that an L∞ ball is, by n iterations of L-BFGS.

    eta = middle + half·sin(z) is in the box for every z, so z is free. From near the minimiser of
    the linearised H_0, which is the answer if nothing lower is found.
    """
    if not isinstance(threat, Linf):
        raise ValueError(
            "expected yopo.Linf, whose ball is a box, for adversary='lbfgs', got "
            f"{type(threat).__name__}; use adversary='gradient'"
        )
    low, high = (threat.project(torch.full_like(h0.x, sign), h0.x) for sign in (-1.0, 1.0))
    middle, half = (low + high) / 2, (high - low) / 2
    vertex = linear_argmin(threat, h0.at.p[0], h0.x)
    inner = ((vertex - middle) / half).clamp(-0.9, 0.9)  # sin is flat at the bounds themselves
    z = inner.asin().requires_grad_()
    scale = 1 / (h0.at.p[0] * half).abs().sum().clamp(min=torch.finfo(inner.dtype).tiny)

    def work() -> Tensor:
        lbfgs([z], lambda: scale * h0.hamiltonian(middle + half * z.sin()), n)
        part = z.detach().sin()
        part = torch.where(part.abs() > 0.95, part.sign(), part)  # on its way to a bound
        eta = threat.project(middle + half * part, h0.x)
        with torch.no_grad():
            return eta if h0.hamiltonian(eta) < h0.hamiltonian(vertex) else vertex

    return untouched(h0.dynamics.layers.model, work)


def exact_argmin(h0: FirstLayer, threat: Threat) -> Tensor:
    """The minimiser of H_0 in closed form, where H_0 is affine in eta."""
    if not h0.is_affine():
        raise ValueError(
            f"f0 (up to {h0.dynamics.layers.names[0]!r}) or its regulariser is not affine in the "
            "image, so H_0 has no closed-form minimiser; use adversary='gradient' or 'lbfgs'"
        )
    return linear_argmin(threat, h0.at.p[0], h0.x)
