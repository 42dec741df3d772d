"""The user's model is left exactly as found."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import Batch, bn_convnet, convnet
from tests.methods.test_methods import METHODS, Make, every_method
from yopo import YOPO, Linf, Split, models
from yopo.attacks import cw, pgd
from yopo.core.frozen import Frozen

THREAT = Linf(0.1)


def fingerprint(model: nn.Module) -> list[tuple[Any, ...]]:
    """Flags, hooks, attributes and tensor identities of every module."""
    found: list[tuple[Any, ...]] = []
    for name, module in model.named_modules():
        hooks = {k: len(v) for k, v in vars(module).items() if "hook" in k and v is not None}
        tensors = {k: id(v) for k, v in (module._parameters | module._buffers).items()}
        wants = {k: v.requires_grad for k, v in module._parameters.items() if v is not None}
        found.append((name, module.training, sorted(vars(module)), hooks, tensors, wants))
    return found


def partly_frozen() -> nn.Sequential:
    """Mixed training flags, one parameter that the user does not train, and a hook of theirs."""
    model = bn_convnet()
    model[4].eval()
    model[0].weight.requires_grad_(False)
    model[3].register_forward_hook(lambda *_: None)
    return model


def _after(model: nn.Module) -> YOPO:
    return YOPO(model, THREAT, m=2, n=2)


def _deep(model: nn.Module) -> YOPO:
    return YOPO(model, THREAT, m=2, n=2, first_layer="1")


class Breaks(nn.Module):
    """Passes its input on, but fails at one of its calls or one of its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.at = -1
        self.how: type[BaseException] = RuntimeError

    def forward(self, x: Tensor) -> Tensor:
        self._count()
        out = x * 1.0
        if out.requires_grad:
            out.register_hook(self._count)
        return out

    def _count(self, _grad: Tensor | None = None) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise self.how("broken")


@every_method
@pytest.mark.parametrize("training", [True, False])
def test_backward_leaves_the_model_as_found(make: Make, training: bool, batch: Batch) -> None:
    model = partly_frozen()
    model.train(training)
    model[4].eval()
    method = make(model)
    before = fingerprint(model)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    x = batch[0].clone().requires_grad_()
    for _ in range(2):
        method.backward(x, batch[1])
    assert fingerprint(model) == before
    assert x.grad is None
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (name != "0.weight")
    for name, value in model.state_dict().items():
        moves = (training and name.startswith("1.") and "running" in name) or "1.num" in name
        if not (training and moves):
            assert torch.equal(value, state[name]), name


@every_method
def test_an_exception_halfway_leaves_the_model_as_found(make: Make, batch: Batch) -> None:
    """Whichever pass fails, forward or backward, also with gradients there from before."""
    x, y = batch
    model = partly_frozen()
    breaks = Breaks()
    model.append(breaks)
    F.cross_entropy(model(x), y).backward()
    method = make(model)
    method.backward(x, y)
    for first in (True, False):  # a method's first batch also studies the network
        breaks.calls = 0
        (make(model) if first else method).backward(x, y)
        passes = breaks.calls
        for at in range(1, passes + 1):
            method = make(model) if first else method
            kept = {
                k: (id(p.grad), p.grad.clone())
                for k, p in model.named_parameters()
                if p.grad is not None
            }
            breaks.calls, breaks.at = 0, at
            before = fingerprint(model)
            with pytest.raises(RuntimeError, match="broken"):
                method.backward(x, y)
            assert fingerprint(model) == before
            for name, p in model.named_parameters():
                if name in kept:
                    assert p.grad is not None
                    assert id(p.grad) == kept[name][0]
                    assert torch.equal(p.grad, kept[name][1])
                else:
                    assert p.grad is None


def test_an_interrupt_halfway_leaves_no_gradients(batch: Batch) -> None:
    model = bn_convnet()
    calls = 0

    def loss(z: Tensor, t: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return F.cross_entropy(z, t)

    before = fingerprint(model)
    with pytest.raises(KeyboardInterrupt):
        YOPO(model, THREAT, m=3, n=2, first_layer="2", loss=loss).backward(*batch)
    assert fingerprint(model) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_attacks_leave_the_model_as_found(training: bool, batch: Batch) -> None:
    x, y = batch
    model = partly_frozen().train(training)
    before, state = fingerprint(model), {k: v.clone() for k, v in model.state_dict().items()}
    pgd(model, x, y, THREAT, steps=2)
    cw(model, x, y, THREAT, steps=2)
    assert fingerprint(model) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_studying_the_network_draws_no_random_numbers(batch: Batch) -> None:
    model = nn.Sequential(nn.Dropout(0.5), bn_convnet())
    state = torch.get_rng_state()
    Split(model).cut(batch[0])
    assert torch.equal(torch.get_rng_state(), state)


def test_every_method_is_covered() -> None:
    """The table of methods in the tests has all that the package exports."""
    import yopo

    exported = {
        value
        for value in (getattr(yopo, name) for name in yopo.__all__)
        if isinstance(value, type)
        and issubclass(value, yopo.Method)
        and not value.__abstractmethods__
    }
    assert {type(make(bn_convnet())) for make in METHODS.values()} == exported


class Block(nn.Module):
    """LayerNorm, Linear, GELU, Linear, as in a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm(x))))
        return out


def kept_for_the_way_back(model: nn.Module, network: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Bytes that a forward pass keeps, parameters aside."""
    own, kept = {p.data_ptr() for p in model.parameters()}, dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = network(x.clone().requires_grad_())
        assert out.requires_grad  # and so all that it keeps is still there
        return sum(size for place, size in kept.items() if place not in own)


def test_attack_passes_keep_nothing_for_the_weights() -> None:
    """What docs/design.md says of transformers and of convolutions after BatchNorm and ReLU."""
    x = torch.rand(4, 16, 32)
    blocks = nn.Sequential(*(Block(32) for _ in range(8)))
    frozen = kept_for_the_way_back(blocks, Frozen(blocks), x)
    assert 1.8 < kept_for_the_way_back(blocks, blocks, x) / frozen < 2.2
    x = torch.rand(4, 3, 16, 16)
    resnet = models.preactresnet18(width=4)
    frozen = kept_for_the_way_back(resnet, Frozen(resnet), x)
    assert kept_for_the_way_back(resnet, resnet, x) < 1.05 * frozen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch, as it compiles
@pytest.mark.parametrize("build", [_after, _deep], ids=["affine f0", "inner loop"])
def test_compiled_attack_passes_are_code_of_their_own(
    build: Callable[[nn.Module], YOPO], batch: Batch
) -> None:
    """torch before 2.13 does not look at a parameter's flag when it takes up compiled code again.

    So none may stand in its place during an attack pass: else the pass for the weights would get
    the attack's code, and no gradient, without a word.
    """
    inputs: list[set[bool]] = []  # of each compiled code: is a parameter among them?

    def backend(graph: Any, given: list[Any]) -> Any:
        inputs.append({isinstance(t, nn.Parameter) for t in given})
        return aot_eager(graph, given)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    torch._dynamo.reset()
    net = convnet()
    twin = copy.deepcopy(net)
    compiled: Any = torch.compile(net, backend=backend)
    for model in (compiled, twin):
        torch.manual_seed(1)
        build(model).backward(*batch)
    for got, want in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-12)
    if build is _after:  # with an inner loop it runs as it was written
        assert {False} in inputs
        assert {True, False} in inputs
