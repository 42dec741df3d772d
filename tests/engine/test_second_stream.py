"""Weight gradients on a second stream, tried on a CPU with one that works as late as it may.

What it is given is done only when the first stream waits for it. Until then its results are NaN,
and what it will read must stay as it was.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Batch, assert_same
from tests.engine.test_engine import METHODS, THREAT, plainly, several, streams_of, with_engine
from yopo.engine import network, overlap
from yopo.engine.engine import Engine
from yopo.models import preactresnet18
from yopo.models.stem import Stem

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor"
)


class Late:
    """In the place of aten.convolution_backward, `accumulate` and torch.cuda's streams."""

    default = torch.ops.aten.convolution_backward.default

    def __init__(self) -> None:
        self.aside = False
        self.todo: list[Callable[[], object]] = []
        self.done, self.spoilt = 0, 0

    def __call__(self, grad: Tensor, x: Tensor, weight: Tensor, *rest: object) -> Any:
        if not self.aside:
            return self.default(grad, x, weight, *rest)
        found, given = torch.full_like(weight, torch.nan), (grad.clone(), x.clone())

        def work() -> None:
            self.done += 1
            self.spoilt += not all(map(torch.equal, given, (grad, x)))
            found.copy_(self.default(grad, x, weight, *rest)[1])

        self.todo.append(work)
        return None, found, None

    def accumulate(self, found: list[tuple[Tensor, Tensor]]) -> None:
        assert self.aside
        for p, grad in found:
            if p.grad is None:
                p.grad = torch.full_like(p, torch.nan)
                self.todo.append(partial(p.grad.copy_, grad))
            else:
                self.todo.append(partial(p.grad.add_, grad))

    def catch_up(self) -> None:
        todo, self.todo = self.todo, []
        for work in todo:
            work()

    @contextmanager
    def stream(self, _: object) -> Iterator[None]:
        self.aside = True
        yield
        self.aside = False


class Stream:
    def __init__(self, waits: Callable[[], None]) -> None:
        self.waits = waits

    def wait_stream(self, _: object) -> None:
        self.waits()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """For the duration of a test."""
    made, plain = Late(), network.accumulate

    class Aten:
        convolution_backward = made

    def accumulate(found: list[tuple[Tensor, Tensor]]) -> None:
        (made.accumulate if made.aside else plain)(found)

    monkeypatch.setattr(overlap, "_aten", Aten())
    monkeypatch.setattr(network, "accumulate", accumulate)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Stream(lambda: None))
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream(made.catch_up))
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def beside_plain(net: nn.Module, name: str, batches: list[Batch]) -> Engine:
    """A few steps of both; the engine."""
    twin = copy.deepcopy(net)
    torch.manual_seed(1)
    plainly(net, METHODS[name], batches, THREAT)
    torch.manual_seed(1)
    engine, *_ = with_engine(twin, METHODS[name], batches, THREAT, overlap=True)
    assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=1e-9)
    return engine


def small_resnet(*blocks: int) -> nn.Module:
    net = preactresnet18(4, width=4, blocks=blocks)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


GRAPHS_ALONE = pytest.mark.usefixtures("graphs_alone")


@pytest.mark.parametrize("name", ["free", "yopo after", "trades"])
def test_a_late_stream_changes_nothing(
    name: str, late: Late, batch: Batch, request: pytest.FixtureRequest
) -> None:
    if name != "yopo after":  # one has kernels, which may write over buffers
        request.getfixturevalue("graphs_alone")
    engine = beside_plain(small_resnet(1), name, several(batch, 3))
    assert late.done > 0
    assert late.spoilt == 0
    # TRADES' two passes are summed by autograd, on the first stream: noticed.
    assert (streams_of(engine).side is None) == (name == "trades")


@GRAPHS_ALONE
def test_the_first_layers_gradient_does_not_forbid_it(
    late: Late, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compiled for a GPU, where the images' gradient is put together from slices."""
    monkeypatch.setattr(Stem, "forward", Stem._as_product)
    net = small_resnet(1, 1)  # with a shortcut's convolution
    engine = beside_plain(net, "yopo after", several(batch, 3))
    steps, m = 1 + 3, 3  # a rehearsal first
    convolutions = sum(type(layer) is nn.Conv2d for layer in net.modules())
    assert late.done == steps * m * convolutions
    assert late.spoilt == 0
    assert streams_of(engine).side is not None


class Writes(nn.Module):
    """The compiler lets this assignment write into what the convolution before it has read."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        convs = [nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1) for i in range(4)]
        for conv in convs:
            conv.bias = None
        self.a, self.b, self.c, self.d = convs
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        z = self.c(h).clone()
        z[:, :4] = 0
        out: Tensor = self.head(torch.tanh(self.d(self.b(h) + z)).mean((2, 3)))
        return out


def test_a_network_that_writes_into_its_activations(late: Late, batch: Batch) -> None:
    beside_plain(Writes(), "natural", several(batch, 3))
    assert late.spoilt == 0


def test_a_pass_that_broke_off_costs_no_gradient(late: Late, batch: Batch) -> None:
    net = small_resnet(1)
    twin = copy.deepcopy(net)
    engine, *_ = with_engine(twin, METHODS["natural"], [batch], THREAT, overlap=True)
    streams_of(engine).made_aside.append(torch.zeros(3))  # as a failed capture leaves it
    engine.step(*batch)
    plainly(net, METHODS["natural"], [batch, batch], THREAT)
    assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=1e-9)
    assert late.spoilt == 0
