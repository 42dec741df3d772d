"""What users' own networks, threats and loops do that ours do not."""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import yopo
from tests.conftest import Batch, TwoTowers, assert_same, bn_convnet, convnet, grads
from tests.core.test_first_layer import small_resnet
from tests.methods.test_yopo import GRAD_AT
from tests.tiny import Silent, tiny_config, tiny_data
from yopo import (
    EMA,
    L2,
    NFGSM,
    PGD,
    PMP,
    TRADES,
    YOPO,
    Engine,
    Free,
    Linf,
    Natural,
    Normalize,
    attacks,
)
from yopo.evaluation.suite import starts
from yopo.runs.progress import StopRequested
from yopo.runs.trainer import Trainer

METHODS: dict[str, Callable[[nn.Module], yopo.Method]] = {
    "natural": Natural,
    "pgd": lambda net: PGD(net, Linf(0.1), steps=2),
    "yopo": lambda net: YOPO(net, Linf(0.1), m=2, n=2),
    "yopo deep": lambda net: YOPO(net, Linf(0.1), m=2, n=2, first_layer="1"),
}


def sgd(net: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr)


# ---------------------------------------------------------------- networks


@pytest.mark.parametrize("name", METHODS)
def test_cached_parametrizations_get_their_gradients(name: str, batch: Batch) -> None:
    net = convnet()
    weight_norm(net[0])
    twin = copy.deepcopy(net)
    torch.manual_seed(1)
    METHODS[name](net).backward(*batch)
    torch.manual_seed(1)
    with parametrize.cached():
        METHODS[name](twin).backward(*batch)
        assert parametrize._cache_enabled
    assert_same(grads(net), grads(twin))
    assert grads(net)["0.parametrizations.weight.original1"].norm() > 0


@pytest.mark.parametrize("attack", [attacks.pgd, attacks.cw])
def test_an_attack_leaves_no_frozen_weights_in_a_cache(attack: Any, batch: Batch) -> None:
    x, y = batch
    net = convnet()
    weight_norm(net[0])
    with parametrize.cached():
        F.cross_entropy(net(attack(net, x, y, Linf(0.1), steps=2)), y).backward()
    assert grads(net)["0.parametrizations.weight.original1"].norm() > 0


@pytest.mark.filterwarnings("ignore")  # of torch's own making, when it compiles
@pytest.mark.parametrize("name", [*METHODS, "pmp"])
@pytest.mark.parametrize("how", ["module", "forward"])
def test_a_network_may_be_compiled_in_place(name: str, how: str, batch: Batch) -> None:
    plain, ours = small_resnet(), small_resnet()
    ours.load_state_dict(plain.state_dict())
    if how == "module":
        ours.compile(backend="aot_eager")
    else:
        ours.forward = torch.compile(ours.forward, backend="aot_eager")
    NFGSM(ours, Linf(0.1)).backward(*batch)  # a pass without our hooks comes first
    ours.zero_grad()
    ours.load_state_dict(plain.state_dict())
    outs = []
    for net in (plain, ours):
        torch.manual_seed(1)
        build: Any = METHODS.get(name) or (lambda net: PMP(net, Linf(0.1), m=2))
        if name == "yopo deep":
            build = partial(YOPO, threat=Linf(0.1), m=2, n=2, first_layer="layer1")
        outs.append(build(net).backward(*batch).eta)
    torch.testing.assert_close(*outs)
    assert_same(grads(plain), grads(ours))


@pytest.mark.filterwarnings("ignore")  # of torch's own making, when it compiles
@pytest.mark.parametrize("name", METHODS)
def test_a_part_of_the_network_may_be_compiled(name: str, batch: Batch) -> None:
    plain = nn.Sequential(Normalize([0.5] * 3, [0.25] * 3), convnet())
    part = copy.deepcopy(plain)
    part[1] = torch.compile(part[1], backend="eager")  # type: ignore[assignment]
    if name == "yopo deep":
        methods = [YOPO(plain, Linf(0.1), m=2, n=2, first_layer="1.1")]
        methods.append(YOPO(part, Linf(0.1), m=2, n=2, first_layer="1._orig_mod.1"))
    else:
        methods = [METHODS[name](net) for net in (plain, part)]  # type: ignore[misc]
    part(batch[0])  # compiled before it is studied
    outs = []
    for method in methods:
        torch.manual_seed(1)
        outs.append(method.backward(*batch))
    torch.testing.assert_close(outs[0].eta, outs[1].eta)
    ours = {k.replace("_orig_mod.", ""): v for k, v in grads(part).items()}
    assert_same(grads(plain), ours)


def test_a_layer_may_be_exchanged_between_steps(batch: Batch) -> None:
    class Squared(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    net = convnet()
    deep = YOPO(net, Linf(0.1), m=2, n=2, first_layer="1")
    method = YOPO(net, Linf(0.1), m=2, n=2)
    for each in (method, deep):
        each.backward(*batch)
    first = net[0]
    net[0] = Squared(first.in_channels, first.out_channels, 3, padding=first.padding)  # type: ignore[arg-type]
    net[1] = nn.GELU()
    for old, new in (
        (method, YOPO(net, Linf(0.1), m=2, n=2)),
        (deep, YOPO(net, Linf(0.1), m=2, n=2, first_layer="1")),
    ):
        outs = []
        for each in (old, new):
            torch.manual_seed(1)
            outs.append(each.backward(*batch).eta)
        assert torch.equal(*outs)
    last = net[-1]
    net[-1] = nn.Linear(last.in_features, 9)  # type: ignore[arg-type]
    method.backward(batch[0], torch.full_like(batch[1], 8))


class Numpy(nn.Module):
    """Leaves autograd on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(torch.from_numpy(x.detach().numpy()))
        return out


def test_a_network_that_leaves_autograd_is_warned_of(batch: Batch) -> None:
    model, x = Numpy(), batch[0]
    y = model(x).argmax(1)
    attacks = ["pgd-2", "cw-linf-2", "cw", "apgd-ce"]
    result = yopo.evaluate(model, (x, y), Linf(0.01), attacks)
    assert "zero-gradients" in [w.code for w in result.warnings]
    assert result.accuracy["pgd-2"] == 1
    free = Free(model, Linf(0.1), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for method in (PGD(model, Linf(0.1)), TRADES(model, Linf(0.1)), free):
        with pytest.raises(ValueError, match="does not depend on its input"):
            method.backward(x, y)
    for attack in (yopo.attacks.pgd, yopo.attacks.cw):
        with pytest.raises(ValueError, match="does not depend on its input"):
            attack(model, x, y, Linf(0.1))


class TwoInTraining(nn.Module):
    """Returns what an auxiliary head says too, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> Any:
        out = self.net(x)
        return (out, out) if self.training else out


def test_more_than_logits_is_refused_by_all(batch: Batch) -> None:
    net = TwoInTraining()
    threat = Linf(0.1)
    for method in (Natural(net), PGD(net, threat), TRADES(net, threat), YOPO(net, threat)):
        with pytest.raises(ValueError, match="wrap it so that it returns the logits alone"):
            method.backward(*batch)

    class Dict(TwoInTraining):
        def forward(self, x: Tensor) -> Any:
            return {"logits": self.net(x)}

    for attack in (attacks.pgd, attacks.cw):
        with pytest.raises(ValueError, match=r"expected logits .* got dict"):
            attack(Dict(), *batch, Linf(0.1))


def test_natural_training_leaves_the_images_alone(batch: Batch) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x.sub_(0.5))
            return out

    x = batch[0].clone()
    Natural(InPlace()).backward(x, batch[1])
    assert torch.equal(x, batch[0])


def test_cw_breaks_a_network_in_half_precision(batch: Batch) -> None:
    """Pixels without a gradient, and a loss of more than 65504, are no obstacle."""
    x = batch[0].to(torch.float16)
    crop = nn.ZeroPad2d(-1)
    net = nn.Sequential(crop, nn.Flatten(), nn.Linear(crop(x[:1]).numel(), 4)).half()
    y = net(x).argmax(1)
    found = attacks.cw(net, x, y, L2(3.0))
    assert found.dtype == torch.float16
    assert (net(found).argmax(1) != y).all()
    assert torch.equal((found - x)[:, :, 0], torch.zeros_like(x[:, :, 0]))


def test_inference_mode_is_refused(batch: Batch) -> None:
    for build in METHODS.values():
        with torch.inference_mode(), pytest.raises(ValueError, match=r"leave torch\.inference"):
            build(convnet()).backward(*batch)


def test_a_mean_for_each_channel_is_for_images() -> None:
    with pytest.raises(ValueError, match="give one number"):
        Normalize([0.5] * 3, [0.25] * 3)(torch.rand(3, 3, 8))
    assert Normalize(0.5, 0.25)(torch.rand(3, 3, 8)).shape == (3, 3, 8)


# ---------------------------------------------------------------- threats, targets, loops


@pytest.mark.parametrize("eps", [0.2, 0.4, 0.7])
def test_nfgsm_at_any_radius(eps: float, batch: Batch) -> None:
    """Against its own description: noise in 2·eps, a step of eps, the box."""
    x, y = batch
    net = convnet()
    torch.manual_seed(1)
    out = NFGSM(net, Linf(eps)).backward(x, y)
    torch.manual_seed(1)
    noise = (2 * eps * torch.empty_like(x).uniform_(-1, 1)).clamp(-x, 1 - x).requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(net(x + noise), y), noise)
    torch.testing.assert_close(out.eta, (noise.detach() + eps * grad.sign()).clamp(-x, 1 - x))
    with pytest.raises(TypeError, match=r"expected yopo\.Linf or yopo\.L2, got Mine"):
        NFGSM(net, Mine(0.1))  # type: ignore[arg-type]


def test_targets_of_the_wrong_kind_name_the_fix(batch: Batch) -> None:
    x, y = batch
    net = convnet()
    classes = net(x).shape[1]
    hot = F.one_hot(y, classes)
    for wrong, fix in (
        (hot, r"y\.argmax\(1\) for class indices, or y\.float\(\)"),
        (y[:, None], r"y\.squeeze\(1\)"),
        (y.double(), r"use y\.long\(\)"),
        (hot.double()[:, 1:], rf"soft targets \(B, {classes}\)"),
    ):
        with pytest.raises(ValueError, match=fix):
            Natural(net).backward(x, wrong)
    Natural(net).backward(x, hot.double())
    ignoring = partial(F.cross_entropy, ignore_index=255)
    Natural(net, loss=ignoring).backward(x, torch.cat([y[:-1], torch.tensor([255])]))
    with pytest.raises(ValueError, match="use x / 255"):
        Natural(net).backward(255 * x, y)


def test_numpys_numbers_count(batch: Batch) -> None:
    YOPO(convnet(), Linf(0.1), m=np.int64(2), n=np.int32(1)).backward(*batch)  # type: ignore[arg-type]


def test_free_wants_an_optimizer_of_the_same_network() -> None:
    with pytest.raises(ValueError, match="none of the model's parameters"):
        Free(convnet(), Linf(0.1), optimizer=sgd(convnet()))


@pytest.mark.parametrize("name", [*METHODS, "nfgsm"])
def test_a_scaler_may_scale_the_loss(name: str, batch: Batch) -> None:
    """As the README says; with a power of two every number is the same to the bit."""
    x, y = (t.float() if t.is_floating_point() else t for t in batch)
    make = (METHODS | {"nfgsm": lambda net: NFGSM(net, Linf(0.1))})[name]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    net = convnet().float()
    twin = copy.deepcopy(net)
    method, scaled = make(net), make(twin)
    scaled.loss = lambda z, y: scaler.scale(F.cross_entropy(z, y))
    optimizer, other = sgd(net), sgd(twin)
    start = Linf(0.1).start(x)
    for _ in range(2):
        eta = None if name == "natural" else start
        method.backward(x, y, eta)
        optimizer.step()
        optimizer.zero_grad()
        scaled.backward(x, y, eta)
        scaler.step(other)
        scaler.update()
        other.zero_grad()
    assert_same(dict(net.named_parameters()), dict(twin.named_parameters()))


def test_ema_follows_a_network_that_was_moved() -> None:
    net = convnet()
    ema = EMA(net, 0.5)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with torch.no_grad():
        next(net.parameters()).add_(1.0)
    for step in range(60):
        ema.update(step)
    assert_same(dict(ema.model.state_dict()), dict(net.state_dict()), tol=1e-9)


@pytest.mark.parametrize("weight", [0.5, torch.tensor(0.5)])
def test_ema_averages_what_has_an_average_and_copies_the_rest(weight: Any) -> None:
    net: Any = bn_convnet()
    net.register_parameter("spectrum", nn.Parameter(torch.randn(3, dtype=torch.complex128)))
    net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    net.register_buffer("count", torch.tensor(0))
    norm = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    ema, began = EMA(net, 0.5), copy.deepcopy(net)
    with torch.no_grad():
        for t in (*net.parameters(), norm.running_mean, norm.num_batches_tracked, net.count):
            t.add_(1)
        net.mask[0] = 3.0
    ema.move(weight)
    average, before = dict(ema.model.state_dict()), dict(began.state_dict())
    for key, value in net.state_dict().items():
        if key in ("mask", "count") or "num_batches" in key:
            assert torch.equal(average[key], value)
        else:
            torch.testing.assert_close(average[key], (before[key] + value) / 2)


# ---------------------------------------------------------------- the engine


def test_the_engine_wants_the_optimizer_that_free_steps() -> None:
    net = convnet()
    with pytest.raises(ValueError, match="the optimizer that Free was given"):
        Engine(Free(net, Linf(0.1), optimizer=sgd(net)), sgd(net))


def test_the_engine_wants_the_method_it_was_made_for(batch: Batch) -> None:
    def engine() -> tuple[Engine, YOPO]:
        net = convnet()
        method = YOPO(net, Linf(0.05), m=2, n=1)
        made = Engine(method, sgd(net), compile=False)
        made.step(*batch)
        return made, method

    made, method = engine()
    method.threat = Linf(0.1)
    with pytest.raises(ValueError, match=r"step\(\.\.\., part=\)"):
        made.step(*batch)
    made, method = engine()
    method.loss = partial(F.cross_entropy, label_smoothing=0.1)
    with pytest.raises(ValueError, match="make a new Engine"):
        made.step(*batch)
    made, method = engine()
    made.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ValueError, match="other parameter groups"):
        made.step(*batch)


def test_targets_of_another_kind_are_plain_steps(batch: Batch) -> None:
    x, y = batch
    net = convnet()
    twin, soft = copy.deepcopy(net), F.one_hot(y, net(x).shape[1]).double()
    engine, optimizer = Engine(Natural(net), sgd(net), compile=False), sgd(twin)
    for target in (y, soft, y):
        engine.step(x, target)
        Natural(twin).backward(x, target)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(dict(net.state_dict()), dict(twin.state_dict()))


def test_on_a_cpu_rates_stay_numbers(batch: Batch) -> None:
    net = convnet()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, foreach=True)
    Engine(Natural(net), optimizer, compile=False).step(*batch)
    assert optimizer.param_groups[0]["lr"] == 1e-3


# ---------------------------------------------------------------- evaluations that go on


class Mine:
    """A threat without a name for itself."""

    def __init__(self, eps: float) -> None:
        self.eps, self.step, self._as = eps, eps / 4, Linf(eps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_as"], name)


def test_threats_of_ones_own_are_told_apart(tmp_path: Path, batch: Batch) -> None:
    net, x = convnet(), batch[0]
    y = net(x).argmax(1)
    for eps in (0.001, 0.5):
        fresh = yopo.evaluate(net, (x, y), Mine(eps), "pgd-5").worst
        kept = yopo.evaluate(net, (x, y), Mine(eps), "pgd-5", state=tmp_path).worst
        assert kept == fresh == (1 if eps < 0.01 else kept)

    class Hidden(Mine):
        def __init__(self, eps: float) -> None:
            super().__init__(eps)
            self.secret = object()

    with pytest.raises(ValueError, match="give its class a __repr__"):
        yopo.evaluate(net, (x, y), Hidden(0.1), "pgd-5", state=tmp_path)


def test_another_forward_pass_is_another_network(tmp_path: Path, batch: Batch) -> None:
    class Rounded(nn.Module):
        def __init__(self, net: nn.Module, straight: bool) -> None:
            super().__init__()
            self.net, self.straight = net, straight

        def forward(self, x: Tensor) -> Tensor:
            rounded = (x * 255).round() / 255
            out: Tensor = self.net(x + (rounded - x).detach() if self.straight else rounded)
            return out

    net, x = convnet(), batch[0]
    y = net(x).argmax(1)

    def worst(straight: bool, eps: float, state: Path | None = None) -> float:
        model = Rounded(net, straight)
        return yopo.evaluate(model, (x, y), L2(eps), "pgd-5", checks=False, state=state).worst

    radii = (0.25 * 2**i for i in range(6))  # one at which it makes a difference
    eps = next(eps for eps in radii if worst(True, eps) < worst(False, eps))
    for straight in (False, True):
        assert worst(straight, eps, tmp_path) == worst(straight, eps)


# ---------------------------------------------------------------- training


class Restless(nn.Module):
    """Draws from Python's and NumPy's streams, and counts in a buffer that is not saved."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 0.01
        noise = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        out: Tensor = self.net(x * noise) * (1 + self.seen)
        return out


def test_everything_random_goes_on_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr("yopo.runs.learner.build_model", lambda *_: Restless())
    config = tiny_config({"method": {"first_layer": "net.1"}})

    def trainer(name: str) -> Trainer:
        return Trainer(config, tiny_data(), tmp_path / name, Silent(), torch.device("cpu"))

    whole = trainer("whole")
    whole.run()
    stopped = trainer("stopped")
    stopped.stop = True
    with pytest.raises(StopRequested):
        stopped.run()
    random.seed(5)
    again = trainer("stopped")
    again.resume()
    again.run()
    assert_same(
        dict(again.learner.model.state_dict()), dict(whole.learner.model.state_dict()), tol=0
    )


def test_a_network_that_cannot_be_diagnosed_is_trained_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr("yopo.runs.learner.build_model", lambda *_: TwoTowers(256))
    config = tiny_config({"method": {"first_layer": None}, "diagnose": {"every": 1}, "epochs": 1})
    watcher = Silent()
    run = Trainer(config, tiny_data(), tmp_path / "run", watcher, torch.device("cpu"))
    assert "last" in run.run()
    assert any("not diagnosed: no module inside this network" in text for text in watcher.said)


def test_a_state_that_cannot_be_saved_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Extra(Restless):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

    monkeypatch.setattr("yopo.runs.learner.build_model", lambda *_: Extra())
    with pytest.raises(ValueError, match="get_extra_state"):
        Trainer(tiny_config(), tiny_data(), tmp_path / "r", Silent(), torch.device("cpu"))


class Cached(nn.Module):
    """Keeps, in eval mode, what it computed from a weight, and drops it in train(True)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.kept: Tensor | None = None

    def train(self, mode: bool = True) -> "Cached":
        super().train(mode)
        if mode:
            self.kept = None
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1))
        if self.training:
            return out + self.shift
        if self.kept is None:
            self.kept = self.shift * 1
        return out + self.kept


def test_what_a_network_keeps_in_eval_mode_is_that_of_todays_weights(batch: Batch) -> None:
    net, x = Cached(), batch[0]
    y = torch.full((len(x),), 2)
    yopo.evaluate(net, (x, y), Linf(0.1), "clean", checks=False)
    attacks.pgd(net, x, y, Linf(0.1), steps=1)
    with torch.no_grad():
        net.shift[2] += 100
    assert yopo.evaluate(net, (x, y), Linf(0.1), "clean", checks=False).accuracy == {"clean": 1.0}
    assert net.training
    assert net.linear.training
    frozen = nn.Sequential(inner := Cached())
    inner.linear.eval()  # the user's own choice
    attacks.pgd(frozen, x, y, Linf(0.1), steps=1)
    assert [m.training for m in frozen.modules()] == [True, True, False]


class Merges(nn.Linear):
    """As LoRA does: in eval mode the weight holds the sum."""

    def __init__(self) -> None:
        super().__init__(192, 4)
        self.add, self.merged = nn.Parameter(torch.rand(4, 192)), False

    def train(self, mode: bool = True) -> "Merges":
        super().train(mode)
        if self.merged is mode:
            self.weight.data += -self.add.data if mode else self.add.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.merged else self.weight + self.add
        return F.linear(x.flatten(1), weight, self.bias)


class Unfrozen(nn.Sequential):
    """Its train() freezes the first layer, as code for fine-tuning does."""

    def train(self, mode: bool = True) -> "Unfrozen":
        super().train(mode)
        self[0].requires_grad_(False)
        return self


def calls(net: nn.Module, batch: Batch) -> dict[str, Callable[[], object]]:
    """Of all kinds."""
    threat = Linf(0.1)
    return {
        "natural": lambda: Natural(net).backward(*batch),
        "pgd": lambda: PGD(net, threat, steps=2).backward(*batch),
        "yopo": lambda: YOPO(net, threat, m=2, n=2).backward(*batch),
        "attack": lambda: attacks.pgd(net, *batch, threat, steps=1),
        "evaluate": lambda: yopo.evaluate(net, batch, threat, "pgd-2", checks=False),
    }


@pytest.mark.parametrize("name", ["natural", "pgd", "yopo", "attack", "evaluate"])
def test_a_train_of_its_own_freezes_nothing_for_good(name: str, batch: Batch) -> None:
    net = Unfrozen(*bn_convnet())
    net.requires_grad_(True)
    calls(net, batch)[name]()
    assert all(p.requires_grad for p in net.parameters())
    if name in ("natural", "pgd", "yopo"):
        assert all(p.grad is not None for p in net.parameters())


class Noisy(nn.Module):
    """Its noise goes by a flag of its own, which its train() sets."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.noisy = convnet(), True

    def train(self, mode: bool = True) -> "Noisy":
        super().train(mode)
        self.noisy = mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out + 100 * torch.randn_like(out) if self.noisy else out


def test_eval_mode_is_the_networks_own(batch: Batch) -> None:
    net = Noisy()
    y = net.net(batch[0]).argmax(1)
    found = yopo.evaluate(net, (batch[0], y), Linf(0.01), ["clean", "pgd-3"], checks=False)
    assert net.noisy
    net.eval()
    expected = yopo.evaluate(net, (batch[0], y), Linf(0.01), ["clean", "pgd-3"], checks=False)
    assert found.accuracy == expected.accuracy
    assert found.accuracy["clean"] == 1
    assert not net.noisy


class Training(Noisy):
    def train(self, training: bool = True) -> "Training":
        super().train(training)
        return self


class Unannotated(Noisy):
    def train(self, training=True):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        return super().train(training)


class PositionalOnly(Noisy):
    def train(self, flag: bool = True, /) -> "PositionalOnly":
        super().train(flag)
        return self


class Required(Noisy):
    def train(self, flag: "bool") -> "Required":  # type: ignore[override]
        super().train(flag)
        return self


class Passing(Noisy):
    def train(self, *args: Any, **kwargs: Any) -> "Passing":
        super().train(*args, **kwargs)
        return self


@pytest.mark.parametrize("kind", [Training, Unannotated, PositionalOnly, Required, Passing])
def test_the_networks_own_train_is_called_as_eval_calls_it(kind: type[Noisy], batch: Batch) -> None:
    net = kind()
    attacks.pgd(net, *batch, Linf(0.1), steps=1)
    seen: list[bool] = []
    net.net.register_forward_hook(lambda *_: seen.append(net.noisy))
    attacks.pgd(net, *batch, Linf(0.1), steps=1)
    assert seen
    assert not any(seen)
    assert net.noisy
    assert all(m.training for m in net.modules())


class KeywordOnly(Noisy):
    def train(self, *, mode: bool = True) -> "KeywordOnly":  # type: ignore[override]
        super().train(mode)
        return self


def test_a_train_that_eval_cannot_call_is_left_alone(batch: Batch) -> None:
    net = KeywordOnly()
    with pytest.raises(TypeError):
        net.eval()
    attacks.pgd(net, *batch, Linf(0.1), steps=1)
    assert net.noisy
    assert all(m.training for m in net.modules())


class Renormalised(nn.Module):
    """Reads the statistics of a BatchNorm inside it, which the pass before moved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.rest = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), convnet()[4:]
        self.last = nn.Linear(180, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        assert self.bn.running_mean is not None
        mean = self.bn.running_mean.clone()
        return self.last((self.bn(h) + mean[:, None, None]).tanh().flatten(1))  # type: ignore[no-any-return]


class Views(nn.Module):
    """One buffer is a part of another, which a pass in training mode moves."""

    stats: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 5, 3), nn.Linear(180, 4)
        self.register_buffer("stats", torch.zeros(2, 5))
        self.register_buffer("mean", self.stats[0])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv(x)
        if self.training:
            self.stats[0].mul_(0.5).add_(h.detach().mean((0, 2, 3)), alpha=0.5)
        return self.last((h - self.mean.clone()[:, None, None]).tanh().flatten(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", [Renormalised, Views])
@pytest.mark.parametrize("grad_at", GRAD_AT)
def test_each_attack_pass_begins_with_the_buffers_of_now(
    grad_at: Any, kind: type[nn.Module], copied: bool, batch: Batch
) -> None:
    """Against the paper's loop with a copy of the whole network for each attack pass."""
    net, threat = kind(), Linf(0.1, 0.05)
    net = copy.deepcopy(net) if copied else net  # views have no base then
    twin, (x, y), eta = copy.deepcopy(net), batch, torch.zeros_like(batch[0])
    out = YOPO(net, threat, m=3, n=1, grad_at=grad_at).backward(x, y, eta)
    scale = 1 if grad_at == "last" else 3
    for j in range(3):
        if grad_at == "before":
            at = (x + eta).requires_grad_()
            loss = F.cross_entropy(twin(at), y)
            direction = torch.autograd.grad(loss, at, retain_graph=True)[0]
            (loss / scale).backward()
        elif grad_at == "last" or j == 0:
            at = (x + eta).requires_grad_()
            loss = F.cross_entropy(copy.deepcopy(twin)(at), y)
            direction = torch.autograd.grad(loss, at)[0]
        eta = threat.project(eta + threat.step * direction.sign(), x)
        if grad_at == "after" or (grad_at == "last" and j == 2):
            at = (x + eta).requires_grad_()
            loss = F.cross_entropy(twin(at), y) / scale
            loss.backward()
            direction = at.grad if at.grad is not None else direction
    assert torch.equal(out.eta, eta)
    assert_same(grads(net), grads(twin), tol=1e-12)
    assert_same(dict(net.state_dict()), dict(twin.state_dict()), tol=1e-12)


class Tempered(nn.Module):
    """A loss with a parameter, which fails once."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.t, self.fails = nn.Parameter(torch.ones(())), fails

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        self.fails -= 1
        if not self.fails:
            raise MemoryError
        return F.cross_entropy(z * self.t, y)


def test_after_an_error_no_half_gradient_is_left_in_the_loss(batch: Batch) -> None:
    net, start = convnet(), torch.zeros_like(batch[0])
    twin = copy.deepcopy(net)
    failing, sound = Tempered(3), Tempered(99)
    method = YOPO(net, Linf(0.1), m=3, n=1, loss=failing)
    with pytest.raises(MemoryError):
        method.backward(*batch, start)
    assert failing.t.grad is None
    method.backward(*batch, start)
    YOPO(twin, Linf(0.1), m=3, n=1, loss=sound).backward(*batch, start)
    assert sound.t.grad is not None
    torch.testing.assert_close(failing.t.grad, sound.t.grad, rtol=0, atol=0)


def test_a_forward_of_the_modules_own_is_run(batch: Batch) -> None:
    """Put over its class's, as mixed precision does."""
    net, start = convnet(), torch.zeros_like(batch[0])
    around, forward = nn.Sequential(Doubled(), *copy.deepcopy(net)), net.forward
    net.forward = lambda z: forward(z * 2 - 1)  # type: ignore[method-assign, no-untyped-call]
    want = yopo.PMP(around, Linf(0.1), m=2, n=1, adversary="gradient").backward(*batch, start)
    got = yopo.PMP(net, Linf(0.1), m=2, n=1, adversary="gradient").backward(*batch, start)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=0)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 - 1


@pytest.mark.parametrize("name", ["natural", "pgd", "yopo", "attack", "evaluate"])
def test_a_network_of_inference_mode_is_refused_and_stays(name: str, batch: Batch) -> None:
    with torch.inference_mode():
        net = convnet()
    with pytest.raises(ValueError, match=r"made under torch.inference_mode\(\)"):
        calls(net, batch)[name]()
    assert all(p.requires_grad for p in net.parameters())


class Adapts(nn.Module):
    """Differentiates by a weight of its own in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 5, 3), nn.Linear(180, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv(x)
        with torch.enable_grad():
            (g,) = torch.autograd.grad(h.square().mean(), self.conv.weight, create_graph=True)
        return self.last((h * g.sum()).flatten(1))  # type: ignore[no-any-return]


def test_a_network_that_differentiates_by_its_weights_is_refused(batch: Batch) -> None:
    with pytest.raises(ValueError, match="differentiates by its own parameters in forward"):
        YOPO(Adapts(), Linf(0.1), m=1, n=1).backward(*batch)


class Routed(nn.Module):
    """Bright images take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.dark, self.bright = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3)
        self.last = nn.Linear(180, 4)

    def forward(self, x: Tensor) -> Tensor:
        way = self.bright if x.mean() > 0.45 else self.dark
        return self.last(way(x).relu().flatten(1))  # type: ignore[no-any-return]


def test_a_network_with_two_ways_is_told_what_to_do(batch: Batch) -> None:
    x, y = 0.3 * batch[0], batch[1]
    YOPO(Routed(), Linf(0.01), m=2, n=3).backward(x, y)
    with pytest.raises(ValueError, match="takes another way for other images"):
        YOPO(Routed(), Linf(0.9, 0.5), m=2, n=3).backward(x, y)


class Loops(nn.Linear):
    """Its train() is another thing."""

    def train(self, epochs: Any) -> None:  # type: ignore[override]
        raise AssertionError(epochs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


def test_attacks_do_not_ask_the_network_for_more_than_its_flags(batch: Batch) -> None:
    net = Merges()
    before = net.weight.detach().clone()
    for _ in range(5):
        PGD(net, Linf(0.1), steps=2).backward(*batch)
        attacks.pgd(net, *batch, Linf(0.1), steps=1)
    assert torch.equal(net.weight, before)
    attacks.pgd(Loops(192, 4), *batch, Linf(0.1), steps=1)


class Scaled(nn.Module):
    """One of several blocks that have a buffer in common."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", table)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h * self.table))


def test_blocks_may_share_a_buffer(batch: Batch) -> None:
    table = torch.rand(6)
    blocks = [Scaled(table), Scaled(table)]
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), *blocks, nn.Linear(6, 4))
    start = torch.zeros_like(batch[0])
    got = YOPO(net, Linf(0.1), m=2, n=2, first_layer="2").backward(*batch, start)
    net[4].table = table.clone()
    want = YOPO(net, Linf(0.1), m=2, n=2, first_layer="2").backward(*batch, start)
    assert torch.equal(got.eta, want.eta)


def test_an_exchanged_hook_is_seen(batch: Batch) -> None:
    net, start = convnet(), torch.zeros_like(batch[0])
    hook = net[0].register_forward_pre_hook(lambda _, args: (2 * args[0],))
    method = YOPO(net, Linf(0.1), m=2, n=3)
    method.backward(*batch, start)
    hook.remove()
    net[0].register_forward_pre_hook(lambda _, args: ((9 * args[0]).sin(),))
    want = YOPO(net, Linf(0.1), m=2, n=3).backward(*batch, start)
    assert torch.equal(method.backward(*batch, start).eta, want.eta)


def test_the_engines_average_follows_a_converted_network(batch: Batch) -> None:
    net: Any = convnet()
    ema, literal = EMA(net, 0.5), net[0].weight.detach().clone()
    net.to(memory_format=torch.channels_last)
    engine = Engine(Natural(net), sgd(net), ema=ema, compile=False)
    for step in range(12):
        engine.step(*batch)
        decay = min(0.5, (1 + step) / (10 + step))
        literal = decay * literal + (1 - decay) * net[0].weight.detach()
    average: Any = ema.model
    torch.testing.assert_close(average[0].weight, literal, rtol=0, atol=1e-12)


def test_a_step_of_the_engine_that_fails_leaves_no_gradient(batch: Batch) -> None:
    net, calls = convnet(), 0

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise RuntimeError("out of memory")
        return F.cross_entropy(logits, y)

    method = YOPO(net, Linf(0.1), m=3, n=1, loss=loss)
    engine = Engine(method, torch.optim.SGD(net.parameters(), 0.1), compile=False)
    engine.step(*batch)
    calls = 1
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(*batch)
    assert all(p.grad is None for p in net.parameters())


def test_tensors_of_inference_mode_and_of_a_teacher(batch: Batch) -> None:
    net, teacher, start = convnet(), convnet(), torch.zeros_like(batch[0])
    with torch.inference_mode():
        x = batch[0] + 0
    soft = teacher(batch[0]).softmax(1)  # has a graph of its own
    got = YOPO(net, Linf(0.1), m=2, n=2).backward(x, soft, start)
    want = YOPO(net, Linf(0.1), m=2, n=2).backward(batch[0], soft.detach(), start)
    assert torch.equal(got.eta, want.eta)
    assert all(p.grad is None for p in teacher.parameters())


def test_starts_do_not_depend_on_the_memory_layout(batch: Batch) -> None:
    other = batch[0].to(memory_format=torch.channels_last)
    assert torch.equal(starts(Linf(0.1), batch[0], "0/0"), starts(Linf(0.1), other, "0/0"))


def test_things_of_the_wrong_kind_are_named() -> None:
    net = convnet()
    with pytest.raises(TypeError, match="expected a threat, as"):
        YOPO(net, Linf)  # type: ignore[arg-type]
    for loss in (nn.CrossEntropyLoss, "cross-entropy"):
        with pytest.raises(TypeError, match=r"expected loss as a function of .*, as .* got"):
            YOPO(net, Linf(0.1), loss=loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"first_layer as a module's name, as .*, got Conv2d"):
        YOPO(net, Linf(0.1), first_layer=net[0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a method, as yopo\.YOPO.*, got Sequential"):
        Engine(net, torch.optim.SGD(net.parameters(), 0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected step as a number"):
        Linf(0.1, "0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"step\(\) needs no closure, got LBFGS"):
        Free(net, Linf(0.1), optimizer=torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match="one for each channel, got shape"):
        Normalize(torch.zeros(1, 3, 1, 1), 1.0)  # type: ignore[arg-type]
