"""Our own kernel: on a GPU, or with TRITON_INTERPRET=1 on a CPU (float32 alone)."""

import os

import pytest
import torch
from torch import Tensor, nn

from yopo import Linf

pytest.importorskip("triton")
from yopo.engine import kernel as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs a CUDA device"
    ),
]
THREAT = Linf(1 / 4, 1 / 16)


def step_by_step(
    conv: nn.Conv2d, p: Tensor, x: Tensor, eta: Tensor, grad: Tensor, n: int
) -> Tensor:
    for s in range(n):
        if s > 0:
            at = (x + eta).requires_grad_()
            (grad,) = torch.autograd.grad((p * conv(at).relu()).sum(), at)
        eta = THREAT.ascend(eta, grad, x)
    return eta


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("channels", "out", "side", "padding", "bias"),
    [(1, 32, 28, 0, True), (3, 5, 9, 1, True), (1, 17, 12, 0, False), (3, 64, 32, 1, False)],
)
def test_n_steps_in_one_kernel(
    channels: int, out: int, side: int, padding: int, bias: bool, half: bool
) -> None:
    """All numbers are small multiples of 1/16, so every sum is exact, in bf16 too."""
    if half and DEVICE == "cpu":
        pytest.skip("the interpreter multiplies bf16 as integers")
    g = torch.Generator().manual_seed(0)

    def whole(most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=g).float().to(DEVICE)

    conv = nn.Conv2d(channels, out, 3, padding=padding, bias=bias).float().to(DEVICE)
    with torch.no_grad():
        conv.weight.copy_(whole(3, *conv.weight.shape))
        if conv.bias is not None:
            conv.bias.copy_(whole(8, out) / 16)
    x = whole(8, 5, channels, side, side) / 16 + 0.5
    eta = THREAT.project(whole(4, *x.shape) / 16, x)
    grad, p = whole(1, *x.shape), whole(3, *conv(x).shape)
    eps, step = (torch.tensor(v, device=DEVICE, dtype=torch.float32) for v in (1 / 4, 1 / 16))
    before = eta.clone()
    for n in (1, 2, 5):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            costate = p.bfloat16() if half else p
            found = kernels.inner_loop(conv, costate, x, eta, grad, eps, step, n)
        assert torch.equal(found, step_by_step(conv, p, x, eta, grad, n))
        assert not torch.equal(found, eta)
    assert torch.equal(eta, before)


def test_what_it_is_made_for() -> None:
    x = torch.zeros(2, 3, 8, 8, device=DEVICE, dtype=torch.float32)
    on_gpu = DEVICE == "cuda"

    def fits(*modules: nn.Module, images: Tensor = x) -> bool:
        return kernels.fits(nn.Sequential(*modules).float().to(DEVICE), images)

    conv = nn.Conv2d(3, 16, 3, padding=1)
    assert fits(conv, nn.ReLU()) == on_gpu
    assert not fits(conv, nn.Tanh())
    assert not fits(conv, nn.ReLU(), nn.ReLU())
    assert not fits(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU())
    assert not fits(nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.ReLU())
    assert not fits(nn.Conv2d(16, 16, 3), nn.ReLU())
    assert not fits(nn.Conv2d(3, 16, 3, padding="same"), nn.ReLU())
    assert not fits(conv, nn.ReLU(), images=x.double())
    assert not fits(conv, nn.ReLU(), images=x.new_zeros(1, 3, 224, 224))

    class Standardized(nn.Conv2d):  # what it computes is its own affair
        pass

    assert not fits(Standardized(3, 16, 3, padding=1), nn.ReLU())
