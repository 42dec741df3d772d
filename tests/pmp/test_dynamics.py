"""The maximum principle: Lemma 1, Theorem 2 and Theorem 1, in float64."""

import copy
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import Batch, NormalisesInForward, PatchTransformer, SharesModules, convnet
from yopo.core.losses import Loss
from yopo.models import preactresnet18
from yopo.pmp.dynamics import Dynamics, Regulariser, WeightDecay, check_separable
from yopo.pmp.layers import Theta

close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14)


class Residual(nn.Module):
    """x + conv(tanh(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.tanh())  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[], list[nn.Module]]] = {
    "dense": lambda: [
        nn.Sequential(nn.Flatten(), nn.Linear(192, 9)),
        nn.Tanh(),
        nn.Linear(9, 7, bias=False),
        nn.GELU(),
        nn.Linear(7, 4),
    ],
    "conv": lambda: list(convnet()),
    "residual": lambda: [
        nn.Conv2d(3, 5, 3),
        Residual(),
        Residual(),
        nn.Sequential(nn.Flatten(), nn.Linear(180, 4)),
    ],
    "in place": lambda: [nn.Conv2d(3, 5, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(180, 4)],
}
networks = pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS.keys())


def activity(t: int, x: Tensor, theta: Theta) -> Tensor:
    """A regulariser of states and weights that differs from layer to layer."""
    mixed = sum((p.sin().sum() for p in theta), x.new_zeros(()))
    return (t + 1) * (x.pow(4).flatten(1).sum(1).mean() + 0.1 * mixed)


REGULARISERS: dict[str, Regulariser | None] = {
    "none": None,
    "decay": WeightDecay(0.3),
    "of x and θ": activity,
}
regularisers = pytest.mark.parametrize("r", REGULARISERS.values(), ids=REGULARISERS.keys())


def payoff(
    layers: Sequence[nn.Module], x: Tensor, y: Tensor, r: Regulariser | None
) -> tuple[Tensor, list[Tensor]]:
    """J and the states, by one plain autograd graph."""
    states, total = [x.clone().requires_grad_()], torch.zeros(())
    for t, layer in enumerate(layers):
        if r is not None:
            total = total + r(t, states[-1], list(layer.parameters()))
        states.append(layer(states[-1].clone()))
    return total + F.cross_entropy(states[-1], y), states


@regularisers
@networks
def test_lemma_1_costates_are_gradients(
    build: Callable[[], list[nn.Module]], r: Regulariser | None, batch: Batch
) -> None:
    """p_t = −∂J/∂x_t for every layer, p_T and p_0 included."""
    layers = build()
    at = Dynamics(layers, regulariser=r).propagate(*batch, F.cross_entropy)
    j, states = payoff(layers, *batch, r)
    expected = torch.autograd.grad(j, states)
    assert len(at.p) == len(at.x) == len(layers) + 1
    for t, state in enumerate(states):
        close(at.x[t], state.detach())
        close(at.p[t], -expected[t])
    close(at.payoff, j.detach())
    # The recursion by its definition: x_{t+1} = ∇_p H_t, p_t = ∇_x H_t.
    dynamics = Dynamics(layers, regulariser=r)
    for t in range(len(layers)):
        x, p = at.x[t].clone().requires_grad_(), at.p[t + 1].clone().requires_grad_()
        grad_x, grad_p = torch.autograd.grad(dynamics.hamiltonian(t, x, p), [x, p])
        close(grad_x, at.p[t])
        close(grad_p, at.x[t + 1])


@regularisers
@networks
def test_theorem_2_ascent_on_the_hamiltonians_is_sgd(
    build: Callable[[], list[nn.Module]], r: Regulariser | None, batch: Batch
) -> None:
    """θ_t + α ∇θ Σ_i H_t(x_t, p_{t+1}, θ_t) and a step of SGD, parameter by parameter."""
    layers = build()
    twins = copy.deepcopy(layers)
    dynamics = Dynamics(layers, regulariser=r)
    at = dynamics.propagate(*batch, F.cross_entropy)
    for t, layer in enumerate(layers):
        theta = list(layer.parameters())
        if theta:
            h = dynamics.hamiltonian(t, at.x[t], at.p[t + 1])
            grads = torch.autograd.grad(h, theta)
            with torch.no_grad():
                for parameter, grad, quick in zip(theta, grads, at.ascent[t], strict=True):
                    assert quick is not None
                    close(quick, grad)
                    parameter.add_(0.1 * grad)
    sgd = torch.optim.SGD([p for twin in twins for p in twin.parameters()], 0.1)
    payoff(twins, *batch, r)[0].backward()
    sgd.step()
    moved = 0
    for layer, twin in zip(layers, twins, strict=True):
        for a, b in zip(layer.parameters(), twin.parameters(), strict=True):
            close(a, b)
            moved += 1
    assert moved >= 4


# ---------------------------------------------------------------- layers of a model


@pytest.mark.parametrize(
    ("build", "names", "layers"),
    [
        (convnet, None, 6),
        (convnet, ["1", "3"], 3),
        (lambda: nn.Sequential(nn.Identity(), convnet()), None, 6),
        (lambda: preactresnet18(4, width=4), None, 2),
        (lambda: preactresnet18(4, width=4), ["conv1", "layer1.0", "layer2", "bn"], 5),
        (NormalisesInForward, None, 2),
        (PatchTransformer, ["patch_embed", "encoder.layers.0"], 3),
        (SharesModules, None, 2),
    ],
)
def test_a_models_layers_compose_to_the_model(
    build: Callable[[], nn.Module], names: list[str] | None, layers: int, batch: Batch
) -> None:
    """One by one, in one go, and to the gradients of plain backprop."""
    x, y = batch
    model = build().eval()
    dynamics = Dynamics.of(model, x, names)
    assert len(dynamics) == layers
    at = dynamics.propagate(x, y, F.cross_entropy)
    out = x
    for t in range(layers):
        close(at.x[t], out.detach())
        out = dynamics.layers.f(t, out)
    close(out, model(x))
    parameters = list(model.parameters())
    expected = dict(
        zip(parameters, torch.autograd.grad(F.cross_entropy(out, y), parameters), strict=True)
    )
    found = 0
    for theta, ascent in zip(dynamics.layers.theta, at.ascent, strict=True):
        for p, grad in zip(theta, ascent, strict=True):
            assert grad is not None
            torch.testing.assert_close(grad, -expected[p], rtol=1e-10, atol=1e-13)
            found += 1
    assert found == len(parameters)


def test_passes_without_weights_move_no_statistics(batch: Batch) -> None:
    model = preactresnet18(4, width=4)
    dynamics = Dynamics.of(model, batch[0])
    before = copy.deepcopy(model.state_dict())
    at = dynamics.propagate(*batch, F.cross_entropy, weights=False)
    assert not any(at.ascent)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    dynamics.propagate(*batch, F.cross_entropy)
    assert model.state_dict()["bn.num_batches_tracked"] == 1


# ---------------------------------------------------------------- Theorem 1


class Game:
    """(w1·w0·(x + η) − y)²/2 with λ/2·(w0² + w1²), on (x, y) and (−x, −y), |η| ≤ ε.

    For u = w0·w1 and z = x − ε the weights' optimum is u = (y·z − λ)/z² with w0 = w1; the residual
    −λ/z has the sign that makes η = −ε, pushing x towards zero, the adversary's best answer as
    long as ε·(y − λ/z) < λ. Each plays best against the other: a saddle point.
    """

    lam, eps, x0, y0 = 0.5, 0.2, 1.0, 1.0

    def __init__(self) -> None:
        z = self.x0 - self.eps
        assert self.y0 * z > self.lam
        assert self.eps * (self.y0 - self.lam / z) < self.lam
        self.w = ((self.y0 * z - self.lam) / z**2) ** 0.5
        self.layers = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
        for layer in self.layers:
            nn.init.constant_(layer.weight, self.w)
        self.x = torch.tensor([[self.x0], [-self.x0]])
        self.y = torch.tensor([[self.y0], [-self.y0]])
        self.eta = torch.tensor([[-self.eps], [self.eps]])
        self.dynamics = Dynamics(self.layers, regulariser=WeightDecay(self.lam))

    def violations(self) -> set[str]:
        """Which player has a better answer to the co-states, anywhere on a fine grid."""
        at = self.dynamics.propagate(self.x + self.eta, self.y, squared)
        grid = torch.linspace(-self.eps, self.eps, 41)
        with torch.no_grad():
            h0 = self.dynamics.hamiltonian(0, self.x + self.eta, at.p[1])
            found = set()
            for pair in itertools.product(grid, grid):
                eta = torch.stack(pair)[:, None]
                if self.dynamics.hamiltonian(0, self.x + eta, at.p[1]) < h0 - 1e-12:
                    found.add("η")
            for t, layer in enumerate(self.layers):
                kept = layer.weight.clone()
                h = self.dynamics.hamiltonian(t, at.x[t], at.p[t + 1])
                for weight in torch.linspace(-3, 3, 601):
                    layer.weight.fill_(weight)
                    if self.dynamics.hamiltonian(t, at.x[t], at.p[t + 1]) > h + 1e-12:
                        found.add(f"θ_{t}")
                layer.weight.copy_(kept)
        return found


def squared(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().sum(1).mean() / 2


def test_theorem_1_holds_at_the_saddle_point() -> None:
    game = Game()
    # The analytic solution is one: neither player gains in J by moving alone.
    j = game.dynamics.propagate(game.x + game.eta, game.y, squared).payoff

    def by_hand(w0: Tensor, w1: Tensor, first: Tensor, second: Tensor) -> Tensor:
        error = (w1 * w0 * (game.x0 + first) - game.y0, w1 * w0 * (second - game.x0) + game.y0)
        return (error[0] ** 2 + error[1] ** 2) / 4 + game.lam / 2 * (w0**2 + w1**2)

    eta, grid = game.eps * torch.linspace(-1, 1, 201), torch.linspace(-2, 2, 401)
    w = torch.tensor(game.w)
    torch.testing.assert_close(by_hand(w, w, *game.eta[:, 0]), j)
    assert by_hand(w, w, eta[:, None], eta).max() <= j + 1e-14
    assert by_hand(grid[:, None], grid, *game.eta[:, 0]).min() >= j - 1e-14
    assert Game().violations() == set()


@pytest.mark.parametrize("by", [0.05, -0.05])
@pytest.mark.parametrize("player", ["η", "θ_0", "θ_1"])
def test_theorem_1_fails_when_a_player_is_moved(player: str, by: float) -> None:
    game = Game()
    if player == "η":
        game.eta = game.eta + abs(by) * torch.tensor([[1.0], [0.0]])  # inside the ball
    else:
        with torch.no_grad():
            game.layers[int(player[-1])].weight += by
    assert player in game.violations()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: [], "at least one layer"),
        (
            lambda: [nn.Flatten(), nn.Linear(192, 5), nn.Linear(6, 4)],
            r"layer 2 \(Linear\) cannot take what layer 1 gives, \(6, 5\) of torch.float64",
        ),
        (lambda: [nn.Conv2d(1, 2, 3)], r"layer 0 \(Conv2d\) cannot take the input, \(6, 3, 8, 8\)"),
        (lambda: [nn.Flatten(0)], r"layer 0 .* tensor for 6 samples, got \(1152,\)"),
        (lambda: [nn.Flatten(2), nn.LSTM(64, 4)], "layer 1 .* got tuple"),
        (lambda: [nn.Flatten(), *[nn.Linear(192, 192)] * 2], "'1' and '2' share a parameter"),
    ],
)
def test_layers_that_do_not_compose(
    build: Callable[[], list[nn.Module]], message: str, batch: Batch
) -> None:
    with pytest.raises(ValueError, match=message):
        Dynamics(build()).propagate(*batch, F.cross_entropy)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layer11"], "no module 'layer11' .* near names: layer1"),
        (["layer1", "conv1"], "in the order in which they run, got layer1, conv1"),
        (["conv1", "conv1"], "different names"),
        (["layer1.0.conv1"], r"does not see the whole input.*name 'layer1\.0' instead"),
        (["conv1", "linear"], "gives the logits"),
    ],
)
def test_names_that_do_not_work(names: list[str], message: str, batch: Batch) -> None:
    with pytest.raises(ValueError, match=message):
        Dynamics.of(preactresnet18(4, width=4), batch[0], names)


def test_names_in_the_wrong_order_in_a_sequential(batch: Batch) -> None:
    with pytest.raises(ValueError, match="in the order in which they run, got 3, 1"):
        Dynamics.of(convnet(), batch[0], ["3", "1"])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda z, y: F.cross_entropy(z, y) ** 2, "a sum or mean over samples"),
        (lambda z, y: F.cross_entropy(z - z.mean(0), y), "one term for each sample"),
        (nn.CrossEntropyLoss(reduction="none"), "one number"),
    ],
)
def test_losses_that_are_no_sum_over_samples(loss: Loss, message: str, batch: Batch) -> None:
    net = convnet()
    with torch.no_grad():
        list(net.parameters())[-2].mul_(30)  # what mixes samples shows only where they differ
    with pytest.raises(ValueError, match=message):
        Dynamics.of(net, batch[0]).propagate(*batch, loss)


class Remembers(nn.Module):
    """Keeps for the loss what is no logit: features, or what a second head makes of them."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.keep = keep
        self.stem, self.head, self.second = nn.Linear(192, 6), nn.Linear(6, 4), nn.Linear(6, 1)
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1)).tanh()
        out: Tensor = self.head(h)
        kept = {"features": h, "head": self.second(h), "image": x, "logits": out}
        self.kept = kept[self.keep].square().mean()
        return out


def penalised(net: nn.Module) -> Loss:
    """As one would write weight decay."""
    return lambda z, y: (
        F.cross_entropy(z, y) + 0.1 * sum(p.square().sum() for p in net.parameters())
    )


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("keep", ["features", "head", "image", "logits"])
def test_a_loss_of_more_than_the_logits_is_refused(keep: str, weights: bool, batch: Batch) -> None:
    """The gradient would lack what does not go through the logits."""
    net = Remembers(keep)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + 10 * net.kept

    dynamics = Dynamics.of(net, batch[0])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the logits and targets alone.*use yopo\.YOPO for"):
            dynamics.propagate(*batch, loss, weights=weights)


@pytest.mark.parametrize("build", [convnet, lambda: preactresnet18(4, width=4)])
def test_a_penalty_on_the_weights_belongs_to_the_regulariser(
    build: Callable[[], nn.Module], batch: Batch
) -> None:
    net = build()
    dynamics = Dynamics.of(net, batch[0])
    with pytest.raises(ValueError, match=r"or regulariser=yopo\.pmp\.WeightDecay"):
        dynamics.propagate(*batch, penalised(net))
    for p in net.parameters():  # then the penalty is a constant
        p.requires_grad_(False)
    Dynamics.of(net, batch[0]).propagate(*batch, penalised(net), weights=False)


def test_a_loss_may_have_parameters_of_its_own_and_detached_features(batch: Batch) -> None:
    net, scale = Remembers("features"), torch.tensor(2.0, requires_grad=True)

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scale * z, y) + net.kept.detach()

    at = Dynamics.of(net, batch[0]).propagate(*batch, loss)
    z = at.x[-1].clone().requires_grad_()
    close(at.p[-1], -torch.autograd.grad(F.cross_entropy(2 * z, batch[1]), z)[0])


def test_only_the_first_pass_asks_where_the_loss_comes_from(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("yopo.pmp.dynamics.check_of_logits", lambda *args: asked.append(args))
    dynamics = Dynamics.of(convnet(), batch[0])
    for _ in range(3):
        dynamics.propagate(*batch, F.cross_entropy)
    assert len(asked) == 1


def test_a_loss_may_be_a_sum(batch: Batch) -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    at = Dynamics.of(convnet(), batch[0]).propagate(*batch, loss)
    expected = F.one_hot(batch[1], 4) - at.x[-1].softmax(1)
    close(at.p[-1], expected)


@pytest.mark.parametrize(
    "r", [lambda t, x, theta: x.flatten(1).sum(1), lambda t, x, theta: 0.0], ids=["(B,)", "float"]
)
def test_regularisers_that_return_no_number(r: Regulariser, batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"one number for layer 5, got (\(6,\)|float); take"):
        Dynamics.of(convnet(), batch[0], regulariser=r).propagate(*batch, F.cross_entropy)


TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (B, 4), (B,) -> (B,)
    "cross-entropy": lambda z, y: F.cross_entropy(z, y, reduction="none"),
    "margin": lambda z, y: (1 + z.amax(1) - z.gather(1, y[:, None])[:, 0]).square(),
    "either sign": lambda z, y: z.gather(1, y[:, None])[:, 0],
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {  # of a batch's terms; no sum and no mean of them
    "variance": lambda terms: terms.var(correction=0),
    "square of the mean": lambda terms: terms.mean() ** 2,
    "logarithm of a sum": lambda terms: terms.exp().sum().log(),
}
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16])


def logits_of_three(seed: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(3, 4, dtype=torch.float64, generator=g)
    return (z * scale).to(dtype), torch.randint(4, (3,), generator=g)


@given(
    seed=st.integers(0, 2**32),
    scale=st.floats(1e-6, 1e6),
    dtype=DTYPES,
    term=st.sampled_from(sorted(TERMS)),
    mean=st.booleans(),
)
def test_a_sum_or_mean_over_samples_is_one(
    seed: int, scale: float, dtype: torch.dtype, term: str, mean: bool
) -> None:
    """Where terms cancel too: the tolerance is relative to them, not to what is left."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        terms = TERMS[term](z, y)
        return terms.mean() if mean else terms.sum()

    check_separable(loss, *logits_of_three(seed, scale, dtype))


@given(
    seed=st.integers(0, 2**32),
    part=st.floats(1e-6, 1),
    term=st.sampled_from(["cross-entropy", "either sign"]),  # margins may be alike
    mixed=st.sampled_from(sorted(MIXED)),
    mean=st.booleans(),
)
def test_little_of_what_mixes_samples_is_found(
    seed: int, part: float, term: str, mixed: str, mean: bool
) -> None:
    """A millionth of the loss in float64, whose rounding is far below that."""

    def loss(z: Tensor, y: Tensor) -> Tensor:
        terms = TERMS[term](z, y)
        return (terms.mean() if mean else terms.sum()) + part * MIXED[mixed](terms)

    z, y = logits_of_three(seed, 1.0, torch.float64)
    with pytest.raises(ValueError, match="a sum or mean over samples"):
        check_separable(loss, z, y)
