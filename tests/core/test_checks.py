"""Bad input gets an error that names the fix, and changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.conftest import Batch, bn_convnet, convnet
from yopo import L2, PGD, YOPO, Linf, Natural, evaluate
from yopo.attacks import cw, pgd
from yopo.pmp.diagnose import diagnose

Spoil = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def with_value(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[2, 1, 3, 3] = value
    return x


BAD: dict[str, tuple[Spoil, str]] = {
    "above 1": (lambda x, y: (x * 2, y), r"in \[0, 1\], got values from 0 to 2; .*yopo\.Normalize"),
    "below 0": (lambda x, y: (x - 0.5, y), r"values from -0\.5 to 0\.5"),
    "integers": (lambda x, y: ((x * 255).to(torch.uint8), y), r"got torch\.uint8; use x / 255"),
    "nan": (lambda x, y: (with_value(x, float("nan")), y), r"finite images, got NaN"),
    "inf": (lambda x, y: (with_value(x, float("inf")), y), r"finite images, got NaN or infinite"),
    "empty": (lambda x, y: (x[:0], y[:0]), r"at least one image, got an empty batch"),
    "no batch": (lambda x, y: (x[0, 0, 0], y), r"use x\.unsqueeze\(0\)"),
    "label too large": (lambda x, y: (x, y + 1), r"labels from 0 to 3 .* from 1 to 4; renumber"),
    "label negative": (lambda x, y: (x, y - 1), r"labels from 0 to 3 .* from -1 to 2"),
    "too few labels": (lambda x, y: (x, y[:5]), r"one target per image, got .*\(5,\) for 6 images"),
    "scalar label": (lambda x, y: (x, y[0]), r"one target per image"),
    "nan targets": (lambda x, y: (x, torch.full((6, 4), float("nan"))), r"finite targets"),
    "images elsewhere": (lambda x, y: (x.to("meta"), y), r"images are on meta.*use x\.to\('cpu'\)"),
    "labels elsewhere": (lambda x, y: (x, y.to("meta")), r"targets are on meta.*use y\.to"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD.keys())
def test_bad_batches(spoil: Spoil, message: str, batch: Batch) -> None:
    model = bn_convnet()
    before = copy.deepcopy(model.state_dict())
    bad = spoil(*batch)
    for method in (Natural(model), PGD(model, Linf(0.1), steps=2), YOPO(model, Linf(0.1))):
        with pytest.raises(ValueError, match=message):
            method.backward(*bad)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("eta", "message"),
    [
        (torch.zeros(6, 3, 8, 7), r"expected eta like the images, \(6, 3, 8, 8\)"),
        (torch.full((6, 3, 8, 8), float("nan")), "finite eta"),
        (torch.zeros(6, 3, 8, 8, dtype=torch.int64), r"floating-point .*got torch\.int64"),
    ],
)
def test_bad_eta(eta: Tensor, message: str, batch: Batch) -> None:
    with pytest.raises(ValueError, match=message):
        YOPO(bn_convnet(), Linf(0.1)).backward(*batch, eta=eta)


def test_a_start_outside_is_brought_inside(batch: Batch) -> None:
    x, y = batch
    out = YOPO(bn_convnet(), Linf(0.1), m=1, n=0).backward(x, y, eta=torch.full_like(x, 3.0))
    assert torch.equal(out.eta, Linf(0.1).project(torch.full_like(x, 3.0), x))


def test_natural_takes_no_eta(batch: Batch) -> None:
    with pytest.raises(ValueError, match="leave eta out"):
        Natural(bn_convnet()).backward(*batch, eta=torch.zeros_like(batch[0]))


def test_models_that_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="no parameters"):
        YOPO(nn.Flatten(), Linf(0.1))
    with pytest.raises(ValueError, match=r"model\.requires_grad_\(\)"):
        YOPO(bn_convnet().requires_grad_(False), Linf(0.1))
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        YOPO(lambda x: x, Linf(0.1))  # type: ignore[arg-type]


def test_things_that_are_not_tensors(batch: Batch) -> None:
    x, y = batch
    with pytest.raises(TypeError, match=r"images as a .*Tensor, got ndarray"):
        Natural(bn_convnet()).backward(x.numpy(), y)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"targets as a .*Tensor, got list"):
        Natural(bn_convnet()).backward(x, y.tolist())  # type: ignore[arg-type]


def test_things_that_are_no_threat(batch: Batch) -> None:
    with pytest.raises(TypeError, match=r"expected a threat, as yopo\.Linf\(8 / 255\), got 0\.03"):
        YOPO(bn_convnet(), 0.03)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a threat, as .*, got 0\.03"):
        evaluate(bn_convnet(), batch, 0.03)  # type: ignore[arg-type]
    for bad_threat in (0.03, Linf):
        for attack in (pgd, cw, diagnose):
            with pytest.raises(TypeError, match=r"expected a threat, as yopo\.Linf\(8 / 255\)"):
                attack(bn_convnet(), *batch, bad_threat)  # type: ignore[arg-type]
    for bad in ("8/255", None):
        with pytest.raises(TypeError, match=f"eps as a number, as 8 / 255, got {bad!r}"):
            Linf(bad)  # type: ignore[arg-type]


def test_functions_are_no_modules(batch: Batch) -> None:
    for attack in (pgd, cw, diagnose):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
            attack(lambda x: x.flatten(1), *batch, Linf(0.1))  # type: ignore[arg-type]


def test_rounding_may_leave_the_box(batch: Batch) -> None:
    x, y = batch
    over = x.clone()
    over[0, 0, 0, 0] = 1 + 5e-7
    for kind in (Linf(0.1), L2(0.5)):
        eta = PGD(bn_convnet(), kind, steps=2).backward(over, y).eta
        assert (over + eta).max() <= 1
    over[0, 0, 0, 0] = 1.003
    with pytest.raises(ValueError, match=r"from .* to 1\.003; use x\.clamp\(0, 1\)"):
        PGD(bn_convnet(), Linf(0.1)).backward(over, y)


FIXES = {"tuple": "wrap it so that it returns the logits alone", "map": r"unsqueeze\(1\)"}


@pytest.mark.parametrize("output", FIXES)
def test_models_that_do_not_return_logits(output: str, batch: Batch) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> object:
            return (self.conv(x),) if output == "tuple" else self.conv(x)

    message = rf"expected logits \(batch, classes\) .*{FIXES[output]}"
    with pytest.raises(ValueError, match=message):
        YOPO(Wrong(), Linf(0.1)).backward(*batch)
    with pytest.raises(ValueError, match=message):
        evaluate(Wrong(), batch, Linf(0.1))


# ---------------------------------------------------------------- FSDP of the first kind


class Around(nn.Module):
    """A network and its method in a module, as LightningModules have them."""

    def __init__(self, kind: type[PGD] | type[YOPO]) -> None:
        super().__init__()
        self.network = convnet()
        self.method = kind(self.network, Linf(0.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.method(x, y)


def flat(net: nn.Module, original: bool) -> Any:
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(net, device_id=cpu, use_orig_params=original)


FIRST_KIND = r"FullyShardedDataParallel \(FSDP1\) .* use torch\.distributed\.fsdp\.fully_shard"


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # its own
@pytest.mark.parametrize("kind", [PGD, YOPO])
@pytest.mark.parametrize("original", [True, False])  # parameters stay in their places, as views
def test_fsdp1_is_refused(kind: type[PGD] | type[YOPO], original: bool, batch: Batch) -> None:
    outer = flat(convnet(), original)
    for net in (outer, outer.module, nn.Sequential(outer)):
        with pytest.raises(ValueError, match=FIRST_KIND):
            kind(net, Linf(0.1))
    around = flat(Around(kind), original)  # after the method was made
    with pytest.raises(ValueError, match=FIRST_KIND):
        around(*batch)
    net = convnet()
    method = kind(net, Linf(0.1))
    net[2] = flat(net[2], original)
    for call in (method, method.backward):
        with pytest.raises(ValueError, match=FIRST_KIND):
            call(*batch)


@pytest.mark.usefixtures("group")
def test_fully_shard_is_not(batch: Batch) -> None:
    """Given the network, its blocks or a module around it, before the method or after."""
    mesh = init_device_mesh("cpu", (1,))
    for name in ("", "network", "network.2"):
        around = Around(YOPO)
        fully_shard(around.get_submodule(name), mesh=mesh)
        around(*batch).backward()
        YOPO(around.network, Linf(0.1))
