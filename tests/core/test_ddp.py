"""DistributedDataParallel in two processes (gloo) against one process on the combined batch."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import yopo
from tests.conftest import Batch, bn_convnet, convnet
from tests.tiny import PATIENCE, as_one_of, in_two

THREAT = yopo.Linf(0.1)
METHODS: dict[str, Callable[[nn.Module], yopo.Method]] = {
    "natural": lambda net: yopo.Natural(net),
    "yopo": lambda net: yopo.YOPO(net, THREAT, m=2, n=2),
    "before": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, grad_at="before"),
    "last": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, grad_at="last"),
    "relu": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, first_layer=first(net, "1")),
    "pgd": lambda net: yopo.PGD(net, THREAT, steps=2),
    "trades": lambda net: yopo.TRADES(net, THREAT, steps=2),
    "trades-yopo": lambda net: yopo.TRADESYOPO(net, THREAT, m=2, n=2),
    "fast": lambda net: yopo.Fast(net, THREAT),
    "nfgsm": lambda net: yopo.NFGSM(net, THREAT),
}
FREE = 3  # replays, each with an exchange and a step of the optimizer
UNUSED: dict[str, Any] = {"find_unused_parameters": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "unused": UNUSED,  # of which one is
}
BUCKET: dict[str, Any] = {"bucket_cap_mb": 5e-4}  # of 500 bytes, so that there are several


def first(net: nn.Module, name: str) -> str:
    """The module of that name, wherever it lies."""
    paths: list[str] = [path for path, _ in net.named_modules()]
    return next(path for path in paths if f".{path}".endswith(f".{name}"))


def data() -> Batch:
    torch.manual_seed(1)
    return torch.rand(8, 3, 8, 8), torch.arange(8) % 4


def at(method: yopo.Method, x: Tensor) -> Tensor | None:
    """Where an attack begins belongs to the image, not to the process."""
    return None if isinstance(method, yopo.Natural) else 0.1 * torch.sin(1000 * x)


def network(kind: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    return unused(convnet()) if kind.startswith("unused") else convnet()


def gradients(method: yopo.Method, x: Tensor, y: Tensor) -> list[Tensor]:
    """What two batches add up to, after a first one that was thrown away."""
    start = at(method, x)
    method.backward(x, y, start)
    method.model.zero_grad(set_to_none=False)
    method.backward(x, y, start)
    method.backward(x.flip(3), y, start)
    return [p.grad.clone() for p in method.model.parameters() if p.grad is not None]


def accumulated(net: nn.Module, method: yopo.Method, x: Tensor, y: Tensor) -> list[Tensor]:
    """Two batches again, the first without an exchange."""
    start = at(method, x)
    wait = net.no_sync() if isinstance(net, DistributedDataParallel) else nullcontext()
    with wait:
        method.backward(x, y, start)
    method.backward(x.flip(3), y, start)
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def free(net: nn.Module) -> yopo.Free:
    return yopo.Free(net, THREAT, m=FREE, optimizer=torch.optim.SGD(net.parameters(), 0.1))


class Turns(nn.Module):
    """Layers take turns, pass by pass, from the moment on when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(192, 6), nn.Linear(6, 4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.turn: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x.flatten(1))
        if self.turn is not None:
            h = h + self.layers[self.turn % 2](h.tanh())  # the third is never used
            self.turn += 1
        return self.head(h)  # type: ignore[no-any-return]


def turned(turns: Turns, net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor | None]:
    """The last weight pass does not use the layer that the one before it used."""
    method = yopo.YOPO(net, THREAT, m=3, n=2)
    method.prepare(x, y)
    turns.turn = 0
    method.backward(x, y, 0.1 * torch.sin(1000 * x))
    return [None if p.grad is None else p.grad.clone() for p in turns.parameters()]


def counted(net: DistributedDataParallel) -> list[int]:
    """Gets the size of every message from now on; a comm hook that averages."""
    sizes: list[int] = []

    def hook(
        _state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().numel())
        work: Any = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        sent: torch.futures.Future[Tensor] = work.get_future()
        return sent.then(lambda future: future.value()[0])

    net.register_comm_hook(None, hook)
    return sizes


def messages(make: Callable[[nn.Module], yopo.Method], x: Tensor, y: Tensor) -> dict[str, Any]:
    """What is sent for the second batch, and the gradient's bits beside those of one exchange."""
    plain, net = network(), DistributedDataParallel(network(), **BUCKET)
    sizes, method = counted(net), make(net)
    start = at(method, x)
    for each in (make(plain), method):
        each.backward(x, y, start)
        each.model.zero_grad()
    sizes.clear()
    with net.no_sync():
        method.backward(x, y, start)
    none = len(sizes)
    net.zero_grad()
    method.backward(x, y, start)
    make(plain).backward(x, y, start)
    for p in plain.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad.div_(2))
    pairs = zip(net.parameters(), plain.parameters(), strict=True)
    same = all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]
    return {"none": none, "sizes": sizes, "same": same}


def uneven(make: Callable[[nn.Module], yopo.Method], kind: str, rank: int) -> list[list[Tensor]]:
    """Gradients of three batches, the last of which the second process does not have."""
    inside, options = UNEVEN[kind]
    inner = DistributedDataParallel(network(kind), **options)
    net, found = nn.Sequential(inner) if inside else inner, []
    method, (x, y) = make(net), data()
    x, y = x[rank::2], y[rank::2]
    with Join([inner]):
        for k in range(3 - rank):
            method.backward(x.roll(k, 3), y, at(method, x.roll(k, 3)))
            found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            net.zero_grad()
    return found


UNEVEN: dict[str, tuple[bool, dict[str, Any]]] = {
    "default": (False, {}),
    "inside": (True, {}),
    "unused": (False, UNUSED),
    "unused inside": (True, UNUSED),
    "static": (False, OPTIONS["static"]),
}


def stepped(net: nn.Module, x: Tensor, y: Tensor, say: Callable[[str], None]) -> list[Tensor]:
    """The weights after steps of the engine; from zero, since it draws its own starts."""
    method = yopo.Natural(net)
    engine = yopo.Engine(method, torch.optim.SGD(net.parameters(), 0.1), say=say)
    for _ in range(3):
        engine.step(x, y)
    return [p.detach() for p in net.parameters()]


class Redirected(nn.Module):
    """What Lightning gives to DistributedDataParallel: whose forward runs any part of a step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, part: Callable[[], Tensor]) -> Tensor:
        return part()


def left(net: nn.Module) -> list[Tensor | None]:
    """What is in .grad, which may be a view of what is exchanged next."""
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


LOSSES = ("yopo", "before", "relu", "pgd", "trades")
AROUND = ("outside", "inside", "redirected")


def summed(
    ddp: nn.Module, method: yopo.Method, x: Tensor, y: Tensor, *, through: bool
) -> dict[str, list[Tensor | None]]:
    """What `method(x, y).backward()` leaves in .grad, alone and in company."""
    start = 0.1 * torch.sin(1000 * x)
    net = method.model
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "once": [lambda: method(x, y, start)],
        "again": [lambda: method(x, y, start)],
        "a third each": [lambda: method(x, y, start) / 3, lambda: method(x.flip(3), y, start) / 3],
        "before another": [lambda: method(x, y, start) + F.cross_entropy(net(x), y)],
        "after another": [lambda: F.cross_entropy(net(x), y) + method(x, y, start)],
        "two at once": [lambda: method(x, y, start) + method(x.flip(3), y, start)],
    }

    def backward(call: Callable[[], Tensor]) -> None:
        (ddp(call) if through else call()).backward()

    found: dict[str, list[Tensor | None]] = {}
    for name, parts in calls.items():
        for part in parts:
            backward(part)
        found[name] = left(net)
        ddp.zero_grad()
    with ddp.no_sync() if isinstance(ddp, DistributedDataParallel) else nullcontext():
        backward(calls["once"][0])
    backward(calls["a third each"][1])
    return found | {"the first under no_sync": left(net)}


def unused(net: nn.Sequential) -> nn.Sequential:
    """With a parameter that no pass comes by."""
    net.register_parameter("extra", nn.Parameter(torch.ones(2)))
    return net


def losses(x: Tensor, y: Tensor) -> dict[str, Any]:
    """`summed`, and messages exchanged, wherever DistributedDataParallel may stand."""
    found: dict[str, Any] = {}
    for kind, options in OPTIONS.items():
        for name in LOSSES if kind == "default" else ("yopo",):
            for around in AROUND:
                net = network(kind)
                through = around == "redirected"
                ddp = DistributedDataParallel(Redirected(net) if through else net, **options)
                sizes = counted(ddp)
                given = {"outside": ddp, "inside": nn.Sequential(ddp), "redirected": net}[around]
                key = f"loss {kind} {name} {around}"
                try:
                    method = METHODS[name](given)
                    found[key] = summed(ddp, method, x, y, through=through)
                except ValueError as error:
                    found[key] = str(error)
                found[f"{key} messages"] = len(sizes)
    return found


def statistics(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """BatchNorm's, which are the first process's after a step."""
    torch.manual_seed(0)
    net = bn_convnet()
    yopo.PGD(DistributedDataParallel(net), THREAT, steps=1)(x, y, torch.zeros_like(x))
    return {k: v.clone() for k, v in net.state_dict().items() if "running" in k}


def exchanges(rank: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in METHODS.items():
        found[f"messages {name}"] = messages(make, x, y)
    for name, make in (METHODS | {"free": free}).items():
        for kind in UNEVEN:
            found[f"uneven {kind} {name}"] = uneven(make, kind, rank)
    torch.manual_seed(0)
    net = DistributedDataParallel(convnet())
    sizes = counted(net)
    free(net).backward(x, y, 0.1 * torch.sin(1000 * x))
    found["free"] = len(sizes), list(net.parameters()), [p.grad for p in net.parameters()]
    torch.manual_seed(0)
    turns = Turns()
    found["turns"] = turned(turns, DistributedDataParallel(turns, **UNUSED), x, y)
    return found


def work(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    as_one_of(2, rank, port)
    # What is not matched would wait for ever.
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE / 2))
    x, y = data()
    x, y = x[rank::2], y[rank::2]
    found: dict[str, Any] = {}
    found |= exchanges(rank, x, y)
    for kind, options in OPTIONS.items():
        for name, make in METHODS.items():
            net: Any = DistributedDataParallel(network(kind), **options)
            found[f"{kind} {name}"] = gradients(make(net), x, y)
            if kind != "static":
                net = DistributedDataParallel(net.module, **options)
                net.zero_grad()
                found[f"{kind} {name} accumulated"] = accumulated(net, make(net), x, y)
            net = nn.Sequential(DistributedDataParallel(network(kind), **options))
            try:
                found[f"{kind} {name} inside"] = gradients(make(net), x, y)
            except ValueError as error:
                found[f"{kind} {name} inside"] = str(error)
    found |= losses(x, y)
    found["statistics"] = statistics(x, y)
    torch.manual_seed(0)
    said: list[str] = []
    net = nn.Sequential(nn.Identity(), DistributedDataParallel(convnet()))
    found["engine"] = stepped(net, x, y, said.append)
    found["said"] = said
    net = DistributedDataParallel(bn_convnet())
    if rank == 0:  # alone: the other does not answer
        found["robust"] = yopo.evaluate(net, (x, y), THREAT, ["clean", "pgd-3"]).accuracy
    net = nn.Sequential(DistributedDataParallel(bn_convnet()))
    before = yopo.PGD(net, THREAT, steps=1).backward(x, y).loss  # both
    if rank == 0:
        found["robust inside"] = yopo.evaluate(net, (x, y), THREAT, ["clean", "pgd-3"]).accuracy
    dist.all_reduce(before)  # what had been sent before would be taken for this
    net = DistributedDataParallel(convnet())
    wrong: dict[str, Callable[[], object]] = {
        "pmp": lambda: yopo.PMP(net, THREAT),
        "free in no_sync": lambda: free(net).backward(x, y),
    }
    for name, call in wrong.items():
        try:
            with net.no_sync():
                call()
        except ValueError as error:
            found[name] = str(error)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    return in_two(work, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_one_process(
    kind: str, name: str, found: list[dict[str, Any]]
) -> None:
    want = gradients(METHODS[name](network(kind)), *data())
    assert len(want) == 6
    for each in found:
        torch.testing.assert_close(each[f"{kind} {name}"], want, rtol=1e-10, atol=1e-10)
        inside = each[f"{kind} {name} inside"]
        if kind == "static":
            assert "let it be the outermost module" in inside
        else:
            torch.testing.assert_close(inside, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("default", name) for name in LOSSES), ("views", "yopo"), ("unused", "yopo")],
)
def test_a_loss_is_exchanged_once(
    kind: str, name: str, around: str, found: list[dict[str, Any]]
) -> None:
    net = network(kind)
    want = summed(net, METHODS[name](net), *data(), through=False)
    assert len(want) == 7
    for each in found:
        got = each[f"loss {kind} {name} {around}"]
        for what, grads in want.items():
            torch.testing.assert_close(got[what], grads, rtol=1e-10, atol=1e-10, msg=what)
        # Eight backward passes. After another forward pass of DistributedDataParallel's, which
        # waits for gradients, the method's own are taken for them: a needless message, no more.
        assert each[f"loss {kind} {name} {around} messages"] == (
            8 if around == "redirected" else 10
        )


@pytest.mark.parametrize("around", ["outside", "redirected"])  # inside: above
def test_a_loss_refuses_a_static_graph(around: str, found: list[dict[str, Any]]) -> None:
    assert all("leave static_graph out" in each[f"loss static yopo {around}"] for each in found)


def test_a_loss_takes_over_the_first_ones_statistics(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    net, (x, y) = bn_convnet(), data()
    yopo.PGD(net, THREAT, steps=1)(x[::2], y[::2], torch.zeros_like(x[::2]))
    for each in found:
        for name, value in each["statistics"].items():
            torch.testing.assert_close(value, net.state_dict()[name])


@pytest.mark.parametrize("kind", ["default", "views", "unused"])
@pytest.mark.parametrize("name", METHODS)
def test_what_no_sync_left_is_exchanged_too(
    kind: str, name: str, found: list[dict[str, Any]]
) -> None:
    net = network(kind)
    want = accumulated(net, METHODS[name](net), *data())
    for each in found:
        torch.testing.assert_close(each[f"{kind} {name} accumulated"], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_makes_one_exchange_and_its_bits_are_the_same(
    name: str, found: list[dict[str, Any]]
) -> None:
    """However many weight passes it has: each parameter is sent once; under no_sync none is."""
    numbers = sum(p.numel() for p in convnet().parameters())
    for each in found:
        sent = each[f"messages {name}"]
        assert len(sent["sizes"]) > 2  # buckets
        assert sum(sent["sizes"]) == numbers
        assert sent["none"] == 0
        assert sent["same"]


@pytest.mark.parametrize("kind", UNEVEN)
@pytest.mark.parametrize("name", [*METHODS, "free"])
def test_uneven_inputs(kind: str, name: str, found: list[dict[str, Any]]) -> None:
    """Under torch's Join: what a process that has no more batches sends counts as zero."""
    net, (x, y) = network(kind), data()
    method = (METHODS | {"free": free})[name](net)
    for k in range(3):
        mine, whose = (x.roll(k, 3), y) if k < 2 else (x[::2].roll(k, 3), y[::2])
        net.zero_grad()
        if k == 2 and method.optimizer is not None:  # its steps are of half a gradient, too
            method.optimizer.param_groups[0]["lr"] /= 2
        method.backward(mine, whose, at(method, mine))
        want = [p.grad / (1 if k < 2 else 2) for p in net.parameters() if p.grad is not None]
        for each in found[: 2 if k < 2 else 1]:
            got = each[f"uneven {kind} {name}"]
            torch.testing.assert_close(got[k], want, rtol=1e-10, atol=1e-10)


def test_a_layer_that_only_an_earlier_pass_used_is_exchanged(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    turns = Turns()
    want = turned(turns, turns, *data())
    assert [grad is None for grad in want] == [False] * 8 + [True] * 2
    for each in found:
        got = each["turns"]
        assert [grad is None for grad in got] == [grad is None for grad in want]
        torch.testing.assert_close(got[:8], want[:8], rtol=1e-10, atol=1e-10)


def test_free_exchanges_before_each_of_its_steps(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    net, (x, y) = convnet(), data()
    free(net).backward(x, y, 0.1 * torch.sin(1000 * x))
    for each in found:
        sent, weights, grads = each["free"]
        assert sent == FREE
        torch.testing.assert_close(weights, list(net.parameters()), rtol=1e-10, atol=1e-10)
        want = [p.grad for p in net.parameters()]
        torch.testing.assert_close(grads, want, rtol=1e-10, atol=1e-10)


def test_one_process_evaluates_alone(found: list[dict[str, Any]]) -> None:
    for name in ("robust", "robust inside"):
        assert set(found[0][name]) == {"clean", "pgd-3"}


def test_the_engine_leaves_the_exchange_to_it(found: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    want = stepped(convnet(), *data(), say=lambda _: None)
    for each in found:
        torch.testing.assert_close(each["engine"], want, rtol=1e-6, atol=1e-6)
        assert "DistributedDataParallel exchanges gradients in backward()" in each["said"][0]


def test_free_refuses_no_sync(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "each process would train a network of its own" in each["free in no_sync"]


def test_pmp_refuses_it(found: list[dict[str, Any]]) -> None:
    assert all("DistributedDataParallel would exchange nothing" in each["pmp"] for each in found)
