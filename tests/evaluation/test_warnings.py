"""Each suspicion has a network that raises it and it alone; honest networks raise none."""

import ast
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import Batch
from tests.core.test_untouched import fingerprint, partly_frozen
from tests.robust import NETWORKS, digits, network
from yopo import L2, Linf, Threat
from yopo.attacks import pgd
from yopo.core.losses import margin
from yopo.evaluation import warnings as suspicions
from yopo.evaluation.warnings import after, before
from yopo.runs import evaluating

GRID = 255  # pixels are whole multiples of 1/255, as in files
PROTOTYPES = torch.where(
    torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) < 0.5, 0.25, 0.75
).double()


def images(n: int = 200) -> Batch:
    """Noisy copies (n, 64) of four prototypes, and which they are."""
    y = torch.arange(n) % 4
    x = PROTOTYPES[y] + 0.1 * (torch.rand(n, 64, generator=torch.Generator().manual_seed(1)) - 0.5)
    return (x.double() * GRID).round() / GRID, y


class After(nn.Module):
    """A linear classifier, honest and broken at eps=0.3 but not at 0.2, behind `defence`."""

    def __init__(self, defence: Callable[[Tensor], Tensor] = lambda x: x, scale: float = 1) -> None:
        super().__init__()
        self.defence = defence
        self.head = nn.Linear(64, 4)
        self.head.weight.data = scale * (PROTOTYPES - 0.5)
        self.head.bias.data = -0.5 * self.head.weight.data.sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.defence(x))  # type: ignore[no-any-return]


def ripple(x: Tensor) -> Tensor:
    """On the grid of pixel values the slope is true; between its points it flips."""
    return x + 0.002 * (2 * torch.pi * GRID * x).sin()


def reverse(x: Tensor) -> Tensor:
    """The gradient of the opposite."""
    return 2 * x.detach() - x


def another(x: Tensor) -> Tensor:
    """The gradient with respect to other pixels."""
    moved = x.roll(7, 1)
    return x.detach() + moved - moved.detach()


def far_away(x: Tensor) -> Tensor:
    """True near the data."""
    distance = (x[:, None] - PROTOTYPES).abs().amax(2).amin(1, keepdim=True)
    return torch.where(distance > 0.27, reverse(x), x)


def snap(x: Tensor) -> Tensor:
    """Fragile near the data: four times as sensitive, except far from every prototype."""
    distance = (x[:, None] - PROTOTYPES).abs().amax(2)
    nearest = PROTOTYPES[distance.argmin(1)]
    far = distance.amin(1, keepdim=True) > 0.17
    return torch.where(far, x, nearest + 4 * (x - nearest))


class Foreign(nn.Module):
    """Computes outside of autograd."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() @ (PROTOTYPES.numpy().T - 0.5))


def many_small_logits() -> nn.Module:
    """Nine wrong classes in nine directions; where all are as likely, the cross-entropy takes none.

    It answers 0 to all images, so that those of the first class are right.
    """
    head = nn.Linear(64, 10)
    signs = torch.rand(10, 64, generator=torch.Generator().manual_seed(2)) < 0.5
    head.weight.data = 0.01 * torch.where(signs, -1.0, 1.0)
    head.weight.data[0] = 0
    head.bias.data = -0.5 * head.weight.data.sum(1)
    head.bias.data[0] = 0.12
    return head


@dataclass
class Case:
    code: str
    model: Callable[[], nn.Module]
    threat: Threat
    change: Callable[[Tensor], Tensor] = lambda x: x
    says: str = ""


LINF = Linf(0.3)
NAN = torch.tensor(float("nan"))
CASES = {
    "softmax": Case(
        "probabilities", lambda: nn.Sequential(After(), nn.Softmax(1)), LINF, says="all 64 images"
    ),
    "torch noise": Case("random-forward", lambda: After(lambda x: F.dropout(x, 0.1)), LINF),
    "numpy noise": Case("random-forward", lambda: After(lambda x: x * np.random.rand()), LINF),
    "python noise": Case("random-forward", lambda: After(lambda x: x * random.random()), LINF),
    "quantised": Case("zero-gradients", lambda: After(lambda x: (8 * x).round() / 8), LINF),
    "quantised, L2": Case("zero-gradients", lambda: After(lambda x: (8 * x).round() / 8), L2(2.0)),
    "foreign": Case("zero-gradients", Foreign, LINF, says="for 100% of 64"),
    "nan": Case("zero-gradients", lambda: After(lambda x: x + 0 * (x - x).abs().sqrt()), LINF),
    "all outputs nan": Case(
        "not-finite", lambda: After(lambda x: x / 0 - x / 0), LINF, says="100%"
    ),
    "nan beside the images": Case(
        "not-finite",
        lambda: After(lambda x: torch.where((GRID * x - (GRID * x).round()).abs() < 1e-6, x, NAN)),
        LINF,
        says="a random point of the ball the outputs are NaN for 100%",
    ),
    "mean of the batch": Case("batch-dependent", lambda: After(lambda x: x - x.mean(0)), LINF),
    "small logits": Case("cross-entropy-weaker", many_small_logits, Linf(0.25)),
    "confident": Case("vanishing-cross-entropy", lambda: After(scale=1000), LINF),
    "rounded": Case("vanishing-cross-entropy", lambda: After(scale=20), LINF, says="zero for 0%"),
    "ripple": Case("weaker-with-steps", lambda: After(ripple), LINF),
    "snap": Case("weaker-with-eps", lambda: After(snap), Linf(0.1)),
    "reversed": Case("false-gradients", lambda: After(reverse), LINF, says="for 100% of 64"),
    "reversed, L2": Case("false-gradients", lambda: After(reverse), L2(2.0)),
    "another's": Case("false-gradients", lambda: After(another), LINF),
    "another's, L2": Case("false-gradients", lambda: After(another), L2(2.0)),
    "fast ripple": Case(
        "false-gradients", lambda: After(lambda x: x + 0.2 * (2000 * x).sin()), L2(2.0)
    ),
    "reversed far away": Case("unbounded-eps", lambda: After(far_away), Linf(0.1)),
    "short steps": Case("step-too-small", After, Linf(0.3, 0.01), says="at least 0.03"),
    "normalised": Case("input-range", After, LINF, lambda x: 4 * x - 2, r"Normalize"),
    "bytes": Case("input-range", After, LINF, lambda x: (255 * x).to(torch.uint8), "x / 255"),
    "float bytes": Case("input-range", After, LINF, lambda x: 255 * x, "x / 255"),
    "scaled twice": Case("input-range", After, LINF, lambda x: x / 255, "twice"),
    "not a number": Case("input-range", After, LINF, lambda x: x / 0 - x / 0, "clean the data"),
    "dropout left on": Case("training-mode", lambda: nn.Sequential(After(), nn.Dropout()), LINF),
    "norm left on": Case(
        "training-mode", lambda: nn.Sequential(nn.BatchNorm1d(64), After()), LINF, says="'0'"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_network_that_raises_it_and_it_alone(case: Case) -> None:
    x, y = images()
    model = case.model()
    if case.code != "training-mode":
        model.eval()
    (found,) = before(model, case.change(x), y, case.threat)
    assert found.code == case.code
    assert case.says in found.text


def test_a_batch_of_another_size_may_round_otherwise() -> None:
    x, y = images()

    def rounds(x: Tensor) -> Tensor:
        return x + (2e-3 if len(x) == 2 else 0.0)

    assert before(After(rounds), x, y, LINF) == []


def test_the_linear_classifier_itself_raises_none() -> None:
    """So the defences above are what is noticed. Log-probabilities are no suspicion."""
    x, y = images()
    for model in (After(), nn.Sequential(After(), nn.LogSoftmax(1))):
        for threat in (Linf(0.1), LINF, L2(0.5), L2(2.0)):
            assert before(model, x, y, threat) == []
    model = After()
    again = x.clone()
    again[0, 0], again[1, 0] = -3e-8, 1 + 1e-7  # as images come out, normalised and back
    assert before(model, again, y, LINF) == []
    with torch.inference_mode():
        assert before(model, x.clone(), y.clone(), LINF) == []


def test_a_ball_of_more_than_half_the_range() -> None:
    x, y = images()
    assert before(After(), x, y, Linf(0.8)) == []


def test_half_of_the_images_masked_is_noticed_and_the_rest_still_probed() -> None:
    x, y = images()
    model = After(lambda x: torch.where(x[:, :1] > 0.5, x.detach(), reverse(x)))
    masked, false = before(model, x, y, LINF)
    assert (masked.code, false.code) == ("zero-gradients", "false-gradients")
    dead = (x[torch.arange(64) * 200 // 64, 0] > 0.5).double().mean()
    assert f"{dead:.0%} of 64" in masked.text
    assert f"of {64 - round(64 * float(dead))} correctly" in false.text


class Mine:
    """A threat of the user's own: nobody else can say what twice its size is."""

    eps, step = LINF.eps, LINF.step
    start, project, ascend = LINF.start, LINF.project, LINF.ascend


def test_threats_of_other_kinds() -> None:
    x, y = images()
    assert before(After(), x, y, Mine()) == []
    (found,) = before(After(ripple), x, y, Mine())
    assert found.code == "weaker-with-steps"


@pytest.mark.parametrize("ball", [Linf, L2])
def test_balls_with_a_start_of_their_own(ball: type[Linf | L2]) -> None:
    class Corner(ball):  # type: ignore[misc, valid-type]
        def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            eta: Tensor = self.project(torch.ones_like(x), x)
            return eta

    assert before(After(), *images(), Corner(0.3)) == []


def test_the_step_to_come_counts() -> None:
    x, y = images(8)
    assert before(After(), x, y, LINF, step=2 * 0.3 / 7, steps=7) == []
    (found,) = before(After(), x, y, LINF, step=0.3 / 4, steps=7)
    assert "7 steps reach 1.8·eps" in found.text


@pytest.mark.parametrize("name", NETWORKS)
def test_honest_networks_raise_none(name: str) -> None:
    torch.set_default_dtype(torch.float32)  # the fixture sets it back
    model, (x, y) = network(name), digits()
    right = model(x).argmax(1) == y
    assert right.double().mean() > 0.8  # it has learnt something
    assert after({"clean": right}, y, 10) == []
    for threat in (Linf(0.05), Linf(0.1), Linf(0.3), L2(0.5), L2(2.0)):
        assert before(model, x, y, threat) == [], threat


def random_streams() -> list[str]:
    return [repr(torch.get_rng_state().tolist()), repr(random.getstate()), repr(np_state())]


def np_state() -> list[int]:
    state = np.random.get_state(legacy=False)["state"]
    return [*state["key"].tolist(), state["pos"]]


@pytest.mark.parametrize("training", [True, False])
def test_probing_leaves_everything_as_found(training: bool, batch: Batch) -> None:
    model = nn.Sequential(nn.Dropout(0.3), partly_frozen(), nn.Linear(4, 4)).train(training)
    noise = lambda _, inputs: inputs[0] * random.random() * np.random.rand() * torch.rand(())  # noqa: E731
    model.register_forward_pre_hook(noise)
    x = batch[0].clone().requires_grad_()
    found, state = fingerprint(model), {k: v.clone() for k, v in model.state_dict().items()}
    streams = random_streams()
    before(model, x, batch[1], LINF)
    model._forward_pre_hooks.clear()
    before(model, x, batch[1], LINF)
    model.register_forward_pre_hook(noise)
    assert fingerprint(model) == found
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in (x, *model.parameters()))
    assert random_streams() == streams


def tail(k: int, n: int, p: float) -> float:
    """P(at least k of n), literally."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))


def first(n: int, k: int) -> Tensor:
    """True for the first k of n images."""
    return torch.arange(n) < k


@pytest.mark.parametrize(("n", "classes", "top"), [(100, 10, 10), (60, 4, 15), (50, 2, 40)])
def test_chance_up_to_what_one_label_for_all_explains(n: int, classes: int, top: int) -> None:
    """`top` images have the commonest label."""
    y = torch.where(first(n, top), 0, 1 + torch.arange(n) % (classes - 1))
    needed = next(k for k in range(n + 1) if tail(k, n, top / n) < 0.05)
    (found,) = after({"clean": first(n, needed - 1)}, y, classes)
    assert found.code == "chance"
    assert after({"clean": first(n, needed)}, y, classes) == []


def test_no_verdict_on_chance_from_images_that_cannot_tell() -> None:
    for y in (torch.arange(4) % 2, torch.zeros(100, dtype=torch.long)):
        assert after({"clean": torch.ones_like(y, dtype=torch.bool)}, y, 2) == []


def coordinate_search(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Black box: try ±eps in one pixel after the other, keep what helps."""
    eta = torch.zeros_like(x)
    with torch.no_grad():
        for pixel in range(x.shape[1]):
            for value in (-eps, eps):
                trial = eta.clone()
                trial[:, pixel] = value
                better = margin(model(x + trial), y) > margin(model(x + eta), y)
                eta = torch.where(better[:, None], trial, eta)
        stands: Tensor = model(x + eta).argmax(1) == y
    return stands


def test_black_box_beats_white_box_only_where_gradients_are_masked() -> None:
    x, y = images(100)
    for defence, codes in (
        (lambda x: (8 * x).round() / 8, ["black-box-stronger"]),
        (lambda x: x, []),
    ):
        model = After(defence)
        white = model(pgd(model, x, y, LINF)).argmax(1) == y
        correct = {"clean": model(x).argmax(1) == y, "pgd-20": white}
        correct["square"] = coordinate_search(model, x, y, 0.3)
        assert [s.code for s in after(correct, y, 4)] == codes


def test_a_few_images_broken_by_square_alone_are_no_sign() -> None:
    n, y = 1000, torch.arange(1000) % 10
    standing = {"clean": first(n, 900), "pgd-20": first(n, 600), "apgd-t": first(n, 550)}
    needed = next(k for k in range(n) if tail(k, n, 0.01) < 0.01)
    assert after({**standing, "square": first(n, 551 - needed)}, y, 10) == []
    (found,) = after({**standing, "square": first(n, 550 - needed)}, y, 10)
    assert found.code == "black-box-stronger"
    assert f"broke {needed} of 1000" in found.text
    assert after({"clean": first(n, 900), "square": first(n, 0)}, y, 10) == []  # nothing to compare
    assert after({**standing, "autoattack": first(n, 0)}, y, 10) == []


@pytest.mark.parametrize(
    ("threat", "attacks", "expected"),
    [
        (L2(1.0), ["cw"], ["cw-alone"]),
        (L2(1.0), ["cw", "cw-20"], ["cw-alone"]),
        (L2(1.0), ["cw", "pgd-50"], []),
        (L2(1.0), ["cw", "square"], []),
        (L2(1.0), [], []),
        (Linf(0.1), ["cw"], []),
    ],
)
def test_cw_as_the_only_attack_in_l2(
    threat: Threat, attacks: list[str], expected: list[str]
) -> None:
    y = torch.arange(1000) % 10
    correct = dict.fromkeys(["clean", *attacks], first(1000, 900))
    assert [s.code for s in after(correct, y, 10, threat)] == expected


def test_every_code_is_explained_and_has_a_network() -> None:
    codes = {
        str(node.args[0].value)
        for file in (suspicions.__file__, evaluating.__file__)
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Suspicion"
        and isinstance(node.args[0], ast.Constant)
    } | {*suspicions.PAIRS}
    tested = {case.code for case in CASES.values()} | {"chance", "black-box-stronger", "cw-alone"}
    tested |= {"other-weights", "other-images"}  # in tests/runs/test_loading.py
    page = (Path(__file__).parents[2] / "docs" / "warnings.md").read_text()
    assert codes == tested
    assert sorted(codes) == sorted(re.findall(r"^## (.*)$", page, re.MULTILINE))
