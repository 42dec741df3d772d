"""Algorithm 1 in general form: each player's optimum against brute force, and YOPO as a case."""

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import (
    Batch,
    Build,
    NormalisesInForward,
    assert_same,
    bn_convnet,
    convnet,
    grads,
)
from yopo import L2, PMP, YOPO, Linf, Threat
from yopo.models import preactresnet18
from yopo.pmp.adversary import FirstLayer, descend, lbfgs_argmin, linear_argmin
from yopo.pmp.dynamics import Dynamics, WeightDecay
from yopo.pmp.weights import Argmax, Pair, ridge

LINF, BALL = Linf(0.1, 0.03), L2(0.5, 0.2)
threats = pytest.mark.parametrize("threat", [LINF, BALL], ids=["linf", "l2"])


# ---------------------------------------------------------------- the adversary, exactly


@threats
def test_the_closed_form_beats_ten_thousand_points_of_the_ball(
    threat: Threat, batch: Batch
) -> None:
    x = batch[0][:2]
    p = torch.randn_like(x)
    eta = linear_argmin(threat, p, x)
    torch.testing.assert_close(threat.project(eta, x), eta, rtol=1e-12, atol=1e-12)
    best = (p * eta).flatten(1).sum(1)
    many = x.repeat(10_000, 1, 1, 1)
    points = threat.start(many)
    at_points = (p.repeat(10_000, 1, 1, 1) * points).flatten(1).sum(1).view(10_000, 2)
    assert (at_points >= best).all()
    # also those pushed outward to ball and box along the very gradient
    pushed = threat.project(points - 10 * p.repeat(10_000, 1, 1, 1), many)
    at_pushed = (p.repeat(10_000, 1, 1, 1) * pushed).flatten(1).sum(1).view(10_000, 2)
    assert (at_pushed >= best - 1e-12).all()


@given(st.integers(0, 10_000), st.integers(1, 8), st.floats(0.01, 1.0))
def test_in_few_dimensions_it_is_the_best_vertex(seed: int, d: int, eps: float) -> None:
    g = torch.Generator().manual_seed(seed)
    x, p = torch.rand(3, d, generator=g).round(decimals=1), torch.randn(3, d, generator=g)
    corners = torch.tensor(list(itertools.product([-eps, eps], repeat=d)))
    vertices = Linf(eps).project(corners[:, None].expand(-1, 3, -1), x)  # (2^d, 3, d)
    expected = (p * vertices).sum(2).amin(0)
    torch.testing.assert_close((p * linear_argmin(Linf(eps), p, x)).sum(1), expected)


@given(st.integers(0, 10_000), st.integers(1, 6), st.floats(0.01, 3.0))
def test_the_l2_minimiser_is_optimal_by_duality(seed: int, d: int, eps: float) -> None:
    """Weak duality: p·eta ≥ Σ_k min over the box of (p_k e + μ e²/2) − μ eps²/2 for every μ ≥ 0.

    A μ that attains it proves that no point of ball and box is lower.
    """
    g = torch.Generator().manual_seed(seed)
    x, p = torch.rand(1, d, generator=g).round(decimals=1), torch.randn(1, d, generator=g)
    p[torch.rand(1, d, generator=g) < 0.2] = 0
    eta = linear_argmin(L2(eps), p, x)
    assert eta.norm() <= eps + 1e-12
    assert ((x + eta >= 0) & (x + eta <= 1)).all()
    mu = torch.logspace(-9, 6, 4001)[:, None]
    inner = (-p / mu).clamp(-x, 1 - x)
    dual = (p * inner + mu / 2 * inner**2).sum(1) - mu[:, 0] / 2 * eps**2
    value = (p * eta).sum()
    assert value >= dual.max() - 1e-12
    assert value <= dual.max() + 1e-3 * (1 + value.abs())  # as fine as the grid of μ


def test_a_gradient_of_zeros_is_no_reason_to_move(batch: Batch) -> None:
    x = batch[0]
    for threat in (LINF, BALL):
        assert torch.equal(linear_argmin(threat, torch.zeros_like(x), x), torch.zeros_like(x))
        tiny = linear_argmin(threat, torch.full_like(x, 1e-300), x)
        torch.testing.assert_close(tiny, linear_argmin(threat, torch.ones_like(x), x))


def test_exact_is_lower_than_any_number_of_steps(batch: Batch) -> None:
    """H_0 itself, on the network, for both threats."""
    x, y = batch
    game = Dynamics.of(convnet(), x)
    for threat in (LINF, BALL):
        eta = threat.start(x)
        h0 = FirstLayer(game, x, game.propagate(x + eta, y, F.cross_entropy))
        lowest = h0.hamiltonian(linear_argmin(threat, h0.at.p[0], x))
        far = descend(h0, threat, eta, 200)
        assert lowest <= h0.hamiltonian(far) + 1e-14
        if threat is LINF:  # L2's steps clip to the box after the ball, and stop short
            torch.testing.assert_close(h0.hamiltonian(far), lowest)
        assert lowest < h0.hamiltonian(descend(h0, threat, eta, 2))


def test_lbfgs_finds_the_minimum_of_a_convex_first_layer() -> None:
    """Softplus with p > 0 is convex in eta: the minimum, on a grid, lies inside or at a bound."""
    grid = torch.linspace(-0.3, 0.3, 201)
    points = torch.cartesian_prod(grid, grid)  # (N, 2)
    at_bound = []
    for _ in range(4):
        x, y = 0.3 + 0.4 * torch.rand(16, 2), torch.arange(16) % 2
        first = nn.Linear(2, 6)
        nn.init.normal_(first.weight, std=8.0)
        with torch.no_grad():
            first.bias.copy_(-first.weight.sum(1) / 2)  # bends run through the middle
        game = Dynamics.of(nn.Sequential(first, nn.Softplus(), nn.Linear(6, 2)), x, ["1"])
        at = game.propagate(x, y, F.cross_entropy)
        at.p[1].copy_(torch.rand(16, 6))
        p_0 = FirstLayer(game, x, at).gradient(torch.zeros_like(x))
        eta = lbfgs_argmin(FirstLayer(game, x, replace(at, p=[p_0, *at.p[1:]])), Linf(0.3), 50)
        with torch.no_grad():
            values = (at.p[1][:, None] * game.layers.f(0, x[:, None] + points)).sum(2)  # (16, N)
            best, found = values.amin(1), (at.p[1] * game.layers.f(0, x + eta)).sum(1)
        # It stops where the sum over images hardly changes: of 1,600 (25 seeds) the worst was
        # 0.34% above the best of the grid, whatever the number of iterations.
        assert (found <= best + 1e-2 * best.abs()).all()
        at_bound.append((points[values.argmin(1)].abs() > 0.2999).any(1))
    assert torch.cat(at_bound).any()
    assert not torch.cat(at_bound).all()


def test_lbfgs_goes_lower_than_as_many_steps_with_a_whole_stage_as_f0(batch: Batch) -> None:
    x, y = batch
    game = Dynamics.of(convnet(), x, ["3"])
    eta = LINF.start(x)
    h0 = FirstLayer(game, x, game.propagate(x + eta, y, F.cross_entropy))
    found = lbfgs_argmin(h0, LINF, 20)
    torch.testing.assert_close(LINF.project(found, x), found, rtol=0, atol=1e-15)
    with torch.no_grad():
        assert h0.hamiltonian(found) < h0.hamiltonian(descend(h0, LINF, eta, 20))
        vertex = h0.hamiltonian(linear_argmin(LINF, h0.at.p[0], x))
        assert h0.hamiltonian(lbfgs_argmin(h0, LINF, 1)) <= vertex


# ---------------------------------------------------------------- the weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(9, 3), (2, 7), (2, 3, 4)], ids=["tall", "wide", "tokens"])
def test_ridge_is_the_maximum_of_the_augmented_hamiltonian(
    shape: tuple[int, ...], decay: float, bias: bool
) -> None:
    """Its gradient vanishes at θ*, and L-BFGS on the same function arrives there."""
    layer = nn.Linear(shape[-1], 5, bias=bias)
    game = Dynamics([layer], regulariser=WeightDecay(decay) if decay else None)
    player = Argmax(game, rho=0.7, n=500)
    for part in (0.25, 0.75):
        x = torch.randn(*shape)
        out = layer(x).detach()
        rng = torch.get_rng_state(), None
        player.seen[0].append(Pair(part, x, torch.randn_like(out) / len(x), out, rng, {}))
    ridge(layer, player.seen[0], 0.7, decay)
    closed = grads(layer)
    layer.zero_grad()
    player._search(0)
    searched = grads(layer)
    assert_same(searched, closed, tol=1e-4)
    before = [p.detach().clone() for p in layer.parameters()]
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.sub_(closed[name])  # an SGD step of rate 1
    slope = torch.autograd.grad(player.augmented(0, before), list(layer.parameters()))
    assert all(s.abs().max() < 1e-10 for s in slope)


@pytest.mark.parametrize("build", [convnet, lambda: preactresnet18(4, width=4)])
def test_argmax_steps_raise_the_hamiltonians_and_lower_the_payoff(
    build: Build, batch: Batch
) -> None:
    """A step of rate 1 with a cautious rho, at fixed perturbations, for all layers together."""
    x, y = batch
    model = build().eval()
    sgd = torch.optim.SGD(model.parameters(), 1.0)
    method = PMP(model, LINF, m=2, weights="argmax", rho=20.0, weights_at="before")
    eta = LINF.start(x)
    out = method.backward(x, y, eta)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    sgd.step()
    sgd.zero_grad()
    assert any(not torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert method.backward(x, y, eta).loss < out.loss


class Drops(nn.Module):
    """Dropout in each layer, and no Sequential. wrap: what is done to the second convolution."""

    def __init__(self, wrap: Callable[[nn.Conv2d], nn.Module] = lambda conv: conv) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.5))
        self.b = nn.Sequential(wrap(nn.Conv2d(4, 4, 3)), nn.Dropout(0.5))
        self.c = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(F.dropout(self.b(self.a(x)).flatten(1), 0.5, self.training))
        return out


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("at", ["after", "before", "algorithm1"])
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (Drops, ["a", "b"]),
        (lambda: Drops(nn.utils.spectral_norm), ["a", "b"]),
        (lambda: moving_weights(), ["1", "3"]),
    ],
)
def test_argmax_searches_from_the_states_that_the_costates_belong_to(
    build: Build, names: list[str], at: Any, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At θ_t itself the augmented Hamiltonian is H_t: f_t(x_t) is x_{t+1}, each time it is asked.

    Same dropout masks and spectral norms, and the global stream goes on as if nothing was asked.
    """
    players: list[Argmax] = []

    def finish(player: Argmax) -> float:
        players.append(player)
        return 0.0

    monkeypatch.setattr(Argmax, "finish", finish)
    options: dict[str, Any] = {"adversary": "gradient", "weights": "argmax", "weights_at": at}
    PMP(build(), LINF, m=2, layers=names, **options).backward(*batch)
    (player,) = players
    for t, pairs in enumerate(player.seen):
        before = [p.detach().clone() for p in player.dynamics.layers.theta[t]]
        at_states = sum(pair.part * (pair.p * pair.out).sum() for pair in pairs)
        drawn = torch.get_rng_state()
        for _ in range(2):
            torch.testing.assert_close(
                player.augmented(t, before).detach(), at_states, rtol=1e-12, atol=1e-14
            )
        assert torch.equal(torch.get_rng_state(), drawn)


def test_theta_0_is_the_mean_over_the_perturbations_after_the_argmin(batch: Batch) -> None:
    """Algorithm 1 to the letter, written out."""
    x, y = batch
    model = convnet()
    conv = model[0]
    start = LINF.start(x)
    out = PMP(model, LINF, m=3, weights_at="algorithm1").backward(x, y, start)
    found = grads(model)
    eta, theta_0 = start, torch.zeros(5, 3, 3, 3)
    for _ in range(3):
        x_0 = (x + eta).requires_grad_()
        x_1 = conv(x_0)
        loss = F.cross_entropy(model[1:](x_1), y)
        p_0, p_1 = torch.autograd.grad(-loss, [x_0, x_1], retain_graph=True)
        eta = (x - 0.1 * p_0.sign()).clamp(x - 0.1, x + 0.1).clamp(0, 1) - x
        h_0 = (p_1 * conv(x + eta)).sum()
        theta_0 -= torch.autograd.grad(h_0, list(conv.parameters()))[0] / 3
    rest = list(model[1:].parameters())
    expected = torch.autograd.grad(loss, rest)
    torch.testing.assert_close(out.eta, eta, rtol=0, atol=1e-14)
    torch.testing.assert_close(found["0.weight"], theta_0, rtol=1e-11, atol=1e-14)
    for p, grad in zip(rest, expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, grad, rtol=1e-11, atol=1e-14)


# ---------------------------------------------------------------- YOPO as a special case


def moving_weights() -> nn.Sequential:
    """Its first convolution has other weights after each pass: spectral_norm's iteration."""
    net = convnet(nn.Tanh)
    net[0] = nn.utils.spectral_norm(net[0])
    with torch.no_grad():  # far from where the iteration ends
        for p in net[0].parameters():
            p.add_(torch.randn_like(p))
    return net


@threats
@pytest.mark.parametrize("at", ["after", "before"])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (convnet, None),
        (lambda: convnet(nn.Tanh), "1"),
        (lambda: convnet(nn.Tanh), "3"),
        (bn_convnet, "2"),
        (lambda: preactresnet18(4, width=4), "conv1"),
        (lambda: preactresnet18(4, width=4), "layer1"),
        (NormalisesInForward, None),
        pytest.param(
            lambda: moving_weights(),
            "1",
            marks=pytest.mark.filterwarnings("ignore:.*spectral_norm"),
        ),
    ],
)
def test_with_gradients_for_both_players_it_is_yopo(
    build: Build,
    name: str | None,
    at: Literal["after", "before"],
    threat: Threat,
    batch: Batch,
) -> None:
    x, y = batch
    results: list[dict[str, Tensor]] = []
    makes: list[Any] = [
        lambda net: YOPO(net, threat, m=3, n=4, first_layer=name, grad_at=at),
        lambda net: PMP(
            net,
            threat,
            m=3,
            adversary="gradient",
            n=4,
            layers=None if name is None else [name],
            weights_at=at,
        ),
    ]
    for make in makes:
        torch.manual_seed(0)
        model = build()
        torch.manual_seed(1)
        out = make(model).backward(x, y)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        results.append(
            grads(model) | state | {"eta": out.eta, "loss": out.loss, "logits": out.logits}
        )
        spent = out.propagations
    assert spent == (3 + 2 / 3 if at == "after" else 3)
    assert_same(results[1], results[0], tol=1e-11)


def test_regularisers_reach_the_gradients(batch: Batch) -> None:
    x, y = batch
    model, eta = convnet(), torch.zeros_like(batch[0])
    PMP(model, LINF, m=2, weights_at="before").backward(x, y, eta)
    plain = grads(model)
    model.zero_grad()
    PMP(model, LINF, m=2, weights_at="before", regulariser=WeightDecay(0.3)).backward(x, y, eta)
    decayed = {k: plain[k] + 0.3 * p.detach() for k, p in model.named_parameters()}
    assert_same(grads(model), decayed)


def test_an_exchanged_layer_is_the_one_that_is_trained(batch: Batch) -> None:
    model = convnet()
    assert isinstance(model, nn.Sequential)
    method = PMP(model, LINF, m=2)
    method.backward(*batch)
    model.zero_grad()
    model[-1] = new = copy.deepcopy(model[-1])
    method.backward(*batch)
    assert all(p.grad is not None for p in new.parameters())


# ---------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 0}, "m to be a whole number of at least 1"),
        ({"n": 0}, "n to be"),
        ({"steps": 0}, "steps to be"),
        ({"rho": 0.0}, "rho > 0"),
        ({"adversary": "exakt"}, "'exact' or 'gradient' or 'lbfgs', got 'exakt'"),
        ({"weights": "sgd"}, "'gradient' or 'argmax'"),
        ({"weights_at": "last"}, "'after' or 'before' or 'algorithm1'"),
    ],
)
def test_bad_options_name_the_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PMP(convnet(), LINF, **options)


class MyThreat:
    """A ball of one's own."""

    eps, step = 0.1, 0.1
    start, project, ascend = LINF.start, LINF.project, LINF.ascend


@pytest.mark.parametrize(
    ("options", "threat", "message"),
    [
        ({"layers": ["1"]}, LINF, r"up to '1'.* not affine.*use adversary='gradient' or 'lbfgs'"),
        ({"adversary": "lbfgs"}, BALL, r"yopo\.Linf, whose ball is a box.*got L2"),
        ({}, MyThreat(), r"yopo\.Linf or yopo\.L2 for an exact adversary, got MyThreat"),
        ({"layers": ["9"]}, LINF, "no module '9'"),
        (
            {"regulariser": lambda t, x, theta: x.square().mean()},
            LINF,
            "or its regulariser is not affine",
        ),
        ({"regulariser": lambda t, x, theta: x}, LINF, "one number for layer 5"),
        ({"loss": lambda z, y: F.cross_entropy(z, y) ** 2}, LINF, "a sum or mean over samples"),
    ],
)
def test_what_cannot_be_done_is_said_at_the_first_batch(
    options: dict[str, Any], threat: Threat, message: str, batch: Batch
) -> None:
    model = convnet()
    with pytest.raises(ValueError, match=message):
        PMP(model, threat, **options).backward(*batch)
    assert not grads(model)


class Spectrum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x)  # type: ignore[no-any-return]


class Size(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def test_complex_states_are_refused_in_words(batch: Batch) -> None:
    x, _ = batch
    model = nn.Sequential(Spectrum(), Size(), nn.Flatten(), nn.Linear(x[0].numel(), 4))
    with pytest.raises(ValueError, match="complex ones after '0'"):
        PMP(model, LINF, layers=["0"]).backward(*batch)
    PMP(model, LINF, adversary="gradient", layers=["1"]).backward(*batch)


def test_a_regulariser_of_the_image_moves_the_adversary(batch: Batch) -> None:
    """Without it the exact step is taken; with it eta also shrinks what R_0 punishes least."""
    x, y = batch
    eta = torch.zeros_like(x)
    options: dict[str, Any] = {"m": 1, "adversary": "gradient", "weights_at": "before"}
    plain = PMP(convnet(), LINF, **options).backward(x, y, eta).eta
    bright = PMP(
        convnet(), LINF, regulariser=lambda t, x, theta: 1e3 * x.mean() * (t == 0), **options
    )
    # The adversary maximises J, so it brightens every pixel that R_0 rewards.
    brightened = bright.backward(x, y, eta).eta
    assert torch.equal(brightened, LINF.project(torch.full_like(x, 0.1), x))
    assert not torch.equal(plain, brightened)


# ---------------------------------------------------------------- the record


def test_the_record_shows_pmp_near_yopo_and_its_page_agrees() -> None:
    folder = Path(__file__).parents[2] / "records" / "pmp-cpu"
    page = (folder / "README.md").read_text()
    robust = {}
    for file in folder.glob("*-result.json"):
        result = json.loads(file.read_text())
        best = result["best"]
        robust[file.name] = best["pgd-20"]
        assert f"{100 * best['clean']:.2f} / {100 * best['pgd-20']:.2f}" in page
    assert abs(robust["pmp-result.json"] - robust["yopo-5-10-result.json"]) < 0.05


class Sometimes(nn.Module):
    """Blocks that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(192, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.blocks[self.turn](torch.tanh(self.stem(x.flatten(1)))))
        out: Tensor = self.head(h)
        return out


@pytest.mark.parametrize("at", ["after", "before", "algorithm1"])
def test_blocks_that_were_not_used_at_first_are_trained_too(at: Any, batch: Batch) -> None:
    net = Sometimes()
    method = PMP(net, LINF, m=1, weights_at=at)
    for turn in range(3):
        net.turn = turn
        net.zero_grad()
        method.backward(*batch, torch.zeros_like(batch[0]))
        alone = copy.deepcopy(net)
        alone.zero_grad()
        PMP(alone, LINF, m=1, weights_at=at).backward(*batch, torch.zeros_like(batch[0]))
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None and q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        assert net.blocks[turn].weight.grad is not None


class Wanders(nn.Module):
    """A block that runs in one layer, or in another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(192, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.block, self.at = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.flatten(1))
        h = self.b(self.block(h) if self.at == 1 else h)
        out: Tensor = self.c(self.block(h) if self.at == 2 else h)
        return out


def test_a_parameter_of_two_layers_is_refused_each_time(batch: Batch) -> None:
    net = Wanders()
    method = PMP(net, LINF, m=1, layers=["a", "b"])
    for net.at in (0, 1, 0, 1):
        method.backward(*batch)
    net.at = 2
    for _ in range(3):
        with pytest.raises(ValueError, match="share a parameter"):
            method.backward(*batch)


def test_algorithm1_with_a_layer_without_parameters_and_one_unused(batch: Batch) -> None:
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    net.add_module("block", Idle())
    method = PMP(net, LINF, m=2, weights_at="algorithm1", layers=["flat", "block.first"])
    method.backward(*batch)
    assert net.get_parameter("block.last.weight").grad is not None


class Idle(nn.Module):
    """Two layers, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, 6), nn.Linear(6, 4)
        self.idle = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


def test_parameters_exchanged_by_loading_are_those_that_are_trained(batch: Batch) -> None:
    net = convnet()
    method = PMP(net, LINF)
    method.backward(*batch)
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)
    method.backward(*batch)
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("options", [{"adversary": "lbfgs"}, {"weights": "argmax"}])
def test_channels_last_gives_the_same(options: dict[str, Any], batch: Batch) -> None:
    net, (x, y) = convnet(nn.GELU), batch
    other: Any = copy.deepcopy(net)
    other.to(memory_format=torch.channels_last)
    start = torch.zeros_like(x)
    want = PMP(net, LINF, m=2, **options).backward(x, y, start)
    got = PMP(other, LINF, m=2, **options).backward(
        x.to(memory_format=torch.channels_last), y, start
    )
    torch.testing.assert_close(got.eta, want.eta)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_argmax_in_half_precision(batch: Batch) -> None:
    net, (x, y) = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Linear(6, 4)), batch
    other = copy.deepcopy(net).bfloat16()
    PMP(net, LINF, m=1, weights="argmax").backward(x, y, torch.zeros_like(x))
    x = x.bfloat16()
    PMP(other, LINF, m=1, weights="argmax").backward(x, y, torch.zeros_like(x))
    got, want = grads(other)["2.weight"], grads(net)["2.weight"]
    # Two layers round input, weight and output by 2⁻⁸ at most, on both ways.
    assert (got - want).norm() <= 2 * 3 * 2 * 2**-8 * want.norm()


@pytest.mark.parametrize("layers", [None, ["0"]])
def test_argmax_under_autocast_sees_the_weights_that_it_moves(layers: list[str] | None) -> None:
    """As without autocast's cache; nor does a pass of one's own afterwards get old casts."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5)).float()
    x, y, found = torch.rand(6, 3, 8, 8).float(), torch.arange(6) % 5, []
    for kept in (False, True):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=kept):
            method = PMP(net, LINF, m=1, weights="argmax", layers=layers)
            method.backward(x, y, torch.zeros_like(x))
            logits = net(x).detach()
        found.append({**grads(net), "logits": logits})
    assert all(found[0][name].norm() > 0 for name, _ in net.named_parameters())
    assert_same(found[1], found[0], tol=0)


def test_a_loss_of_the_whole_batch_is_refused_in_words(batch: Batch) -> None:
    mixed = batch[1].flip(0)

    def mixup(logits: Tensor, y: Tensor) -> Tensor:
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * F.cross_entropy(logits, mixed)

    with pytest.raises(ValueError, match="any part of a batch"):
        PMP(convnet(), LINF, loss=mixup).backward(*batch)
