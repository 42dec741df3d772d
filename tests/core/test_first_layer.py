"""Finding f0, knowing when it is affine, p, and refusing cuts that cannot work."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import (
    Batch,
    Build,
    NormalisesInForward,
    PatchTransformer,
    SharesModules,
    TwoStems,
    TwoTowers,
    bn_convnet,
    convnet,
    mlp,
    signal_net,
)
from yopo import PGD, TRADES, TRADESYOPO, YOPO, Linf, Normalize, Split
from yopo.attacks import cw, pgd
from yopo.core.first_layer import _watch_costate
from yopo.models import SmallCNN, preactresnet18, wideresnet
from yopo.pmp.dynamics import Dynamics


def small_resnet() -> nn.Module:
    return preactresnet18(4, width=4, blocks=(1, 1))


FOUND: list[tuple[Build, tuple[int, ...], str]] = [
    (convnet, (3, 8, 8), "0"),
    (lambda: nn.Sequential(Normalize([0.5] * 3, [0.2] * 3), convnet()), (3, 8, 8), "1.0"),
    (PatchTransformer, (3, 8, 8), "patch_embed"),
    (NormalisesInForward, (3, 8, 8), "stem"),
    (SharesModules, (3, 8, 8), "stem"),
    (TwoStems, (3, 8, 8), "body"),
    (mlp, (192,), "0"),
    (signal_net, (3, 20), "0"),
    (small_resnet, (3, 8, 8), "conv1"),
    (lambda: wideresnet(4, depth=10, width=1), (3, 8, 8), "conv1"),
    (lambda: SmallCNN(4, width=4, size=16), (1, 16, 16), "conv1"),
]


@pytest.mark.parametrize(("build", "shape", "name"), FOUND)
def test_first_layer_is_found_and_affine(build: Build, shape: tuple[int, ...], name: str) -> None:
    cut = Split(build()).cut(torch.rand(3, *shape))
    assert cut.name == name
    assert cut.affine
    assert not cut.random


class DividesByDetachedStd(nn.Module):
    """The graph shows a division by a constant; the constant depends on x."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().std((1, 2, 3), keepdim=True)


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class OneOver(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / (1 + x)


class AffineMix(nn.Module):
    """Many linear operations, none of them a layer."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 1)
        y = torch.cat([y, 2 - x.flip(3)], 1)[:, :3] - x.mean((2, 3), keepdim=True) / 7
        return torch.einsum("bchw,cd->bdhw", y, torch.eye(3) + 0.1)


class FlipsSomeSigns(nn.Module):
    """One channel hides behind another's size; its gradient's sign depends on the pixel."""

    def forward(self, x: Tensor) -> Tensor:
        flipped = x[:, 1:] * torch.where(x[:, 1:].detach() > 0.5, -1.0, 1.0)
        return torch.cat([255 * x[:, :1], 1e-2 * flipped], 1)


class FlipsAtOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.where(x.detach() >= 1, -1.0, 1.0)


@pytest.mark.parametrize(
    ("first", "affine"),
    [
        (FlipsSomeSigns(), False),
        (FlipsAtOne(), False),
        (nn.Identity(), True),
        (AffineMix(), True),
        (nn.Dropout(0.5), False),  # another draw may be another function
        (nn.Conv2d(3, 3, 3), True),
        (nn.ReLU(), False),
        (nn.Tanh(), False),
        (nn.BatchNorm2d(3), False),
        (nn.MaxPool2d(2), False),
        (DividesByDetachedStd(), False),
        (Squares(), False),
        (OneOver(), False),
    ],
)
def test_affine_prefixes_are_told_from_others(first: nn.Module, affine: bool) -> None:
    model = nn.Sequential(first, nn.Flatten(), nn.LazyLinear(4)).double()
    x = 0.9 * torch.rand(4, 3, 8, 8)
    model(x)  # fill in the lazy layer
    assert Split(model, "0").cut(x).affine is affine


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (convnet, "0"),
        (convnet, "1"),
        (convnet, "3"),
        (bn_convnet, "1"),
        (small_resnet, "layer1"),
        (NormalisesInForward, "stem"),  # its output is overwritten in place by ReLU
        (PatchTransformer, "encoder.layers.0"),
    ],
)
def test_p_is_autograds_gradient_at_the_split(build: Build, name: str, batch: Batch) -> None:
    """p and f0 against a hand-made cut: the module's output replaced by a leaf."""
    x, y = batch
    model = build()
    split = Split(model, name)
    leaf: list[Tensor] = []

    def replace(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        leaf.append(output.detach().requires_grad_())
        return leaf[0].clone()  # later in-place operations then spare the leaf

    handle = model.get_submodule(name).register_forward_hook(replace)
    loss = F.cross_entropy(model(x), y)
    handle.remove()
    (p,) = torch.autograd.grad(loss, leaf[0])

    at = split.propagate(x, lambda logits: F.cross_entropy(logits, y), weights=None)
    torch.testing.assert_close(split.f0(x)(x), leaf[0], rtol=1e-12, atol=1e-12)
    if split.cut(x).affine:  # then p is not kept, but its pull-back is ∂loss/∂x
        assert at.p is None
    else:
        assert at.p is not None
        torch.testing.assert_close(at.p, p, rtol=1e-12, atol=1e-14)
    pulled = split.f0(x).pull_back(p, x)
    torch.testing.assert_close(at.grad, pulled, rtol=1e-12, atol=1e-14)


def test_pull_back_is_the_derivative_of_p_times_f0(batch: Batch) -> None:
    x, _ = batch
    model = convnet(nn.Tanh)
    p = torch.randn_like(model[:2](x))
    leaf = x.clone().requires_grad_()
    (literal,) = torch.autograd.grad((p * model[:2](leaf)).sum(), leaf)
    assert torch.equal(Split(model, "1").f0(x).pull_back(p, x), literal)


def test_f0_stops_at_the_split_and_moves_no_statistics(batch: Batch) -> None:
    x, _ = batch
    model = bn_convnet()
    reached: list[str] = []
    model[3].register_forward_hook(lambda *_: reached.append("conv2"))
    split = Split(model, "1")
    split.cut(x)
    reached.clear()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    f0 = split.f0(x)
    out = f0(x)
    assert reached == []
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not torch.equal(out.mean((0, 2, 3)), torch.zeros(5))  # it ran
    model[1].eval()
    assert not torch.allclose(out, model[:2](x))  # with batch statistics: it ran in training mode


def test_dropout_in_f0_keeps_the_mask_of_the_propagation(batch: Batch) -> None:
    """p belongs to one mask, so f0 in the inner loop uses that one, call after call."""
    x, y = batch
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(180, 4)
    )
    seen: list[Tensor] = []
    model[2].register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
    split = Split(model, "2")
    assert split.cut(x).random
    seen.clear()
    at = split.propagate(x, lambda logits: F.cross_entropy(logits, y), weights=None)
    assert at.f0 is not None
    mask = seen[0] == 0
    for _ in range(3):
        assert torch.equal(at.f0(x) == 0, mask)
    state = torch.get_rng_state()
    at.f0(x)
    assert torch.equal(torch.get_rng_state(), state)  # replays do not use up random numbers
    split.propagate(x, lambda logits: F.cross_entropy(logits, y), weights=None)
    assert not torch.equal(seen[-1] == 0, mask)  # the next propagation draws a new mask


class SkippedAtRandom(nn.Module):
    """Stochastic depth: affine where the block is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.5 else x + torch.relu(self.conv(x))


def test_one_draw_does_not_decide_that_f0_is_affine(batch: Batch) -> None:
    model = nn.Sequential(SkippedAtRandom(), nn.Flatten(), nn.LazyLinear(4))
    model(batch[0])
    for seed in range(6):
        torch.manual_seed(seed)
        assert not Split(model, "0").cut(batch[0]).affine


def test_what_f0_is_is_looked_at_again_after_a_hook_or_another_module(batch: Batch) -> None:
    x, _ = batch
    model = convnet()
    split = Split(model, "0")
    assert split.cut(x).affine
    hook = model[0].register_forward_pre_hook(lambda _m, args: (torch.sin(20 * args[0]),))
    assert not split.cut(x).affine
    hook.remove()
    assert split.cut(x).affine
    model = nn.Sequential(nn.Identity(), nn.Flatten(), nn.Linear(x[0].numel(), 4))
    split = Split(model, "0")
    for _ in range(20):  # the memory of one module may become that of the next
        model[0] = nn.Identity()
        assert split.cut(x).affine
        model[0] = None  # type: ignore[assignment]
        model[0] = nn.Sigmoid()
        assert not split.cut(x).affine


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize(
    "norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm]
)
def test_inner_steps_have_the_weights_of_the_propagation(norm: Any, batch: Batch) -> None:
    """spectral_norm goes one step of its power iteration in every pass."""
    x, y = batch
    model = nn.Sequential(norm(nn.Conv2d(3, 5, 3)), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))
    model(x)
    for weights in (None, 1.0):
        seen: list[Tensor] = []
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.3 * torch.randn_like(p))
        split = Split(model, "1")
        split.cut(x)
        with model[1].register_forward_hook(lambda _m, _a, out, s=seen: s.append(out.detach())):
            at = split.propagate(x, lambda z: F.cross_entropy(z, y), weights=weights)
        assert at.f0 is not None
        assert at.p is not None
        for _ in range(3):
            torch.testing.assert_close(at.f0(x), seen[0], rtol=0, atol=0)
            torch.testing.assert_close(at.f0.pull_back(at.p, x), at.grad)


class Renorm(nn.BatchNorm2d):
    """Reads its running mean in training too."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        before = self.running_mean.clone()
        return super().forward(x) * before.exp()[:, None, None]


def test_inner_steps_have_the_statistics_of_the_propagation(batch: Batch) -> None:
    x, y = batch
    model = nn.Sequential(nn.Conv2d(3, 5, 3), Renorm(5), nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))
    model(x)
    at = Split(model, "2").propagate(x, lambda z: F.cross_entropy(z, y), weights=1.0)
    assert at.f0 is not None
    assert at.p is not None
    for _ in range(3):
        torch.testing.assert_close(at.f0.pull_back(at.p, x), at.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo in torch 2.11
def test_compiled_models_are_cut_in_the_original(batch: Batch) -> None:
    x, y = batch
    model = convnet()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)

    def objective(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    for name in ("0", "1"):
        plain = Split(model, name).propagate(x, objective, weights=None)
        fast = Split(compiled, name).propagate(x, objective, weights=None)
        torch.testing.assert_close(fast.grad, plain.grad)


def test_a_view_overwritten_in_place_is_still_a_cut() -> None:
    """The output of a linear layer on sequences is a view."""
    model = nn.Sequential(
        nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Flatten(), nn.Linear(18, 4)
    )
    x, y = torch.rand(6, 3, 5), torch.arange(6) % 4
    cut = Split(model).cut(x)
    assert (cut.name, cut.affine) == ("0", True)
    z = model[0](x).detach().requires_grad_()
    (p,) = torch.autograd.grad(F.cross_entropy(model[2:](z.relu()), y), z)
    with _watch_costate(model[0]) as found:
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(found[0], p)


def test_models_may_write_into_their_input(batch: Batch) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.sub_(0.5).div_(0.25))  # type: ignore[no-any-return]

    x, y = batch
    before, model = x.clone(), Writes()
    for method in (YOPO(model, Linf(0.1)), TRADES(model, Linf(0.1)), PGD(model, Linf(0.1))):
        method.backward(x, y)
    pgd(model, x, y, Linf(0.1), steps=2)
    cw(model, x, y, Linf(0.1), steps=2)
    assert torch.equal(x, before)
    assert Split(model).cut(x).affine


@pytest.mark.parametrize("first_layer", [None, "body"])
def test_checkpointed_layers_move_statistics_only_with_weight_gradients(
    first_layer: str | None, batch: Batch
) -> None:
    """Recomputation on the way back must run on the frozen state as well."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 5, 3, padding=1)
            self.body = Recomputed(bn_convnet()[1:3])
            self.head = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]

    class Recomputed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    x, y = batch
    model = Checkpointed()
    counter = "body.inner.1.num_batches_tracked"
    F.cross_entropy(model(x), y).backward()
    once = int(model.state_dict()[counter])
    Dynamics.of(model, x, first_layer and [first_layer])  # studies the network
    assert int(model.state_dict()[counter]) == once
    YOPO(model, Linf(0.1), m=2, n=3, first_layer=first_layer).backward(x, y)
    assert int(model.state_dict()[counter]) == 3 * once


class Recurrent(nn.Module):
    """LSTM returns a tuple, and the next module gives the logits themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Bare(nn.Module):
    """No module at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(15, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.w).tanh()


@pytest.mark.parametrize("build", [Recurrent, TwoTowers, Bare])
def test_where_no_module_can_end_f0_it_is_the_identity(build: Build) -> None:
    """As if a module that does nothing stood in front."""
    model, x, y = build().double(), torch.rand(3, 3, 5).double(), torch.tensor([0, 1, 3])
    threat = Linf(0.1, step=0.01)
    eta = threat.start(x)
    cut = Split(model).cut(x)
    assert (cut.name, cut.affine, cut.random) == ("", True, False)
    f0, p = Split(model).f0(x), torch.randn_like(x)
    assert torch.equal(f0(x), x)
    assert torch.equal(f0.pull_back(p, x), p)
    for method in (YOPO, TRADESYOPO):
        model.zero_grad()
        got = method(model, threat, m=3, n=2).backward(x, y, eta)
        grads = {k: q.grad for k, q in model.named_parameters() if q.grad is not None}
        assert grads.keys() == dict(model.named_parameters()).keys()
        model.zero_grad()  # leaves these tensors to us
        before = nn.Sequential(nn.Identity(), model)
        expected = method(before, threat, m=3, n=2, first_layer="0").backward(x, y, eta)
        assert torch.equal(got.eta, expected.eta)
        for name, q in model.named_parameters():
            assert q.grad is not None
            assert torch.equal(q.grad, grads[name])
    with pytest.raises(ValueError, match="put its first operations into a module"):
        Dynamics.of(model, x)


def test_the_module_that_gives_the_logits_cannot_end_f0() -> None:
    with pytest.raises(ValueError, match="f0 would be the whole network"):
        Split(Recurrent(), "head").cut(torch.rand(2, 3, 5))


def test_flags_of_inner_modules_count(batch: Batch) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Dropout(), nn.Flatten(), nn.Linear(180, 4)
    )
    model[2].eval()
    split = Split(model, "2")
    assert not split.cut(batch[0]).random
    model[2].train()
    assert split.cut(batch[0]).random


# ---------------------------------------------------------------- refused


class Odd(nn.Module):
    """A network with modules at which no cut is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(5, 5, 1), nn.ReLU())
        self.residual = Residual()
        self.unused = nn.Conv2d(3, 5, 1)
        self.constant = nn.Linear(2, 5)
        self.pair = nn.MaxPool2d(2, return_indices=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(self.block(self.block(self.conv1(x))))
        x = self.pair(x)[0]
        bias = self.constant(torch.ones(2))
        return self.head(x.mean((2, 3)) + bias)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """x + conv(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)  # type: ignore[no-any-return]


def test_a_refused_cut_changes_nothing(batch: Batch) -> None:
    model = Odd()
    method = YOPO(model, Linf(0.1), first_layer="unused")
    with pytest.raises(ValueError, match="never called"):
        method.backward(*batch)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unused", r"never called.*name 'conv1' instead"),
        ("block", r"called 2 times.*name 'conv1' instead"),
        ("constant", r"does not see the input.*name 'conv1' instead"),
        ("residual.conv", r"takes another way to the output; name 'residual' instead"),
        ("pair", r"does not return a tensor; name 'conv1' instead"),
    ],
)
def test_impossible_cuts_are_refused(name: str, message: str, batch: Batch) -> None:
    with pytest.raises(ValueError, match=message):
        Split(Odd(), name).cut(batch[0])


def test_unknown_names_get_near_ones() -> None:
    with pytest.raises(ValueError, match=r"no module 'conv_1'.*near names: conv1"):
        Split(Odd(), "conv_1")
    with pytest.raises(ValueError, match="near names"):
        Split(Odd(), "")


class Joined(nn.Module):
    """Neither stem sees all of the output; what joins them has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(x), self.b(x)], 1))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.relu = nn.Linear(192, 192), nn.ReLU()
        self.flatten, self.head = nn.Flatten(), nn.Linear(192, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.relu(self.tied(x.flatten(1))))
        return self.head(x.relu()) + self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("build", "name"), [(Joined, "head.0"), (Tied, "relu")])
def test_f0_may_end_at_a_module_without_parameters(build: Build, name: str, batch: Batch) -> None:
    model = build()
    assert Split(model).cut(batch[0]).name == name
    YOPO(model, Linf(0.1), m=2, n=2).backward(*batch)


def test_an_output_that_ignores_the_input_is_refused(batch: Batch) -> None:
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.detach().mean((2, 3)))  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="does not depend on its input"):
        Split(Blind()).cut(batch[0])
