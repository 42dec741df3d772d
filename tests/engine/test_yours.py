"""The engine around other people's networks, losses, optimizers and habits; on a CPU."""

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from tests.conftest import Batch, assert_same, bn_convnet, convnet
from tests.engine.test_engine import THREAT
from yopo import PGD, TRADES, YOPO, Engine, Free, Linf, Method, Natural
from yopo.engine.capture import Rehearsal, begins_at_zero

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a"),
    pytest.mark.usefixtures("graphs_alone"),
]
Make = Callable[[nn.Module, torch.optim.Optimizer], Method]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)


def natural(net: nn.Module, _: torch.optim.Optimizer) -> Method:
    return Natural(net)


def plain(net: nn.Module, make: Make, batches: list[Batch], optimize: Optimize = sgd) -> Method:
    optimizer = optimize(net)
    method = make(net, optimizer)
    torch.manual_seed(1)
    for x, y in batches:
        method.backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
    return method


def fast(
    net: nn.Module,
    make: Make,
    batches: list[Batch],
    optimize: Optimize = sgd,
    **options: Any,
) -> tuple[Engine, list[str]]:
    said: list[str] = []
    optimizer = optimize(net)
    engine = Engine(make(net, optimizer), optimizer, say=said.append, **options)
    torch.manual_seed(1)
    for x, y in batches:
        engine.step(x, y)
    return engine, said


def equal(net: nn.Module, twin: nn.Module, tol: float = 1e-9) -> None:
    assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=tol)


def test_free_goes_on_after_a_batch_of_another_size(batch: Batch) -> None:
    def make(net: nn.Module, optimizer: torch.optim.Optimizer) -> Method:
        return Free(net, THREAT, m=2, optimizer=optimizer)

    net, (x, y) = convnet(), batch
    twin = copy.deepcopy(net)
    batches = [(x, y), (x[:4], y[:4]), (x, y), (x, y)]
    plain(net, make, batches)
    engine, _ = fast(twin, make, batches[:1])
    eta = engine._steps.carried.tensors["eta"]
    for other in batches[1:]:
        engine.step(*other)
    assert engine._steps.carried.tensors["eta"] is eta  # a captured step knows it by its address
    equal(net, twin)


def pooled() -> nn.Module:
    """For images of any side."""
    first = [nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(20, 4))


def replayed(net: nn.Module, optimizer: torch.optim.Optimizer) -> Method:
    """With a radius for which it matters what is carried."""
    return Free(net, Linf(0.3, 0.1), m=3, optimizer=optimizer)


def of_shapes(*shapes: tuple[int, int]) -> list[Batch]:
    """Random batches of so many images of such a side."""
    return [(torch.rand(n, 3, side, side), torch.arange(n) % 4) for n, side in shapes]


SHAPES = {
    "grow": [(4, 8), (8, 8), (8, 8), (6, 8), (4, 8)],
    "shrink": [(8, 8), (4, 8), (8, 8)],
    "one more": [(3, 8), (3, 8), (5, 8), (5, 8), (3, 8)],
    "wider": [(4, 8), (4, 12), (4, 12), (4, 8), (4, 8)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("how", ["plain", "compiled", "captured"])
def test_free_carries_what_the_plain_loop_does(
    how: str, shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's part is played by a graph that knows tensors as it was recorded with them."""
    net, batches = pooled(), of_shapes(*shapes)
    twin = copy.deepcopy(net)
    expected = plain(net, replayed, batches)
    engine, _ = fast(twin, replayed, [], compile=how == "compiled")
    steps, capture, replays = engine._steps, engine._capture, []

    class Graph:
        known: dict[str, Tensor] | None = None

        def replay(self) -> None:
            replays.append(0)
            self.known = self.known or dict(steps.carried.tensors)
            steps.carried.tensors = dict(self.known)
            capture._out = steps.take(steps.fast, capture._x, capture._y)
            assert all(steps.carried.tensors[name] is t for name, t in self.known.items())

    engine.prepare(*batches[0])
    if how == "captured":
        on_a_cpu(monkeypatch, Graph)
        engine._ready.record(*batches[0])
    for x, y in batches:
        engine.step(x, y)
    equal(net, twin)
    assert_same(engine.method.state_dict(), expected.state_dict(), tol=1e-9)
    assert engine.compiled == (how == "compiled")
    fitting = sum(shape == shapes[0] for shape in shapes)
    assert len(replays) == (fitting + 1 if how == "captured" else 0)  # one was compared


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, graph: type) -> None:
    """Let steps be recorded there, as graphs of this kind."""
    for name in ("Stream", "current_stream", "default_generators"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)


def test_a_module_that_comes_twice(batch: Batch) -> None:
    def make(net: nn.Module, _: torch.optim.Optimizer) -> Method:
        return YOPO(net, THREAT, m=2, n=2, first_layer="0")

    act = nn.Tanh()
    first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh())
    rest = [nn.Conv2d(4, 4, 3), act, nn.Conv2d(4, 4, 3), act, nn.Flatten(), nn.Linear(16, 4)]
    net = nn.Sequential(first, *rest)
    twin = copy.deepcopy(net)
    plain(net, make, [batch] * 3)
    _, said = fast(twin, make, [batch] * 3)
    assert said == []
    equal(net, twin)


def test_hooks_on_a_sequence_are_run(batch: Batch) -> None:
    def make(net: nn.Module, _: torch.optim.Optimizer) -> Method:
        return YOPO(net, THREAT, m=2, n=2, first_layer="0")

    f0 = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh())
    net = nn.Sequential(f0, nn.Sequential(nn.Flatten(), nn.Linear(144, 4)))
    nothing: Any = lambda _module, grads: (0 * grads[0],)  # noqa: E731
    net[1].register_full_backward_pre_hook(nothing)
    twin = copy.deepcopy(net)
    plain(net, make, [batch] * 2)
    fast(twin, make, [batch] * 2)
    equal(net, twin)


def test_the_inner_loop_leaves_spectral_norm_where_it_was(batch: Batch) -> None:
    def make(net: nn.Module, _: torch.optim.Optimizer) -> Method:
        return YOPO(net, THREAT, m=2, n=5, first_layer="1")

    first = torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3))
    net = nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(144, 4))
    twin = copy.deepcopy(net)
    plain(net, make, [batch])
    fast(twin, make, [batch])
    equal(net, twin)


def test_a_network_that_was_compiled_before(batch: Batch) -> None:
    def make(net: nn.Module, _: torch.optim.Optimizer) -> Method:
        return YOPO(net, THREAT, m=2, n=2, first_layer="1")

    net = convnet(nn.Tanh)
    twin = copy.deepcopy(net)
    plain(net, make, [batch] * 2)
    compiled: Any = torch.compile(twin)
    engine, said = fast(compiled, make, [batch] * 2)
    assert engine.compiled
    assert said == []
    equal(net, twin)


def test_frozen_statistics_stay_frozen(batch: Batch) -> None:
    net = bn_convnet()
    norm = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    norm.eval()
    twin = copy.deepcopy(net)
    plain(net, natural, [batch] * 2)
    fast(twin, natural, [batch] * 2)
    assert [m.training for m in twin.modules()] == [m.training for m in net.modules()]
    equal(net, twin)


@pytest.mark.parametrize("cast", [False, True])
def test_a_loss_that_looks_at_the_weights(cast: bool, batch: Batch) -> None:
    torch.set_default_dtype(torch.float32)
    x, y = batch[0].float(), batch[1]

    def make(net: nn.Module, _: torch.optim.Optimizer) -> Method:
        def loss(logits: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(logits, y) + 3.0 * sum(
                p.square().sum() for p in net.parameters()
            )

        return Natural(net, loss=loss)

    net = convnet()
    twin = copy.deepcopy(net)
    plain(net, make, [(x, y)] * 2)
    optimizer = sgd(twin)
    engine = Engine(make(twin, optimizer), optimizer, precision="bf16" if cast else "float32")
    engine.options.cast = cast
    for _ in range(2):
        engine.step(x, y)
    equal(net, twin, tol=3e-3 if cast else 1e-5)  # without the penalty: 0.1


def test_a_loss_with_parameters_of_its_own(batch: Batch) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, logits: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.scale * logits, y)

    def steps(net: nn.Module, run: Callable[..., object]) -> float:
        loss = Scaled()
        parameters = [*net.parameters(), *loss.parameters()]
        run(net, lambda n, _: Natural(n, loss=loss), [batch] * 3, lambda _: SGD(parameters, 0.5))
        return float(loss.scale.detach())

    net = convnet()
    expected = steps(copy.deepcopy(net), plain)
    assert expected != 1
    assert steps(net, fast) == pytest.approx(expected, abs=1e-9)


def test_hooks_on_gradients_are_run(batch: Batch) -> None:
    net = convnet()
    weight = next(net.parameters())

    def freeze(p: Tensor) -> None:
        p.grad = torch.zeros_like(p)

    weight.register_post_accumulate_grad_hook(freeze)
    before = weight.detach().clone()
    _, said = fast(net, natural, [batch] * 2)
    assert said == ["not compiled: ValueError: a parameter has a hook on its gradient"]
    torch.testing.assert_close(weight.detach(), before)


def test_gradients_are_accumulated(batch: Batch) -> None:
    """A step takes the mean over its own batch and those that were added before it."""
    net, (x, y) = bn_convnet(), batch
    twin = copy.deepcopy(net)
    groups = [[(x, y), (x.flip(3), y), (x[:4], y[:4])], [(x, y)], [(x.flip(2), y), (x, y)]]
    torch.manual_seed(1)
    optimizer, method = sgd(net), YOPO(net, THREAT, m=2, n=2)
    for group in groups:
        for part in group:
            method.backward(*part)
        for p in net.parameters():
            assert p.grad is not None
            p.grad /= len(group)
        optimizer.step()
        optimizer.zero_grad()
    other = sgd(twin)
    engine = Engine(YOPO(twin, THREAT, m=2, n=2), other)
    torch.manual_seed(1)
    for *before, last in groups:
        weights = [p.clone() for p in twin.parameters()]
        for part in before:
            out = engine.add(*part)
            assert out.loss.isfinite()
        assert all(torch.equal(a, b) for a, b in zip(weights, twin.parameters(), strict=True))
        engine.step(*last)
    assert engine.compiled
    equal(net, twin)
    free = Engine(Free(twin, THREAT, m=2, optimizer=other), other)
    with pytest.raises(ValueError, match="Free steps on every batch"):
        free.add(*batch)


def test_a_batch_that_fails_takes_those_before_it_along(batch: Batch) -> None:
    """Half a gradient must not join the next step; nor is that one divided by what is gone."""
    net = convnet()
    twin = copy.deepcopy(net)
    plain(net, natural, [batch])
    optimizer = sgd(twin)
    engine = Engine(Natural(twin), optimizer)
    engine.add(*batch)
    with pytest.raises(ValueError, match="batch_size"):
        engine.add(batch[0], batch[1][:3])
    engine.step(*batch)
    equal(net, twin)


def test_where_nothing_compiles_steps_are_plain(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler here")

    def make(net: nn.Module, _: torch.optim.Optimizer) -> Method:
        return PGD(net, THREAT, steps=2)

    monkeypatch.setattr(Rehearsal, "__call__", broken)
    net = convnet()
    twin = copy.deepcopy(net)
    plain(net, make, [batch] * 2)
    engine, said = fast(twin, make, [batch] * 2)
    assert said == ["not compiled: RuntimeError: no compiler here"]
    assert type(engine._steps.plain.threat) is Linf
    equal(net, twin)


OPTIMIZERS: dict[str, Optimize] = {
    "sgd": sgd,
    "dampened": lambda n: torch.optim.SGD(n.parameters(), 0.05, momentum=0.9, dampening=0.5),
    **{
        kind.__name__: lambda n, kind=kind: kind(n.parameters(), lr=0.01)  # type: ignore[misc]
        for kind in (
            *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RMSprop),
            *(torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RAdam),
            *(torch.optim.NAdam, torch.optim.Rprop, torch.optim.ASGD),
        )
    },
}


@pytest.mark.parametrize("name", ["dampened", "NAdam", "Rprop", "ASGD"])
def test_optimizers_begin_as_they_do(name: str, batch: Batch) -> None:
    net = convnet()
    twin = copy.deepcopy(net)
    plain(net, natural, [batch] * 3, OPTIMIZERS[name])
    fast(twin, natural, [batch] * 3, OPTIMIZERS[name])
    equal(net, twin)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_optimizers_begin_at_zero(name: str) -> None:
    """Two first steps: from nothing, and from what one makes, set to zero."""
    ends = []
    for zero in (False, True):
        net = nn.Linear(3, 2)
        nn.init.constant_(net.weight, 0.5)
        optimizer = OPTIMIZERS[name](net)
        for step in range(2 if zero else 1):
            if step == 1:
                nn.init.constant_(net.weight, 0.5)
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()
            net.weight.grad = torch.arange(1.0, 7).view(2, 3)
            optimizer.step()
        ends.append(net.weight.detach().clone())
    assert begins_at_zero(optimizer) <= torch.allclose(ends[0], ends[1], rtol=1e-12)
    assert begins_at_zero(optimizer) == (name not in ("dampened", "NAdam", "Rprop", "ASGD"))


def test_flags_may_change(batch: Batch) -> None:
    net = convnet()
    engine, said = fast(net, natural, [batch])
    first = next(net.parameters()).requires_grad_(False)
    before = first.detach().clone()
    engine.step(*batch)
    engine.step(*batch)
    assert torch.equal(first.detach(), before)
    assert len(said) == 1
    assert said[0].startswith("plain steps: train() or requires_grad")
    first.requires_grad_(True)
    engine.step(*batch)
    assert not torch.equal(first.detach(), before)


def named() -> Any:
    """Layers with names; two share their weight."""
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten())
    middle, other = nn.Linear(144, 144), nn.Linear(144, 144)
    other.weight = middle.weight
    layers = {"body": body, "middle": middle, "other": other, "head": nn.Linear(144, 4)}
    return nn.Sequential(OrderedDict(layers))


Change = Callable[[Any], object]
EXCHANGED: dict[str, Change] = {
    "head": lambda net: setattr(net, "head", nn.Linear(144, 4)),
    "by index": lambda net: net.body.__setitem__(0, nn.Conv2d(3, 4, 3)),
    "parameter": lambda net: setattr(net.head, "weight", nn.Parameter(torch.randn(4, 144) / 12)),
    "shared no more": lambda net: setattr(net.other, "weight", nn.Parameter(torch.eye(144))),
    "dropped": lambda net: setattr(net.middle, "bias", None),
    "inserted": lambda net: net.body.insert(1, nn.Conv2d(4, 4, 1)),
    "inserted without weights": lambda net: net.body.insert(1, nn.Softplus()),
    "parametrized": lambda net: torch.nn.utils.parametrizations.spectral_norm(net.middle),
}
MOVED: dict[str, Change] = {
    "values": lambda net: setattr(net.head.weight, "data", torch.randn(4, 144) / 12),
    "statistics": lambda net: setattr(net.body[1], "running_mean", torch.ones(4)),
}


@pytest.mark.parametrize("name", [*EXCHANGED, *MOVED, "the optimizer's"])
@pytest.mark.parametrize("how", ["affine", "not affine", "captured", "plain"])
def test_layers_and_parameters_may_be_exchanged(how: str, name: str, batch: Batch) -> None:
    """Between steps, the optimizer being given what is there then; also the one or the other."""
    net = named()
    ends, said, graph = [], list[str](), Mock()
    for with_engine in (False, True):
        model = copy.deepcopy(net)
        optimizer = sgd(model)
        first = "body.2" if how == "not affine" else None
        method = YOPO(model, THREAT, m=2, n=2, first_layer=first)
        compiled = how in ("affine", "not affine")
        engine = Engine(method, optimizer, compile=compiled, say=said.append)
        for step in range(4):
            torch.manual_seed(step)
            if step == 1 and name in EXCHANGED | MOVED:
                (EXCHANGED | MOVED)[name](model)
            if step == 2 or (step == 1 and "inserted" not in name):
                some = model.head if name == "the optimizer's" else model
                optimizer.param_groups[0]["params"] = list(some.parameters())
            if with_engine:
                engine.step(*batch)
            else:
                method.backward(*batch)
                optimizer.step()
                optimizer.zero_grad()
            if with_engine and step == 0:
                assert engine.compiled == compiled
                if how == "captured":
                    engine._capture.keep(graph)  # as after a recording
        ends.append(model)
    assert not graph.replay.called
    equal(*ends)
    expected = "layers or parameters of the network, or of the optimizer, were exchanged since"
    if name in MOVED:
        expected = "weights or buffers of the network moved to other memory since"
    heard = how == "captured" or (compiled and name not in MOVED)
    assert [line.startswith(f"plain steps: {expected}") for line in said] == [True] * heard


def test_what_was_exchanged_is_compiled_by_prepare(batch: Batch) -> None:
    """Which leaves no trace, and gradients are accumulated for what is there now."""
    net = named()
    twin = copy.deepcopy(net)
    engine, said = fast(twin, natural, [batch])
    method, optimizer = plain(net, natural, []), sgd(net)
    for step in range(4):
        if step == 1:
            for model, its in ((net, optimizer), (twin, engine.optimizer)):
                torch.manual_seed(3)
                model.head = nn.Linear(144, 4)
                its.param_groups[0]["params"] = list(model.parameters())
        for _ in range(1 + (step > 0)):
            method.backward(*batch)
        for p in net.parameters():
            p.grad /= 1 + (step > 0)
        optimizer.step()
        optimizer.zero_grad()
        if step > 0:
            engine.prepare(*batch)
            engine.add(*batch)
            engine.step(*batch)
            assert engine._is_fast(*batch)
    assert engine.compiled
    assert said == []
    equal(net, twin)


def test_a_loaded_state_goes_where_the_captured_step_reads_it(batch: Batch) -> None:
    net = convnet()
    engine, _ = fast(net, natural, [batch] * 2)
    optimizer = engine.optimizer
    capture = engine._capture
    capture.keep(Mock())  # as after a recording
    capture.graph = None  # but steps are run
    state = optimizer.state
    tensors = [state["momentum_buffer"] for state in optimizer.state.values()]
    saved = copy.deepcopy(optimizer.state_dict())
    engine.step(*batch)
    optimizer.load_state_dict(saved)
    assert optimizer.state is not state
    capture.take_over_state()
    assert optimizer.state is state
    for i, (tensor, state) in enumerate(zip(tensors, optimizer.state.values(), strict=True)):
        assert state["momentum_buffer"] is tensor
        torch.testing.assert_close(tensor, saved["state"][i]["momentum_buffer"])


def test_a_captured_step_is_not_replayed_with_other_momentum(batch: Batch) -> None:
    """As OneCycleLR cycles it."""
    net = convnet()
    twin = copy.deepcopy(net)
    optimizer, method = sgd(net), Natural(net)
    engine, said = fast(twin, natural, [batch])
    graph = Mock()
    engine._capture.keep(graph)  # as after a recording
    for momentum in (0.9, 0.5, 0.25):
        for each in (optimizer, engine.optimizer):
            each.param_groups[0]["momentum"] = momentum
        method.backward(*batch)
        optimizer.step()
        optimizer.zero_grad()
        if momentum < 0.9:
            engine.step(*batch)
    assert not graph.replay.called
    assert len(said) == 1
    assert "the optimizer's momentum changed" in said[0]
    equal(net, twin)
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    engine._capture._x, engine._capture._y, engine._capture._out = (Mock() for _ in range(3))
    engine.step(*batch)
    assert graph.replay.called


@pytest.mark.parametrize("wrong", [False, True])
def test_a_replay_must_do_what_the_step_does(
    wrong: bool, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's part is played by a graph that runs the step, or one that steps back."""
    net = bn_convnet()
    engine, said = fast(net, lambda net, _: PGD(net, THREAT, steps=2), [batch], compile=False)
    before = copy.deepcopy(net.state_dict())

    class Graph:
        def replay(self) -> None:
            capture = engine._capture
            for group in engine.optimizer.param_groups:
                group["lr"] *= -1 if wrong else 1
            capture._out = engine._steps.take(engine._steps.fast, capture._x, capture._y)
            for group in engine.optimizer.param_groups:
                group["lr"] *= -1 if wrong else 1

    on_a_cpu(monkeypatch, Graph)
    engine._ready.record(*batch)
    assert engine.captured is not wrong
    ends = "not captured as one CUDA graph: RuntimeError: its replay moves the weights otherwise"
    assert [text.startswith(ends) for text in said] == [True] * wrong
    assert_same(dict(net.state_dict()), dict(before), tol=0)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda net, _: PGD(net, THREAT, steps=2), "steps", 5),
        (lambda net, _: TRADES(net, THREAT, steps=2), "beta", 10.0),
        (lambda net, _: YOPO(net, THREAT, m=2, n=2), "n", 3),
        (lambda net, _: YOPO(net, THREAT, m=2, n=2), "grad_at", "before"),
    ],
    ids=["steps", "beta", "n", "grad_at"],
)
def test_settings_that_the_fast_path_would_not_see_are_refused(
    make: Make, name: str, value: Any, batch: Batch
) -> None:
    engine, _ = fast(convnet(), make, [batch], compile=False)
    setattr(engine.method, name, value)
    with pytest.raises(ValueError, match=f"the method's {name} was .* is {value} now"):
        engine.step(*batch)


def test_a_part_of_a_threat_of_ones_own_is_refused(batch: Batch) -> None:
    class Mine(Linf):
        pass

    net = convnet()
    engine, _ = fast(net, lambda net, _: PGD(net, Mine(0.1), steps=2), [batch], compile=False)
    with pytest.raises(ValueError, match=r"part= is for yopo\.Linf and yopo\.L2, not Mine"):
        engine.step(*batch, part=0.5)
    Engine(natural(net, sgd(net)), sgd(net), compile=False).step(*batch, part=0.5)


def test_an_unknown_precision_is_refused() -> None:
    net = convnet()
    with pytest.raises(
        ValueError, match="expected precision to be 'float32' or 'bf16', got 'bfloat16'"
    ):
        Engine(Natural(net), sgd(net), precision="bfloat16")  # type: ignore[arg-type]


def test_batches_of_other_shapes_compile_nothing(batch: Batch) -> None:
    x, y = batch
    net = convnet()
    engine = Engine(PGD(net, THREAT, steps=1), sgd(net), capture=False, say=pytest.fail)
    engine.step(x, y)
    before = sum(torch._dynamo.utils.counters["frames"].values())
    for n in range(1, len(x)):
        engine.step(x[:n], y[:n])
    assert sum(torch._dynamo.utils.counters["frames"].values()) == before


def test_an_optimizer_of_another_network_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the model's parameters"):
        Engine(Natural(convnet()), sgd(convnet()))


def test_an_optimizer_outlives_its_engines(batch: Batch) -> None:
    net = bn_convnet()
    optimizer = sgd(net)
    for _ in range(2):
        engine = Engine(Free(net, THREAT, m=2, optimizer=optimizer), optimizer)
        engine.step(*batch)
        del engine
        gc.collect()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    Natural(net).backward(*batch)
    optimizer.step()


def test_preparing_leaves_no_trace(batch: Batch) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = bn_convnet()
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1  # a new tensor each time
            out: Tensor = self.net(x)
            return out

    net = Counts()
    left_out = list(net.parameters())[-1]
    optimizer = torch.optim.SGD(list(net.parameters())[:-1], 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    method = PGD(net, THREAT, steps=1, generator=generator)
    before = copy.deepcopy(net.state_dict()), generator.get_state(), torch.get_rng_state()
    seen = net.seen
    engine = Engine(method, optimizer, say=lambda _: None)
    engine.prepare(*batch)
    assert_same(dict(net.state_dict()), dict(before[0]), tol=0)
    assert net.seen is seen
    assert engine._capture.rehearsal.exchanges_buffers  # so that it will not be captured
    assert torch.equal(generator.get_state(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert left_out.grad is None
    assert not optimizer.state


def test_labels_of_any_integer_kind(batch: Batch) -> None:
    net, (x, y) = convnet(), batch
    twin = copy.deepcopy(net)
    plain(net, natural, [(x, y)] * 2)
    _, said = fast(twin, natural, [(x, y.to(torch.uint8))] * 2)
    assert said == []
    equal(net, twin)
