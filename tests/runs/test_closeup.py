"""Class by class, answer by answer, radius by radius: each against a plain count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import yopo
from tests.cli.test_eval import run
from tests.robust import trained
from yopo.core import tensor_files
from yopo.data import load
from yopo.evaluation.result import Result
from yopo.runs.api import evaluate_run
from yopo.runs.closeup import AT_RADII, RADII
from yopo.runs.shown import choose

__all__ = ["run"]

pytestmark = pytest.mark.usefixtures("float32")

N, EPS = 60, 0.2


def looked(run: Path, **how: Any) -> tuple[dict[str, Any], Result, Tensor, Tensor]:
    """What the file says, the result, and the images that were evaluated with their labels."""
    result = evaluate_run(run, "pgd-5,cw", samples=N, eps=EPS, **how).result
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))[:N].sort().values
    data = load("mnist-subset")
    return (
        json.loads((run / "eval.json").read_text()),
        result,
        *(
            data.x_test[order],
            data.y_test[order],
        ),
    )


def test_classes_are_counted_one_by_one(run: Path) -> None:
    told, result, _, y = looked(run)
    assert "confusion" not in told
    assert "radii" not in told
    clean, standing = result.correct["clean"].tolist(), result.standing.tolist()
    assert 0 < sum(standing) < sum(clean) < N
    for label, row in enumerate(told["classes"]):
        mine = [i for i in range(N) if int(y[i]) == label]
        assert row == {
            "name": str(label),
            "images": len(mine),
            "clean": sum(clean[i] for i in mine),
            "worst": sum(standing[i] for i in mine),
        }
    assert len(told["classes"]) == 10


def test_confusion_is_what_the_network_answers_to_the_images_written(run: Path) -> None:
    told, result, x, y = looked(run, examples=True)
    model = trained()[0].eval()
    held = tensor_files.load_weights(run / "eval-examples.safetensors")
    worst = x.float() / 255
    for name in ("cw", "pgd-5"):  # of both the first counts
        worst[held[f"{name}.index"]] = held[f"{name}.images"]
    answers = model(worst).argmax(1).tolist()
    counts = [[0] * 10 for _ in range(10)]
    for label, answer in zip(y.tolist(), answers, strict=True):
        counts[label][answer] += 1
    assert told["confusion"] == counts
    assert sum(counts[i][i] for i in range(10)) == int(result.standing.sum())


def test_the_same_images_do_not_depend_on_the_network(run: Path) -> None:
    _, _, x, y = looked(run, examples=True)
    held = tensor_files.load_weights(run / "eval-examples.safetensors")
    rows = choose(y)
    assert held["same.index"].tolist() == rows.tolist()
    assert len({*y[rows].tolist()}) == len(rows) == 8
    assert torch.equal(held["same.clean"], x[rows])
    moved = (held["same.images"] - x[rows].float() / 255).abs().amax((1, 2, 3))
    assert moved.min() > 0.5 * EPS
    assert moved.max() <= EPS + 1e-6
    model = trained()[0].eval()
    assert torch.equal(held["same.answers"], model(held["same.images"]).argmax(1))
    assert torch.equal(held["same.clean_answers"], model(x[rows].float() / 255).argmax(1))
    assert (held["same.answers"] != y[rows]).any()


def test_accuracy_at_radii_is_that_of_attacks_there(run: Path) -> None:
    """What stands at a radius withstood the attack at that one and at each before."""
    told, _, x, y = looked(run, radii=True)
    model, standing = trained()[0].eval(), torch.ones(N, dtype=torch.bool)
    assert told["radii"]["attack"] == AT_RADII
    assert told["radii"]["eps"] == [part * EPS for part in RADII]
    for eps, share in zip(told["radii"]["eps"], told["radii"]["accuracy"], strict=True):
        alone = yopo.evaluate(model, (x, y), yopo.Linf(eps), AT_RADII, checks=False)
        standing &= alone.correct[AT_RADII]
        assert share == float(standing.double().mean())
    assert told["radii"]["accuracy"][0] > told["radii"]["accuracy"][-1]


def test_radii_stay_in_the_box_and_end_where_nothing_stands(run: Path) -> None:
    told = evaluate_run(run, "clean", samples=N, eps=0.9, radii=True).files.values
    radii = json.loads(told.read_text())["radii"]
    assert max(radii["eps"]) == 0.9
    assert radii["accuracy"][-2:] == [0, 0]
