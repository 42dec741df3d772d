"""On a CUDA device: the same results as on the CPU, and nothing that only a CPU forgives."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import GPU, Batch, assert_same, bn_convnet, convnet, grads
from tests.methods.test_methods import THREAT, Make, every_method
from tests.methods.test_yopo import GRAD_AT
from yopo import YOPO, Linf, Natural, evaluate
from yopo.attacks import cw, pgd
from yopo.models import preactresnet18

pytestmark = GPU


@every_method
def test_every_method_agrees_with_the_cpu(make: Make, batch: Batch) -> None:
    x, y = batch
    cpu = bn_convnet()
    gpu = copy.deepcopy(cpu).cuda()
    on_cpu, on_gpu = make(cpu), make(gpu)
    eta = None if isinstance(on_cpu, Natural) else THREAT.start(x)
    expected = on_cpu.backward(x, y, eta)
    out = on_gpu.backward(x.cuda(), y.cuda(), None if eta is None else eta.cuda())
    torch.testing.assert_close(out.eta.cpu(), expected.eta, rtol=0, atol=1e-10)
    torch.testing.assert_close(out.loss.cpu(), expected.loss, rtol=1e-10, atol=0)
    found = {name: grad.cpu() for name, grad in grads(gpu).items()}
    assert_same(found, grads(cpu), tol=1e-9)
    statistics = {k: v.cpu() for k, v in gpu.state_dict().items()}
    assert_same(statistics, dict(cpu.state_dict()), tol=1e-9)


def test_a_scaler_finds_the_same_step(batch: Batch) -> None:
    """Of a loss handed over; nobody reads the scale, which is on the device."""
    x, y = batch[0].cuda(), batch[1].cuda()
    net, start = convnet().cuda(), THREAT.start(x)
    twin = copy.deepcopy(net)
    plain, scaled = (torch.optim.SGD(n.parameters(), 0.1) for n in (net, twin))
    YOPO(net, THREAT, m=2, n=2).backward(x, y, start)
    plain.step()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    scaler.scale(YOPO(twin, THREAT, m=2, n=2)(x, y, start)).backward()
    for name, grad in grads(twin).items():
        torch.testing.assert_close(grad, 2.0**12 * grads(net)[name])
    scaler.step(scaled)
    scaler.update()
    assert_same(dict(twin.state_dict()), dict(net.state_dict()), tol=1e-12)


@every_method
def test_every_method_draws_its_own_start(make: Make, batch: Batch) -> None:
    model = convnet().cuda()
    out = make(model).backward(batch[0].cuda(), batch[1].cuda())
    assert out.eta.is_cuda
    assert out.logits.is_cuda


def test_dropout_in_f0_keeps_its_mask(batch: Batch) -> None:
    x, y = batch[0].cuda(), batch[1].cuda()
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(180, 4)
    ).cuda()
    split = YOPO(model, THREAT, first_layer="2").split
    assert split.cut(x).random
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    at = split.propagate(x, lambda logits: F.cross_entropy(logits, y), weights=None)
    assert at.f0 is not None
    state = torch.cuda.get_rng_state()
    assert torch.equal(at.f0(x) == 0, seen[0] == 0)
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_bad_labels_are_caught_before_the_device_asserts(batch: Batch) -> None:
    x, y = batch[0].cuda(), batch[1].cuda()
    model = convnet().cuda()
    method = YOPO(model, THREAT)
    with pytest.raises(ValueError, match="labels from 0 to 3"):
        method.backward(x, y + 1)
    with pytest.raises(ValueError, match="labels from 0 to 3"):
        pgd(model, x, y + 1, THREAT)
    method.backward(x, y)  # the device still works
    torch.cuda.synchronize()


def test_images_on_the_other_device_are_refused(batch: Batch) -> None:
    x, y = batch
    with pytest.raises(ValueError, match=r"images are on cpu.*use x\.to\('cuda:0'\)"):
        YOPO(convnet().cuda(), THREAT).backward(x, y)
    with pytest.raises(ValueError, match=r"targets are on cpu.*use y\.to"):
        YOPO(convnet().cuda(), THREAT).backward(x.cuda(), y)


def test_attacks_stay_inside(batch: Batch) -> None:
    x, y = batch[0].float().cuda(), batch[1].cuda()
    model = bn_convnet().float().cuda()
    for adversarial in (pgd(model, x, y, THREAT, steps=5), cw(model, x, y, THREAT, steps=5)):
        assert adversarial.min() >= 0
        assert adversarial.max() <= 1
        assert (adversarial - x).abs().max() <= THREAT.eps + 1e-6


@pytest.mark.parametrize("first_layer", ["conv1", "layer1"])
def test_bf16_channels_last_and_peak_memory(first_layer: str) -> None:
    """A YOPO step holds little more than a natural one: no second graph is alive."""
    x = torch.rand(256, 3, 32, 32, dtype=torch.float32, device="cuda")
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(10, (256,), device="cuda")
    model = preactresnet18().float().cuda()

    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def peak(method: Natural | YOPO) -> int:
        for _ in range(2):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                out = method.backward(x, y)
            assert out.loss.isfinite()
            assert out.eta.dtype == torch.float32
        return torch.cuda.max_memory_allocated() - before

    natural = peak(Natural(model))
    for grad_at in GRAD_AT:
        method = YOPO(model, Linf(8 / 255), m=5, n=3, first_layer=first_layer, grad_at=grad_at)
        assert peak(method) <= 1.15 * natural


def test_evaluate_agrees_with_the_cpu(batch: Batch) -> None:
    """Random starts are drawn on the CPU, from the images, so they are the same."""
    x, y = batch
    cpu = bn_convnet()
    gpu = copy.deepcopy(cpu).cuda()
    expected = evaluate(cpu, (x, y), THREAT, ["pgd-3-2", "cw"], batch=4)
    for data in ((x, y), (x.cuda(), y.cuda())):
        result = evaluate(gpu, data, THREAT, ["pgd-3-2", "cw"], batch=4, examples=True)
        assert all(torch.equal(v, expected.correct[k]) for k, v in result.correct.items())


def test_autoattacks_stages_run_on_the_device(batch: Batch) -> None:
    pytest.importorskip("pyautoattack")
    model = bn_convnet().float().cuda()
    stream = torch.cuda.get_rng_state()
    result = evaluate(model, batch, THREAT, ["apgd-ce", "fab-t"], batch=4)
    assert result.worst <= result.accuracy["clean"]
    assert torch.equal(torch.cuda.get_rng_state(), stream)
