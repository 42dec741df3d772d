"""docs/frameworks/fabric.md, run by Fabric, against the plain loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import yopo
from tests.conftest import assert_same, grads
from tests.frameworks.loops import (
    BATCH,
    MOMENTUM,
    RATE,
    THREAT,
    State,
    alone,
    as_a_file,
    by_turns,
    images,
    in_several,
    keeper,
    loader,
    network,
    page,
    plain,
    same_bits,
)

pytest.importorskip("lightning", reason="needs yopo-torch[lightning]")
pytestmark = pytest.mark.filterwarnings("default")  # Lightning's own

HALF: dict[str, Any] = {"dtype": torch.float32, "autocast": torch.bfloat16}


def train(dtype: torch.dtype, size: int, precision: Any, **options: Any) -> State:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", precision=precision, **options)
    fabric.launch()
    torch.set_default_dtype(dtype)
    net = network(dtype)
    page("fabric")["train"](fabric, net, loader(size, dtype), THREAT)
    return dict(net.state_dict())


def accumulate(**options: Any) -> tuple[State, State]:
    """As the page says in words, two batches a step: the first gradients, and the end."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", precision="64-true", **options)
    fabric.launch()
    torch.set_default_dtype(torch.float64)
    net, first = network(), State()
    sgd = torch.optim.SGD(net.parameters(), RATE, momentum=MOMENTUM)
    model, optimizer = fabric.setup(net, sgd)
    method = yopo.YOPO(model, THREAT, m=2, n=2)
    loading = fabric.setup_dataloaders(loader(BATCH // fabric.world_size))
    for i, (x, y) in enumerate(loading):
        with fabric.no_backward_sync(model, enabled=i % 2 == 0):
            fabric.backward(method(x, y) / 2)
        first = first or {k: v.clone() for k, v in grads(net).items()}
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return first, dict(net.state_dict())


def several(out: Path) -> None:
    """In each of two processes."""
    keep, two = keeper(out), {"strategy": "ddp", "devices": 2}
    keep("64", train(torch.float64, 2, "64-true", **two))
    for name, state in zip(("first", "accumulated"), accumulate(**two), strict=True):
        keep(name, state)
    keep("bf16", train(torch.float32, 2, "bf16-mixed", **two))


def test_one_process() -> None:
    found = train(torch.float64, 4, "64-true", devices=1)
    assert_same(found, plain(network(), alone(4)), tol=1e-10)


def test_bf16_by_equal_bits() -> None:
    found = train(torch.float32, 4, "bf16-mixed", devices=1)
    assert same_bits(found, plain(network(torch.float32), alone(4), **HALF))


def test_two_processes(tmp_path: Path) -> None:
    first, second = in_several(__name__, tmp_path)
    assert all(same_bits(first[name], second[name]) for name in ("64", "bf16"))
    assert_same(first["64"], plain(network(), alone(4)), tol=1e-10)
    assert same_bits(first["bf16"], plain(network(torch.float32), by_turns(2), **HALF))
    assert same_bits(first["accumulated"], second["accumulated"])
    assert_same(first["accumulated"], plain(network(), alone(4, together=2)), tol=1e-10)
    assert not torch.allclose(
        first["first"]["0.weight"], second["first"]["0.weight"]
    )  # each its own


def test_accumulation_in_one_process() -> None:
    _, found = accumulate(devices=1)
    assert_same(found, plain(network(), alone(4, together=2)), tol=1e-10)


def test_the_page_as_a_file(tmp_path: Path) -> None:
    as_a_file("fabric", tmp_path, "--accelerator", "cpu")


# ---------------------------------------------------------------- backward passes of our own


@pytest.fixture
def mixed() -> Any:
    """A network that refuses backward passes, and its Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    net = fabric.setup(network(torch.float32))
    x, y = images(torch.float32).tensors
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        nn.functional.cross_entropy(net(x), y).backward()
    net.zero_grad()
    return net, x, y, fabric


def test_the_private_name_is_still_theirs() -> None:
    import lightning.fabric.wrappers as theirs

    from yopo.core.parallel import IN_BACKWARD

    assert getattr(theirs, IN_BACKWARD) is False


def refuses(net: nn.Module, x: Tensor, y: Tensor) -> bool:
    try:
        nn.functional.cross_entropy(net(x), y).backward()
    except RuntimeError as error:
        return "fabric.backward" in str(error)
    return False


def test_attacks_and_evaluations_are_let_through(mixed: Any) -> None:
    net, x, y, _ = mixed
    twin = network(torch.float32)
    ours = yopo.evaluate(net, (x, y), THREAT, ["pgd-2", "cw"])
    with torch.autocast("cpu", torch.bfloat16):
        found = yopo.evaluate(twin, (x, y), THREAT, ["pgd-2", "cw"])
        assert ours.accuracy == found.accuracy
        for attack in (yopo.attacks.pgd, yopo.attacks.cw):
            at = attack(net, x, y, THREAT, steps=3)
            assert torch.equal(at, attack(twin, x, y, THREAT, steps=3))
            assert not torch.equal(at, x)
    assert refuses(net, x, y)  # afterwards as before


def test_backward_is_refused_in_a_sentence_of_ours(mixed: Any) -> None:
    net, x, y, fabric = mixed
    fabric.backward(nn.functional.cross_entropy(net(x), y))
    before = [p.grad.clone() for p in net.parameters()]
    for method in (yopo.YOPO(net, THREAT, m=2), yopo.Natural(net)):
        with pytest.raises(ValueError, match=r"use loss = method\(x, y\) and fabric\.backward"):
            method.backward(x, y)
        after = [p.grad for p in net.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"use loss = method\(x, y\) and fabric\.backward"):
        yopo.Engine(yopo.PGD(net, THREAT, steps=1), optimizer, compile=False).step(x, y)


def test_the_flag_is_put_back_after_an_error(mixed: Any) -> None:
    net, x, y, _ = mixed
    with pytest.raises(ValueError, match="images in"):
        yopo.PGD(net, THREAT, steps=1)(x * 255, y)
    assert refuses(net, x, y)
    (handle,) = [net.module[4].register_forward_hook(lambda *_: 1 / 0)]
    with pytest.raises(ZeroDivisionError):
        yopo.attacks.pgd(net, x, y, THREAT)
    handle.remove()
    assert refuses(net, x, y)
