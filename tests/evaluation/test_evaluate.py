"""`yopo.evaluate`: what it counts, that nothing but the images decides it, and what it refuses."""

import copy
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import scipy.stats  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import yopo
from tests.conftest import Batch, bn_convnet, convnet, grads
from tests.robust import EPS, trained
from yopo import L2, Linf, Threat
from yopo.attacks.autoattack import Stages
from yopo.attacks.cw import descend
from yopo.attacks.names import Attack, parse, parse_all
from yopo.attacks.pgd import LOSSES, climb
from yopo.attacks.strongest import Strongest
from yopo.core.frozen import Frozen
from yopo.core.losses import margin
from yopo.data.source import InMemory
from yopo.evaluation.images import Data
from yopo.evaluation.network import Network
from yopo.evaluation.result import wilson
from yopo.evaluation.suite import Piece, run, starts

THREATS: list[Threat] = [Linf(EPS), L2(1.5)]
evaluate = partial(yopo.evaluate, checks=False)  # which have tests of their own
threats = pytest.mark.parametrize("threat", THREATS, ids=["Linf", "L2"])


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor]:
    """The trained network in float64, where the size of a batch hardly moves a result."""
    model, x, y = trained()
    return copy.deepcopy(model).double(), x[:60].double(), y[:60]


# ---------------------------------------------------------------- what is counted


def alone(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, attack: Attack, seed: int
) -> Tensor:
    """A slow reference: one image at a time, every step of every restart, no early end."""
    standing = []
    for image, label in zip(x.split(1), y.split(1), strict=True):
        right = bool(model(image).argmax(1) == label)
        for number in range(attack.restarts):
            eta = starts(threat, image, f"{seed}/{number}")
            for i in range(attack.steps + 1):
                at = (image + eta).requires_grad_()
                logits = model(at)
                right &= bool(logits.argmax(1) == label)
                if i < attack.steps:
                    (grad,) = torch.autograd.grad(LOSSES[attack.loss](logits, label).sum(), at)
                    step = 2.5 * threat.eps / attack.steps
                    eta = threat.ascend(eta, grad, image, step=step)
        standing.append(right)
    return torch.tensor(standing)


@threats
@pytest.mark.parametrize("name", ["pgd-4", "pgd-3-2", "cw-linf-3-2"])
def test_every_accuracy_is_that_of_each_image_attacked_alone(
    threat: Threat, name: str, digits: tuple[nn.Module, Tensor, Tensor]
) -> None:
    if name.startswith("cw-linf") and isinstance(threat, L2):
        pytest.skip("cw-linf is in L∞")
    model, x, y = digits
    expected = alone(model, x, y, threat, parse(name), seed=3)
    result = evaluate(model, (x, y), threat, [name], batch=17, seed=3)
    assert torch.equal(result.correct[name], expected)
    assert result.accuracy[name] == float(expected.double().mean())
    assert 0.2 < result.accuracy[name] < result.accuracy["clean"] - 0.05


@threats
def test_results_do_not_depend_on_batch_size_order_or_subset(
    threat: Threat, digits: tuple[nn.Module, Tensor, Tensor]
) -> None:
    model, x, y = digits[0], digits[1][:30], digits[2][:30]
    names = ["clean", "pgd-3-2", "cw"]

    def correct(x: Tensor, y: Tensor, batch: int) -> dict[str, Tensor]:
        return evaluate(model, (x, y), threat, names, batch=batch).correct

    expected, order = correct(x, y, 30), torch.randperm(30)
    for other in (correct(x, y, 7), correct(x, y, 29)):
        assert all(torch.equal(other[name], expected[name]) for name in names)
    permuted, part = correct(x[order], y[order], 16), correct(x[10:], y[10:], 16)
    for name in names:
        assert torch.equal(permuted[name], expected[name][order])
        assert torch.equal(part[name], expected[name][10:])


def test_starts_belong_to_the_image_and_the_seed(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    _, x, _ = digits
    for threat in THREATS:
        eta = starts(threat, x[:5], "0/0")
        assert torch.equal(starts(threat, x[2:5], "0/0"), eta[2:])
        assert not torch.equal(starts(threat, x[:5], "0/1"), eta)
        assert not torch.equal(eta[0], eta[1])
        size = eta.flatten(1).abs().amax(1) if threat == THREATS[0] else eta.flatten(1).norm(dim=1)
        assert size.max() <= threat.eps + 1e-12


def test_worst_is_per_image_and_attacks_do_not_know_each_other(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = digits
    names = ["pgd-2", "cw-linf-2", "cw"]
    result = evaluate(model, (x, y), Linf(EPS), names)
    alone = {n: evaluate(model, (x, y), Linf(EPS), [n]).correct[n] for n in names}
    for name in names:
        assert torch.equal(result.correct[name], alone[name])
    expected = alone["pgd-2"] & alone["cw-linf-2"] & alone["cw"]
    assert torch.equal(result.standing, expected)
    assert result.worst == float(expected.double().mean()) <= min(result.accuracy.values())
    assert list(result.accuracy) == ["clean", *names]


@threats
@pytest.mark.parametrize("grain", [1, 7])
def test_leaving_broken_images_alone_breaks_the_same_images_for_fewer_passes(
    threat: Threat, digits: tuple[nn.Module, Tensor, Tensor], grain: int
) -> None:
    """grain: sizes of batches are its multiples, and that of the first."""
    model, x, y = digits
    sizes: set[int] = set()
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    passed = {True: 0, False: 0}
    for until_broken in (True, False):

        def f(x: Tensor, u: bool = until_broken) -> Tensor:
            passed[u] += len(x)
            sizes.add(len(x))
            return Frozen(model)(x)

        for loss in (LOSSES["cross-entropy"], margin):
            best = Strongest(f, x, y, loss)
            best.grain = grain
            eta = starts(threat, x, "0")
            climb(best, eta, threat, steps=5, step=threat.eps / 2, until_broken=until_broken)
            found[until_broken] += [best.wrong, model(best.images).argmax(1) != y]
        best = Strongest(f, x, y, margin)
        best.grain = grain
        descend(best, threat, steps=12, lr=0.05, until_broken=until_broken)
        found[until_broken] += [best.wrong, model(best.images).argmax(1) != y]
    assert all(map(torch.equal, found[True], found[False]))
    assert torch.equal(found[True][0], found[True][1])
    assert passed[True] < passed[False]
    assert len(sizes) > 2
    assert all(size % grain == 0 for size in sizes - {len(x)})


def test_each_restart_goes_over_what_stands_in_full_batches(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = digits

    class Records(dict[str, Piece]):
        def recall(self, key: str) -> Piece | None:
            return None

        def keep(self, key: str, piece: Piece) -> None:
            self[key] = piece

    seen = Records()
    net = Network.of(model, "float32", x)
    data = Data.of(net, InMemory(x, y))
    outcomes = run(net, data, Linf(EPS), [parse("pgd-1-3")], batch=25, memory=seen)
    standing = outcomes["clean"].correct.nonzero()[:, 0]
    for restart in range(3):
        pieces = [piece for key, piece in seen.items() if key.startswith(f"pgd-1-3.{restart}.")]
        assert torch.equal(torch.cat([p.rows for p in pieces]), standing)
        assert all(len(p.rows) == 25 for p in pieces[:-1])
        wrong = torch.cat([p.wrong for p in pieces])
        assert restart > 0 or wrong.any()
        standing = standing[~wrong]
    assert torch.equal(standing, outcomes["pgd-1-3"].correct.nonzero()[:, 0])


def test_propagations_are_two_thirds_a_step_and_a_third_a_look(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = digits
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _m, args: sizes.append(len(args[0])))
    result = evaluate(model, (x, y), Linf(EPS), ["pgd-2"])
    hook.remove()
    clean, first, second, look = sizes[1:]  # after a first look at one image
    assert clean == 60 > first >= second > look > 0
    assert result.propagations["clean"] == pytest.approx(1 / 3)
    assert result.propagations["pgd-2"] == pytest.approx((2 * (first + second) + look) / 3 / 60)


def test_adversarial_images_are_inside_wrong_and_all_there(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = digits
    for threat in THREATS:
        result = evaluate(model, (x, y), threat, ["pgd-3-2", "cw"], batch=11, examples=True)
        for name in ("pgd-3-2", "cw"):
            out = result.outcomes[name]
            assert out.images is not None
            broken = result.correct["clean"] & ~result.correct[name]
            assert torch.equal(out.index, broken.nonzero()[:, 0])
            assert (model(out.images).argmax(1) != y[out.index]).all()
            delta = (out.images - x[out.index]).flatten(1)
            size = delta.abs().amax(1) if isinstance(threat, Linf) else delta.norm(dim=1)
            assert size.max() <= threat.eps + 1e-12
            assert out.images.min() >= 0
            assert out.images.max() <= 1


def test_intervals_are_wilsons() -> None:
    for right, n in ((0, 1), (0, 40), (3, 7), (500, 1000), (999, 1000), (40, 40)):
        expected = scipy.stats.binomtest(right, n).proportion_ci(method="wilson")
        assert wilson(right, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_model_stays_as_it_was(batch: Batch) -> None:
    model = bn_convnet()
    model[1].eval()
    model(batch[0]).sum().backward()
    state, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    gradients, stream = grads(model), torch.get_rng_state()
    evaluate(model, batch, Linf(0.1), ["pgd-2", "cw"])
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, gradients[k]) for k, v in grads(model).items())
    assert torch.equal(torch.get_rng_state(), stream)


def test_loaders_pairs_and_bytes_are_the_same_data() -> None:
    model, x, y = trained()
    raw = (255 * x[:40]).round().byte()
    expected = evaluate(model, (x[:40], y[:40]), Linf(EPS), "pgd-3").correct["pgd-3"]
    loader = DataLoader(TensorDataset(x[:100], y[:100]), batch_size=16)
    leaf = x[:40].clone().requires_grad_()
    for data in ((raw, y[:40]), (leaf, y[:40]), loader, [(x[:30], y[:30]), (x[30:50], y[30:50])]):
        result = evaluate(model, data, Linf(EPS), "pgd-3", samples=40)
        assert torch.equal(result.correct["pgd-3"], expected)
    with torch.inference_mode():
        inside = evaluate(model, (x[:40].clone(), y[:40]), Linf(EPS), "pgd-3")
    assert torch.equal(inside.correct["pgd-3"], expected)


def test_a_nan_is_neither_right_nor_broken(batch: Batch) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet()

        def forward(self, x: Tensor) -> Tensor:
            bad = (x.flatten(1)[:, 0] != 0.5) & (x.flatten(1)[:, 0] != 0.25)
            return self.net(x).masked_fill(bad[:, None], float("nan"))  # type: ignore[no-any-return]

    x = batch[0].clone()
    x[:, 0, 0, 0] = 0.5
    model = Breaks()
    y = model(x).argmax(1)
    x[0, 0, 0, 0] = 0.75
    result = evaluate(model, (x, y), Linf(0.1), ["pgd-3"])
    assert result.correct["clean"].tolist() == [False, True, True, True, True, True]
    assert torch.equal(result.correct["pgd-3"], result.correct["clean"])


# ---------------------------------------------------------------- names


def test_names_are_steps_then_restarts() -> None:
    assert parse("pgd-50-10") == Attack("pgd-50-10", "pgd", 50, 10)
    assert parse("pgd-7") == Attack("pgd-7", "pgd", 7, 1)
    assert parse("cw-linf") == Attack("cw-linf", "pgd", 50, 1, "margin")
    assert parse("cw-linf-30-2") == Attack("cw-linf-30-2", "pgd", 30, 2, "margin")
    assert parse("autoattack").stages == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert [a.name for a in parse_all(" clean, pgd-20,fab-t")] == ["clean", "pgd-20", "fab-t"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pdg-20"], "did you mean pgd-20?"),
        (["pgd"], "did you mean pgd-20?"),
        (["pdg-5"], "did you mean pgd-5?"),
        (["pdg-5-2"], "did you mean pgd-5-2?"),
        (["cw-inf-30"], "did you mean cw-linf-30?"),
        (["auto-attack"], "did you mean autoattack?"),
        (["pgd-20-"], "did you mean pgd-20?"),
        (["pgd-0"], "at least 1 step"),
        (["pgd-5-0"], "at least 1 step"),
        (["clean", "pgd-20", "pgd-20-1"], "each attack once, got pgd-20 and pgd-20-1"),
        ([], "at least one attack"),
        ("", "at least one attack"),
        (["zzz"], "attacks are written like clean, pgd-20"),
    ],
)
def test_bad_names_get_a_suggestion(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_all(names)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": []}, "at least one image, got none"),
        ({"data": (torch.rand(0, 3, 8, 8), torch.zeros(0).long())}, "at least one image"),
        ({"data": (torch.rand(6, 3, 8, 8), torch.arange(6))}, "labels from 0 to 3 .* from 0 to 5"),
        ({"data": (torch.rand(6, 3, 8, 8), torch.arange(5))}, "labels .* of one length"),
        ({"data": [torch.rand(6, 3, 8, 8)]}, "each batch should be a pair"),
        ({"data": (torch.rand(6, 3, 8, 8), torch.zeros(6))}, "int64"),
        ({"data": (2 + torch.rand(6, 3, 8, 8), torch.zeros(6).long())}, "images in \\[0, 1\\]"),
        ({"samples": 7}, "at most 6 samples, the images there are, got 7"),
        ({"samples": 0}, "samples to be a whole number of at least 1"),
        ({"batch": 0}, "batch to be a whole number"),
        ({"precision": "fp8"}, "'tf32'"),
        ({"step": 0.0}, "step > 0"),
        ({"attacks": ["cw-linf"], "threat": L2(1.0)}, "L2 threat; use cw"),
    ],
)
def test_bad_input_is_refused_before_anything_is_kept(
    change: dict[str, Any], message: str, batch: Batch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"data": batch, "threat": Linf(0.1), "attacks": ["pgd-2"]}
    with pytest.raises(ValueError, match=message):
        evaluate(convnet(), state=tmp_path / "state", **(options | change))
    assert not list(tmp_path.iterdir())


def test_eps_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="eps > 0, got 0"):
        Linf(0)


# ---------------------------------------------------------------- precision


class Flat(nn.Module):
    """Two classes whose logits differ by little and are large, as after a bad last layer.

    bf16 has steps of 2 at 256, so there the difference is gone and class 0 always wins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.linear.weight.data = torch.tensor([[0.5] * 4, [-0.5] * 4])
        self.linear.bias.data = torch.tensor([255.0, 257.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def test_bf16_hides_and_invents_robustness_and_the_default_does_neither() -> None:
    """True margin: 4·mean − 2. Class 0 at 0.55 and class 1 at 0.45 fall at eps 0.1, exactly."""
    model = Flat().float()
    x = torch.cat([torch.full((10, 4), 0.55), torch.full((10, 4), 0.45)]).float()
    y = torch.tensor([0] * 10 + [1] * 10)
    strong, weak = Linf(0.1), Linf(0.01)

    def accuracy(threat: Threat, **options: Any) -> float:
        return evaluate(model, (x, y), threat, ["pgd-5"], **options).accuracy["pgd-5"]

    with torch.autocast("cpu", torch.bfloat16):  # what a training script may have around it
        assert accuracy(strong) == 0.0
        assert accuracy(weak) == 1.0
    assert accuracy(strong, precision="bf16") == 0.5  # class 0 seems to stand
    assert accuracy(weak, precision="bf16") == 0.5  # class 1 seems to fall
    half = Flat().bfloat16()
    with pytest.raises(ValueError, match=r"got torch.bfloat16; use model.float\(\)"):
        evaluate(half, (x, y), strong)


def test_tf32_is_off_while_attacks_run_and_back_after(batch: Batch) -> None:
    seen = []
    model = convnet()
    model.register_forward_hook(
        lambda *_: seen.append(
            (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
        )
    )
    torch.set_float32_matmul_precision("high")
    try:
        before = torch.backends.cudnn.allow_tf32
        evaluate(model, batch, Linf(0.1), ["pgd-1"])
        assert torch.backends.cudnn.allow_tf32 == before
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {(False, "highest")}


class Rough(nn.Module):
    """Takes images brighter than 0.5 for class 1; where TF32 is on, brighter than 0.45."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        edge = 0.45 if torch.backends.cudnn.allow_tf32 else 0.5
        z = self.scale * (x.flatten(1).mean(1) - edge)
        return torch.stack([-z, z], 1)


@pytest.mark.parametrize("attack", ["pgd-10", "apgd-ce"])
def test_what_tf32_finds_counts_where_float32_agrees(attack: str) -> None:
    """Both are broken for TF32, 0.36 alone is out of reach for float32."""
    x = torch.cat([torch.full((3, 1, 2, 2), v) for v in (0.36, 0.44)]).float()
    y = torch.zeros(6, dtype=torch.long)
    result = evaluate(Rough().float(), (x, y), Linf(0.1), [attack], precision="tf32", checks=False)
    assert result.accuracy == {"clean": 1.0, attack: 0.5}
    assert result.outcomes[attack].correct.tolist() == [True] * 3 + [False] * 3
    assert result.about["precision"] == "tf32"


def test_one_evaluation_wraps_the_model_and_the_images_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    for kind in (Network, Data):

        def init(self: Any, *args: Any, real: Any = kind.__init__) -> None:
            made.append(type(self).__name__)
            real(self, *args)

        monkeypatch.setattr(kind, "__init__", init)
    x = torch.rand(6, 3, 8, 8)
    evaluate(convnet(), (x, torch.arange(6) % 3), Linf(EPS), "pgd-1", state=tmp_path / "state")
    assert made == ["Network", "Data"]


def test_examples_of_a_model_that_writes_into_its_input_are_in_the_ball() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            z = self.scale * x.sub_(0.5).flatten(1).mean(1)
            return torch.stack([-z, z], 1)

    x, y = torch.full((3, 1, 2, 2), 0.44).float(), torch.zeros(3, dtype=torch.long)
    found = evaluate(
        Shifts().float(),
        (x, y),
        Linf(0.1),
        ["pgd-10"],
        precision="tf32",
        checks=False,
        examples=True,
    ).outcomes["pgd-10"]
    assert found.images is not None
    assert len(found.images) == 3
    assert (found.images - x).abs().max() <= 0.1 + 1e-6


@pytest.mark.filterwarnings("ignore")  # of torch's own making, when it compiles
def test_compiled_the_same_images_fall(batch: Batch) -> None:
    model, x = convnet(), batch[0]
    y = model(x).argmax(1)

    def result(eps: float, compile: bool) -> yopo.Result:
        return evaluate(model, (x, y), Linf(eps), "pgd-3", batch=4, compile=compile)

    radii = torch.logspace(-3, 0, 30).tolist()
    eps = next(eps for eps in radii if 0 < result(eps, False).worst < 1)  # some fall, not all
    plain, fast = (result(eps, compile) for compile in (False, True))
    assert torch.equal(plain.outcomes["pgd-3"].correct, fast.outcomes["pgd-3"].correct)
    assert 0 < fast.worst < fast.accuracy["clean"] == 1


@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.filterwarnings("ignore")  # of torch's own making, when it compiles
def test_two_graphs_serve_every_batch() -> None:
    model = yopo.models.SmallCNN(width=4, hidden=8).double().eval().requires_grad_(False)
    net = Network(model, "float32", torch.device("cpu"))
    net.speed_up()
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for size in (20, 19, 17, 16, 15, 2, 1, 20):
        x = torch.rand(size, 1, 28, 28, dtype=torch.float64, requires_grad=True)
        with torch.no_grad():
            torch.testing.assert_close(net(x), model(x))
        torch.testing.assert_close(net(x.detach()), model(x))
        ours, theirs = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (net, model))
        torch.testing.assert_close(ours, theirs)
    assert graphs["unique_graphs"] - before == 2


# ---------------------------------------------------------------- going on


class Interrupted(Exception):  # noqa: N818
    pass


def stop_after(pieces: int) -> Callable[[str, float, float], None]:
    calls = 0

    def progress(name: str, part: float, accuracy: float) -> None:
        nonlocal calls
        calls += name != "clean"
        if calls == pieces:
            raise Interrupted

    return progress


def test_an_interrupted_evaluation_goes_on_to_the_same_result(
    digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, y = copy.deepcopy(digits[0]), digits[1], digits[2]
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _m, args: sizes.append(len(args[0])))

    def go(**options: Any) -> yopo.Result:
        return evaluate(
            model,
            (x, y),
            Linf(EPS),
            ["pgd-2-3", "cw-linf-2"],
            batch=16,
            examples=True,
            **options,
        )

    expected = go()
    whole = len(sizes)
    for stops in ([2], [5], [10, 3], [12, 4, 6]):
        sizes.clear()
        state = tmp_path / str(stops)
        for stop in stops:
            with pytest.raises(Interrupted):
                go(state=state, progress=stop_after(stop))
        assert list(state.rglob("*.safetensors"))
        result = go(state=state)
        for name in ("pgd-2-3", "cw-linf-2"):
            assert torch.equal(result.correct[name], expected.correct[name])
            ours, theirs = result.outcomes[name].images, expected.outcomes[name].images
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)
        assert result.propagations == pytest.approx(expected.propagations)
        first_passes = (1 + math.ceil(60 / 16)) * len(stops)  # one image, then the clean pass
        first_passes += len(stops) + 1  # whether it is still the same network
        assert len(sizes) == whole + first_passes  # no finished batch was attacked twice
        result.forget()
        assert not state.exists()


def test_kept_batches_serve_only_the_same_evaluation(
    digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, y = digits
    first = evaluate(model, (x, y), Linf(EPS), ["pgd-2"], state=tmp_path)
    for change in ({"seed": 1}, {"batch": 13}, {"step": 0.07}):
        evaluate(model, (x, y), Linf(EPS), ["pgd-2"], state=tmp_path, **change)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters())[0] += 1e-9
    evaluate(other, (x, y), Linf(EPS), ["pgd-2"], state=tmp_path)
    evaluate(model, (x, y), Linf(EPS / 2), ["pgd-2"], state=tmp_path)
    evaluate(model, (x, y.flip(0)), Linf(EPS), ["pgd-2"], state=tmp_path)
    assert len(list(tmp_path.iterdir())) == 7
    first.forget()
    assert len(list(tmp_path.iterdir())) == 6


def test_a_damaged_or_foreign_piece_is_attacked_again(
    digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path
) -> None:
    model, x, y = digits
    expected = evaluate(model, (x, y), Linf(EPS), ["pgd-2"], batch=16, state=tmp_path)
    files = sorted(tmp_path.rglob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-3])
    files[1].write_bytes(files[2].read_bytes())
    files[3].write_bytes(b"\x80\x04 a pickle")
    result = evaluate(model, (x, y), Linf(EPS), ["pgd-2"], batch=16, state=tmp_path)
    assert torch.equal(result.correct["pgd-2"], expected.correct["pgd-2"])


def test_a_full_disk_does_not_end_the_evaluation(
    digits: tuple[nn.Module, Tensor, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, y = digits
    (tmp_path / "state").write_text("a file where the folder should be")
    result = evaluate(model, (x[:20], y[:20]), Linf(EPS), ["pgd-2"], state=tmp_path / "state")
    assert "could not keep a finished batch" in caplog.text
    assert 0 < result.accuracy["pgd-2"] < 1


# ---------------------------------------------------------------- what is written


def test_json_and_card_say_what_was_done(digits: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = digits
    about = {"model": "net-7", "data": "digits"}
    result = evaluate(model, (x, y), Linf(8 / 255), "clean,pgd-4-2", seed=5, about=about)
    tree = json.loads(result.to_json())
    assert tree["accuracy"] == result.accuracy
    assert tree["worst"]["accuracy"] == result.worst
    assert tree["attacks"]["pgd-4-2"]["interval"] == list(result.interval["pgd-4-2"])
    assert tree["about"]["eps"] == 8 / 255
    assert tree["about"]["images"] == 60
    assert len(tree["about"]["weights_sha256"]) == 64
    card = result.card()
    for words in ("net-7", "60 images: digits", "L∞, eps = 8/255", "seed 5", "float32"):
        assert words in card
    assert "4 steps of 0.0196, 2 random starts, cross-entropy loss" in card
    low, high = result.interval["pgd-4-2"]
    share = f"{100 * result.accuracy['pgd-4-2']:.2f}% ({100 * low:.1f}–{100 * high:.1f})"
    assert f"| pgd-4-2 | {share} |" in card
    assert torch.__version__ in card
    assert len(card.splitlines()) < 20
    assert repr(result).startswith(f"Result(clean {100 * result.accuracy['clean']:.2f}%")
    assert repr(result).endswith(f"worst {100 * result.worst:.2f}%)")


class Softmax(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).softmax(1)  # type: ignore[no-any-return]


def test_warnings_stand_in_result_json_and_card(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = digits
    assert not yopo.evaluate(model, (x, y), Linf(EPS), ["pgd-2"]).warnings
    result = yopo.evaluate(Softmax(model), (x, y), Linf(EPS), ["pgd-2"], step=0.01)
    codes = [warning.code for warning in result.warnings]
    assert {"probabilities", "step-too-small"} <= set(codes)
    tree, card = json.loads(result.to_json()), result.card()
    assert [warning["code"] for warning in tree["warnings"]] == codes
    for warning in result.warnings:
        assert f"**Warning ({warning.code})**: {warning.text}" in card
    shuffled = yopo.evaluate(model, (x, (y + 1) % 10), Linf(EPS), ["pgd-2"])
    assert [warning.code for warning in shuffled.warnings] == ["chance"]
    assert not yopo.evaluate(Softmax(model), (x, y), Linf(EPS), "pgd-2", checks=False).warnings


def test_square_ahead_inside_autoattack_is_noticed(
    digits: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that fail but for the last: what masked gradients look like."""
    model, x, y = digits

    def phases(self: object, names: tuple[str, ...]) -> list[Any]:
        def stage(x: Tensor, y: Tensor, _: Tensor, broke: bool) -> tuple[Tensor, Tensor]:
            return x, torch.full_like(y, broke, dtype=torch.bool)

        return [partial(stage, broke=name == "square") for name in names]

    monkeypatch.setattr(Stages, "phases", phases)
    result = yopo.evaluate(model, (x, y), Linf(EPS), ["autoattack"])
    assert [warning.code for warning in result.warnings] == ["black-box-stronger"]


def test_progress_ends_at_the_whole_and_the_accuracy(
    digits: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = digits
    calls: list[tuple[str, float, float]] = []
    result = evaluate(
        model, (x, y), Linf(EPS), ["pgd-2-2"], batch=16, progress=lambda *a: calls.append(a)
    )
    for name in ("clean", "pgd-2-2"):
        mine = [(part, accuracy) for n, part, accuracy in calls if n == name]
        assert mine == sorted(mine, key=lambda c: c[0])
        assert name == "clean" or mine[0] == (0.0, result.accuracy["clean"])  # as it begins
        assert mine[-1] == (1.0, result.accuracy[name])


def test_pieces_of_another_memory_are_used() -> None:
    """The suite asks its memory first: here a memory that claims that everything broke."""
    model, x, y = trained()

    class Claims:
        def recall(self, key: str) -> Piece | None:
            rows = (model(x[:9]).argmax(1) == y[:9]).nonzero()[:, 0]
            return Piece(rows, torch.ones(len(rows), dtype=torch.bool), torch.empty(0), 2.0, 0.0)

        def keep(self, key: str, piece: Piece) -> None:
            raise AssertionError

    net = Network.of(model, "float32", x)
    data = Data.of(net, InMemory(x[:9], y[:9]))
    outcomes = run(net, data, Linf(EPS), [parse("pgd-2")], memory=Claims())
    assert outcomes["pgd-2"].accuracy == 0
    assert outcomes["pgd-2"].seconds == 2.0
