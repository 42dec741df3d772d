"""Weights spread over two processes (gloo), by FSDP2 or tensor parallelism, against one process."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import yopo
from tests.conftest import GPU, Batch
from tests.tiny import PATIENCE, forkserver, free_port
from yopo.core.parallel import is_shard, whole

THREAT = yopo.Linf(0.1)
Make = Callable[[nn.Module], yopo.Method]
METHODS: dict[str, Make] = {
    "natural": lambda net: yopo.Natural(net),
    "after": lambda net: yopo.YOPO(net, THREAT, m=3, n=3),
    "before": lambda net: yopo.YOPO(net, THREAT, m=3, n=3, grad_at="before"),
    "last": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, grad_at="last"),
    "block": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, first_layer="1"),
    "in a block": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, first_layer="2.a"),
    "pgd": lambda net: yopo.PGD(net, THREAT, steps=2),
    "trades": lambda net: yopo.TRADES(net, THREAT, steps=2),
    "trades-yopo": lambda net: yopo.TRADESYOPO(net, THREAT, m=2, n=2, first_layer="1"),
    "fast": lambda net: yopo.Fast(net, THREAT),
    "nfgsm": lambda net: yopo.NFGSM(net, THREAT),
}
KEPT = ("after", "block", "trades-yopo")  # also with weights that stay whole between the passes
GROUPS = 3  # two blocks, and the root with what is outside of them


class Block(nn.Module):
    """All of the input goes through a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(5, 5, 3, padding=1), nn.Conv2d(5, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        return x + self.b(x)  # type: ignore[no-any-return]


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Conv2d(3, 5, 3, padding=1)
    return nn.Sequential(first, Block(), Block(), nn.Flatten(), nn.Linear(320, 4))


def spread(net: nn.Module, **options: Any) -> Any:
    mesh = init_device_mesh(next(net.parameters()).device.type, (dist.get_world_size(),))
    for module in net.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def data() -> Batch:
    torch.manual_seed(1)
    return torch.rand(8, 3, 8, 8), torch.arange(8) % 4


def start(method: yopo.Method, x: Tensor) -> Tensor | None:
    """It belongs to the image, not to the process."""
    return None if isinstance(method, yopo.Natural) else 0.1 * torch.sin(1000 * x)


def all_of(tensors: Any) -> list[Tensor]:
    return [whole(t).detach().clone() for t in tensors]


def gradients(net: nn.Module) -> list[Tensor]:
    return all_of(p.grad for p in net.parameters())


def three_batches(method: yopo.Method, x: Tensor, y: Tensor) -> list[Tensor]:
    """What the last two of them add up to."""
    method.backward(x, y, start(method, x))
    method.model.zero_grad()
    for images in (x, x.flip(3)):
        method.backward(images, y, start(method, images))
    return gradients(method.model)


def free(net: nn.Module) -> yopo.Free:
    return yopo.Free(net, THREAT, m=3, optimizer=torch.optim.SGD(net.parameters(), 0.1))


def replayed(net: nn.Module, x: Tensor, y: Tensor, *, gathered: bool = False) -> list[Tensor]:
    method = free(net)
    with yopo.gathered(net) if gathered else nullcontext():
        method.backward(x, y, 0.1 * torch.sin(1000 * x))
    return gradients(net) + all_of(net.parameters())


def trained(
    net: nn.Module, ema: yopo.EMA, x: Tensor, y: Tensor, *, gathered: bool = False
) -> list[Tensor]:
    """AdamW, clipping and an average."""
    method = yopo.YOPO(net, THREAT, m=2, n=2)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    for step in range(3):
        with yopo.gathered(net) if gathered else nullcontext():
            method.backward(x.flip(3), y, start(method, x))
            net.zero_grad()
            method.backward(x, y, start(method, x))
            clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            ema.model(x)  # leaves its root whole
        ema.update(step)
    return all_of(net.parameters()) + all_of(ema.model.parameters())


def breaks_in_the_second_pass() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(z: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:  # an attack pass, and two for the weights
            raise KeyError("of the user's own")
        return F.cross_entropy(z, y)

    return loss


# ------------------------------------------------------------ in each of the two processes


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many messages FSDP2 sends in the block."""
    sent = {"gathered": 0, "reduced": 0}
    kinds = {
        _fsdp_collectives.DefaultAllGather: "gathered",
        _fsdp_collectives.DefaultReduceScatter: "reduced",
    }
    real = {kind: kind.__call__ for kind in kinds}
    for kind, name in kinds.items():

        def call(self: Any, *args: Any, kind: Any = kind, name: str = name, **given: Any) -> Any:
            sent[name] += 1
            return real[kind](self, *args, **given)

        kind.__call__ = call  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        for kind, own in real.items():
            kind.__call__ = own  # type: ignore[method-assign]


def messages(make: Make, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Of one step: as it is; gathered once; without an exchange, and then with one."""
    net = spread(blocks())
    method, found = make(net), dict[str, Any]()
    method.prepare(x, y)
    found["left whole"] = [name for name, p in net.named_parameters() if not is_shard(p)]
    blocked: list[tuple[str, AbstractContextManager[None]]] = [
        ("plain", nullcontext()),
        ("gathered", yopo.gathered(net)),
    ]
    for name, block in blocked:
        net.zero_grad()
        with counted() as sent, block:
            method.backward(x, y, start(method, x))
        found[name] = dict(sent), gradients(net)
        found["left whole"] += [name for name, p in net.named_parameters() if not is_shard(p)]
    net.zero_grad()
    with counted() as sent:
        net.set_requires_gradient_sync(False)
        method.backward(x, y, start(method, x))
        assert sent["reduced"] == 0
        net.set_requires_gradient_sync(True)
        method.backward(x.flip(3), y, start(method, x.flip(3)))
    found["accumulated"] = sent["reduced"], gradients(net)
    return found


def broken(x: Tensor, y: Tensor) -> dict[str, Any]:
    """In the middle of a step, after a batch without an exchange."""
    net = spread(blocks())
    method = yopo.YOPO(net, THREAT, m=3, n=1)
    method.backward(x, y, start(method, x))
    net.set_requires_gradient_sync(False)
    method.backward(x, y, start(method, x))
    before, method.loss = gradients(net), breaks_in_the_second_pass()
    with pytest.raises(KeyError, match="of the user's own"):
        method.backward(x, y, start(method, x))
    after, method.loss = gradients(net), F.cross_entropy
    left = [name for name, p in net.named_parameters() if not is_shard(p)]
    net.set_requires_gradient_sync(True)
    method.backward(x.flip(3), y, start(method, x.flip(3)))
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"same": same, "left whole": left, "gradients": gradients(net)}


def stopped(x: Tensor) -> dict[str, Any]:
    """f0 alone, forward and back: what FSDP2 does around a module that is left half-way."""
    net, found = spread(blocks()), dict[str, Any]()
    for name in ("0", "1", "1.a", "2.a"):
        method = yopo.YOPO(net, THREAT, first_layer=name)
        f0 = method.split.f0(x)
        with torch.no_grad():
            out = f0(x)
        found[name] = out, f0.pull_back(out.cos(), x)
        found[f"{name} left"] = [name for name, p in net.named_parameters() if not is_shard(p)]
        found[f"{name} own"] = any("forward" in vars(m) for m in net.modules())
    return found


def tensor_parallel(make: Make, net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return three_batches(make(net), x, y)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 4))


TENSOR_PARALLEL: dict[str, Make] = {
    name: METHODS[name]
    for name in ("natural", "after", "before", "last", "pgd", "trades", "fast", "nfgsm")
} | {
    "tanh": lambda net: yopo.YOPO(net, THREAT, m=2, n=2, first_layer="2"),
    "trades-yopo": lambda net: yopo.TRADESYOPO(net, THREAT, m=2, n=2, first_layer="2"),
    "free": free,
}


def evaluated(net: nn.Module, x: Tensor, y: Tensor, **more: Any) -> dict[str, Any]:
    result = yopo.evaluate(net, (x, y), THREAT, ["clean", "pgd-3", "cw"], batch=3, **more)
    return {"accuracy": result.accuracy, "sha": result.about["weights_sha256"]}


def teams(rank: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Two-dimensional meshes, of data x tensor: who evaluates which images."""
    found: dict[str, Any] = {}
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        net = parallelize_module(mlp(), mesh["tensor"], plan)
        fully_shard(net, mesh=mesh["data"])
        for name, rows, more in (
            ("same", slice(None), {}),
            ("own", slice(rank, None, 2), {}),
            ("fewer", slice(8 - rank), {}),
            ("seeds", slice(None), {"seed": rank}),
            ("together", slice(None), {"together": True}),
        ):
            try:
                found[f"{shape} {name}"] = evaluated(net, x[rows], y[rows], **more)
            except ValueError as error:
                found[f"{shape} {name}"] = str(error)
    return found


def refusals(net: nn.Module) -> list[str]:
    found, said = [], list[str]()
    for wrong in (
        lambda: yopo.EMA(net, 0.9),
        lambda: yopo.PMP(net, THREAT),
        lambda: yopo.exchange_gradients(torch.optim.SGD(net.parameters(), 0.1)),
    ):
        with pytest.raises(ValueError, match=r"fully_shard|DTensors") as error:
            wrong()
        found.append(str(error.value))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    yopo.Engine(yopo.Natural(net), optimizer, say=said.append).step(*data())
    net.set_requires_gradient_sync(False)  # type: ignore[operator]
    unsent: list[Callable[[], object]] = [
        lambda: yopo.Natural(net)(*data()),
        lambda: free(net).backward(*data()),
    ]
    for call in unsent:
        with pytest.raises(ValueError, match=r"set_requires_gradient_sync") as error:
            call()
        said.append(str(error.value))
    return found + said


def handed(net: nn.Module, x: Tensor, y: Tensor, *, gathered: bool = False) -> list[Tensor]:
    """Half of a loss, where weights are whole."""
    method = yopo.YOPO(net, THREAT, m=2, n=2)
    with yopo.gathered(net) if gathered else nullcontext():
        (method(x, y, start(method, x)) / 2).backward()
    return gradients(net)


def work(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    address = f"tcp://127.0.0.1:{port}"
    wait = timedelta(seconds=PATIENCE / 2)  # what is not matched would wait for ever
    dist.init_process_group("gloo", address, rank=rank, world_size=2, timeout=wait)
    both = data()
    x, y = (t[rank::2] for t in both)
    found: dict[str, Any] = {}
    for name, make in METHODS.items():
        found[name] = three_batches(make(spread(blocks())), x, y)
        found[f"{name} messages"] = messages(make, x, y)
    for name in KEPT:
        kept = spread(blocks(), reshard_after_forward=False)
        found[f"{name} kept"] = three_batches(METHODS[name](kept), x, y)
    found["free"] = replayed(spread(blocks()), x, y)
    found["free gathered"] = replayed(spread(blocks()), x, y, gathered=True)
    for name in ("trained", "trained gathered"):
        net: nn.Module = blocks()
        ema = yopo.EMA(net, 0.5)
        spread(net), spread(ema.model)
        found[name] = trained(net, ema, x, y, gathered=name != "trained")
    found["handed"] = handed(spread(blocks()), x, y, gathered=True)
    found["broken"] = broken(x, y)
    found["stopped"] = stopped(both[0])
    mesh = init_device_mesh("cpu", (2,))
    for name, make in TENSOR_PARALLEL.items():
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        net = parallelize_module(mlp(), mesh, plan)
        if name == "free":
            found["tensor parallel free"] = replayed(net, *both)
        else:
            found[f"tensor parallel {name}"] = three_batches(make(net), *both)
    net = spread(blocks())
    wrong = (blocks()(x).argmax(1) + 1) % 4  # nothing stands in the second process
    found["evaluated"] = evaluated(net, x, wrong if rank else blocks()(x).argmax(1))
    found |= teams(rank, both[0], mlp()(both[0]).argmax(1))
    found["refused"] = refusals(net)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = spread(blocks().float(), mp_policy=policy)
    torch.set_default_dtype(torch.float32)
    found["bf16"] = three_batches(METHODS["after"](net), x.float(), y)
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


# ------------------------------------------------------------ and what they found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out, port = tmp_path_factory.mktemp("fsdp"), free_port()
    context = forkserver()
    pair = [context.Process(target=work, args=(rank, port, str(out))) for rank in (0, 1)]
    for process in pair:
        process.start()
    for process in pair:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [torch.load(Path(out) / f"{rank}.pt") for rank in (0, 1)]


def assert_close(got: object, want: object) -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_one_process(name: str, found: list[dict[str, Any]]) -> None:
    want = three_batches(METHODS[name](blocks()), *data())
    assert len(want) == 12
    for each in found:
        assert_close(each[name], want)
        if name in KEPT:
            assert_close(each[f"{name} kept"], want)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_reduces_each_group_once(name: str, found: list[dict[str, Any]]) -> None:
    """However many weight passes it has; and gathers it once, where that is asked for."""
    x, y = data()
    net = blocks()
    method = METHODS[name](net)
    method.backward(x, y, start(method, x))
    want = gradients(net)
    method.backward(x.flip(3), y, start(method, x.flip(3)))
    for each in found:
        sent = each[f"{name} messages"]
        assert sent["left whole"] == []
        for kind in ("plain", "gathered"):
            assert sent[kind][0]["reduced"] == GROUPS
            assert_close(sent[kind][1], want)
        assert sent["plain"][0]["gathered"] > GROUPS
        assert sent["gathered"][0]["gathered"] == GROUPS
        # TRADES has two forward passes for one backward pass, in which each block ends twice: first
        # what was there before is sent, then what is new.
        twice = GROUPS - 1 if name.startswith("trades") else 0
        assert sent["accumulated"][0] == GROUPS + twice
        assert_close(sent["accumulated"][1], gradients(net))


def test_yopo_3_3_gathers_3_times_instead_of_20(found: list[dict[str, Any]]) -> None:
    for each in found:
        sent = each["after messages"]
        assert (sent["plain"][0]["gathered"], sent["gathered"][0]["gathered"]) == (20, 3)


def test_free_steps_with_weights_of_its_last_step(found: list[dict[str, Any]]) -> None:
    want = replayed(blocks(), *data())
    for each in found:
        assert_close(each["free"], want)
        assert_close(each["free gathered"], want)


def test_adamw_clipping_and_an_average(found: list[dict[str, Any]]) -> None:
    net = blocks()
    want = trained(net, yopo.EMA(net, 0.5), *data())
    for each in found:
        assert_close(each["trained"], want)
        assert_close(each["trained gathered"], want)  # clipped and zeroed inside the block, too


def test_a_loss_hands_out_gradients_inside_gathered(found: list[dict[str, Any]]) -> None:
    want = handed(blocks(), *data())
    for each in found:
        assert_close(each["handed"], want)


def test_after_an_error_gradients_are_as_they_were(found: list[dict[str, Any]]) -> None:
    """Those, too, that a batch without an exchange had left."""
    net, (x, y) = blocks(), data()
    method = yopo.YOPO(net, THREAT, m=3, n=1)
    for images in (x, x, x.flip(3)):
        method.backward(images, y, start(method, images))
    for each in found:
        assert each["broken"]["same"]
        assert each["broken"]["left whole"] == []
        assert_close(each["broken"]["gradients"], gradients(net))


@pytest.mark.parametrize("name", ["0", "1", "1.a", "2.a"])
def test_a_pass_that_stops_at_the_end_of_f0_leaves_nothing_whole(
    name: str, found: list[dict[str, Any]]
) -> None:
    x, _ = data()
    f0 = yopo.YOPO(blocks(), THREAT, first_layer=name).split.f0(x)
    out = f0(x)
    for each in found:
        assert_close(each["stopped"][name], (out, f0.pull_back(out.cos(), x)))
        assert each["stopped"][f"{name} left"] == []
        assert not each["stopped"][f"{name} own"]


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallel(name: str, found: list[dict[str, Any]]) -> None:
    net = mlp()
    if name == "free":
        want = replayed(net, *data())
    else:
        want = three_batches(TENSOR_PARALLEL[name](net), *data())
    for each in found:
        assert_close(each[f"tensor parallel {name}"], want)


def test_evaluations_of_which_one_has_nothing_to_attack(found: list[dict[str, Any]]) -> None:
    x, _ = data()
    for rank, each in enumerate(found):
        images, net = x[rank::2], blocks()
        labels = (net(images).argmax(1) + rank) % 4
        assert each["evaluated"] == evaluated(net, images, labels)
    assert found[0]["evaluated"]["accuracy"]["clean"] == 1
    assert found[1]["evaluated"]["accuracy"]["clean"] == 0


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_who_makes_passes_together_evaluates_the_same_images(
    shape: tuple[int, int], found: list[dict[str, Any]]
) -> None:
    """With tensor parallelism: else each would read logits that are partly of another's images."""
    x, _ = data()
    y, net, tensor = mlp()(x).argmax(1), mlp(), shape == (1, 2)
    for rank, each in enumerate(found):
        got = {name: each[f"{shape} {name}"] for name in ("same", "own", "fewer", "seeds")}
        want = {
            "same": evaluated(net, x, y),
            "own": evaluated(net, x[rank::2], y[rank::2]),
            "fewer": evaluated(net, x[: 8 - rank], y[: 8 - rank]),
            "seeds": evaluated(net, x, y, seed=rank),
        }
        together = each[f"{shape} together"]
        assert got["same"] == want["same"]
        if not tensor:
            assert got == want
            assert together == want["same"]
            continue
        for name in ("own", "fewer", "seeds"):
            assert "have other images, labels or settings; give all of them the same" in got[name]
        assert "together=True gives each process batches of its own" in together
    assert 0 < found[0][f"{shape} same"]["accuracy"]["pgd-3"] < 1


def test_bf16_by_fsdps_own_policy(found: list[dict[str, Any]]) -> None:
    """Its gradient points where float64's does."""
    want = torch.cat([g.flatten() for g in three_batches(METHODS["after"](blocks()), *data())])
    for each in found:
        assert {g.dtype for g in each["bf16"]} == {torch.float32}
        got = torch.cat([g.flatten() for g in each["bf16"]]).double()
        assert 0.98 < F.cosine_similarity(got, want, dim=0) < 1 - 1e-9
        assert 0.97 < got.norm() / want.norm() < 1.03


def test_what_does_not_work_is_refused(found: list[dict[str, Any]]) -> None:
    for each in found:
        average, pmp, exchange, engine, loss, free = each["refused"]
        assert "make the EMA before it, and give its .model to fully_shard" in average
        assert "give it a network that each process has whole" in pmp
        assert "leave exchange_gradients out" in exchange
        assert "plain steps: the network's weights are spread over processes" in engine
        assert "accumulate with method.backward(x, y), or leave the exchange on" in loss
        assert "each process would train a network of its own" in free


@pytest.mark.parametrize("name", [*METHODS, "free"])
def test_under_autocast_no_pass_loses_its_gradient(name: str, group: None, float32: None) -> None:
    """Casts of weights are kept from pass to pass, and FSDP2 would not wait for their gradients."""
    x, y = data()
    found = []
    for net in (blocks(), spread(blocks())):
        with torch.autocast("cpu", torch.bfloat16):
            grads = replayed(net, x, y) if name == "free" else one_after_the_other(name, net, x, y)
        found.append(grads)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def one_after_the_other(name: str, net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Two batches inside one block, whose weights differ."""
    method, optimizer = METHODS[name](net), torch.optim.SGD(net.parameters(), 0.1)
    method.backward(x, y, start(method, x))
    first = gradients(net)
    optimizer.step()
    optimizer.zero_grad()
    torch.clear_autocast_cache()
    method.backward(x, y, start(method, x))
    return first + gradients(net)


# ------------------------------------------------------------ on a GPU


class TestOnAGPU:
    """A group of one over nccl: what a second process adds is not seen, the rest is."""

    pytestmark = GPU

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.parametrize("way", [spread, DistributedDataParallel])
    def test_gradients_are_those_of_one_process(
        self, way: Callable[[nn.Module], nn.Module], name: str, alone: torch.device
    ) -> None:
        x, y = (t.to(alone) for t in data())
        expected = three_batches(METHODS[name](blocks().to(alone)), x, y)
        found = three_batches(METHODS[name](way(blocks().to(alone))), x, y)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

    def test_training_with_an_average(self, alone: torch.device) -> None:
        x, y = (t.to(alone) for t in data())
        nets = blocks().to(alone), blocks().to(alone)
        averages = [yopo.EMA(net, 0.5) for net in nets]
        spread(nets[0]), spread(averages[0].model)
        found, expected = (trained(net, ema, x, y) for net, ema in zip(nets, averages, strict=True))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

    def test_weights_gathered_once_a_step(self, alone: torch.device) -> None:
        x, y = (t.to(alone) for t in data())
        expected = replayed(blocks().to(alone), x, y)
        found = replayed(spread(blocks().to(alone)), x, y, gathered=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)

    def test_an_evaluation(self, alone: torch.device) -> None:
        x, y = (t.to(alone) for t in data())
        net = blocks().to(alone)
        expected = evaluated(net, x, y)
        assert evaluated(spread(net), x, y) == expected
