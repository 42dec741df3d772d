"""The average of a network that changes its buffers in its own forward passes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.buffers import WAYS, buffers, network
from tests.conftest import Batch
from yopo import EMA, YOPO, Engine, Linf, Method, Natural

every_way = pytest.mark.parametrize("way", WAYS)
STATISTICS = ("running_mean", "running_var")
STEPS = 4


def made(way: str, kind: str = "natural") -> tuple[nn.Module, Method, torch.optim.SGD, EMA]:
    torch.manual_seed(0)
    net = network(way, after=1)
    method = Natural(net) if kind == "natural" else YOPO(net, Linf(0.1), m=2, n=2)
    return net, method, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), EMA(net, 0.5)


def plainly(way: str, kind: str, batch: Batch, steps: int = STEPS) -> tuple[nn.Module, EMA]:
    net, method, optimizer, ema = made(way, kind)
    for step in range(steps):
        torch.manual_seed(step)
        method.backward(*batch)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    return net, ema


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    """The same buffers under the same names, shared alike; what has an average up to rounding."""
    mine, theirs = buffers(one), buffers(other)
    assert mine.keys() == theirs.keys()
    for name, (value, shown) in mine.items():
        wanted, is_shown = theirs[name]
        assert (value is None) == (wanted is None), name
        if value is not None and wanted is not None:
            assert shown == is_shown, name
            exact = not name.endswith(STATISTICS)
            torch.testing.assert_close(value, wanted, rtol=0, atol=0 if exact else 1e-7)
    sharing = [[v is w for v, _ in b.values() for w, _ in b.values()] for b in (mine, theirs)]
    assert sharing[0] == sharing[1]
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)


@every_way
def test_the_average_has_the_networks_buffers(way: str, batch: Batch) -> None:
    """Those that have an average of their own are compared with the formula."""
    net, method, optimizer, ema = made(way)
    average = {k: v.detach().clone() for k, v in averaged(net).items()}
    for step in range(STEPS):
        method.backward(*batch)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in averaged(net).items():
            average[name] = decay * average[name] + (1 - decay) * value.detach()
            torch.testing.assert_close(averaged(ema.model)[name], average[name])
            averaged(ema.model)[name].copy_(value.detach())  # for the comparison of all
        assert_alike(ema.model, net)
        for name, value in averaged(ema.model).items():
            value.copy_(average[name])
    one = {id(b) for b, _ in buffers(net).values() if b is not None}
    assert not one & {id(b) for b, _ in buffers(ema.model).values()}


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that have an average."""
    state: dict[str, Any] = dict(model.state_dict(keep_vars=False))
    parameters = dict(model.named_parameters())
    return {k: v for k, v in state.items() if k in parameters or k.endswith(STATISTICS)}


@every_way
@pytest.mark.parametrize("kind", ["natural", "yopo"])
def test_the_engines_average_is_the_plain_one(way: str, kind: str, batch: Batch) -> None:
    net, ema = plainly(way, kind, batch)
    other, method, optimizer, average = made(way, kind)
    engine = Engine(method, optimizer, ema=average, compile=False)
    for step in range(STEPS):
        torch.manual_seed(step)
        engine.step(*batch)
    assert_alike(other, net)
    assert_alike(average.model, ema.model)


@every_way
def test_a_rehearsal_puts_buffers_back_and_says_that_they_changed(way: str, batch: Batch) -> None:
    """A CUDA graph would stay with those of the rehearsal, so none is made of such a step."""
    _, method, optimizer, ema = made(way)
    engine = Engine(method, optimizer, ema=ema, compile=False)
    engine.step(*batch)  # the buffers change in the next
    models = method.model, ema.model
    before = [{k: b for k, (b, _) in buffers(model).items()} for model in models]
    values = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    engine._capture.rehearsal(engine._steps.first, *batch)
    assert engine._capture.rehearsal.exchanges_buffers
    for model, own, value in zip(models, before, values, strict=True):
        now = {k: b for k, (b, _) in buffers(model).items()}
        assert now.keys() == own.keys()
        assert all(b is own[k] for k, b in now.items())
        assert all(torch.equal(v, value[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("way", ["rebinds", "fills"])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_changes_buffers_is_no_cuda_graph(way: str) -> None:
    net, said = network(way).float().cuda(), list[str]()
    optimizer, ema = torch.optim.SGD(net.parameters(), 0.1), EMA(net, 0.5)
    engine = Engine(Natural(net), optimizer, ema=ema, compile=False, say=said.append)
    x, y = torch.rand(6, 3, 8, 8, device="cuda"), torch.arange(6, device="cuda") % 4
    for _ in range(3):
        engine.step(x.float(), y)
    assert not engine.captured
    assert "puts new tensors in the place of its buffers" in said[0]
    (_, mine, *_), (_, theirs, *_) = ema.model.children(), net.children()
    assert_alike(mine, theirs)


@pytest.mark.parametrize("way", ["rebinds", "fills", "fills_and_empties"])
@pytest.mark.parametrize("steps", [0, 2, 3])
def test_an_average_goes_on_from_one_that_was_saved(way: str, steps: int, batch: Batch) -> None:
    """Into one that is new, and into one whose network went further."""
    _, ema = plainly(way, "natural", batch, steps=2)
    state = {k: v.clone() for k, v in ema.state_dict().items()}
    _, other = plainly(way, "natural", batch, steps=steps)
    other.load_state_dict(state)
    assert other.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in other.state_dict().items())


def test_an_average_of_another_network_is_refused(batch: Batch) -> None:
    net: Any = network("fills")
    ema = EMA(net, 0.5)
    net.append(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="make the EMA when it has all of them"):
        ema.update(0)
    method, optimizer = Natural(net), torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="make the EMA when it has all of them"):
        Engine(method, optimizer, ema=ema, compile=False).step(*batch)


def test_a_buffer_that_is_a_parameter_has_the_parameters_average() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("same", net.weight)
    ema, before = EMA(net, 0.5), net.weight.detach().clone()
    with torch.no_grad():
        net.weight.add_(1)
    ema.pair()
    ema.move(0.5)
    torch.testing.assert_close(ema.model.weight, before + 0.5)
