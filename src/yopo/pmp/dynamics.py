"""The maximum principle of section 3: a network as a game between its weights and an adversary.

    min_θ max_η  J = loss(x_T) + Σ_t R_t(x_t, θ_t),    x_0 = x + η,  x_{t+1} = f_t(x_t, θ_t)

Here the paper's sign: p_t = −∂J/∂x_t. The weights maximise H_t, the adversary minimises H_0. The
methods of section 2.2 (yopo.YOPO and its kin) write +∂loss/∂f0 and ascend instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from yopo.core.affine import walk
from yopo.core.first_layer import Split
from yopo.core.frozen import RngState, made_of, moving, untouched
from yopo.core.losses import Loss
from yopo.core.propagation import scalar
from yopo.pmp.layers import Chain, Layers, Theta, layers_of, refuse_sharing

# t, x_t (B, ...), θ_t -> one number: the mean of R_t(x_i, θ_t) over the batch, the paper's Σ_i R/B
Regulariser = Callable[[int, Tensor, Theta], Tensor]


@dataclass(frozen=True, slots=True)
class WeightDecay:
    """R_t(x, θ_t) = weight/2·‖θ_t‖²."""

    weight: float

    def __call__(self, t: int, x: Tensor, theta: Theta) -> Tensor:
        """R_t."""
        return self.weight / 2 * sum((p.square().sum() for p in theta), x.new_zeros(()))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """States and co-states of one propagation, T layers. All detached."""

    x: list[Tensor]  # x_0 … x_T, each (B, ...)
    p: list[Tensor]  # p_0 … p_T, like x
    ascent: list[list[Tensor | None]]  # ∇θ_t Σ_i H_t for every parameter; empty if not asked for
    payoff: Tensor  # (), J
    rng: list[RngState]  # where each layer's random numbers began
    buffers: Mapping[str, Tensor]  # those that move from pass to pass, as they were before this one


class Dynamics:
    """x_{t+1} = f_t(x_t, θ_t), with Hamiltonians H_t(x, p, θ) = p·f_t(x, θ) − R_t(x, θ)/B.

    layers: modules that follow each other; `Dynamics.of` takes them from a model. regulariser: R_t.
    """

    def __init__(
        self, layers: Sequence[nn.Module] | Layers, *, regulariser: Regulariser | None = None
    ) -> None:
        self.layers: Layers = Chain(layers) if isinstance(layers, Sequence) else layers
        self.regulariser = regulariser
        self.affine = False  # f_0 is known to be affine in x_0
        self._checked = False  # whether the loss is one that has co-states

    @classmethod
    def of(
        cls,
        model: nn.Module,
        x: Tensor,
        names: Sequence[str] | None = None,
        *,
        regulariser: Regulariser | None = None,
    ) -> "Dynamics":
        """The dynamics of a model on inputs like x, its layers ending at the modules `names`."""
        dynamics = cls(layers_of(model, x, names), regulariser=regulariser)
        dynamics.affine = Split(model, dynamics.layers.names[0]).cut(x).affine
        return dynamics

    def __len__(self) -> int:
        """T."""
        return len(self.layers.theta)

    def hamiltonian(self, t: int, x: Tensor, p: Tensor) -> Tensor:
        """Σ_i H_t(x_i, p_i, θ_t) at states x (B, ...) and the next co-states p."""
        return (p * self.layers.f(t, x)).sum() - self.r(t, x)

    def r(self, t: int, x: Tensor) -> Tensor:
        """Σ_i R_t(x_i, θ_t)/B."""
        if self.regulariser is None:
            return x.new_zeros(())
        value = self.regulariser(t, x, self.layers.theta[t])
        if not isinstance(value, Tensor) or value.dim() > 0:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"expected the regulariser to return one number for layer {t}, got {got}; take the "
                "mean over the batch, as a tensor of shape ()"
            )
        return value

    def propagate(self, x: Tensor, y: Tensor, loss: Loss, *, weights: bool = True) -> Trajectory:
        """States forward, co-states backward: x_{t+1} = ∇_p H_t, p_t = ∇_x H_t.

        p_T = −∂loss/∂x_T, for a loss that is the mean over the batch the paper's −∇ℓ_i/B. With
        `weights`, also ∇θ_t H_t; without, no buffer (running statistics) moves either.
        """
        if not weights:
            return untouched(self.layers.model, lambda: self._propagate(x, y, loss, False))
        return self._propagate(x, y, loss, True)

    @torch.enable_grad()
    def _propagate(self, x: Tensor, y: Tensor, loss: Loss, weights: bool) -> Trajectory:
        buffers = {name: b.clone() for name, b in moving(self.layers.model).items()}
        segments = self.layers.segments(x)
        for name, segment in zip(self.layers.names, segments, strict=True):
            if segment.out.is_complex():
                raise ValueError(
                    f"expected real states, got complex ones after {name!r}; cut later"
                )
        end = segments[-1].out.detach().requires_grad_()  # x_T
        if not self._checked:
            check_separable(loss, end.detach(), y)
        payoff = scalar(loss(end, y))
        if not self._checked:
            check_of_logits(payoff, self.layers.model, [segment.x for segment in segments])
            self._checked = True
        (grad,) = torch.autograd.grad(payoff, end)
        p: list[Tensor] = [-grad]
        ascent: list[list[Tensor | None]] = []
        for t, segment in reversed(list(enumerate(segments))):
            r = self.r(t, segment.x)
            payoff = payoff + r
            outputs, grads = [segment.out], [p[0]]
            if r.requires_grad:
                outputs, grads = [*outputs, r], [*grads, -torch.ones_like(r)]
            (p_t,), slopes = self.ascent(t, outputs, grads, segment.x, weights=weights)
            p.insert(0, torch.zeros_like(segment.x) if p_t is None else p_t)
            ascent.insert(0, slopes)
        states = [*(segment.x.detach() for segment in segments), end.detach()]
        rng = [segment.rng for segment in segments]
        return Trajectory(states, p, ascent, payoff.detach(), rng, buffers)

    def ascent(
        self,
        t: int,
        outputs: list[Tensor],
        grads: list[Tensor],
        *x: Tensor,
        weights: bool = True,
    ) -> tuple[Sequence[Tensor | None], list[Tensor | None]]:
        """Gradients of outputs·grads with respect to x, and to θ_t if asked for.

        A parameter that was not used when the network was studied (stochastic depth, experts)
        joins the layer that first uses it.
        """
        theta = self.layers.theta[t] if weights else []
        mine = {id(q) for q in theta}
        spare = [q for q in self.layers.spare if weights and id(q) not in mine]
        inputs = [*x, *theta, *spare]
        slopes: Sequence[Tensor | None] = [None] * len(inputs)
        if inputs and any(out.requires_grad for out in outputs):
            slopes = torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
        known = len(x) + len(theta)
        new = [(q, g) for q, g in zip(spare, slopes[known:], strict=True) if g is not None]
        if new:
            every = [list(each) for each in self.layers.theta]
            every[t] += [q for q, _ in new]
            refuse_sharing(self.layers.names, every)
            theta += [q for q, _ in new]
        return slopes[: len(x)], [*slopes[len(x) : known], *(g for _, g in new)]


class Studied:
    """The dynamics of a model, found once for each kind of input and state of the model."""

    def __init__(
        self, model: nn.Module, names: Sequence[str] | None, regulariser: Regulariser | None
    ) -> None:
        self.model, self.names, self.regulariser = model, names, regulariser
        self._found: dict[object, Dynamics] = {}
        self._of: list[nn.Parameter] = []  # the parameters that they know

    def on(self, x: Tensor) -> Dynamics:
        """The dynamics on inputs like x (B, ...)."""
        flags = [module.training for module in self.model.modules()]
        parameters = list(self.model.parameters())
        if [*map(id, parameters)] != [*map(id, self._of)]:
            self._found, self._of = {}, parameters
        wants = [p.requires_grad for p in parameters]
        key = (x.shape[1:], x.dtype, x.device, *flags, *wants, made_of(self.model))
        if key not in self._found:
            self._found[key] = Dynamics.of(self.model, x, self.names, regulariser=self.regulariser)
        return self._found[key]


def check_separable(loss: Loss, logits: Tensor, y: Tensor) -> None:
    """The loss of a batch is the sum or the mean of its samples' own losses."""
    some = slice(0, 3)
    with torch.no_grad():
        try:
            whole = scalar(loss(logits[some], y[some]))
            each = [loss(logits[i : i + 1], y[i : i + 1]) for i in range(len(logits[some]))]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                "expected a loss that takes the logits and targets of any part of a batch: the "
                f"maximum principle needs one term for each sample; got {error}"
            ) from error
        alone = torch.stack([value.reshape(()) for value in each])
    # Far above each precision's rounding, and relative to the terms: they may cancel in the sum.
    rtol = {torch.float64: 1e-11, torch.float32: 1e-4}.get(whole.dtype, 2e-2)
    near = rtol * float(alone.abs().sum())
    sums = (alone.sum(), alone.mean())
    if not any(whole == joint or float((whole - joint).abs()) <= near for joint in sums):
        raise ValueError(
            f"expected a loss that is a sum or mean over samples, got {float(whole):.4g} for "
            f"{len(each)} samples with {float(alone.sum()):.4g} in sum; the maximum principle "
            "needs one term for each sample"
        )


def check_of_logits(loss: Tensor, model: nn.Module, states: Sequence[Tensor]) -> None:
    """No way but through the logits leads from a loss to the weights or the states x_t.

    p_T = −∂loss/∂x_T would leave that part out of every gradient.
    """
    if loss.grad_fn is None:
        return
    inside = {id(leaf) for leaf in (*model.parameters(), *states)}
    reached = walk((loss.grad_fn, loss.output_nr))
    if any(id(getattr(node, "variable", None)) in inside for node in reached):
        raise ValueError(
            "expected a loss of the logits and targets alone, got one that sees weights or "
            "features of the network, too, which no gradient of PMP would contain; use yopo.YOPO "
            "for such a loss, or regulariser=yopo.pmp.WeightDecay(...) for a penalty on the weights"
        )
