"""Diagnostics against networks whose co-states are known, and against plain autograd."""

import copy
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cli.test_commands import TINY
from tests.cli.test_commands import yopo as run
from tests.conftest import Batch, PatchTransformer, bn_convnet, convnet
from tests.core.test_untouched import fingerprint
from tests.tiny import tiny_data, tiny_trainer, weights
from yopo import YOPO, Linf
from yopo.core import seals
from yopo.core.first_layer import Split, cut_names
from yopo.models import preactresnet18
from yopo.pmp.diagnose import INNER, brief, diagnose, drift
from yopo.pmp.dynamics import Dynamics

THREAT = Linf(0.1, 0.03)


def test_a_network_whose_costates_never_turn() -> None:
    """Two classes and a linear network: p keeps its direction, so frozen steps are as good."""
    x, y = torch.rand(5, 6), torch.tensor([0, 1, 1, 0, 1])
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2))
    game = Dynamics.of(model, x, ["0"])
    seen = drift(game, THREAT, x, y, THREAT.start(x), 8)
    assert seen.cosine == pytest.approx([1.0] * 9)
    assert seen.gain[:3] == pytest.approx([1.0] * 3)  # later on eta cannot move any more
    assert seen.gap[0] == pytest.approx(1)
    assert seen.gap[-1] == pytest.approx(0, abs=1e-12)
    assert sorted(seen.loss) == seen.loss


class Peak(nn.Module):
    """The loss for label 0 is largest where the pixel is 0.6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.stem.weight)

    def forward(self, x: Tensor) -> Tensor:
        u = self.stem(x)
        return torch.cat([torch.zeros_like(u), -((u - 0.6) ** 2)], 1)


def test_where_the_frozen_direction_stops_being_one_of_ascent() -> None:
    """From 0.5 by 0.03: three steps up, the fourth passes the peak, the fifth leads down."""
    x, y = torch.full((2, 1), 0.5), torch.tensor([0, 0])
    game = Dynamics.of(Peak(), x)
    seen = drift(game, Linf(0.3, 0.03), x, y, torch.zeros_like(x), 6)
    assert seen.stops == 4
    assert seen.gain == pytest.approx([1, 1, 1, 1, -1, -1, -1])
    assert seen.cosine == pytest.approx([1, 1, 1, 1, -1, -1, -1])
    assert max(seen.loss) == seen.loss[3]


@pytest.mark.parametrize("name", ["0", "1", "3"])
def test_drift_follows_yopos_inner_loop(name: str, batch: Batch) -> None:
    x, y = batch
    model = bn_convnet().eval()
    eta = THREAT.start(x)
    seen = drift(Dynamics.of(model, x, [name]), THREAT, x, y, eta, 6)
    once = YOPO(model, THREAT, m=1, n=6, first_layer=name, grad_at="before").backward(x, y, eta)
    with torch.no_grad():
        assert seen.loss[0] == pytest.approx(float(F.cross_entropy(model(x + eta), y)))
        assert seen.loss[6] == pytest.approx(float(F.cross_entropy(model(x + once.eta), y)))


def test_diagnosis(batch: Batch) -> None:
    x, y = batch
    model = bn_convnet()
    model(x)
    before, state = fingerprint(model), copy.deepcopy(model.state_dict())
    found = diagnose(model, x, y, THREAT, m=4)
    assert fingerprint(model) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [d.name for d in found.depths] == ["0", "1", "3"]
    assert [d.affine for d in found.depths] == [True, False, False]
    assert len(found.depths[0].reach) == 4 * len(INNER)
    # With n = 1 every split is plain PGD; the strong attack is stronger than all of them.
    for depth in found.depths:
        assert [depth.reach[f"{m}-1"] for m in (1, 2, 3, 4)] == pytest.approx(
            [found.pgd[str(m)] for m in (1, 2, 3, 4)]
        )
        assert max(depth.reach.values()) < 1
    # The recommendation, from the printed figures alone.
    most = max(*found.pgd.values(), *(r for d in found.depths for r in d.reach.values()))
    prices = [1 + 2 / 3 * int(r) for r in found.pgd]
    leads = {
        (d.name, key): d.reach[key] - np.interp(d.cost[key], prices, list(found.pgd.values()))
        for d in found.depths
        for key in d.reach
        if d.reach[key] >= most / 2 and not key.startswith("1-")
    }
    mine = next(d for d in found.depths if d.name == found.first_layer)
    key = f"{found.m}-{found.n}"
    assert leads[mine.name, key] == max(leads.values())
    assert f"YOPO-{key} at {mine.name} adds {mine.reach[key]:.0%}" in found.because[0]
    json.dumps(found.tree(), allow_nan=False)


@pytest.mark.parametrize("tick", [0.01, 1e9])
def test_a_clock_may_be_coarse(tick: float, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still in most passes, or in all of them."""
    now = itertools.count()
    monkeypatch.setattr("yopo.pmp.diagnose._clock", lambda _: 0.003 * next(now) // tick * tick)
    study = diagnose(convnet(), *batch, THREAT, m=1, splits=["0", "2"])
    assert all(math.isfinite(depth.inner_cost) for depth in study.depths)


def test_residuals_are_relative_slopes_of_the_loss(batch: Batch) -> None:
    """By finite differences: scaling θ_t's step by h changes the loss by residual·h·loss."""
    x, y = batch
    model = convnet()
    found = diagnose(model, x, y, Linf(1e-9), m=1, splits=["0"])  # at the images themselves
    assert list(found.residuals) == ["0", "2", "5"]
    loss = F.cross_entropy(model(x), y)
    for name, residual in found.residuals.items():
        theta = list(model.get_submodule(name).parameters())
        grads = torch.autograd.grad(loss, theta, retain_graph=True)
        size = sum(p.square().sum() for p in theta) ** 0.5
        slope = sum(g.square().sum() for g in grads) ** 0.5
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for p, g in zip(twin.get_submodule(name).parameters(), grads, strict=True):
                p.add_(1e-6 * size * g / slope)  # a relative step of 1e-6 up the loss
            rise = (F.cross_entropy(twin(x), y) - loss) / loss
        assert residual == pytest.approx(float(rise) / 1e-6, rel=1e-3)


@pytest.mark.parametrize("build", [lambda: preactresnet18(4, width=4), PatchTransformer])
def test_places_to_cut_are_found_in_any_network(build: type[nn.Module], batch: Batch) -> None:
    x, y = batch
    model = build().eval()
    names = cut_names(model, x)
    assert len(names) >= 3
    assert names[0] == Split(model).cut(x).name
    for name in names:
        Split(model, name).cut(x)  # each can be
    found = diagnose(model, x, y, THREAT, m=1)
    assert set(found.residuals) <= {*names, "output"}
    assert found.first_layer in names


def test_a_threat_of_ones_own(batch: Batch) -> None:
    class Half:
        """The upper half of an L∞ ball."""

        eps, step, _ball = 0.1, 0.025, Linf(0.1)

        def start(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return self.project(self._ball.start(x, generator), x)

        def project(self, eta: Tensor, x: Tensor) -> Tensor:
            return self._ball.project(eta, x).clamp(min=0)

        def ascend(
            self, eta: Tensor, grad: Tensor, x: Tensor, *, n: int = 1, step: float | None = None
        ) -> Tensor:
            for _ in range(n):
                eta = self.project(eta + (step or self.step) * grad.sign(), x)
            return eta

    found = diagnose(convnet(), *batch, Half(), m=2)
    assert found.depths[0].affine
    assert found.depths[0].drift.gap[0] == 1  # nothing lower than what a long search finds
    assert min(found.depths[0].drift.gap) >= 0


def test_a_network_of_one_layer_is_refused(batch: Batch) -> None:
    class Flat(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1))

    with pytest.raises(ValueError, match="no module inside this network"):
        diagnose(Flat(batch[0][0].numel(), 4), *batch, Linf(0.1), m=2)


def test_brief_is_a_part_of_the_whole(batch: Batch) -> None:
    x, y = batch
    model = convnet()

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    whole = diagnose(model, x, y, THREAT, splits=["1"], m=1, generator=seeded())
    short = brief(model, x, y, THREAT, first_layer="1", n=10, generator=seeded())
    assert short["cosine"] == pytest.approx(whole.depths[0].drift.cosine[10])
    assert short["gap"] == pytest.approx(whole.depths[0].drift.gap[10])
    assert short["strong_loss"] == pytest.approx(whole.strong_loss)


@pytest.mark.parametrize(
    ("splits", "m", "message"), [(["zero"], 2, "no module 'zero'"), (None, 0, "m to be a whole")]
)
def test_bad_options(splits: list[str] | None, m: int, message: str, batch: Batch) -> None:
    with pytest.raises(ValueError, match=message):
        diagnose(convnet(), *batch, THREAT, splits=splits, m=m)


# ---------------------------------------------------------------- in training, on the command line


def test_a_run_is_the_same_with_and_without_looking(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    finals = []
    for every in (0, 2):
        trainer = tiny_trainer(tmp_path / str(every), {"diagnose": {"every": every, "images": 8}})
        trainer.run()
        finals.append(weights(trainer.learner.model))
    assert all(torch.equal(v, finals[1][k]) for k, v in finals[0].items())
    lines = [json.loads(line) for line in (tmp_path / "2/metrics.jsonl").read_text().splitlines()]
    assert ["diagnose" in line for line in lines] == [False, True, False]
    assert lines[1]["diagnose"]["cosine"] <= 1


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_default_dtype(torch.float32)
    out, data = tmp_path / "run", tiny_data()
    arrays = {k: getattr(data, k).numpy() for k in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "tiny.npz", **arrays)
    words = ("--data.path", tmp_path / "tiny.npz", *TINY, "--out", out)
    assert run(monkeypatch, "train", "demo", *words) == 0
    capsys.readouterr()
    assert run(monkeypatch, "diagnose", out, "--images", "6", "--m", "2", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    found = seals.read_json(out / "diagnose.json")
    assert json.loads((out / "diagnose.json").read_text()).keys() - found.keys() == {"sha256"}
    assert f"--method.first_layer {found['first_layer']}" in shown
    first, *further = shown.partition("places where")[0].splitlines()
    assert first == f"looking at 6 training images with {out / 'model.safetensors'}, on cpu"
    names = [depth["name"] for depth in found["depths"]]
    places = [f"place {i} of {len(names)}: f0 ends at {name};" for i, name in enumerate(names, 1)]
    assert all(any(line.startswith(place) for line in further) for place in places)
    assert (out / "diagnose.png").stat().st_size > 10_000
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib", None)
        words = ("diagnose", out, "--images", "4", "--m", "2", "--device", "cpu")
        assert run(without, *words) == 0
    assert "diagnose.json; a picture needs matplotlib" in capsys.readouterr().out
    assert json.loads((out / "diagnose.json").read_text())["settings"]["images"] == 4
    assert run(monkeypatch, "diagnose", tmp_path) == 2
    assert "expected a run with config.yaml" in capsys.readouterr().err
    assert run(monkeypatch, "diagnose", out, "--splits", "conv9") == 2
    assert "no module 'conv9'" in capsys.readouterr().err


class Tied(nn.Module):
    """Two of its layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(192, 6), nn.Linear(6, 4)
        self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.d.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x.flatten(1)))
        for layer in (self.b, self.c, self.d):
            h = torch.tanh(layer(h))
        out: Tensor = self.h(h)
        return out


def test_layers_that_share_a_weight_count_as_one(batch: Batch) -> None:
    found = diagnose(Tied(), *batch, Linf(0.1), m=2)
    assert {d.name for d in found.depths} <= {"a", "d"}
    assert {"a", "d"} <= found.residuals.keys()
    assert not {"b", "c"} & found.residuals.keys()
    with pytest.raises(ValueError, match="share a parameter"):
        diagnose(Tied(), *batch, Linf(0.1), m=2, splits=["b"])


def test_inference_mode_is_named(batch: Batch) -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match=r"leave torch.inference_mode\(\)"):
        diagnose(Tied(), *batch, Linf(0.1))
