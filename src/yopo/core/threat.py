"""What the adversary may do: a ball around each image, inside the box [0, 1].

Every threat has `eps` (radius), `step` (the paper's α₁), and three operations on eta: a random
start, a projection, and n ascent steps along one fixed gradient. Any object with these works.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Protocol, Self

import torch
from torch import Tensor

from yopo.core.checks import check_step
from yopo.core.random import Counted
from yopo.core.words import fraction


class Threat(Protocol):
    """The operations that methods and attacks need of a threat."""

    @property
    def eps(self) -> float:
        """Radius of the ball."""

    @property
    def step(self) -> float:
        """Size of one ascent step."""

    def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw eta uniformly from the ball, then put it into the box."""

    def project(self, eta: Tensor, x: Tensor) -> Tensor:
        """Bring eta into the ball and x + eta into [0, 1]."""

    def ascend(
        self, eta: Tensor, grad: Tensor, x: Tensor, *, n: int = 1, step: float | None = None
    ) -> Tensor:
        """Take n projected steps up a gradient that stays the same for all n.

        Its direction counts, not its length: YOPO's is divided by m.
        """


@dataclass(frozen=True, slots=True, init=False, repr=False)
class _Ball:
    """A radius and a step that can be, whatever the norm."""

    eps: float
    step: float

    def __init__(self, eps: float, step: float | None = None) -> None:
        given: object = eps
        if not isinstance(given, Real):
            raise TypeError(f"expected eps as a number, as 8 / 255, got {eps!r}")
        if not 0 < eps < float("inf"):
            raise ValueError(f"expected eps > 0, got {eps}; without an adversary use yopo.Natural")
        self._set(float(eps), float(eps) / 4 if step is None else check_step(step))

    def __repr__(self) -> str:
        """What makes it again: Linf(eps=8/255, step=2/255)."""
        eps, step = (fraction(float(value)) for value in (self.eps, self.step))
        return f"{type(self).__name__}(eps={eps}, step={step})"

    def resized(self, eps: float | Tensor, step: float | Tensor) -> Self:
        """A ball of this kind and of any radius, also one beyond the box; tensors () will do."""
        made = object.__new__(type(self))
        made._set(eps, step)
        return made

    def _set(self, eps: float | Tensor, step: float | Tensor) -> None:
        object.__setattr__(self, "eps", eps)
        object.__setattr__(self, "step", step)


class Linf(_Ball):
    """‖eta‖∞ ≤ eps; the step is eps/4 unless given (2/255 at 8/255)."""

    __slots__ = ()

    def __init__(self, eps: float, step: float | None = None) -> None:
        super().__init__(eps, step)
        if eps > 1:
            raise ValueError(
                f"expected eps of at most 1, the range of pixels, got {eps}; 8 of 255 is 8/255"
            )

    def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw eta uniformly from the ball, then put it into the box."""
        eta = torch.empty_like(x).uniform_(-1, 1, generator=generator)
        return self.project(self.eps * eta, x)

    def start_counted(self, x: Tensor, numbers: Counted) -> Tensor:
        """The same, from numbers that are the image's own."""
        return self.project(self.eps * numbers.in_cube(x), x)

    def project(self, eta: Tensor, x: Tensor) -> Tensor:
        """Clamp eta to [-eps, eps] ∩ [-x, 1 - x]; exact in floating point and idempotent."""
        return eta.clamp((-x).clamp(min=-self.eps), (1 - x).clamp(max=self.eps))

    def ascend(
        self, eta: Tensor, grad: Tensor, x: Tensor, *, n: int = 1, step: float | None = None
    ) -> Tensor:
        """Take n projected sign steps, which for a fixed gradient are one step of size n·step.

        Each coordinate walks in one direction inside an interval, so clamping after every step
        or once at the end gives the same point.
        """
        step = self.step if step is None else step
        return self.project(eta + n * step * grad.sign(), x)


class L2(_Ball):
    """‖eta‖₂ ≤ eps for each sample; the step is eps/4 unless given."""

    __slots__ = ()

    def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw eta uniformly from the ball, then put it into the box."""
        direction = torch.empty_like(x).normal_(generator=generator)
        u = torch.empty_like(_norm(x)).uniform_(generator=generator)
        radius = self.eps * u ** (1 / x[0].numel())
        return self.project(radius * direction / _norm(direction), x)

    def start_counted(self, x: Tensor, numbers: Counted) -> Tensor:
        """The same, from numbers that are the image's own."""
        return (self.eps * numbers.in_ball(x)).clamp(-x, 1 - x)

    def project(self, eta: Tensor, x: Tensor) -> Tensor:
        """Scale eta back to the sphere where it is outside, then clamp x + eta to the box.

        The clamp only shortens eta (x itself is in the box), so the result is in both sets.
        """
        eta = eta * (self.eps / _norm(eta).clamp(min=self.eps))
        return eta.clamp(-x, 1 - x)

    def ascend(
        self, eta: Tensor, grad: Tensor, x: Tensor, *, n: int = 1, step: float | None = None
    ) -> Tensor:
        """Take n projected steps of length `step` along the normalised gradient.

        On the sphere a projected step turns eta, so n steps are not one longer step.
        """
        step = self.step if step is None else step
        grad = grad.nan_to_num(0, 0, 0)
        grad = grad / _largest(grad)  # so that squaring a tiny gradient does not underflow
        direction = grad / _norm(grad)
        for _ in range(n):
            eta = self.project(eta + step * direction, x)
        return eta


def _norm(v: Tensor) -> Tensor:
    """L2 norm of each sample, shaped to divide v; never zero."""
    return _per_sample(v.flatten(1).norm(dim=1), v)


def _largest(v: Tensor) -> Tensor:
    """Largest absolute value of each sample, shaped to divide v; never zero."""
    return _per_sample(v.flatten(1).abs().amax(dim=1), v)


def _per_sample(value: Tensor, v: Tensor) -> Tensor:
    value = value.clamp(min=torch.finfo(v.dtype).tiny)
    return value.view(-1, *[1] * (v.dim() - 1))
