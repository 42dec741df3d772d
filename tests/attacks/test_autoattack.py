"""AutoAttack through us is AutoAttack itself; and independent oracles for the other attacks."""

import copy
import math
from pathlib import Path
from typing import Any

import foolbox
import pyautoattack
import pytest
import torch
from torch import Tensor, nn

import yopo
from tests.conftest import Batch, bn_convnet, convnet, grads
from tests.robust import EPS, trained
from yopo import L2, Linf, Threat
from yopo.attacks.autoattack import Stages
from yopo.attacks.names import STANDARD
from yopo.core.frozen import Frozen
from yopo.evaluation.suite import starts

THREATS: list[Threat] = [Linf(EPS), L2(1.0)]
threats = pytest.mark.parametrize("threat", THREATS, ids=["Linf", "L2"])


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package with fewer steps, for both sides alike: 5000 queries take minutes here."""
    whole = pyautoattack.AutoAttack._set_version

    def shortened(self: Any, version: str) -> None:
        whole(self, version)
        self.apgd.n_iter = self.apgd_targeted.n_iter = 6
        self.fab.n_iter, self.square.n_queries = 3, 30
        self.apgd_targeted.n_target_classes = self.fab.n_target_classes = 3

    monkeypatch.setattr(pyautoattack.AutoAttack, "_set_version", shortened)


# The package itself, called directly, works with this default only.
pytestmark = pytest.mark.usefixtures("float32")


def direct(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, batch: int, stages: list[str] | None
) -> tuple[Tensor, Tensor]:
    """Call the package as its README does; which images stand, and the adversarial images."""
    model = copy.deepcopy(model)  # FAB leaves gradients in it
    norm = "Linf" if isinstance(threat, Linf) else "L2"
    attack = pyautoattack.AutoAttack(model, norm=norm, eps=threat.eps, seed=0, version="standard")
    if stages:
        attack.attacks_to_run = stages
    images, predicted = attack.run_standard_evaluation(x, y, batch_size=batch)
    return predicted == y, images


@threats
@pytest.mark.usefixtures("_quick")
def test_autoattack_equals_the_package_called_directly(threat: Threat) -> None:
    """200 digits, image by image: the same stand, and the same adversarial images are found."""
    model, x, y = trained()
    x, y = x[:200], y[:200]
    standing, images = direct(model, x, y, threat, 90, None)
    result = yopo.evaluate(
        model, (x, y), threat, ["autoattack"], batch=90, examples=True, checks=False
    )
    assert torch.equal(result.correct["autoattack"], standing)
    assert 0.3 < result.accuracy["autoattack"] < result.accuracy["clean"] - 0.05
    found = result.outcomes["autoattack"]
    assert found.images is not None
    assert torch.equal(found.images, images[found.index])
    after = [float(correct.double().mean()) for correct in found.after.values()]
    assert list(found.after) == list(STANDARD)
    assert after == sorted(after, reverse=True)
    assert after[-1] == result.accuracy["autoattack"]


@pytest.mark.usefixtures("_quick")
def test_each_stage_by_itself_equals_the_package_and_starts_from_all_that_is_right() -> None:
    model, x, y = trained()
    x, y = x[:60], y[:60]
    result = yopo.evaluate(model, (x, y), Linf(EPS), STANDARD, batch=60)
    for stage in STANDARD:
        standing, _ = direct(model, x, y, Linf(EPS), 60, [stage])
        assert torch.equal(result.correct[stage], standing)


def test_the_protocol_is_the_standard_version_we_state() -> None:
    assert pyautoattack.__version__ == "0.2.0"
    for threat in THREATS:
        package = Stages(Frozen(convnet()), threat, 7, 10, torch.device("cpu")).package
        assert package.attacks_to_run == list(STANDARD)
        assert (package.apgd.n_iter, package.apgd.n_restarts, package.apgd.loss) == (100, 1, "ce")
        targeted = package.apgd_targeted
        assert (targeted.n_iter, targeted.n_restarts, targeted.n_target_classes) == (100, 1, 9)
        fab = package.fab
        assert (fab.n_iter, fab.n_restarts, fab.n_target_classes) == (100, 1, 9)
        assert fab.targeted
        assert (package.square.n_queries, package.square.n_restarts) == (5000, 1)
        for attack in (package.apgd, targeted, fab, package.square):
            assert (attack.eps, attack.norm) == (threat.eps, type(threat).__name__)
    few = Stages(Frozen(convnet()), THREATS[0], 7, 4, torch.device("cpu")).package
    assert few.apgd_targeted.n_target_classes == few.fab.n_target_classes == 3


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("classes", [2, 3])
def test_with_fewer_than_four_classes_the_stages_that_exist_run_and_the_card_says_so(
    classes: int,
) -> None:
    """What they leave is what they leave one after the other, when named by themselves."""
    net, x, y = trained()
    rows = y < classes
    model = nn.Sequential(copy.deepcopy(net), Slice(classes))
    data = x[rows][:40], y[rows][:40]
    stages = ["apgd-ce", "fab-t", "square"]
    found = yopo.evaluate(model, data, Linf(2 * EPS), ["autoattack"], batch=40, checks=False)
    assert list(found.outcomes["autoattack"].after) == stages
    alone = yopo.evaluate(model, data, Linf(2 * EPS), stages, batch=40, checks=False)
    first, last = found.outcomes["autoattack"].after["apgd-ce"], found.correct["autoattack"]
    assert torch.equal(first, alone.correct["apgd-ce"])
    assert torch.equal(first & alone.correct["fab-t"] & last, last)
    assert last.sum() < found.correct["clean"].sum()
    words = "standard version without apgd-t, which needs 4 classes"
    assert found.to_dict()["attacks"]["autoattack"]["settings"] == words
    assert f"| {words} (after apgd-ce " in found.card()
    ten = yopo.evaluate(net, (x[:4], y[:4]), Linf(EPS), ["autoattack"], checks=False)
    assert ten.to_dict()["attacks"]["autoattack"]["settings"] == "standard version"


class Slice(nn.Module):
    """The first outputs alone."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.classes]


@pytest.mark.usefixtures("_quick")
def test_fab_does_not_depend_on_batches_and_the_random_stages_repeat() -> None:
    """The package draws its random numbers for a whole batch, so only fab-t can promise more.

    In float64, where the size of a batch moves a result by less than any image's margin.
    """
    model, x, y = trained()
    model, x, y, order = copy.deepcopy(model).double(), x[:24].double(), y[:24], torch.randperm(24)

    def correct(x: Tensor, y: Tensor, batch: int, seed: int = 0) -> dict[str, Tensor]:
        names = ["fab-t", "square", "apgd-ce"]
        return yopo.evaluate(model, (x, y), Linf(EPS), names, batch=batch, seed=seed).correct

    first = correct(x, y, 24)
    torch.rand(3)  # the global stream does not matter
    again = correct(x, y, 24)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(correct(x[order], y[order], 24)["fab-t"], first["fab-t"][order])
    assert torch.equal(correct(x, y, 9)["fab-t"], first["fab-t"])


@pytest.mark.usefixtures("_quick")
def test_nothing_is_left_in_the_model_the_streams_or_the_defaults(
    batch: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = batch[0].double(), batch[1]
    model = bn_convnet().double()
    model(x).sum().backward()
    state, gradients = copy.deepcopy(model.state_dict()), grads(model)
    torch.set_default_dtype(torch.float64)
    stream = torch.get_rng_state()
    result = yopo.evaluate(model, (x, y), Linf(0.1), ["autoattack"])  # 4 classes, float64
    assert result.accuracy["autoattack"] <= result.accuracy["clean"]
    assert torch.get_default_dtype() == torch.float64
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(v, gradients[k]) for k, v in grads(model).items())
    assert not caplog.records


@pytest.mark.usefixtures("_quick")
def test_an_interrupted_autoattack_repeats_no_finished_batch(tmp_path: Path) -> None:
    model, x, y = trained()
    data = (x[:60], y[:60])
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    model = copy.deepcopy(model)
    model.register_forward_pre_hook(count)
    expected = yopo.evaluate(model, data, Linf(EPS), "autoattack", batch=25, checks=False)
    whole, passes = passes, 0
    for stop in (1, 4, 6, 9):
        calls = 0

        def progress(name: str, *_: object, stop: int = stop) -> None:
            nonlocal calls
            calls += name.startswith("autoattack: ")
            if calls == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            yopo.evaluate(
                model,
                data,
                Linf(EPS),
                "autoattack",
                batch=25,
                checks=False,
                state=tmp_path,
                progress=progress,
            )
    result = yopo.evaluate(
        model, data, Linf(EPS), "autoattack", batch=25, state=tmp_path, checks=False
    )
    assert torch.equal(result.correct["autoattack"], expected.correct["autoattack"])
    ours, theirs = (r.to_dict()["attacks"]["autoattack"]["after"] for r in (result, expected))
    assert ours == theirs
    again = 4 * (1 + 3)  # one image, then the clean pass, of each interrupted run
    assert passes == whole + again + 5  # and whether it is still the same network


@pytest.mark.parametrize(
    ("classes", "shape", "name", "message"),
    [
        (
            3,
            (2, 3, 8, 8),
            "apgd-t",
            "apgd-t needs at least 4 classes, got 3; .* --attacks apgd-ce,fab-t,square",
        ),
        (4, (2, 192), "square", r"square expects images \(N, C, H, W\)"),
    ],
)
def test_what_the_package_cannot_do_is_said_before_it_runs(
    classes: int, shape: tuple[int, ...], name: str, message: str
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, classes))
    with pytest.raises(ValueError, match=message):
        yopo.evaluate(model, (torch.rand(shape), torch.zeros(2).long()), Linf(0.1), [name])


def test_without_the_package_the_fix_is_named(
    monkeypatch: pytest.MonkeyPatch, batch: Batch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyautoattack", None)
    with pytest.raises(ImportError, match=r"pip install pyautoattack==0\.2\.0"):
        yopo.evaluate(convnet(), batch, Linf(0.1), ["pgd-2", "autoattack"])


# ---------------------------------------------------------------- independent oracles


@pytest.mark.slow
@threats
def test_pgd_breaks_the_images_that_foolbox_breaks(threat: Threat) -> None:
    """Image by image, from the same starts, by steps of one size, in float64.

    We count what is wrong at any step, foolbox at the last: so each of its steps is looked at.
    """
    model, x, y = trained()
    model, x, y = copy.deepcopy(model).double(), x[:150].double(), y[:150]
    step = 2.5 * threat.eps / 20
    ours = yopo.evaluate(model, (x, y), threat, ["pgd-20"], step=step, checks=False)
    kind = foolbox.attacks.LinfPGD if isinstance(threat, Linf) else foolbox.attacks.L2PGD

    class SameStart(kind):  # type: ignore[misc, valid-type]
        def get_random_start(self, x0: Any, _: float) -> Any:
            return x0 + type(x0)(starts(threat, x0.raw, "0/0"))

    attack = SameStart(abs_stepsize=step, steps=20, random_start=True)
    looks: list[Tensor] = []
    model.register_forward_hook(lambda _m, _x, logits: looks.append(logits.argmax(1) == y))
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    clipped = attack.run(wrapped, x, foolbox.criteria.Misclassification(y), epsilon=threat.eps)
    model(clipped)
    assert len(looks) == 20 + 1
    theirs = ours.correct["clean"] & torch.stack(looks).all(0)
    assert torch.equal(ours.correct["pgd-20"], theirs)
    assert 0.3 < theirs.double().mean() < ours.accuracy["clean"] - 0.05


@pytest.mark.slow
@threats
def test_pgd_agrees_with_the_packages_own_apgd(threat: Threat) -> None:
    """A second family of attack on the same loss. It finds its step sizes; PGD gets more starts.

    Where the two are equally strong, an image that one alone breaks is broken by either with a
    chance of one half: how many each has is binomial. Weights, images and starts are fixed, so the
    5 in 100 are drawn once for all; what is left to a machine is an image at the edge.
    """
    model, x, y = trained()
    x, y = x[:400], y[:400]
    ours = yopo.evaluate(model, (x, y), threat, ["pgd-30-3"], checks=False)
    attack = pyautoattack.autopgd_base.APGDAttack(
        copy.deepcopy(model), n_iter=50, n_restarts=1, eps=threat.eps, norm=type(threat).__name__
    )
    with torch.no_grad():
        images = attack.perturb(x, y)
        theirs = model(images).argmax(1) == y
    mine = ours.correct["pgd-30-3"]
    alone = [int((mine & ~theirs).sum()), int((~mine & theirs).sum())]  # broken by the other only
    tail = sum(math.comb(sum(alone), k) for k in range(min(alone) + 1)) / 2 ** sum(alone)
    assert 2 * tail > 0.05, alone
    assert sum(alone) <= 0.05 * len(y)  # they break the same images, not only as many
    assert 0.3 < theirs.double().mean() < ours.accuracy["clean"] - 0.05


def test_starts_reach_every_corner_of_the_ball() -> None:
    """Drawn from images, but uniform: the mean is 0 and the spread that of a uniform draw.

    Both to six standard deviations, which no seed will leave.
    """
    x = torch.rand(400, 1, 4, 4) * 0.5 + 0.25
    eta = starts(Linf(0.2), x, "0")
    assert eta.mean().abs() < 6 * 0.2 / (3 * eta.numel()) ** 0.5
    spread = 0.2**2 * (4 / 45 / eta.numel()) ** 0.5  # of the mean of squares
    assert abs(eta.square().mean() - 0.2**2 / 3) < 6 * spread
