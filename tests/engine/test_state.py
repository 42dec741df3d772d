"""state_dict and load_state_dict: a loop saved and begun anew ends as one that was not stopped."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import yopo
from tests.conftest import Batch, assert_same, bn_convnet

THREAT = yopo.Linf(0.1)


class Loop:
    """All that a user has: network, optimizer, method, average, engine."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.net = bn_convnet()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)
        self.method: yopo.Method = (
            yopo.Free(self.net, THREAT, m=2, optimizer=self.optimizer)
            if kind == "free"
            else yopo.YOPO(self.net, THREAT, m=2, n=2)
        )
        self.ema = yopo.EMA(self.net, 0.9)
        self.engine = yopo.Engine(self.method, self.optimizer, ema=self.ema, compile=False)

    def stateful(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "engine": self.engine}

    def run(self, batches: list[Batch]) -> None:
        for i, (x, y) in enumerate(batches):
            torch.manual_seed(i + len(x))
            self.engine.step(x, y)

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.stateful().items()}, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        saved = torch.load(file, weights_only=True)
        for name, part in self.stateful().items():
            part.load_state_dict(saved[name])


@pytest.mark.parametrize("kind", ["yopo", "free"])
@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_goes_on_where_it_was(kind: str, begun: bool) -> None:
    """Also one that has made steps of its own before it loads."""
    g = torch.Generator().manual_seed(5)
    batches = [(torch.rand(6, 3, 8, 8, generator=g), torch.arange(6) % 4) for _ in range(5)]
    whole, first, second = Loop(kind), Loop(kind), Loop(kind)
    whole.run(batches)
    first.run(batches[:3])
    file = first.save()
    first.run(batches)  # what was saved is not what goes on
    if begun:
        second.run([(x.flip(3), y) for x, y in batches[:2]])
    second.load(file)
    for i, (x, y) in enumerate(batches[3:], 3):
        torch.manual_seed(i + len(x))
        second.engine.step(x, y)
    assert_same(dict(second.net.state_dict()), dict(whole.net.state_dict()), tol=0)
    assert_same(dict(second.ema.model.state_dict()), dict(whole.ema.model.state_dict()), tol=0)
    assert second.engine.state_dict()["steps"] == 5


def test_the_averages_state_is_a_networks(batch: Batch) -> None:
    net = bn_convnet()
    ema = yopo.EMA(net, 0.9)
    net(batch[0])
    for step in range(3):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
        ema.update(step)
    plain, other = bn_convnet(), yopo.EMA(bn_convnet(), 0.9)
    plain.load_state_dict(ema.state_dict())
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    for each in (plain, other.model):
        assert_same(dict(each.state_dict()), dict(ema.model.state_dict()), tol=0)
    ema.update(3)
    assert not torch.equal(plain.state_dict()["0.weight"], ema.model.state_dict()["0.weight"])


def test_an_average_that_was_loaded_still_follows() -> None:
    net: nn.Module = bn_convnet()
    ema = yopo.EMA(net, 0.9)
    ema.load_state_dict(bn_convnet().state_dict())
    ema.move(1.0)
    assert_same(dict(ema.model.state_dict()), dict(net.state_dict()), tol=0)


def test_free_goes_on_where_it_was() -> None:
    g = torch.Generator().manual_seed(5)
    batches = [(torch.rand(6, 3, 8, 8, generator=g), torch.arange(6) % 4) for _ in range(4)]

    def step(loop: Loop, x: torch.Tensor, y: torch.Tensor) -> None:
        loop.method.backward(x, y)
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    whole, first, second = Loop("free"), Loop("free"), Loop("free")
    for batch in batches:
        step(whole, *batch)
    for batch in batches[:2]:
        step(first, *batch)
    file = io.BytesIO()
    parts = ("net", "optimizer", "method")
    torch.save({name: getattr(first, name).state_dict() for name in parts}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for name in parts:
        getattr(second, name).load_state_dict(saved[name])
    for batch in batches[2:]:
        step(second, *batch)
    assert_same(dict(second.net.state_dict()), dict(whole.net.state_dict()), tol=0)
