"""The user's model stays as it is: every object in it, whatever it is made of, whatever is called.

Networks are generated. One test asks that nothing in them is exchanged for something else, also
when a call breaks off; the other that a step trains what plain PyTorch would train.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.utils import parametrizations, spectral_norm

import yopo
from tests.core.test_untouched import THREAT, Breaks
from yopo.attacks import names
from yopo.core.first_layer import cut_names
from yopo.core.threat import Threat
from yopo.pmp.diagnose import diagnose

WIDTH = 4
X = torch.rand(5, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(5) % 3


# ---------------------------------------------------------------- parts of networks


def conv() -> nn.Conv2d:
    return nn.Conv2d(WIDTH, WIDTH, 3, padding=1)


class Rebinds(nn.Module):
    """Counts its calls in three ways: in place, by a new tensor, and by one made when needed."""

    in_place: Tensor
    anew: Tensor
    empty: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros((), dtype=torch.long))
        self.register_buffer("anew", torch.zeros(()), persistent=False)
        self.register_buffer("empty", None)

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.anew = self.anew + 1
        if self.empty is None:
            self.empty = torch.zeros(1)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(1))
        out: Tensor = x * (1 + self.in_place % 2 / 100) + self.anew / 100
        return out


class Seen(nn.Module):
    seen: Tensor

    def __init__(self, seen: Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", seen)


class SharedBuffer(nn.Module):
    """Two modules with one buffer, which each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Seen(torch.zeros(1))
        self.two = Seen(self.one.seen)

    def forward(self, x: Tensor) -> Tensor:
        self.one.seen += 0.01
        out: Tensor = x + self.two.seen
        return out


class Scale(nn.Module):
    """A parameter of no module of torch's, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def with_hook() -> nn.Module:
    module = conv()
    module.register_forward_hook(lambda _m, _a, out: out * 0.9)
    module.register_forward_pre_hook(lambda _m, _a: None)
    return module


def frozen() -> nn.Module:
    return nn.Sequential(conv(), nn.BatchNorm2d(WIDTH)).requires_grad_(False)


def partly_frozen() -> nn.Module:
    module = conv()
    module.weight.requires_grad_(False)
    return module


def compiled() -> nn.Module:
    module = nn.Sequential(conv(), nn.ReLU())
    module.compile(backend="eager")
    return module


PARTS: dict[str, Callable[[], nn.Module]] = {
    "conv": conv,
    "batchnorm": lambda: nn.Sequential(conv(), nn.BatchNorm2d(WIDTH), nn.ReLU()),
    "batchnorm in eval mode": lambda: nn.BatchNorm2d(WIDTH).eval(),
    "no statistics": lambda: nn.BatchNorm2d(WIDTH, affine=False, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(WIDTH, track_running_stats=True),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Sequential(conv()), nn.Dropout(0.5))),
    "weight norm": lambda: parametrizations.weight_norm(conv()),
    "spectral norm": lambda: parametrizations.spectral_norm(conv()),
    "old spectral norm": lambda: spectral_norm(conv()),
    "frozen": frozen,
    "partly frozen": partly_frozen,
    "hook": with_hook,
    "buffers": Rebinds,
    "shared buffer": SharedBuffer,
    "parameter of its own": Scale,
    "compiled": compiled,
}


class Network(nn.Module):
    """Parts called in the order of `plan`, some registered under a second name or tied."""

    def __init__(self, plan: list[str], twice: list[int], aliases: list[int], tied: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.parts = nn.ModuleList(PARTS[name]() for name in plan)
        self.alias = nn.Sequential(*(self.parts[i] for i in aliases))  # the same modules again
        self.again = self.stem
        self.twice = twice
        self.head = nn.Linear(WIDTH, 3)
        self.tied = conv() if tied else None
        if self.tied is not None:
            self.parts.append(conv())
            self.parts[-1].weight = self.tied.weight  # two modules, one parameter
        self.breaks = Breaks()

    def forward(self, x: Tensor) -> Tensor:
        z = self.again(x)
        for i, part in enumerate(self.parts):
            z = part(z)
            if i in self.twice:
                z = part(z)
        z = z if self.tied is None else self.tied(z)
        out: Tensor = self.head(self.breaks(z.tanh()).mean((2, 3)))
        return out


Spec = dict[str, Any]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    plan = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=4))
    some = st.lists(st.integers(0, len(plan) - 1), max_size=2)
    return {"plan": plan, "twice": draw(some), "aliases": draw(some), "tied": draw(st.booleans())}


def build(spec: Spec) -> Network:
    torch.manual_seed(0)
    net = Network(**spec)
    with torch.no_grad():
        for p in net.parameters():  # no zeros: weight decay moves whatever has a gradient
            p.add_(0.01 * torch.rand_like(p) + 0.001)
    return net


# ---------------------------------------------------------------- what is compared


def everything(model: nn.Module) -> dict[str, Any]:
    """Every module, parameter, buffer, hook and flag by all its names: the objects themselves."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path}: module"] = module
        found[f"{path}: names"] = "|".join(sorted(vars(module)))
        found[f"{path}: training"] = module.training
        for kind in ("_parameters", "_buffers", "_modules"):
            for name, value in getattr(module, kind).items():
                found[f"{path}: {kind} {name}"] = value
        for name, p in module._parameters.items():
            if p is not None:
                found[f"{path}: {name} asks"] = p.requires_grad
        for kind, hooks in vars(module).items():
            if "hook" in kind and isinstance(hooks, dict):
                found[f"{path}: {kind}"] = len(hooks)
                found |= {f"{path}: {kind} {key}": hook for key, hook in hooks.items()}
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The keys under which there is another object now."""
    keys = before.keys() | after.keys()
    plain = (bool, int, str)
    return {
        k
        for k in keys
        if (k in before) != (k in after)
        or (before[k] != after[k] if isinstance(before[k], plain) else before[k] is not after[k])
    }


def rebound_by_training(spec: Spec) -> set[str]:
    """What plain passes of this network in its own mode put in other places themselves."""
    net = build(spec)
    before = everything(net)
    F.cross_entropy(net(X), Y).backward()
    return differences(before, everything(net))


def free(net: nn.Module) -> yopo.Method:
    return yopo.Free(net, THREAT, m=2, optimizer=torch.optim.SGD(net.parameters(), 0.0))


METHODS: dict[str, Callable[[nn.Module], yopo.Method]] = {
    "natural": yopo.Natural,
    "pgd": lambda net: yopo.PGD(net, THREAT, steps=2),
    "free": free,
    "fast": lambda net: yopo.Fast(net, THREAT),
    "nfgsm": lambda net: yopo.NFGSM(net, THREAT),
    "trades": lambda net: yopo.TRADES(net, THREAT, steps=2),
    "yopo after": lambda net: yopo.YOPO(net, THREAT, m=2, n=2),
    "yopo before": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, grad_at="before"),
    "yopo last": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, grad_at="last"),
    "trades-yopo": lambda net: yopo.TRADESYOPO(net, THREAT, m=2, n=2),
    "pmp": lambda net: yopo.PMP(net, THREAT, m=2),
    "pmp argmax": lambda net: yopo.PMP(net, THREAT, m=2, weights="argmax", steps=2),
}
Call = Callable[[nn.Module], object]


def enter_gathered(net: nn.Module) -> None:
    with yopo.gathered(net):
        assert all(p.device.type == "cpu" for p in net.parameters())


def evaluate_shortly(net: nn.Module) -> None:
    """cw with two steps in place of a hundred."""
    real = names.parse
    with mock.patch.object(names, "parse", lambda name: replace(real(name), steps=2)):
        yopo.evaluate(net, (X, Y), THREAT, ["clean", "cw"], checks=False)


def own(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, _: torch.Generator) -> Tensor:
    """An attack as a user writes one, on the network itself."""
    eta = torch.zeros_like(x, requires_grad=True)
    F.cross_entropy(model(x + eta), y).backward()
    assert eta.grad is not None
    return x + threat.ascend(eta.detach(), eta.grad, x)


LOOKS: dict[str, Call] = {  # public calls that train nothing
    "attacks.pgd": lambda net: yopo.attacks.pgd(net, X, Y, THREAT, steps=2),
    "attacks.cw": lambda net: yopo.attacks.cw(net, X, Y, THREAT, steps=2),
    "evaluate": lambda net: yopo.evaluate(net, (X, Y), THREAT, ["clean", "pgd-2"], checks=True),
    "evaluate, cw": evaluate_shortly,
    "evaluate, own": lambda net: yopo.evaluate(net, (X, Y), THREAT, ["clean", own], checks=False),
    "Split": lambda net: yopo.Split(net).cut(X),
    "cut_names": lambda net: cut_names(net, X),
    "Split.propagate": lambda net: yopo.Split(net).propagate(
        X, lambda z: F.cross_entropy(z, Y), weights=None
    ),
    "diagnose": lambda net: diagnose(net, X, Y, THREAT, m=2),
    "prepare": lambda net: yopo.YOPO(net, THREAT).prepare(X, Y),
    "EMA": lambda net: yopo.EMA(net, 0.9),
    "EMA.update": lambda net: yopo.EMA(net, 0.9).update(3),
    "Engine.prepare": lambda net: yopo.Engine(
        yopo.YOPO(net, THREAT, m=2, n=2),
        torch.optim.SGD(net.parameters(), 0.1),
        compile=False,
        say=lambda _: None,
    ).prepare(X, Y),
    "gathered": enter_gathered,
}
Step = Callable[[nn.Module], object]


def handed(method: Callable[[nn.Module], yopo.Method]) -> Step:
    return lambda net: method(net)(X, Y).backward()


def engine_step(method: Callable[[nn.Module], yopo.Method]) -> Step:
    def step(net: nn.Module) -> None:
        made = method(net)
        given = made.optimizer or torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1)
        engine = yopo.Engine(made, given, ema=yopo.EMA(net, 0.9), compile=False, say=lambda _: None)
        engine.step(X, Y)

    return step


def backward(method: Callable[[nn.Module], yopo.Method]) -> Step:
    return lambda net: method(net).backward(X, Y)


def exchanged(net: nn.Module) -> None:
    """In a group, which here has one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        exchange = yopo.exchange_gradients(torch.optim.SGD(net.parameters(), 0.1))
        yopo.YOPO(net, THREAT, m=2, n=2).backward(X, Y)
        exchange()
    finally:
        dist.destroy_process_group()


STEPS: dict[str, Step] = {name: backward(make) for name, make in METHODS.items()} | {
    "loss of natural": handed(METHODS["natural"]),
    "loss of pgd": handed(METHODS["pgd"]),
    "loss of yopo": handed(METHODS["yopo after"]),
    "loss of trades-yopo": handed(METHODS["trades-yopo"]),
    "exchange_gradients": exchanged,
    "engine, natural": engine_step(METHODS["natural"]),
    "engine, yopo": engine_step(METHODS["yopo after"]),
    "engine, trades": engine_step(METHODS["trades"]),
}
BREAKS = st.sampled_from([None, RuntimeError, KeyboardInterrupt])
# Networks for each call; those of hundreds of passes meet fewer, broken off in as many places.
EXAMPLES, LONG = 25, {"diagnose": 4, "evaluate": 10, "pmp argmax": 12}


def broken_off(call: Callable[[], object], net: Network, how: type[BaseException] | None) -> None:
    """Do it; if `how`, again and again, broken off in another of its passes each time.

    Forward and backward passes: each of the first ten, then every fifth part further on.
    """
    if how is None:
        call()
        return
    at = 1
    while True:
        net.breaks.calls, net.breaks.at, net.breaks.how = 0, at, how
        with suppress(RuntimeError, KeyboardInterrupt):
            call()
        if net.breaks.calls < at:
            return
        at += 1 + at // 10 * 2


def many(name: str) -> settings:
    return settings(max_examples=LONG.get(name, EXAMPLES), deadline=None)


@pytest.mark.parametrize("name", LOOKS)
def test_a_call_that_trains_nothing_exchanges_nothing(name: str) -> None:
    @many(name)
    @given(spec=specs(), how=BREAKS, training=st.booleans())
    def met(spec: Spec, how: type[BaseException] | None, training: bool) -> None:
        look(name, spec, how, training)

    met()


def look(name: str, spec: Spec, how: type[BaseException] | None, training: bool) -> None:
    net = build(spec)
    if not training:
        net.eval()
    before = everything(net)
    values = {k: v.clone() for k, v in net.state_dict().items()}
    broken_off(lambda: LOOKS[name](net), net, how)
    assert differences(before, everything(net)) == set()
    assert all(p.grad is None for p in net.parameters())
    after = net.state_dict()
    assert after.keys() == values.keys()
    assert all(torch.equal(v, after[k]) for k, v in values.items())


@pytest.mark.parametrize("name", STEPS)
def test_a_step_exchanges_what_a_plain_step_would(name: str) -> None:
    @many(name)
    @given(spec=specs(), how=BREAKS)
    def met(spec: Spec, how: type[BaseException] | None) -> None:
        step(name, spec, how)

    met()


def step(name: str, spec: Spec, how: type[BaseException] | None) -> None:
    net = build(spec)
    before = everything(net)
    broken_off(lambda: STEPS[name](net), net, how)
    assert differences(before, everything(net)) <= rebound_by_training(spec)


def trained(net: nn.Module, step: Callable[[], object]) -> set[str]:
    """The names of the parameters that an optimizer made before the step moves after it."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1)
    kept = {name: p.detach().clone() for name, p in net.named_parameters(remove_duplicate=False)}
    step()
    optimizer.step()
    now = dict(net.named_parameters(remove_duplicate=False))
    assert now.keys() == kept.keys()
    return {name for name, value in kept.items() if not torch.equal(value, now[name])}


@pytest.mark.parametrize("name", STEPS)
@settings(max_examples=15, deadline=None)
@given(spec=specs())
def test_a_step_trains_what_a_plain_step_would(name: str, spec: Spec) -> None:
    if name == "pmp argmax":  # it gives steps of its own in place of gradients
        return
    plain = build(spec)
    expected = trained(plain, lambda: F.cross_entropy(plain(X), Y).backward())
    net = build(spec)
    yopo.attacks.pgd(net, X, Y, THREAT, steps=1)  # a call before the step must not matter
    assert trained(net, lambda: STEPS[name](net)) == expected
