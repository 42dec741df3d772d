"""Every other method against a literal transcription, and what holds for all of them."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost import peak_bytes
from tests.conftest import Batch, assert_same, bn_convnet, convnet, grads
from yopo import (
    L2,
    NFGSM,
    PGD,
    PMP,
    TRADES,
    TRADESYOPO,
    YOPO,
    AdversarialMethod,
    Fast,
    Free,
    Linf,
    Method,
    Natural,
    Threat,
    evaluate,
)
from yopo.models import preactresnet18

THREAT = Linf(0.1, 0.03)

Make = Callable[[nn.Module], Method]
METHODS: dict[str, Make] = {
    "natural": Natural,
    "pgd": lambda net: PGD(net, THREAT, steps=4),
    "free": lambda net: Free(net, THREAT, m=3, optimizer=torch.optim.SGD(net.parameters(), 0.0)),
    "fast": lambda net: Fast(net, THREAT),
    "nfgsm": lambda net: NFGSM(net, THREAT),
    "trades": lambda net: TRADES(net, THREAT, steps=4),
    "yopo after": lambda net: YOPO(net, THREAT, m=3, n=2),
    "yopo before": lambda net: YOPO(net, THREAT, m=3, n=2, grad_at="before"),
    "yopo last": lambda net: YOPO(net, THREAT, m=3, n=2, grad_at="last"),
    "yopo deep": lambda net: YOPO(net, THREAT, m=3, n=2, first_layer="1"),
    "pmp": lambda net: PMP(net, THREAT, m=3),
    "pmp deep": lambda net: PMP(net, THREAT, m=3, adversary="gradient", n=2, layers=["1"]),
    "pmp algorithm1": lambda net: PMP(net, THREAT, m=3, weights_at="algorithm1"),
    "pmp argmax": lambda net: PMP(net, THREAT, m=2, weights="argmax", steps=2),
    "trades-yopo": lambda net: TRADESYOPO(net, THREAT, m=3, n=2),
    "trades-yopo deep": lambda net: TRADESYOPO(net, THREAT, m=3, n=2, first_layer="1"),
}
every_method = pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())


def ascent(loss: Tensor, eta: Tensor, x: Tensor, eps: float, step: float) -> Tensor:
    """One literal L∞ step: sign, clip to the ball, clip to the box."""
    (grad,) = torch.autograd.grad(loss, eta)
    stepped = (eta + step * grad.sign()).clamp(-eps, eps)
    return ((x + stepped).clamp(0, 1) - x).detach()


def literal_grads(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_pgd_is_its_transcription(mode: str, batch: Batch) -> None:
    x, y = batch
    model = bn_convnet()
    model(x)  # running statistics that differ from the batch's
    twin = copy.deepcopy(model)
    start = eta = THREAT.start(x)
    twin.train(mode == "train")
    for _ in range(5):
        eta = eta.detach().requires_grad_()
        eta = ascent(F.cross_entropy(twin(x + eta), y), eta, x, 0.1, 0.03)
    twin.train()
    expected = literal_grads(twin, F.cross_entropy(twin(x + eta), y))

    out = PGD(model, THREAT, steps=5, attack_mode=mode).backward(x, y, eta=start)  # type: ignore[arg-type]
    torch.testing.assert_close(out.eta, eta, rtol=0, atol=1e-14)
    assert_same(grads(model), expected)


def literal_free(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[Batch],
    m: int,
    eps: float,
) -> Tensor:
    """Free-m with one global perturbation, the optimizer stepped in every replay."""
    noise = torch.zeros_like(batches[0][0])
    for x, y in batches:
        delta = noise[: len(x)]
        delta = (x + delta).clamp(0, 1) - x
        for _ in range(m):
            delta = delta.detach().requires_grad_()
            optimizer.zero_grad()
            F.cross_entropy(model(x + delta), y).backward()
            assert delta.grad is not None
            optimizer.step()
            delta = (delta + eps * delta.grad.sign()).clamp(-eps, eps)
            delta = (x + delta).clamp(0, 1) - x
        noise = torch.cat([delta.detach(), torch.zeros_like(noise[len(x) :])])
    return noise


def test_free_is_its_transcription_over_batches_with_optimizer_state() -> None:
    model = bn_convnet()
    twin = copy.deepcopy(model)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    batches = [(torch.rand(size, 3, 8, 8), torch.randint(4, (size,))) for size in (6, 6, 4)]

    theirs = sgd(twin.parameters())
    noise = literal_free(twin, theirs, batches, m=4, eps=0.1)

    ours = sgd(model.parameters())
    method = Free(model, Linf(0.1), m=4, optimizer=ours)
    for x, y in batches:
        out = method.backward(x, y)
        ours.step()
        ours.zero_grad()
    torch.testing.assert_close(out.eta, noise[:4], rtol=0, atol=1e-12)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()), tol=1e-11)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            ours.state[a]["momentum_buffer"], theirs.state[b]["momentum_buffer"]
        )


def test_free_goes_on_after_a_larger_batch() -> None:
    model = convnet()
    method = Free(model, Linf(0.1), m=2, optimizer=torch.optim.SGD(model.parameters(), 0.01))
    for size in (2, 5):
        method.backward(torch.rand(size, 3, 8, 8), torch.randint(4, (size,)))
    assert method.eta is not None
    assert len(method.eta) == 5


def test_free_leaves_the_last_gradient_of_what_its_optimizer_does_not_have(batch: Batch) -> None:
    model = convnet()
    head = torch.optim.SGD(model[-1].parameters(), lr=0.0)  # so that all replays are alike
    x, y = batch
    out = Free(model, Linf(0.1), m=3, optimizer=head).backward(x, y, torch.zeros_like(x))
    found = grads(model)
    before = Free(model, Linf(0.1), m=2, optimizer=head)
    model.zero_grad()
    eta = before.backward(x, y, torch.zeros_like(x)).eta
    model.zero_grad()
    loss = F.cross_entropy(model(x + eta), y)
    loss.backward()
    torch.testing.assert_close(out.loss, loss.detach())
    assert_same(found, grads(model), tol=1e-12)


def literal_kl(clean: Tensor, adversarial: Tensor) -> Tensor:
    p, q = clean.softmax(1), adversarial.softmax(1)
    return (p * (p.log() - q.log())).sum() / len(clean)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_trades_is_its_transcription(mode: str, batch: Batch) -> None:
    x, y = batch
    model = bn_convnet()
    model(x)
    twin = copy.deepcopy(model)
    start = eta = THREAT.start(x)
    twin.train(mode == "train")
    for _ in range(4):
        eta = eta.detach().requires_grad_()
        eta = ascent(literal_kl(twin(x).detach(), twin(x + eta)), eta, x, 0.1, 0.03)
    twin.train()
    clean = twin(x)
    total = F.cross_entropy(clean, y) + 3 * literal_kl(clean, twin(x + eta))
    expected = literal_grads(twin, total)

    method = TRADES(model, THREAT, steps=4, beta=3, attack_mode=mode)  # type: ignore[arg-type]
    out = method.backward(x, y, eta=start)
    torch.testing.assert_close(out.eta, eta, rtol=0, atol=1e-14)
    torch.testing.assert_close(out.loss, total.detach())
    assert_same(grads(model), expected, tol=1e-11)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("cut", [1, 2, 3], ids=["conv", "conv+bn", "conv+bn+relu"])
def test_trades_yopo_is_algorithm_2(cut: int, mode: str, batch: Batch) -> None:
    x, y = batch
    model = bn_convnet()
    model(x)
    twin = copy.deepcopy(model)
    f0, g = twin[:cut], twin[cut:]
    start = eta = THREAT.start(x)
    twin.train(mode == "train")
    for _ in range(3):  # j
        z = f0(x + eta).detach().requires_grad_()
        (p,) = torch.autograd.grad(literal_kl(g(f0(x)).detach(), g(z)), z)
        for _ in range(4):  # s
            eta = eta.detach().requires_grad_()
            eta = ascent((p * f0(x + eta)).sum(), eta, x, 0.1, 0.03)
    twin.train()
    clean = twin(x)
    total = F.cross_entropy(clean, y) + 2 * literal_kl(clean, twin(x + eta))
    expected = literal_grads(twin, total)

    name = str(cut - 1)
    method = TRADESYOPO(model, THREAT, m=3, n=4, beta=2, first_layer=name, attack_mode=mode)  # type: ignore[arg-type]
    out = method.backward(x, y, eta=start)
    torch.testing.assert_close(out.eta, eta, rtol=0, atol=1e-13)
    assert_same(grads(model), expected, tol=1e-11)


def test_fast_is_its_transcription(batch: Batch) -> None:
    x, y = batch
    model = convnet()
    start = THREAT.start(x)
    eta = start.clone().requires_grad_()
    eta = ascent(F.cross_entropy(model(x + eta), y), eta, x, 0.1, 0.125)
    expected = literal_grads(model, F.cross_entropy(model(x + eta), y))
    out = Fast(model, THREAT).backward(x, y, eta=start)
    torch.testing.assert_close(out.eta, eta, rtol=0, atol=1e-14)
    assert_same(grads(model), expected)


def test_nfgsm_is_its_transcription_and_may_leave_the_ball(batch: Batch) -> None:
    x, y = batch
    model = convnet()
    noise = torch.empty_like(x).uniform_(-0.2, 0.2)
    noise = (x + noise).clamp(0, 1) - x
    leaf = noise.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(x + leaf), y), leaf)
    eta = (x + noise + 0.1 * grad.sign()).clamp(0, 1) - x
    expected = literal_grads(model, F.cross_entropy(model(x + eta), y))
    out = NFGSM(model, THREAT).backward(x, y, eta=noise)
    torch.testing.assert_close(out.eta, eta, rtol=0, atol=1e-14)
    assert_same(grads(model), expected)
    assert out.eta.abs().max() > THREAT.eps
    free_start = NFGSM(model, THREAT).backward(x, y).eta
    assert 0.2 < free_start.abs().max() <= 0.3


@pytest.mark.parametrize("threat", [Linf(0.1), L2(0.7)])
def test_l2_works_in_every_method(threat: Threat, batch: Batch) -> None:
    x, y = batch
    model = convnet()
    sgd = torch.optim.SGD(model.parameters(), 0.01)
    methods: list[Method] = [
        PGD(model, threat, steps=3),
        Free(model, threat, m=2, optimizer=sgd),
        Fast(model, threat),
        TRADES(model, threat, steps=2),
        YOPO(model, threat, m=2, n=2),
        TRADESYOPO(model, threat, m=2, n=2),
    ]
    for method in methods:
        eta = method.backward(x, y).eta
        torch.testing.assert_close(threat.project(eta, x), eta, rtol=1e-12, atol=1e-12)
        assert eta.abs().max() > 0


# ---------------------------------------------------------------- what holds for all


@every_method
def test_gradients_accumulate_as_backward_does(make: Make, batch: Batch) -> None:
    x, y = batch
    model = convnet()
    method = make(model)
    eta = None if isinstance(method, Natural) else torch.zeros_like(x) + 0.01
    torch.manual_seed(1)
    method.backward(x, y, eta)
    once = grads(model)
    kept = [p.grad for p in model.parameters()]
    torch.manual_seed(1)
    method.backward(x, y, eta)
    assert_same(grads(model), {k: 2 * v for k, v in once.items()})
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))  # in place


class WeightGradients(TorchDispatchMode):
    """Counts backward passes of convolutions, and those that make a weight gradient."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.convolutions = 0
        self.with_weights = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.convolutions += 1
            self.with_weights += bool(args[-1][1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "passes", "with_weights"),
    [
        ("natural", 1, 1),
        ("pgd", 5, 1),
        ("free", 3, 3),
        ("fast", 2, 1),
        ("nfgsm", 2, 1),
        ("trades", 6, 2),
        ("yopo after", 4, 3),
        ("yopo before", 3, 3),
        ("trades-yopo", 5, 2),
        ("pmp", 4, 3),
    ],
)
def test_attack_only_passes_compute_no_weight_gradients(
    name: str, passes: int, with_weights: int, batch: Batch
) -> None:
    model = convnet()
    method = METHODS[name](model)
    method.backward(*batch)  # the first one also studies the network
    with WeightGradients() as seen:
        method.backward(*batch)
    assert seen.convolutions == 2 * passes  # two convolutions in the network
    assert seen.with_weights == 2 * with_weights


@pytest.mark.parametrize("name", METHODS)
def test_propagations_are_what_the_passes_cost(name: str) -> None:
    """Against counted floating-point operations, in units of a natural step."""
    x, y = torch.rand(4, 3, 16, 16), torch.arange(4)
    whole = preactresnet18(4, width=16, blocks=(1, 1, 1))
    stages = [whole.get_submodule(f"layer{i}") for i in (1, 2, 3)]
    net = nn.Sequential(whole.conv1, nn.Identity(), *stages, Head(whole))

    def counted(method: Method) -> tuple[int, float]:
        method.backward(x, y)
        with FlopCounterMode(display=False) as counter:
            out = method.backward(x, y)  # a search takes as long as its start asks for
        return int(counter.get_total_flops()), out.propagations

    unit, _ = counted(Natural(net))
    flops, spent = counted(METHODS[name](net))
    assert flops / unit == pytest.approx(spent, rel=0.05)


class Head(nn.Module):
    """The end of a PreActResNet."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.bn, self.linear = net.get_submodule("bn"), net.get_submodule("linear")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.bn(x).relu().mean((2, 3)))  # type: ignore[no-any-return]


@every_method
def test_losses_and_targets_of_the_users_own(make: Make, batch: Batch) -> None:
    """Label smoothing as a loss equals smoothed soft targets; int32 labels work."""
    x, y = batch
    smooth = F.one_hot(y, 4) * 0.9 + 0.1 / 4
    results = []
    for loss, target in (
        (nn.CrossEntropyLoss(label_smoothing=0.1), y),
        (nn.CrossEntropyLoss(label_smoothing=0.1), y.int()),
        (F.cross_entropy, smooth),
        (lambda z, t: -(t * z.log_softmax(1)).sum(1).mean(), smooth),
    ):
        torch.manual_seed(0)
        model = convnet()
        method = make(model)
        method.loss = loss
        torch.manual_seed(1)
        out = method.backward(x, target)
        results.append(grads(model) | {"loss": out.loss})
    for other in results[1:]:
        assert_same(other, results[0])
    torch.manual_seed(0)
    model = convnet()
    torch.manual_seed(1)
    make(model).backward(x, y)
    assert not torch.allclose(grads(model)["0.weight"], results[0]["0.weight"])  # it matters


@pytest.mark.parametrize(
    "build",
    [
        lambda net, loss: Natural(net, loss=loss),
        lambda net, loss: PGD(net, THREAT, loss=loss),
        lambda net, loss: Fast(net, THREAT, loss=loss),
        lambda net, loss: NFGSM(net, THREAT, loss=loss),
        lambda net, loss: TRADES(net, THREAT, loss=loss),
        lambda net, loss: YOPO(net, THREAT, loss=loss),
        lambda net, loss: TRADESYOPO(net, THREAT, loss=loss),
        lambda net, loss: PMP(net, THREAT, loss=loss),
        lambda net, loss: Free(
            net, THREAT, loss=loss, optimizer=torch.optim.SGD(net.parameters(), 0.1)
        ),
    ],
)
def test_loss_is_an_argument_and_must_be_a_number(
    build: Callable[[nn.Module, Callable[[Tensor, Tensor], Tensor]], Method], batch: Batch
) -> None:
    method = build(convnet(), nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="take the mean over the batch"):
        method.backward(*batch)


def test_losses_that_lead_nowhere(batch: Batch) -> None:
    with pytest.raises(ValueError, match="the loss does not depend on the model's output"):
        PGD(convnet(), THREAT, loss=lambda z, _: z.detach().sum()).backward(*batch)
    with pytest.raises(TypeError, match="loss as a tensor of one number, got float"):
        PGD(convnet(), THREAT, loss=lambda z, _: z.sum().item()).backward(*batch)  # type: ignore


def test_a_loss_of_ones_own_may_ignore_labels(batch: Batch) -> None:
    x, y = batch
    model = convnet()
    YOPO(model, THREAT, loss=nn.CrossEntropyLoss(ignore_index=-1)).backward(x, y - 1)
    assert grads(model)


@pytest.mark.parametrize("name", ["pgd", "free", "fast", "nfgsm", "yopo after", "trades", "pmp"])
def test_the_threat_can_be_changed_between_batches(name: str, batch: Batch) -> None:
    """As a schedule for eps does."""
    method = METHODS[name](convnet())
    assert isinstance(method, AdversarialMethod)
    method.threat = Linf(0.01)
    largest = {"nfgsm": 0.03}.get(name, 0.01)
    assert method.backward(*batch).eta.abs().max() <= largest


class Remembers(nn.Module):
    """Keeps a number of its last pass, as layers with a balancing loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet(nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        self.aux = logits.square().mean()
        return logits


@pytest.mark.parametrize("kind", [TRADES, TRADESYOPO])
def test_trades_loss_reads_what_the_clean_pass_left(kind: Any, batch: Batch) -> None:
    x, y = batch
    model = Remembers()
    method = kind(model, THREAT, beta=2.0, loss=lambda z, t: F.cross_entropy(z, t) + model.aux)
    eta = method.backward(x, y).eta
    found = grads(model)
    model.zero_grad()
    clean, moved = model.net(x), model.net(x + eta)
    kl = F.kl_div(moved.log_softmax(1), clean.log_softmax(1), log_target=True, reduction="sum")
    (F.cross_entropy(clean, y) + clean.square().mean() + 2 * kl / len(x)).backward()
    assert_same(found, grads(model))


def test_a_model_that_returns_more_than_logits_in_training_is_refused(batch: Batch) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet()

        def forward(self, x: Tensor) -> object:
            return (self.net(x), None) if self.training else self.net(x)

    for method in (Natural(Auxiliary()), YOPO(Auxiliary(), THREAT)):
        with pytest.raises(ValueError, match="expected logits"):
            method.backward(*batch)


def test_one_output_with_a_binary_loss(batch: Batch) -> None:
    x, _ = batch
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 1))
    method = YOPO(
        model,
        THREAT,
        loss=lambda z, t: F.binary_cross_entropy_with_logits(z[:, 0], t.to(z)),
    )
    method.backward(x, torch.arange(6) % 2)
    assert grads(model).keys() == {"1.weight", "1.bias"}
    for kind in (TRADES, TRADESYOPO):  # whose KL between two softmaxes would be 0
        with pytest.raises(ValueError, match=f"{kind.__name__} compares .* model with one output"):
            kind(model, THREAT, loss=method.loss).backward(x, torch.arange(6) % 2)


@pytest.mark.parametrize("y", [torch.zeros(6, dtype=torch.long), torch.arange(6.0)[:, None] % 2])
def test_one_output_has_no_cross_entropy(y: Tensor, batch: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 1))
    with pytest.raises(
        ValueError, match=r"got one output z; .*cat.*zeros_like.* or train .* loss="
    ):
        YOPO(model, THREAT).backward(batch[0], y)  # it would be 0, and so would its gradient
    if y.dtype == torch.long:
        with pytest.raises(ValueError, match="got one output z"):
            evaluate(model, (batch[0], y), THREAT)  # each class would be the first


class Replays(nn.Conv2d):
    """A first layer that remembers the images of one run, and sees them in another."""

    def __init__(self) -> None:
        super().__init__(3, 5, 3, padding=1)
        self.kept: list[Tensor] | None = None
        self.shown: Iterator[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            self.kept.append(x.detach().clone())
        if self.shown is not None:
            x = x + (next(self.shown) - x).detach()
        return super().forward(x)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.usefixtures("float32")
def test_works_under_no_grad_and_in_bf16_autocast(name: str, batch: Batch) -> None:
    """Gradients in bfloat16 are those in float32, at the same images, up to their rounding.

    The signs of an attack's steps flip where gradients are near 0, so the second run is shown the
    images of the first. Then each of 3 layers rounds its input, its weight and its output by 2⁻⁸
    at most, on both ways; tanh because rounding would switch some ReLUs. argmax moves the weights
    by its 2 steps from one gradient to the next.
    """
    x, y = batch[0].float(), batch[1]
    first, model = Replays(), convnet(nn.Tanh)
    model[0] = first

    def run(cast: bool) -> Tensor:
        method = METHODS[name](model)
        kept, shown, first.kept, first.shown = first.kept, first.shown, None, None
        method.backward(x, y)  # the first one also studies the network
        first.kept, first.shown = kept, shown
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast), torch.no_grad():
            assert method.backward(x, y).eta.dtype == torch.float32
        found = torch.cat([g.flatten() for g in grads(model).values()])
        assert found.dtype == torch.float32
        return found

    images: list[Tensor] = []
    first.kept = images
    rough = run(cast=True)
    first.kept, first.shown = None, iter(images)
    exact = run(cast=False)
    assert next(first.shown, None) is None  # all were seen again
    passes = 3 if name == "pmp argmax" else 1
    assert 0 < (rough - exact).norm() <= passes * 3 * 3 * 2 * 2**-8 * exact.norm()


@pytest.mark.parametrize(
    ("few", "many"),
    [
        (lambda net: PGD(net, THREAT, steps=2), lambda net: PGD(net, THREAT, steps=20)),
        (
            lambda net: YOPO(net, THREAT, m=2, n=4, first_layer="1"),
            lambda net: YOPO(net, THREAT, m=5, n=12, first_layer="1"),
        ),
        (
            lambda net: PMP(net, THREAT, m=2, adversary="gradient", n=4, layers=["1"]),
            lambda net: PMP(net, THREAT, m=5, adversary="gradient", n=12, layers=["1"]),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11
def test_memory_does_not_grow_with_steps_under_autocast(few: Make, many: Make) -> None:
    """autocast keeps casts of leaf tensors until it ends; the images must not be among them."""
    x, y = torch.rand(16, 3, 16, 16).float(), torch.arange(16) % 4
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(14), nn.Flatten(), nn.Linear(4, 4)
    ).float()

    def peak(make: Make) -> int:
        method = make(model)

        def run() -> None:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                method.backward(x, y)

        return peak_bytes(run)

    assert peak(many) <= 1.05 * peak(few)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda net: PGD(net, THREAT, steps=0), "steps to be a whole number of at least 1"),
        (lambda net: TRADES(net, THREAT, steps=0), "steps to be"),
        (lambda net: TRADES(net, THREAT, beta=-1), "beta >= 0"),
        (lambda net: TRADESYOPO(net, THREAT, m=0), "m to be"),
        (lambda net: TRADESYOPO(net, THREAT, n=-1), "n to be"),
        (
            lambda net: Free(net, THREAT, m=0, optimizer=torch.optim.SGD(net.parameters())),
            "m to be",
        ),
        (lambda net: Fast(net, THREAT, step=0), "step > 0"),
        (lambda net: NFGSM(net, THREAT, step=-1), "step > 0"),
        (lambda net: NFGSM(net, THREAT, noise=0), r"noise > 0.*without it"),
        (
            lambda net: PGD(net, THREAT, attack_mode="test"),  # type: ignore[arg-type]
            "'eval' or 'train'",
        ),
    ],
)
def test_bad_options_name_the_fix(build: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(convnet())
