"""YOPO-m-n against identities and slow transcriptions of the paper."""

import copy
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.conftest import (
    Batch,
    Build,
    NormalisesInForward,
    PatchTransformer,
    SharesModules,
    assert_same,
    bn_convnet,
    convnet,
    grads,
    mlp,
    signal_net,
)
from yopo import L2, PGD, YOPO, Linf, Normalize, Threat
from yopo.models import SmallCNN, preactresnet18

GradAt = Literal["after", "before", "last"]
GRAD_AT: list[GradAt] = ["after", "before", "last"]


def literal_yopo(
    f0: nn.Module,
    g: nn.Module,
    x: Tensor,
    y: Tensor,
    eta: Tensor,
    threat: Threat,
    m: int,
    n: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Section 2.2, second box, on a network cut by hand: the eta^{j,0} and the eta^{j,n}."""
    before, after = [], []
    for _ in range(m):
        before.append(eta)
        z = f0(x + eta).detach().requires_grad_()
        (p,) = torch.autograd.grad(F.cross_entropy(g(z), y), z)
        for _ in range(n):
            eta = eta.detach().requires_grad_()
            (grad,) = torch.autograd.grad((p * f0(x + eta)).sum(), eta)
            eta = threat.ascend(eta.detach(), grad, x)
        after.append(eta)
    return before, after


def mean_gradient(model: nn.Module, x: Tensor, y: Tensor, etas: list[Tensor]) -> dict[str, Tensor]:
    """1/m Σ_j ∇θ loss(x + eta_j), each computed on its own."""
    total: dict[str, Tensor] = {}
    for eta in etas:
        loss = F.cross_entropy(model(x + eta), y)
        for (name, _), g in zip(
            model.named_parameters(),
            torch.autograd.grad(loss, list(model.parameters())),
            strict=True,
        ):
            total[name] = total.get(name, torch.zeros_like(g)) + g / len(etas)
    return total


@pytest.mark.parametrize("grad_at", GRAD_AT)
@pytest.mark.parametrize("threat", [Linf(0.1, 0.03), L2(0.8, 0.3)], ids=["Linf", "L2"])
@pytest.mark.parametrize("cut", [1, 2, 4], ids=["conv", "conv+tanh", "two layers"])
@pytest.mark.parametrize(("m", "n"), [(1, 0), (1, 3), (3, 1), (4, 3)])
def test_yopo_is_the_papers_loop(
    m: int, n: int, cut: int, threat: Threat, grad_at: GradAt, batch: Batch
) -> None:
    x, y = batch
    model = convnet(nn.Tanh)
    f0, g = model[:cut], model[cut:]
    start = threat.start(x)
    before, after = literal_yopo(f0, g, x, y, start, threat, m, n)
    method = YOPO(model, threat, m=m, n=n, first_layer=str(cut - 1), grad_at=grad_at)
    out = method.backward(x, y, eta=start)
    torch.testing.assert_close(out.eta, after[-1], rtol=1e-11, atol=1e-12)
    etas = {"after": after, "before": before, "last": after[-1:]}[grad_at]
    assert_same(grads(model), mean_gradient(model, x, y, etas), tol=1e-10)
    losses = [F.cross_entropy(model(x + eta), y) for eta in etas]
    torch.testing.assert_close(out.loss, torch.stack(losses).mean().detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(out.logits, model(x + etas[-1]).detach(), rtol=1e-10, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Sequential, Tensor, Tensor, Linf, int, int]:
    torch.manual_seed(draw(st.integers(0, 10**6)))
    channels, filters, size = draw(st.sampled_from([(1, 3, 6), (3, 4, 5), (2, 1, 7)]))
    model = nn.Sequential(
        nn.Conv2d(channels, filters, 3, padding=draw(st.integers(0, 1))),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    x = torch.rand(3, channels, size, size).round(decimals=draw(st.integers(0, 3)))  # 0: corners
    model(x)
    eps = draw(st.floats(1e-3, 1.0))
    threat = Linf(eps, draw(st.floats(1e-3, 1.0)))
    return (
        model,
        x,
        torch.randint(4, (3,)),
        threat,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 12)),
    )


@given(cases())
@settings(max_examples=60)
def test_affine_closed_form_equals_n_explicit_steps(
    case: tuple[nn.Sequential, Tensor, Tensor, Linf, int, int],
) -> None:
    model, x, y, threat, m, n = case
    method = YOPO(model, threat, m=m, n=n, first_layer="0")
    assert method.split.cut(x).affine
    start = threat.start(x)
    _, explicit = literal_yopo(model[:1], model[1:], x, y, start, threat, m, n)
    out = method.backward(x, y, eta=start)
    torch.testing.assert_close(out.eta, explicit[-1], rtol=0, atol=1e-13)


def test_the_same_comparison_fails_for_a_tanh_prefix(batch: Batch) -> None:
    """One long step along the first gradient is *not* n steps when f0 bends."""
    x, y = batch
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(180, 4))
    with torch.no_grad():
        next(model.parameters()).mul_(8)
    threat = Linf(0.3, 0.05)
    start = threat.start(x)
    _, explicit = literal_yopo(model[:2], model[2:], x, y, start, threat, m=1, n=5)
    collapsed = YOPO(model, threat, m=1, n=5, first_layer="0").backward(x, y, eta=start).eta
    real = YOPO(model, threat, m=1, n=5, first_layer="1").backward(x, y, eta=start).eta
    torch.testing.assert_close(real, explicit[-1], rtol=0, atol=1e-13)
    assert (collapsed - explicit[-1]).abs().max() > 0.05


@pytest.mark.parametrize("grad_at", GRAD_AT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("first_layer", [None, "2"], ids=["affine", "deep"])
def test_yopo_m_1_perturbs_as_pgd_m_bitwise(
    first_layer: str | None, dtype: torch.dtype, grad_at: GradAt, batch: Batch
) -> None:
    x, y = batch[0].to(dtype), batch[1]
    model = bn_convnet().to(dtype)
    threat = Linf(8 / 255)
    start = threat.start(x)
    for m in (1, 3, 7):
        yopo = YOPO(model, threat, m=m, n=1, first_layer=first_layer, grad_at=grad_at)
        pgd = PGD(model, threat, steps=m, attack_mode="train")
        ours = yopo.backward(x, y, eta=start).eta
        assert torch.equal(ours, pgd.backward(x, y, eta=start).eta)
        assert not torch.equal(ours, start)


@pytest.mark.parametrize("build", [bn_convnet, SharesModules, PatchTransformer])
def test_last_on_an_affine_f0_is_pgd_with_longer_steps(build: Build, batch: Batch) -> None:
    """YOPO-m-n with steps of α is PGD-m with steps of n·α, weight gradient and cost included."""
    x, y = batch
    model, start = build(), Linf(0.1).start(x)
    yopo = YOPO(model, Linf(0.1, 0.02), m=4, n=3, grad_at="last")
    ours = yopo.backward(x, y, eta=start)
    found = grads(model)
    model.zero_grad()
    theirs = PGD(model, Linf(0.1, 0.06), steps=4, attack_mode="train").backward(x, y, eta=start)
    torch.testing.assert_close(ours.eta, theirs.eta, rtol=0, atol=1e-13)
    assert_same(found, grads(model), tol=1e-10)
    assert ours.propagations == pytest.approx(theirs.propagations)


@pytest.mark.parametrize("build", [convnet, bn_convnet, SharesModules, PatchTransformer])
@pytest.mark.parametrize("m", [1, 4])
def test_before_with_n_0_at_eta_0_is_plain_backprop(build: Build, m: int, batch: Batch) -> None:
    x, y = batch
    model = build()
    F.cross_entropy(model(x), y).backward()
    plain = grads(model)
    model.zero_grad()
    YOPO(model, Linf(0.1), m=m, n=0, grad_at="before").backward(x, y, eta=torch.zeros_like(x))
    assert_same(grads(model), plain)


@pytest.mark.parametrize("grad_at", GRAD_AT)
def test_statistics_move_once_for_each_weight_gradient(grad_at: GradAt, batch: Batch) -> None:
    """BatchNorm in f0: inner and attack-only passes do not move its statistics."""
    x, y = batch
    model = bn_convnet()
    YOPO(model, Linf(0.1), m=3, n=5, first_layer="2", grad_at=grad_at).backward(x, y)
    moved = 1 if grad_at == "last" else 3
    assert int(model.state_dict()["1.num_batches_tracked"]) == moved
    assert int(model.state_dict()["4.num_batches_tracked"]) == moved


def test_batchnorm_in_f0_uses_batch_statistics_in_the_inner_loop(batch: Batch) -> None:
    x, y = batch
    model, threat = bn_convnet(), Linf(0.2, 0.05)
    start = threat.start(x)
    twin = copy.deepcopy(model)
    _, after = literal_yopo(twin[:3], twin[3:], x, y, start, threat, m=2, n=4)
    out = YOPO(model, threat, m=2, n=4, first_layer="2").backward(x, y, eta=start)
    torch.testing.assert_close(out.eta, after[-1], rtol=0, atol=1e-12)


MODELS: list[tuple[Build, tuple[int, ...], str | None]] = [
    (convnet, (3, 8, 8), None),
    (PatchTransformer, (3, 8, 8), None),
    (PatchTransformer, (3, 8, 8), "encoder.layers.0"),
    (NormalisesInForward, (3, 8, 8), None),
    (SharesModules, (3, 8, 8), None),
    (mlp, (192,), None),
    (mlp, (192,), "1"),
    (signal_net, (3, 20), None),
    (lambda: nn.Sequential(Normalize(0.5, 0.25), signal_net()), (3, 20), "1.1"),
    (lambda: preactresnet18(4, width=4, blocks=(1, 1)), (3, 8, 8), None),
    (lambda: preactresnet18(4, width=4, blocks=(1, 1), final_bn=False), (3, 8, 8), "layer1"),
    (lambda: SmallCNN(4, width=8, size=16, dropout=0.1), (1, 16, 16), "conv1"),
    (lambda: SmallCNN(4, width=8, size=16, dropout=0.1), (1, 16, 16), "relu1"),
]


@pytest.mark.parametrize("grad_at", GRAD_AT)
@pytest.mark.parametrize(("build", "shape", "first_layer"), MODELS)
def test_five_lines_train_any_model(
    build: Build,
    shape: tuple[int, ...],
    first_layer: str | None,
    grad_at: GradAt,
) -> None:
    """It learns to classify a few images under attack, sooner or later: when, a seed decides.

    In float64, where machines do not differ in that. Of 12 seeds the slowest took 106 steps.
    """
    y = torch.arange(8) % 4
    x = 0.8 * torch.rand(4, *shape)[y] + 0.2 * torch.rand(8, *shape)
    model = build()
    method = YOPO(model, Linf(0.02), m=2, n=2, first_layer=first_layer, grad_at=grad_at)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses: list[float] = []
    while len(losses) < 10 or sum(losses[-5:]) >= 0.6 * sum(losses[:5]):
        assert len(losses) < 300
        out = method.backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(out.loss))
        assert out.eta.abs().max() <= 0.02


def test_randomness_comes_from_the_generator(batch: Batch) -> None:
    x, y = batch
    model = convnet()

    def eta(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return YOPO(model, Linf(0.1), m=1, n=0, generator=generator).backward(x, y).eta

    state = torch.get_rng_state()
    assert torch.equal(eta(1), eta(1))
    assert not torch.equal(eta(1), eta(2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"m": 0}, "m to be a whole number of at least 1"),
        ({"m": 2.5}, "m to be a whole number"),
        ({"n": -1}, "n to be a whole number of at least 0"),
        ({"grad_at": "later"}, "'after' or 'before' or 'last'"),
    ],
)
def test_bad_options_name_the_fix(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YOPO(convnet(), Linf(0.1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("grad_at", GRAD_AT)
@pytest.mark.parametrize("first_layer", [None, "1"])
def test_modules_are_listed_once_a_step_whatever_m_is(
    grad_at: GradAt, first_layer: str | None, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in each propagation: a network of hundreds of small modules would wait for that."""
    real = nn.Module.named_modules
    walks = 0

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        nonlocal walks
        walks += self is model  # what it calls for its own children is the same walk
        return real(self, *args, **options)

    found = {}
    for m in (2, 6):
        model = convnet()
        method = YOPO(model, Linf(0.1), m=m, n=2, grad_at=grad_at, first_layer=first_layer)
        method.backward(*batch)  # studies the network
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", counted)
            walks = 0
            method.backward(*batch)
        found[m] = walks
    assert found[2] == found[6] > 0
