"""`yopo.exchange_gradients` in two processes (gloo) against plain PyTorch in one."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

import yopo
from tests.conftest import Batch, convnet
from tests.tiny import PATIENCE, as_one_of, in_two
from yopo.core import exchange

# Brightness of the batch -> layers that it runs through; the fourth layer is never used.
PATHS = {0: [0], 1: [1], 2: [0, 1, 2], 3: [2]}
LEVELS = {  # of the two processes' batches at each step; with "equal", as many layers in both
    "equal": [(0, 1), (1, 1), (3, 0), (1, 3)],
    "unequal": [(0, 1), (1, 1), (2, 0), (3, 0)],
}
STEPS = 4
WIDTHS = {"equal": (5, 5, 5, 5), "unequal": (2, 9, 4, 3)}


class Paths(nn.Module):
    """Layers that batches skip, as LayerDrop does; here the images decide which."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(12, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1))
        for i in PATHS[int(4 * x.mean())]:
            h = h + self.layers[i](h)
        return self.head(h)  # type: ignore[no-any-return]


def paths(kind: str = "unequal") -> Paths:
    torch.manual_seed(0)
    return Paths(WIDTHS[kind])


def sgd(net: nn.Module) -> SGD:
    """Momentum and decay move a weight whose gradient is zero, not one that has none."""
    return SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


def batch(step: int, rank: int, kind: str = "unequal") -> Batch:
    g = torch.Generator().manual_seed(10 * step + rank)
    x = (LEVELS[kind][step][rank] + 0.3 + 0.4 * torch.rand(5, 3, 2, 2, generator=g)) / 4
    return x, torch.arange(5) % 4


def alone(kind: str, before_step: Callable[[nn.Module], object] = lambda _: None) -> list[Tensor]:
    """What plain PyTorch trains in one process that sees both batches."""
    net = paths(kind)
    optimizer = sgd(net)
    for step in range(STEPS):
        for rank in (0, 1):
            x, y = batch(step, rank, kind)
            (F.cross_entropy(net(x), y) / 2).backward()
        before_step(net)
        optimizer.step()
        optimizer.zero_grad()
        net.requires_grad_(True)
    return list(net.parameters())


# ------------------------------------------------------------ in each of the two processes


def train(kind: str, rank: int) -> list[Tensor]:
    net = paths(kind)
    optimizer, method = sgd(net), yopo.Natural(net)
    yopo.exchange_gradients(optimizer)
    yopo.exchange_gradients(optimizer)  # once more changes nothing
    for step in range(STEPS):
        method.backward(*batch(step, rank, kind))
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def frozen(kind: str, rank: int) -> list[Tensor]:
    """All layers are frozen while one process alone has the gradients of some."""
    net = paths(kind)
    optimizer, method = sgd(net), yopo.Natural(net)
    yopo.exchange_gradients(optimizer)
    for step in range(STEPS):
        method.backward(*batch(step, rank, kind))
        net.layers.requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        net.requires_grad_(True)
    return list(net.parameters())


def clipped(rank: int) -> list[Tensor]:
    net = paths()
    optimizer, method = sgd(net), yopo.Natural(net)
    now = yopo.exchange_gradients(optimizer)
    for step in range(STEPS):
        method.backward(*batch(step, rank))
        now()
        clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def with_closures(rank: int) -> list[Tensor]:
    net = paths()
    optimizer, method = sgd(net), yopo.Natural(net)
    yopo.exchange_gradients(optimizer)
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            return float(method.backward(*batch(step, rank)).loss)

        if step % 2:
            optimizer.step(closure)
        else:
            optimizer.step(closure=closure)
    return list(net.parameters())


def without_any_gradient(rank: int) -> list[Tensor]:
    """The optimizer has one layer, and the second process's batch does not run through it."""
    net = paths()
    optimizer = SGD(net.layers[0].parameters(), 0.1)
    yopo.exchange_gradients(optimizer)
    yopo.Natural(net).backward(*batch(0, rank))
    optimizer.step()
    return list(net.parameters())


def scaled(rank: int) -> tuple[list[Tensor], float]:
    """In the second process the scaled loss overflows at first; both must skip that step."""
    net = paths()
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", init_scale=4.0)
    now = yopo.exchange_gradients(optimizer)
    for step in range(2):
        over = float("inf") if (step, rank) == (0, 1) else 1.0

        def loss(z: Tensor, y: Tensor, over: float = over) -> Tensor:
            return over * scaler.scale(F.cross_entropy(z, y))

        yopo.Natural(net, loss=loss).backward(*batch(step, rank))
        now()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return list(net.parameters()), scaler.get_scale()


def from_different_weights(rank: int) -> str:
    torch.manual_seed(rank)
    net = Paths(WIDTHS["equal"])
    optimizer = sgd(net)
    yopo.exchange_gradients(optimizer)
    yopo.Natural(net).backward(*batch(0, rank))
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


class Wrapped(nn.Module):
    """As Lightning's ddp with manual optimisation: the loop runs inside the outer forward."""

    def __init__(self, exchanged: bool) -> None:
        super().__init__()
        self.net = paths()
        self.method = yopo.Natural(self.net)
        self.optimizer = sgd(self.net)
        if exchanged:
            yopo.exchange_gradients(self.optimizer)
        self.outer = [DistributedDataParallel(self)]

    def forward(self, x: Tensor, y: Tensor) -> None:
        self.method.backward(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.outer[0].require_backward_grad_sync = False  # Lightning does so

    def fit(self, rank: int) -> list[Tensor]:
        for step in range(STEPS):
            self.outer[0](*batch(step, rank))
            self.outer[0].require_backward_grad_sync = True
        return list(self.net.parameters())


def loop(method: yopo.Method, optimizer: SGD, steps: int = 4) -> None:
    x = torch.rand(4, 3, 8, 8)
    for _ in range(steps):
        method.backward(x, torch.arange(4))
        optimizer.step()
        optimizer.zero_grad()


def bare(_rank: int) -> None:
    net = convnet()
    loop(yopo.PGD(net, yopo.Linf(0.1), steps=2), sgd(net))


def bare_and_made_anew(_rank: int) -> None:
    net = convnet()
    for _ in range(4):
        loop(yopo.PGD(net, yopo.Linf(0.1), steps=2), sgd(net), 1)


def once(_rank: int) -> None:
    net = convnet()
    loop(yopo.Natural(net), sgd(net), 1)


def in_ddp(_rank: int) -> None:
    net = DistributedDataParallel(convnet())
    loop(yopo.YOPO(net, yopo.Linf(0.1), m=2, n=2), sgd(net))


def around_ddp(_rank: int) -> None:
    net = nn.Sequential(nn.Identity(), DistributedDataParallel(convnet()))
    loop(yopo.PGD(net, yopo.Linf(0.1), steps=2), sgd(net))


def exchanged(_rank: int) -> None:
    torch.manual_seed(0)
    net = convnet()
    optimizer = sgd(net)
    yopo.exchange_gradients(optimizer)
    loop(yopo.Free(net, yopo.Linf(0.1), optimizer=optimizer, m=2), optimizer)


def two_optimizers(_rank: int, exchanging: int = 1) -> None:
    """A net's two halves have an optimizer each, of which so many exchange."""
    torch.manual_seed(0)
    net = convnet()
    parts = [[*net.parameters()][:2], [*net.parameters()][2:]]
    optimizers = [SGD(part, 0.1) for part in parts]
    for optimizer in optimizers[:exchanging]:
        yopo.exchange_gradients(optimizer)
    for _ in range(3):
        yopo.Natural(net).backward(torch.rand(4, 3, 8, 8), torch.arange(4))
        for optimizer in optimizers:
            optimizer.step()


def both_of_two_optimizers(rank: int) -> None:
    two_optimizers(rank, 2)


def one_optimizer_and_the_rest_frozen(_rank: int) -> None:
    torch.manual_seed(0)
    net = convnet()
    first, *others = net.parameters()
    first.requires_grad_(False)
    optimizer = SGD(others, 0.1)
    yopo.exchange_gradients(optimizer)
    loop(yopo.Natural(net), optimizer)


def after_a_trial(_rank: int) -> None:
    torch.manual_seed(0)
    net = convnet()
    method, optimizer = yopo.Natural(net), sgd(net)
    method.backward(torch.rand(4, 3, 8, 8), torch.arange(4))
    net.zero_grad()
    yopo.exchange_gradients(optimizer)
    loop(method, optimizer)


def sharded(_rank: int) -> None:
    net: Any = fully_shard(convnet(), mesh=init_device_mesh("cpu", (2,)))
    for _ in range(2):
        exchange.watch(net)
    net = fully_shard(convnet(), mesh=init_device_mesh("cpu", (2,)))
    net.unshard()  # as between forward and backward: the parameters are plain tensors
    for _ in range(2):
        exchange.watch(net)


def sharded_in_part(_rank: int) -> None:
    net = convnet()
    fully_shard(net[-1], mesh=init_device_mesh("cpu", (2,)))
    loop(yopo.Natural(net), sgd(net))


def wrapped_in_part(_rank: int) -> None:
    net = convnet()
    net[-1] = DistributedDataParallel(net[-1])
    loop(yopo.Natural(net), sgd(net))


def tensor_parallel(_rank: int, shape: tuple[int, int] = (1, 2)) -> None:
    """Data x tensor: of what is not cut each process has a copy."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    parallelize_module(net, mesh["tensor"], {"3": ColwiseParallel(output_layouts=Replicate())})
    for _ in range(2):
        exchange.watch(net)


def replicas(rank: int) -> None:
    tensor_parallel(rank, (2, 1))


def engine(_rank: int, with_exchange: bool = False) -> None:
    torch.manual_seed(0)
    net = convnet()
    optimizer = sgd(net)
    if with_exchange:
        yopo.exchange_gradients(optimizer)
    made = yopo.Engine(yopo.Natural(net), optimizer, compile=False)
    for _ in range(3):
        made.step(torch.rand(4, 3, 8, 8), torch.arange(4))


Work = Callable[[int], object]
AGAINST_ONE: list[Work] = [
    clipped,
    with_closures,
    without_any_gradient,
    scaled,
    from_different_weights,
]
WARNED: list[Work] = [bare, bare_and_made_anew, two_optimizers, engine]
WARNED += [sharded_in_part, wrapped_in_part, replicas]
SILENT: list[Work] = [once, in_ddp, around_ddp, exchanged, both_of_two_optimizers]
SILENT += [one_optimizer_and_the_rest_frozen, after_a_trial, sharded]
SILENT += [tensor_parallel]


def heard(work: Work, rank: int) -> tuple[Any, list[str]]:
    """What it gives back, and its warnings that name the cure."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work(rank)
    cures = ("exchange_gradients(optimizer)", "the whole network to fully_shard")
    return result, [w.filename for w in caught if any(cure in str(w.message) for cure in cures)]


def work(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    as_one_of(2, rank, port)
    wait = timedelta(seconds=PATIENCE / 2)  # what cannot be exchanged would wait for ever
    dist.init_process_group("gloo", timeout=wait)
    found: dict[str, Any] = {kind: train(kind, rank) for kind in WIDTHS}
    found |= {f"frozen, {kind}": frozen(kind, rank) for kind in WIDTHS}
    for each in AGAINST_ONE:
        found[each.__name__] = each(rank)
    found["lightning"] = heard(Wrapped(exchanged=True).fit, rank)
    found["lightning without"] = heard(Wrapped(exchanged=False).fit, rank)
    for each in WARNED + SILENT:
        torch.manual_seed(rank)
        found[each.__name__] = heard(each, rank)
    found["engine with"] = heard(lambda r: engine(r, with_exchange=True), rank)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


# ------------------------------------------------------------ and what they found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_two(work, tmp_path_factory.mktemp("exchange"))


def assert_both(found: list[dict[str, Any]], key: str, want: list[Tensor]) -> None:
    """Both processes have the same bits, and what one process has."""
    mine, others = (each[key] for each in found)
    for a, b, c in zip(mine, others, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", WIDTHS)
def test_branches_that_depend_on_the_data(kind: str, found: list[dict[str, Any]]) -> None:
    assert_both(found, kind, alone(kind))


@pytest.mark.parametrize("kind", WIDTHS)
def test_parameters_frozen_with_a_gradient(kind: str, found: list[dict[str, Any]]) -> None:
    want = alone(kind, lambda net: net.layers.requires_grad_(False))
    assert_both(found, f"frozen, {kind}", want)


def test_clipping_sees_the_exchanged_gradients(found: list[dict[str, Any]]) -> None:
    want = alone("unequal", lambda net: clip_grad_norm_(net.parameters(), 0.1))
    assert_both(found, "clipped", want)


def test_gradients_that_a_closure_computes(found: list[dict[str, Any]]) -> None:
    assert_both(found, "with_closures", alone("unequal"))


def test_a_process_without_any_gradient(found: list[dict[str, Any]]) -> None:
    net = paths()
    before = [p.detach().clone() for p in net.parameters()]
    (F.cross_entropy(net(batch(0, 0)[0]), batch(0, 0)[1]) / 2).backward()
    SGD(net.layers[0].parameters(), 0.1).step()
    assert any(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert_both(found, "without_any_gradient", list(net.parameters()))


def test_a_step_that_overflows_in_one_process_is_skipped_in_both(
    found: list[dict[str, Any]],
) -> None:
    net = paths()
    optimizer = sgd(net)
    for rank in (0, 1):
        x, y = batch(1, rank)
        (F.cross_entropy(net(x), y) / 2).backward()
    optimizer.step()
    assert all(each["scaled"][1] == 2.0 for each in found)
    assert_both([{"scaled": each["scaled"][0]} for each in found], "scaled", [*net.parameters()])


def test_different_weights_are_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "begin with different weights" in each["from_different_weights"]


def test_a_loop_inside_anothers_ddp_needs_the_exchange(found: list[dict[str, Any]]) -> None:
    assert all(each["lightning"][1] == [] for each in found)
    assert_both([{"all": each["lightning"][0]} for each in found], "all", alone("unequal"))
    apart = [each["lightning without"] for each in found]
    assert all(len(files) == 1 for _, files in apart)
    assert any(not torch.equal(a, b) for a, b in zip(apart[0][0], apart[1][0], strict=True))


@pytest.mark.parametrize("name", [each.__name__ for each in WARNED])
def test_gradients_that_nobody_exchanges_are_warned_of_once(
    name: str, found: list[dict[str, Any]]
) -> None:
    """And it points to the line of the loop."""
    assert all(each[name][1] == [__file__] for each in found)


@pytest.mark.parametrize("name", [*(each.__name__ for each in SILENT), "engine with"])
def test_no_false_alarm(name: str, found: list[dict[str, Any]]) -> None:
    assert all(each[name][1] == [] for each in found)


def test_in_one_process_nothing_is_exchanged() -> None:
    net = paths()
    twin = paths()
    optimizer, other = sgd(net), sgd(twin)
    yopo.exchange_gradients(optimizer)()
    for step in range(STEPS):
        for model, stepper in ((net, optimizer), (twin, other)):
            yopo.Natural(model).backward(*batch(step, 0))
            stepper.step()
            stepper.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_what_cannot_be_exchanged_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        yopo.exchange_gradients(torch.optim.LBFGS(convnet().parameters()))
