"""What the maximum principle says about a network: how long co-states last, what n and m buy.

Everything is measured in eval mode, on one batch, in the signs of yopo.pmp. Nothing is changed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yopo.attacks.steps import step_size
from yopo.core.checks import check_at_least, check_attack, check_threat
from yopo.core.first_layer import cut_names
from yopo.core.frozen import eval_mode, untouched
from yopo.core.parallel import own_passes
from yopo.core.propagation import ATTACK_ONLY, FULL
from yopo.core.threat import L2, Linf, Threat
from yopo.core.undo import surely
from yopo.pmp.adversary import FirstLayer, descend, lbfgs_argmin, linear_argmin
from yopo.pmp.dynamics import Dynamics
from yopo.pmp.layers import NO_LAYERS, SharedError

ENOUGH = 0.5  # of what the best setting tried makes; a recommendation makes at least this
INNER = (1, 2, 3, 5, 10)  # n that are tried
STEPS = 10  # inner steps that the drift is watched for
PGD = 20  # rounds of plain PGD, for comparison
STRONG = 50  # steps of the attack that stands for the best one


@dataclass(frozen=True, slots=True)
class Drift:
    """n inner steps with the co-state frozen; entry s of each list is after s of them."""

    cosine: list[float]  # between the frozen p and the fresh one, mean over the samples
    gain: list[float]  # what the next frozen step adds to the loss, in parts of a fresh step's
    loss: list[float]
    gap: list[float]  # (H_0 − min H_0), in parts of what it was at the start
    stops: int | None  # steps after which the frozen direction no longer raises the loss


@dataclass(frozen=True, slots=True)
class Depth:
    """One place to cut the network."""

    name: str
    affine: bool
    inner_cost: float  # of one more inner step, in full propagations; measured here
    drift: Drift
    reach: dict[str, float]  # "m-n": part of the strong attack's gain that YOPO's adversary makes
    cost: dict[str, float]  # "m-n": propagations of one training step


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A network's co-states, Hamiltonian gaps and residuals, and what follows for m, n and f0."""

    clean_loss: float  # without an attack
    strong_loss: float  # under PGD with many steps and two starts
    depths: list[Depth]  # for each place where f0 may end
    pgd: dict[str, float]  # "r": part of the strong attack's gain that PGD-r makes
    residuals: dict[str, float]  # layer: ‖θ_t‖·‖∇θ_t H_t‖/loss, under the strong attack
    target: float  # part of the strong attack's gain that a recommendation must make
    m: int  # that is recommended
    n: int  # likewise
    first_layer: str  # likewise
    because: list[str]  # what the recommendation rests on

    def tree(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@surely
@own_passes()
def diagnose(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    splits: Sequence[str] | None = None,
    m: int = 8,
    generator: torch.Generator | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Diagnosis:
    """Study `model` on images x (B, ...) with labels y (B,), and recommend m, n and f0.

    threat: what it is to withstand. generator: of random starts. splits: names of modules where f0
    may end; by default the first two there are and those a quarter and half of the way down. m: the
    largest to try. say: called with a line as each part begins, which may take minutes.
    """
    check_at_least("m", m, 1)
    check_threat(threat)
    check_attack(model, x, y)
    if torch.is_inference_mode_enabled():
        raise ValueError("co-states are gradients; leave torch.inference_mode() first")
    with eval_mode(model):
        if not (names := cut_names(model, x)):
            raise ValueError(NO_LAYERS)
        chosen = dict.fromkeys([*names[:2], names[len(names) // 4], names[len(names) // 2]])
        whole = _whole(model, x, names)
        apart = [c for c in chosen if c in whole.layers.names] or whole.layers.names[:1]
        games = {name: Dynamics.of(model, x, [name]) for name in splits or apart}
        eta = threat.start(x, generator)
        say(f"the strong attack: 2 starts of {STRONG} steps")
        strong = _strong(whole, threat, x, y, generator)
        clean, worst = (_loss(whole, x + e, y) for e in (torch.zeros_like(x), strong))
        depths = []
        for number, (name, game) in enumerate(games.items(), 1):
            say(f"place {number} of {len(games)}: f0 ends at {name}; m to {m}, n to {INNER[-1]}")
            depths.append(_depth(name, game, threat, x, y, eta, m, (clean, worst)))
        say(f"PGD-1 to PGD-{PGD}, for comparison, and residuals")
        pgd = _reach(whole, threat, x, y, eta, PGD, 1, (clean, worst))
        residuals = _residuals(whole, x + strong, y)
    target = ENOUGH * max(*pgd.values(), *(part for d in depths for part in d.reach.values()))
    depth, key, because = _recommend(depths, pgd, target)
    m, n = (int(part) for part in key.split("-"))
    return Diagnosis(clean, worst, depths, pgd, residuals, target, m, n, depth.name, because)


def drift(game: Dynamics, threat: Threat, x: Tensor, y: Tensor, eta: Tensor, n: int) -> Drift:
    """Freeze p at x + eta (B, ...), take n steps down H_0, look at the true loss after each."""
    at = game.propagate(x + eta, y, F.cross_entropy, weights=False)
    h0 = FirstLayer(game, x, at)
    lowest, highest = _lowest(h0, threat, eta), _hamiltonian(h0, eta)
    cosine, gain, loss, gap = [], [], [], []
    for s in range(n + 1):
        fresh = game.propagate(x + eta, y, F.cross_entropy, weights=False) if s else at
        step = threat.ascend(eta, -h0.gradient(eta), x) - eta
        best = threat.ascend(eta, -fresh.p[0], x) - eta
        raised, possible = (float((d * -fresh.p[0]).sum()) for d in (step, best))
        cosine.append(_cosine(at.p[1], fresh.p[1]))
        gain.append(raised / possible if possible > 0 else 0.0)
        loss.append(float(fresh.payoff))
        gap.append((_hamiltonian(h0, eta) - lowest) / max(highest - lowest, 1e-30))
        eta = eta + step
    stops = next((s for s, value in enumerate(gain) if value <= 0), None)
    return Drift(cosine, gain, loss, gap, stops)


def brief(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    first_layer: str | None,
    n: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """A few numbers to follow while training: one split, one round of n steps."""
    with eval_mode(model):
        game = Dynamics.of(model, x, [first_layer] if first_layer else None)
        eta = threat.start(x, generator)
        seen = drift(game, threat, x, y, eta, n)
        worst = _loss(game, x + _strong(game, threat, x, y, generator), y)
    return {
        "cosine": seen.cosine[-1],
        "gain": seen.gain[-1],
        "gap": seen.gap[-1],
        "loss": seen.loss[-1],
        "strong_loss": worst,
    }


# ---------------------------------------------------------------- the parts


def _whole(model: nn.Module, x: Tensor, names: Sequence[str]) -> Dynamics:
    """All layers; those that share parameters, and those between them, as one."""
    while True:
        try:
            return Dynamics.of(model, x, names)
        except SharedError as shared:
            names = [*names[: shared.first], *names[shared.last :]]
            if not names:
                raise


def _depth(
    name: str,
    game: Dynamics,
    threat: Threat,
    x: Tensor,
    y: Tensor,
    eta: Tensor,
    m: int,
    losses: tuple[float, float],
) -> Depth:
    inner = 0.0 if game.affine else _inner_cost(game, x, y, eta)
    reach: dict[str, float] = {}
    cost: dict[str, float] = {}
    for n in INNER:
        for j, part in _reach(game, threat, x, y, eta, m, n, losses).items():
            reach[f"{j}-{n}"] = part
            cost[f"{j}-{n}"] = int(j) * (FULL + (n - 1) * inner) + ATTACK_ONLY
    return Depth(name, game.affine, inner, drift(game, threat, x, y, eta, STEPS), reach, cost)


def _reach(
    game: Dynamics,
    threat: Threat,
    x: Tensor,
    y: Tensor,
    eta: Tensor,
    m: int,
    n: int,
    losses: tuple[float, float],
) -> dict[str, float]:
    """Part of the way from the clean to the worst loss that 1 to m rounds of n steps make."""
    clean, worst = losses
    parts = {}
    for j in range(m + 1):
        at = game.propagate(x + eta, y, F.cross_entropy, weights=False)
        if j:
            parts[str(j)] = (float(at.payoff) - clean) / max(worst - clean, 1e-30)
        eta = descend(FirstLayer(game, x, at), threat, eta, n)
    return parts


def _strong(
    game: Dynamics, threat: Threat, x: Tensor, y: Tensor, generator: torch.Generator | None
) -> Tensor:
    """The perturbation of largest loss, for each sample, in two runs of PGD."""
    best, highest = torch.zeros_like(x), torch.full((len(x),), -torch.inf).to(x)
    for _ in range(2):
        eta = threat.start(x, generator)
        for _ in range(STRONG + 1):
            at = game.propagate(x + eta, y, F.cross_entropy, weights=False)
            loss = F.cross_entropy(at.x[-1], y, reduction="none")
            better = (loss > highest).view(-1, *[1] * (x.dim() - 1))
            best, highest = torch.where(better, eta, best), torch.maximum(loss, highest)
            eta = threat.ascend(eta, -at.p[0], x, step=step_size(threat, STRONG))
    return best


def _lowest(h0: FirstLayer, threat: Threat, eta: Tensor) -> float:
    """min H_0: exact for an affine f0, else the lowest that long searches find."""
    if h0.is_affine() and isinstance(threat, Linf | L2):
        return _hamiltonian(h0, linear_argmin(threat, h0.at.p[0], h0.x))
    lowest = [descend(h0, threat, eta, STRONG)]
    if isinstance(threat, Linf):
        lowest.append(lbfgs_argmin(h0, threat, STRONG))
    return min(_hamiltonian(h0, e) for e in lowest)


def _hamiltonian(h0: FirstLayer, eta: Tensor) -> float:
    with torch.no_grad():
        return float(h0.hamiltonian(eta))


def _loss(game: Dynamics, x: Tensor, y: Tensor) -> float:
    return float(game.propagate(x, y, F.cross_entropy, weights=False).payoff)


def _residuals(game: Dynamics, x: Tensor, y: Tensor) -> dict[str, float]:
    """Each layer's ‖θ_t‖·‖∇θ_t H_t‖/loss: the slope that a maximum of H_t would not have."""
    at = untouched(game.layers.model, lambda: game.propagate(x, y, F.cross_entropy))
    residuals = {}
    for name, theta, ascent in zip(game.layers.names, game.layers.theta, at.ascent, strict=True):
        grads = [g.flatten() for g in ascent if g is not None]
        if grads:
            size = torch.cat([p.detach().flatten() for p in theta]).norm()
            residuals[name] = float(size * torch.cat(grads).norm() / at.payoff)
    return residuals


def _cosine(p: Tensor, q: Tensor) -> float:
    """Mean over the samples that have a direction; co-states of well-learnt ones vanish."""
    p, q = (t.flatten(1) / t.flatten(1).abs().amax(1, keepdim=True) for t in (p, q))
    cosine = F.cosine_similarity(p, q, dim=1)
    return float(cosine[cosine.isfinite()].mean()) if cosine.isfinite().any() else 0.0


def _inner_cost(game: Dynamics, x: Tensor, y: Tensor, eta: Tensor) -> float:
    """Time of one gradient of H_0 over that of a pass without weight gradients, which is 2/3."""
    at = game.propagate(x + eta, y, F.cross_entropy, weights=False)
    h0 = FirstLayer(game, x, at)
    runs: list[Callable[[], object]] = [
        lambda: h0.gradient(eta),
        lambda: game.propagate(x + eta, y, F.cross_entropy, weights=False),
    ]
    times: list[list[float]] = [[], []]
    for _ in range(7):
        for run, seconds in zip(runs, times, strict=True):
            started = _clock(x)
            run()
            seconds.append(_clock(x) - started)
    inner, whole = (min(each) or sum(each) / len(each) for each in times)  # a clock may be coarse
    return ATTACK_ONLY * inner / whole if whole else 0.0


def _clock(x: Tensor) -> float:
    """Seconds; on a CPU those of this process, which others that run beside it do not lengthen."""
    if not x.is_cuda:
        return time.process_time()
    torch.cuda.synchronize(x.device)
    return time.perf_counter()


def lead(depth: Depth, key: str, pgd: dict[str, float]) -> float:
    """How much more of the strong attack's gain a setting makes than PGD does at its price."""
    prices = [int(r) * ATTACK_ONLY + FULL for r in pgd]
    return depth.reach[key] - float(np.interp(depth.cost[key], prices, list(pgd.values())))


def _recommend(
    depths: list[Depth], pgd: dict[str, float], target: float
) -> tuple[Depth, str, list[str]]:
    """The setting that leads PGD most, of those that make the target (if none: that makes most).

    Not one with m = 1, if m was to be tried at all: networks learn to fool an attack of one step.
    """
    tried = [(d, key) for d in depths for key in d.reach if not key.startswith("1-")]
    tried = tried or [(d, key) for d in depths for key in d.reach]
    enough = [(d, key) for d, key in tried if d.reach[key] >= target]
    depth, key = (
        max(enough, key=lambda c: lead(c[0], c[1], pgd))
        if enough
        else max(tried, key=lambda c: c[0].reach[c[1]])
    )
    n, ahead, watched = int(key.split("-")[1]), lead(depth, key, pgd), depth.drift
    because = [
        f"YOPO-{key} at {depth.name} adds {depth.reach[key]:.0%} of what {STRONG} steps of PGD "
        f"with two starts add to the loss, for {depth.cost[key]:.1f} propagations a step",
        f"PGD with this step size adds {depth.reach[key] - ahead:.0%} at that price: "
        + (
            f"the largest lead of {len(enough)} settings that add at least {target:.0%}, half of "
            "the most that any adds"
            if enough and ahead > 0
            else "no setting leads PGD here"
        ),
        f"after {n} inner steps the frozen co-state has cosine "
        f"{watched.cosine[min(n, STEPS)]:.2f} to the fresh one; frozen steps "
        + (
            f"raised the true loss in all {STEPS} looked at"
            if watched.stops is None
            else f"stop raising the true loss after {watched.stops}"
            + (", but fresh co-states make up for it" if n > watched.stops else "")
        ),
        "f0 is affine, so inner steps cost nothing"
        if depth.affine
        else f"an inner step costs {depth.inner_cost:.2f} propagations on this machine",
        "one batch, these weights, this step size: train to see what it is worth",
    ]
    return depth, key, because
