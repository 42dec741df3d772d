"""Attacks stay inside, find the strongest example, and agree with foolbox."""

from typing import Literal

import foolbox
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import Batch, bn_convnet, convnet
from yopo import L2, PGD, Linf, Threat
from yopo.attacks import cw, pgd
from yopo.attacks.strongest import Strongest, towards
from yopo.core.losses import margin

THREATS: list[Threat] = [Linf(0.1, 0.02), L2(0.8, 0.2)]
threats = pytest.mark.parametrize("threat", THREATS, ids=["Linf", "L2"])
Loss = Literal["cross-entropy", "margin"]


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that classifies 64 images of 4 noisy prototypes.

    Trained in float64, from a seed of its own: to a float32's rounding the same on every machine.
    """
    torch.manual_seed(0)
    y = torch.arange(64) % 4
    x = 0.5 * torch.rand(4, 3, 8, 8)[y] + 0.5 * torch.rand(64, 3, 8, 8)
    x, model = x.double(), convnet().double()
    adam = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        F.cross_entropy(model(x), y).backward()
        adam.step()
        adam.zero_grad()
    assert (model(x).argmax(1) == y).all()
    return model, x, y


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


@threats
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attacks_never_leave_ball_and_box(threat: Threat, dtype: torch.dtype, batch: Batch) -> None:
    x, y = batch[0].to(dtype), batch[1]
    model = bn_convnet().to(dtype)
    for adversarial in (
        pgd(model, x, y, threat, steps=7, step=0.5, restarts=2),
        pgd(model, x, y, threat, steps=3, loss="margin", random_start=False),
        cw(model, x, y, threat, steps=5, lr=0.5),
    ):
        assert adversarial.dtype == dtype
        assert adversarial.min() >= 0
        assert adversarial.max() <= 1
        delta = (adversarial - x).flatten(1)
        size = delta.abs().amax(1) if isinstance(threat, Linf) else delta.norm(dim=1)
        assert size.max() <= threat.eps + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("eps", [1 / 255, 2 / 255, 8 / 255, 0.3])
@pytest.mark.parametrize("kind", [Linf, L2], ids=["Linf", "L2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_of_half_types_stay_in_the_ball(
    dtype: torch.dtype, kind: type[Linf] | type[L2], eps: float
) -> None:
    """Where x + eta is no number of the type: compared in float64, to a float32's rounding."""
    threat = kind(eps)
    x, y = torch.rand(6, 3, 8, 8).to(dtype), torch.arange(6) % 4
    x[0], x[1] = x[0].round(), x[1] / 64  # the box's ends, and where the grid is finer than eta
    model = convnet().to(dtype)
    for adversarial in (
        pgd(model, x, y, threat, steps=3, restarts=2),
        pgd(model, x, y, threat, steps=2, loss="margin", random_start=False),
        cw(model, x, y, threat, steps=3, lr=eps),
    ):
        assert adversarial.dtype == dtype
        assert adversarial.min() >= 0
        assert adversarial.max() <= 1
        delta = (adversarial.double() - x.double()).flatten(1)
        size = delta.abs().amax(1) if kind is Linf else delta.norm(dim=1)
        assert size.max() <= eps + 2 * torch.finfo(torch.float32).eps
        assert kind is L2 or size.max() > eps / 3  # and they do move


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_images_are_the_nearest_inside(dtype: torch.dtype) -> None:
    """Of all numbers of the type between x and z the one nearest to z."""
    every = torch.arange(2**15, dtype=torch.int16).view(dtype)
    every = every[every <= 1].float()  # ascending
    x = every[torch.randint(len(every), (2000,))]
    z = torch.cat([torch.rand(1000), x[1000:] * (1 + 0.02 * torch.randn(1000))]).clamp(0, 1)
    got = towards(x, z, dtype).float()
    floor = every[torch.searchsorted(every, z, right=True) - 1]
    ceiling = every[torch.searchsorted(every, z)]
    assert torch.equal(got, torch.where(z > x, floor, ceiling))


@threats
@pytest.mark.parametrize("loss", ["cross-entropy", "margin"])
def test_pgd_is_never_weaker_than_the_clean_image(
    threat: Threat, loss: Loss, trained: tuple[nn.Module, Tensor, Tensor]
) -> None:
    """Even with a step so large that the iterates jump about."""
    model, x, y = trained
    for step in (0.001, 5.0):
        adversarial = pgd(model, x, y, threat, steps=5, step=step, loss=loss)
        clean, attacked = model(x), model(adversarial)
        per_sample = (
            margin if loss == "margin" else (lambda z, t: F.cross_entropy(z, t, reduction="none"))
        )
        wrong = attacked.argmax(1) != y
        assert (wrong | (per_sample(attacked, y) >= per_sample(clean, y) - 1e-6)).all()


@threats
def test_attacks_break_a_natural_network(
    threat: Threat, trained: tuple[nn.Module, Tensor, Tensor]
) -> None:
    """Counted in float64, where machines agree; of 30 seeds none left more than 18 of 64."""
    model, x, y = trained
    noise = (x + threat.start(x)).clamp(0, 1)
    assert accuracy(model, noise, y) > 0.9  # random perturbations of the same size do not
    assert accuracy(model, pgd(model, x, y, threat, steps=10), y) < 0.3
    assert accuracy(model, pgd(model, x, y, threat, steps=10, loss="margin"), y) < 0.3
    assert accuracy(model, cw(model, x, y, threat, steps=20), y) < 0.3


def test_more_steps_and_restarts_never_help_the_defender(
    trained: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, x, y = trained
    threat = Linf(0.05, 0.01)

    def attack(steps: int, restarts: int) -> float:
        generator = torch.Generator().manual_seed(0)
        adversarial = pgd(model, x, y, threat, steps=steps, restarts=restarts, generator=generator)
        return accuracy(model, adversarial, y)

    assert attack(1, 1) >= attack(3, 1) >= attack(10, 1) >= attack(10, 3)
    assert attack(1, 1) > attack(10, 3)


def test_strongest_keeps_misclassified_then_larger_loss() -> None:
    x, y = torch.zeros(1, 2), torch.tensor([0])
    right, wrong = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    losses = iter([1.0, 5.0, 6.0, 2.0, 0.5, 9.0, 0.7, float("nan")])
    best = Strongest(lambda _: right, x, y, lambda *_: torch.tensor([next(losses)]))
    for value, logits, kept in (
        (0.1, right, 0.1),
        (0.2, right, 0.2),  # larger loss
        (0.3, right, 0.2),
        (0.4, wrong, 0.4),  # misclassified beats any loss
        (0.5, right, 0.4),
        (0.6, wrong, 0.6),
        (0.7, wrong, 0.6),
    ):
        best.offer(torch.full_like(x, value), logits)
        assert torch.equal(best.images, torch.full_like(x, kept))


def foolbox_pgd(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, steps: int) -> Tensor:
    wrapped = foolbox.PyTorchModel(model.eval(), bounds=(0, 1), device="cpu")
    kind = foolbox.attacks.LinfPGD if isinstance(threat, Linf) else foolbox.attacks.L2PGD
    attack = kind(abs_stepsize=threat.step, steps=steps, random_start=False)
    result: Tensor = attack.run(
        wrapped, x, foolbox.criteria.Misclassification(y), epsilon=threat.eps
    )
    return result


@pytest.mark.parametrize("threat", [Linf(0.1, 0.004), L2(0.8, 0.05)], ids=["Linf", "L2"])
def test_pgd_agrees_with_foolbox_image_by_image(
    threat: Threat, trained: tuple[nn.Module, Tensor, Tensor]
) -> None:
    """Same start, small steps: the loss grows all the way, so the last iterate is the best."""
    model, x, y = trained
    theirs = foolbox_pgd(model, x, y, threat, steps=8)
    ours = pgd(model, x, y, threat, steps=8, random_start=False)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    assert (ours - x).abs().max() > 0.9 * min(threat.eps, 8 * threat.step) * (
        1 if isinstance(threat, Linf) else 0.1
    )


def test_training_pgd_agrees_with_foolbox_where_the_ball_binds(
    trained: tuple[nn.Module, Tensor, Tensor],
) -> None:
    """The training method keeps the last iterate, as foolbox does."""
    model, x, y = trained
    threat = Linf(0.05, 0.02)
    theirs = foolbox_pgd(model, x, y, threat, steps=6)
    out = PGD(model, threat, steps=6).backward(x, y, eta=torch.zeros_like(x))
    model.zero_grad()
    torch.testing.assert_close(x + out.eta, theirs, rtol=0, atol=1e-9)


def test_cw_first_step_is_adam_on_the_papers_objective(batch: Batch) -> None:
    """Literal: ‖eta‖² + 500·max(z_y − max z_other, 0), one Adam step of 0.01, projected."""
    x, y = batch
    model = convnet()
    y = model(x).argmax(1)  # all classified, so the hinge is active
    eta = torch.zeros_like(x).requires_grad_()
    z = model(x + eta)
    others = torch.stack([z[i, torch.arange(4) != y[i]].max() for i in range(6)])
    objective = (eta**2).sum() + 500 * (z[torch.arange(6), y] - others).clamp(min=0).sum()
    adam = torch.optim.Adam([eta], lr=0.01)
    objective.backward()
    adam.step()
    threat = Linf(0.3)
    expected = x + threat.project(eta.detach(), x)
    torch.testing.assert_close(cw(model, x, y, threat, steps=1), expected, rtol=0, atol=1e-14)


def test_margin_is_positive_exactly_when_misclassified() -> None:
    logits, y = torch.randn(200, 5), torch.randint(5, (200,))
    assert torch.equal(margin(logits, y) > 0, logits.argmax(1) != y)


def test_seeded_attacks_repeat(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained

    def attack(seed: int) -> Tensor:
        return pgd(model, x, y, THREATS[0], steps=3, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(attack(0), attack(0))
    assert not torch.equal(attack(0), attack(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps to be"),
        ({"restarts": 0}, "restarts to be"),
        ({"step": 0.0}, "step > 0"),
        ({"loss": "mse"}, "'cross-entropy' or 'margin'"),
        ({"restarts": 2, "random_start": False}, "use restarts=1"),
    ],
)
def test_bad_options_name_the_fix(options: dict[str, object], message: str, batch: Batch) -> None:
    with pytest.raises(ValueError, match=message):
        pgd(convnet(), *batch, THREATS[0], **options)  # type: ignore[arg-type]


def test_attacks_check_their_input(batch: Batch) -> None:
    x, y = batch
    for attack in (pgd, cw):
        with pytest.raises(ValueError, match="in \\[0, 1\\]"):
            attack(convnet(), x * 2, y, THREATS[0])
        with pytest.raises(ValueError, match="int64"):
            attack(convnet(), x, F.one_hot(y, 4).double(), THREATS[0])
        with pytest.raises(ValueError, match="labels from 0 to 3"):
            attack(convnet(), x, y + 1, THREATS[0])
        flat = nn.Sequential(nn.Flatten(), nn.Linear(192, 1), nn.Flatten(0))
        deep = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Unflatten(1, (1, 4)))
        for net, got in ((flat, r"\(6,\)"), (deep, r"\(6, 1, 4\)")):
            with pytest.raises(ValueError, match=f"expected logits .* got {got}"):
                attack(net, x, y, THREATS[0])


class NanGradient(nn.Module):
    """Finite outputs, but the gradient is NaN at black pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-3)
        return self.head(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]


def test_nan_gradients_do_not_pass_for_successful_attacks(batch: Batch) -> None:
    x = batch[0].clone()
    x[:, :, :4] = 0
    model = NanGradient()
    y = model(x).argmax(1)
    for adversarial in (
        cw(model, x, y, Linf(1e-9), steps=3),
        pgd(model, x, y, L2(1e-9), steps=3),
        pgd(model, x, y, Linf(1e-9), steps=3),
    ):
        assert adversarial.isfinite().all()
        assert accuracy(model, adversarial, y) == 1
    assert pgd(model, x, y, L2(1.0), steps=3).isfinite().all()


def test_nan_outputs_do_not_pass_for_successful_attacks(batch: Batch) -> None:
    x, _ = batch
    x = 0.4 + 0.2 * x

    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) / (x.mean((1, 2, 3)) < 0.52).to(x)[:, None]  # type: ignore[no-any-return]

    model = Breaks()
    y = model(x).argmax(1)
    adversarial = pgd(model, x, y, Linf(0.3), steps=5)
    assert adversarial.isfinite().all()
    assert model(adversarial).isfinite().all()


def test_attacks_work_inside_inference_mode(trained: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, y = trained
    with torch.inference_mode():
        inside = pgd(model, x.clone(), y.clone(), THREATS[0], steps=5, random_start=False)
        cw(model, x.clone(), y.clone(), THREATS[0], steps=2)
    assert torch.equal(inside, pgd(model, x, y, THREATS[0], steps=5, random_start=False))


@pytest.mark.parametrize("options", [{"c": -1.0}, {"c": float("nan")}, {"lr": 0.0}, {"steps": 0}])
def test_bad_cw_options(options: dict[str, float], batch: Batch) -> None:
    with pytest.raises(ValueError, match="expected"):
        cw(convnet(), *batch, THREATS[0], **options)  # type: ignore[arg-type]
