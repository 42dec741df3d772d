"""Batches of another shape, or another m, from some step on: the engine is made ready anew."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import GPU, Batch, assert_same
from tests.engine.test_engine import THREAT
from yopo import EMA, YOPO, Engine, Free, Method

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:\\s*Online softmax", "ignore:The .grad attribute of a"
    ),
]
PHASES = [(8, 6, 1), (12, 6, 3), (12, 4, 3), (12, 4, 2)]  # side, images, m
Make = Callable[[nn.Module, torch.optim.Optimizer], Method]
MAKE: dict[str, Make] = {
    "yopo": lambda net, _: YOPO(net, THREAT, m=1, n=2),
    "yopo not affine": lambda net, _: YOPO(net, THREAT, m=1, n=2, first_layer="2"),
    "free": lambda net, optimizer: Free(net, THREAT, m=1, optimizer=optimizer),
}


def network() -> nn.Module:
    """For images of any side."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()]
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 4))


def batches(side: int, images: int, many: int = 3) -> list[Batch]:
    g = torch.Generator().manual_seed(side)
    return [(torch.rand(images, 3, side, side, generator=g), torch.arange(images) % 4)] * many


def trained(make: Make, net: nn.Module, device: str = "cpu", **options: Any) -> Engine | None:
    """Phase after phase, by the engine where `options` say how."""
    # A power of 2: on a GPU's side the rate is a float32.
    optimizer = torch.optim.SGD(net.parameters(), 2**-4, momentum=0.9)
    method: Any = make(net, optimizer)
    ema = EMA(net, 0.9)
    engine = Engine(method, optimizer, ema=ema, say=pytest.fail, **options) if options else None
    torch.manual_seed(1)
    kept = []  # by someone
    for side, images, m in PHASES:
        given = [(x.to(device), y.to(device)) for x, y in batches(side, images)]
        method.m = m
        if engine:
            engine.prepare(*given[0])
            kept.append(engine._steps.fast)
            assert len(optimizer._optimizer_step_pre_hooks) == engine.compiled  # no earlier one's
        for step, (x, y) in enumerate(given):
            if engine:
                assert engine._is_fast(x, y)
                out = engine.step(x, y)
            else:
                out = method.backward(x, y)
                optimizer.step()
                optimizer.zero_grad()
                ema.update(step)
            assert out.propagations == (m if type(method) is Free else pytest.approx(m + 2 / 3))
    return engine


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("compiled", [True, False])
def test_each_phase_is_as_fast_and_the_same_as_plain_steps(
    name: str, compiled: bool, request: pytest.FixtureRequest
) -> None:
    """Also what Free carries from batch to batch, which has the shape of the phase."""
    if compiled:
        request.getfixturevalue("graphs_alone")
    net = network()
    twin = copy.deepcopy(net)
    trained(MAKE[name], net)
    engine = trained(MAKE[name], twin, compile=compiled)
    assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=1e-9)
    assert engine is not None
    assert engine.compiled == compiled


def test_a_graph_of_another_phase_is_not_replayed(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    engine = Engine(YOPO(net, THREAT, m=1, n=1), optimizer, compile=False)
    engine.step(*batch)
    monkeypatch.setattr(engine._capture, "graph", Graph())
    engine.prepare(*batches(12, 6)[0])
    assert not engine.captured
    assert engine.step(*batches(12, 6)[0]).loss.isfinite()


class Graph:
    """One that must not be replayed."""

    def replay(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("side", [8, 12])
def test_what_was_carried_of_another_shape_begins_anew(side: int) -> None:
    """As after a collapse in the first epoch of a phase, which goes back to the one before."""
    found: list[Tensor] = []
    for engine_of in (lambda *given: Engine(*given, compile=False), lambda *_: None):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        method = Free(net, THREAT, m=2, optimizer=optimizer)
        engine: Engine | None = engine_of(method, optimizer)
        for given in (None, torch.full((6, 3, side, side), 0.05)):
            method.load_state_dict({} if given is None else {"eta": given})
            for x, y in batches(12, 6, 2):
                eta = engine.step(x, y).eta if engine else method.backward(x, y).eta
                found.append(eta.clone())
    assert_same(dict(enumerate(found[:4])), dict(enumerate(found[4:])))  # type: ignore[arg-type]
    assert torch.equal(found[2], found[0]) == (side != 12)


class TestOnAGPU:
    pytestmark = GPU

    @pytest.mark.parametrize("name", MAKE)
    def test_each_phase_has_a_graph_of_its_own(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        net = network().cuda()
        twin = copy.deepcopy(net)
        trained(MAKE[name], net, "cuda")
        engine = trained(MAKE[name], twin, "cuda", compile=True)
        assert engine is not None
        assert engine.captured
        assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=1e-9)
