"""`loss = method(x, y)`: a scalar whose backward() is the method's."""

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import yopo
from benchmarks.cost import peak_bytes
from tests.conftest import Batch, PatchTransformer, bn_convnet, convnet, grads
from tests.core.test_stays import METHODS as ON_ANY
from tests.core.test_stays import Spec, X, Y, build, differences, everything, specs
from tests.core.test_untouched import Breaks, fingerprint, partly_frozen
from tests.methods.test_methods import METHODS, THREAT, Make
from yopo.core.handed import multiply
from yopo.core.parallel import whole

MAKES = {name: make for name, make in METHODS.items() if name != "free"}
every_loss = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES.keys())


def seeded(call: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return call()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


@every_loss
def test_its_backward_is_the_methods_bit_for_bit(make: Make, batch: Batch) -> None:
    """Over two batches, so that the second adds to what is there."""
    net = bn_convnet()
    twin = copy.deepcopy(net)
    ours, theirs = make(net), make(twin)
    for x, y in (batch, (batch[0].flip(3), batch[1])):
        loss = seeded(lambda: ours(x, y))  # noqa: B023
        out = seeded(lambda: theirs.backward(x, y))  # noqa: B023
        loss.backward()
        assert same(grads(net), grads(twin))
        assert same(dict(net.state_dict()), dict(twin.state_dict()))
        assert ours.last is not None
        assert loss.dim() == 0
        for name in ("loss", "logits", "eta"):
            assert torch.equal(getattr(ours.last, name), getattr(out, name))
        assert torch.equal(loss, out.loss)
        assert ours.last.propagations == out.propagations


@pytest.mark.parametrize("name", [name for name in ON_ANY if name != "free"])
@settings(max_examples=15, deadline=None)
@given(spec=specs())
def test_so_it_is_on_any_network(name: str, spec: Spec) -> None:
    """Tied, aliased, frozen, hooked, reparametrised, compiled; and its objects stay there."""
    net, twin = build(spec), build(spec)
    before = everything(net)
    loss = seeded(lambda: ON_ANY[name](net)(X, Y))
    assert all(p.grad is None for p in net.parameters())
    changed = differences(before, everything(net))
    before = everything(twin)
    seeded(lambda: ON_ANY[name](twin).backward(X, Y))
    assert changed == differences(before, everything(twin))
    loss.backward()
    assert same(grads(net), grads(twin))


@every_loss
def test_grad_is_untouched_until_its_backward(make: Make, batch: Batch) -> None:
    model = partly_frozen()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    kept = {k: (p.grad, p.grad.clone()) for k, p in model.named_parameters() if p.grad is not None}
    before, method = fingerprint(model), make(model)
    method(*batch)
    assert fingerprint(model) == before
    for name, p in model.named_parameters():
        assert p.grad is kept.get(name, (None, None))[0]
        assert p.grad is None or torch.equal(p.grad, kept[name][1])


def test_also_when_a_pass_breaks_off(batch: Batch) -> None:
    breaks, net = Breaks(), bn_convnet()
    model = nn.Sequential(net, breaks)
    heard: list[Tensor] = []
    next(net.parameters()).register_hook(heard.append)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    kept = grads(model)
    for at in range(1, 6):
        breaks.calls, breaks.at = 0, at
        with pytest.raises(RuntimeError, match="broken"):
            yopo.YOPO(model, THREAT, m=3)(*batch)
        assert same(grads(model), kept)
    assert len(heard) == 1
    breaks.at = -1
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert len(heard) == 2  # the hook is back


def trained_plainly(net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    seeded(lambda: yopo.YOPO(net, THREAT, m=2, n=2).backward(*batch))
    return grads(net)


def test_it_scales_divides_and_adds_up(batch: Batch) -> None:
    x, y = batch
    net = convnet()
    found = trained_plainly(copy.deepcopy(net), batch)
    clean_net = copy.deepcopy(net)
    F.cross_entropy(clean_net(x), y).backward()
    clean = grads(clean_net)
    method = yopo.YOPO(net, THREAT, m=2, n=2)

    def left(make: Callable[[], Tensor]) -> dict[str, Tensor]:
        net.zero_grad()
        loss = seeded(make)
        loss.backward()
        return grads(net)

    assert same(left(lambda: method(x, y) / 4), {k: g / 4 for k, g in found.items()})
    two = left(lambda: method(x, y) + 0.5 * F.cross_entropy(net(x), y))
    torch.testing.assert_close(two, {k: g + 0.5 * clean[k] for k, g in found.items()})
    two = left(lambda: F.cross_entropy(net(x), y) + 3 * method(x, y))
    torch.testing.assert_close(two, {k: 3 * g + clean[k] for k, g in found.items()})
    squared = left(lambda: method(x, y) ** 2)
    assert method.last is not None
    slope = 2 * method.last.loss
    torch.testing.assert_close(squared, {k: slope * g for k, g in found.items()})
    asked = torch.autograd.grad(seeded(lambda: method(x, y)), list(net.parameters()))
    assert all(torch.equal(g, v) for g, v in zip(asked, found.values(), strict=True))


def test_a_scaler_finds_the_same_step(batch: Batch) -> None:
    nets = [convnet(), convnet()]
    nets[1].load_state_dict(nets[0].state_dict())
    plain, scaled = (torch.optim.SGD(net.parameters(), 0.1) for net in nets)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    trained_plainly(nets[0], batch)
    plain.step()
    loss = seeded(lambda: yopo.YOPO(nets[1], THREAT, m=2, n=2)(*batch))
    scaler.scale(loss).backward()
    scaler.step(scaled)
    scaler.update()
    assert same(dict(nets[1].state_dict()), dict(nets[0].state_dict()))


def test_hooks_on_gradients_hear_of_the_whole_once(batch: Batch) -> None:
    net = bn_convnet()
    found = trained_plainly(copy.deepcopy(net), batch)
    before: dict[str, list[Tensor]] = {name: [] for name in found}
    after = copy.deepcopy(before)
    for name, p in net.named_parameters():
        p.register_hook(lambda g, name=name: before[name].append(g.clone()))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: after[name].append(p.grad.clone())
        )
    loss = seeded(lambda: yopo.YOPO(net, THREAT, m=2, n=2)(*batch))
    assert not any(before.values())
    loss.backward()
    for name, grad in found.items():
        for heard in (before[name], after[name]):
            assert len(heard) == 1
            assert torch.equal(heard[0], grad)


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_an_optimizer_in_the_backward_pass_steps_once_or_is_refused(
    make: Make, batch: Batch
) -> None:
    net = bn_convnet()
    method = make(net)
    steps: list[Tensor] = []
    weight = next(net.parameters())
    handle = weight.register_post_accumulate_grad_hook(steps.append)
    if isinstance(method, yopo.YOPO) and method.grad_at != "last":
        with pytest.raises(ValueError, match=r"each would call them.*use loss = method\(x, y\)"):
            method.backward(*batch)
        assert not steps
        assert weight.grad is None
        method(*batch).backward()
        handle.remove()
        method.backward(*batch)
        method.m = 1
        weight.register_post_accumulate_grad_hook(lambda _: None)
        method.backward(*batch)
    else:
        method.backward(*batch)
    # Free's m steps are its algorithm; PMP writes .grad itself, which calls no hook.
    expected = {yopo.Free: getattr(method, "m", 1), yopo.PMP: 0}.get(type(method), 1)
    assert len(steps) == expected


def test_hooks_of_distributed_data_parallel_are_no_optimizer(batch: Batch) -> None:
    """As it registers them for its reducer in Python, which averages the gradient of each pass."""

    def hook(p: Tensor, *, param_index: int) -> None:
        heard.append(param_index)

    heard: list[int] = []
    hook.__module__ = nn.parallel.DistributedDataParallel.__module__
    net = bn_convnet()
    weight = next(net.parameters())
    weight.register_post_accumulate_grad_hook(functools.partial(hook, param_index=0))
    yopo.YOPO(net, THREAT, m=3, n=1).backward(*batch)
    assert heard == [0, 0, 0]


def test_a_parameter_of_no_part_in_it_gets_no_gradient(batch: Batch) -> None:
    net = convnet()
    net.extra = nn.Parameter(torch.ones(2))
    net[5].requires_grad_(False)
    yopo.YOPO(net, THREAT, m=2)(*batch).backward()
    assert grads(net).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z / self.heat, y)


def plainly(loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda z, y: loss(z, y)


@every_loss
@pytest.mark.parametrize("given_as", [lambda loss: loss, plainly], ids=["module", "function"])
def test_a_loss_with_parameters_of_its_own_trains_them(
    given_as: Any, make: Make, batch: Batch
) -> None:
    """At its backward, in its scale; zero_grad before that takes nothing away."""
    net, loss = bn_convnet(), Tempered()
    twin, other = copy.deepcopy(net), copy.deepcopy(loss)
    heard: list[Tensor] = []
    loss.heat.register_hook(heard.append)
    ours, theirs = make(net), make(twin)
    ours.loss, theirs.loss = given_as(loss), given_as(other)
    kept = ours.loss
    seeded(lambda: theirs.backward(*batch))
    loss.heat.grad = torch.tensor(7.0)
    value = seeded(lambda: ours(*batch))
    assert loss.heat.grad.item() == 7
    assert ours.loss is kept
    assert not heard
    loss.zero_grad()
    (value / 4).backward()
    assert same(grads(loss), {k: g / 4 for k, g in grads(other).items()})
    assert len(heard) == len(grads(loss))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad / 4)


@pytest.mark.parametrize("build_", [PatchTransformer, bn_convnet])
def test_under_autocast(build_: Callable[[], nn.Module], batch: Batch) -> None:
    """The backward outside, as in PyTorch's own examples."""
    x, y = batch[0].float(), batch[1]
    net = build_().float()
    twin = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        loss = seeded(lambda: yopo.YOPO(net, THREAT, m=2, n=2)(x, y))
        seeded(lambda: yopo.YOPO(twin, THREAT, m=2, n=2).backward(x, y))
    loss.backward()
    assert same(grads(net), grads(twin))
    net, twin = net.bfloat16(), twin.bfloat16()  # pure, the loss in float32
    for each in (net, twin):
        each.zero_grad()

    def wide(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z.float(), y)

    x = x.bfloat16()
    (seeded(lambda: yopo.YOPO(net, THREAT, m=2, n=2, loss=wide)(x, y)) / 2).backward()
    seeded(lambda: yopo.YOPO(twin, THREAT, m=2, n=2, loss=wide).backward(x, y))
    assert same(grads(net), {k: g / 2 for k, g in grads(twin).items()})


torchs_own = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")


@torchs_own
def test_on_a_compiled_network(batch: Batch) -> None:
    torch._dynamo.reset()
    net = bn_convnet()
    twin = copy.deepcopy(net)
    compiled: nn.Module = torch.compile(net, backend="aot_eager")  # type: ignore[assignment]
    other: nn.Module = torch.compile(twin, backend="aot_eager")  # type: ignore[assignment]
    for _ in range(2):
        seeded(lambda: yopo.YOPO(compiled, THREAT, m=2, n=2)(*batch)).backward()
        seeded(lambda: yopo.YOPO(other, THREAT, m=2, n=2).backward(*batch))
    assert same(grads(net), grads(twin))


class Counting(TorchDispatchMode):
    """How many operators ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operators.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_all_gradients_of_a_device_are_scaled_at_once() -> None:
    """Whatever they are; of several devices each on its own."""
    own = [torch.ones(2, 3), torch.ones(3).bfloat16(), torch.eye(3).to_sparse(), torch.ones(())]
    elsewhere = [torch.ones(2, device="meta"), torch.ones(3, device="meta")]
    with Counting() as seen:
        multiply([own[0], elsewhere[0], *own[1:], elsewhere[1]], torch.tensor(0.5))
    assert seen.operators.count("_foreach_mul_") == 2
    for t in own:
        assert t.to_dense().unique().tolist() in ([0.5], [0, 0.5])
    with Counting() as seen:
        multiply(own, torch.tensor(1.0))
    assert "_foreach_mul_" not in seen.operators


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own
def test_gradients_some_of_which_are_spread_are_scaled(batch: Batch) -> None:
    """As where tensor parallelism or fully_shard was given a part of the network."""
    net = convnet()
    twin = copy.deepcopy(net)
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    fully_shard(net[2], mesh=init_device_mesh("cpu", (1,)))
    parallelize_module(net[5], other["b"], ColwiseParallel(output_layouts=Replicate()))
    for each in (net, twin):
        seeded(lambda: (yopo.YOPO(each, THREAT, m=2, n=2)(*batch) / 3).backward())  # noqa: B023
    torch.testing.assert_close({k: whole(g) for k, g in grads(net).items()}, grads(twin))


Step = Callable[[Tensor, Tensor], Tensor]


def step_of(method: yopo.Method, form: str) -> Step:
    """A step such as users compile: some of their own around ours."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x.flip(3)
        if form == "backward":
            return 2 * method.backward(x, y).loss
        loss = method(x, y) / 2
        loss.backward()
        return 4 * loss

    return step


def compared_in_a_compiled_step(make: Make, form: str, batch: Batch, backend: str) -> None:
    """Three batches, the last of another size."""
    torch._dynamo.reset()
    net, (x, y) = bn_convnet(), batch
    twin = copy.deepcopy(net)
    compiled = torch.compile(step_of(make(net), form), backend=backend)
    plainly = step_of(make(twin), form)
    for size in (len(x), len(x), len(x) - 1):
        found = seeded(lambda: compiled(x[:size], y[:size]))  # noqa: B023
        assert torch.equal(found, seeded(lambda: plainly(x[:size], y[:size])))  # noqa: B023
        assert same(grads(net), grads(twin))
        assert same(dict(net.state_dict()), dict(twin.state_dict()))
    torch._dynamo.reset()


INSIDE = [(name, form) for name in METHODS for form in ("backward", "loss")]
INSIDE.remove(("free", "loss"))


@torchs_own
@pytest.mark.parametrize(("name", "form"), INSIDE)
def test_inside_a_step_that_is_compiled(name: str, form: str, batch: Batch) -> None:
    compared_in_a_compiled_step(METHODS[name], form, batch, "aot_eager")


@torchs_own
@pytest.mark.usefixtures("graphs_alone")
def test_inside_a_step_that_inductor_compiles(batch: Batch) -> None:
    compared_in_a_compiled_step(METHODS["yopo deep"], "loss", batch, "inductor")


def test_whoever_compiles_nothing_loads_no_compiler() -> None:
    code = """
import sys, torch, yopo
net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
method = yopo.YOPO(net, yopo.Linf(0.1), m=2, n=2)
x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 1])
method.backward(x, y)
method(x, y).backward()
print("torch._dynamo" in sys.modules)
torch.compile(net, backend="eager")(x)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_what_it_hands_out_is_not_copied(batch: Batch) -> None:
    net = convnet()
    loss = yopo.YOPO(net, THREAT, m=2)(*batch)
    where = {g.data_ptr() for g in loss.grad_fn.grads}  # type: ignore[union-attr]
    loss.backward()
    assert {g.data_ptr() for p in net.parameters() if (g := p.grad) is not None} == where


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yopo after", "pgd"])
def test_it_needs_no_more_memory_than_backward(name: str) -> None:
    """Also where weights outweigh activations, and gradients are there already."""
    net = yopo.models.preactresnet18(width=16)
    x, y = torch.rand(2, 3, 32, 32), torch.arange(2)
    method = METHODS[name](net)
    F.cross_entropy(net(x), y).backward()
    peak = peak_bytes(lambda: method(x, y).backward())
    assert peak <= 1.02 * peak_bytes(lambda: method.backward(x, y))


def test_it_gives_its_gradients_once(batch: Batch) -> None:
    net = convnet()
    loss = yopo.PGD(net, THREAT, steps=1)(*batch)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call the method again"):
        loss.backward()


def test_where_gradients_are_off_it_says_so(batch: Batch) -> None:
    method = yopo.YOPO(convnet(), THREAT)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(ValueError, match="gradients are switched off here"):
            method(*batch)


def test_free_says_why_it_has_none(batch: Batch) -> None:
    net = convnet()
    free = yopo.Free(net, THREAT, optimizer=torch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(ValueError, match="Free steps its optimizer inside a batch"):
        free(*batch)


def test_the_last_step_is_the_last_calls(batch: Batch) -> None:
    breaks = Breaks()
    method = yopo.YOPO(nn.Sequential(convnet(), breaks), THREAT, m=2)
    assert repr(method.last) == "None"
    method(*batch)
    assert repr(method.last).startswith("Step(")
    breaks.calls, breaks.at = 0, 1
    with pytest.raises(RuntimeError, match="broken"):
        method(*batch)
    assert repr(method.last) == "None"  # not that of another batch


def test_what_float16_makes_zero_is_scaled_inside_and_divided_outside(batch: Batch) -> None:
    """As docs/frameworks.md says: a scaler multiplies what is handed over, which is too late."""
    x, y = batch[0].float().repeat(10, 1, 1, 1), batch[1].repeat(10)
    middle, last = nn.Linear(192, 4), nn.Linear(4, 4)
    net = nn.Sequential(nn.Flatten(), middle, last).float()
    last.weight.data = 2.0**-23 * last.weight.data.sign()  # float16 has it, and not a tenth of it
    found = []
    for scale in (1, 1024):
        net.zero_grad()
        method = yopo.Natural(net, loss=lambda z, y: scale * F.cross_entropy(z, y))  # noqa: B023
        with torch.autocast("cpu", torch.float16):
            loss = method(x, y) / scale
        loss.backward()
        found.append(grads(net)["1.weight"].abs().sum())
    assert found[0] == 0 < found[1]
