"""What the first line of a training says before torch is there is what torch finds later."""

from pathlib import Path

import pytest
import torch

from yopo.cli import opening
from yopo.core.words import fraction
from yopo.data import sources
from yopo.evaluation.card import norm
from yopo.methods.registry import ENTRIES, said
from yopo.runs.build import build_network, build_threat
from yopo.runs.recipes import RECIPES
from yopo.runs.settings import validate


def shapes(name: str) -> tuple[int, int]:
    """Channels and side of a recipe's images."""
    data = validate(RECIPES[name][1]).data
    return opening.SETS[data.name][2:] if data.name in opening.SETS else (3, data.size or 0)


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "imagenet-finetune"])
def test_parameters_are_those_of_the_network(name: str, classes: int) -> None:
    tree, (channels, side) = RECIPES[name][1], shapes(name)
    with torch.device("meta"):
        net = build_network(validate(tree).model, classes, channels, side)
    told = opening.parameters(tree["model"], classes, (channels, side))
    assert told == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    "model",
    [
        {"name": "smallcnn", "options": {"width": 3}},
        {"name": "timm:resnet18"},
        {"name": "my_module:build"},
        {},
    ],
)
def test_of_others_nothing_is_said(model: dict[str, object]) -> None:
    assert opening.parameters(model, 10, (1, 28)) is None
    assert opening.parameters({"name": "fitted"}, 10, (3, 96)) is None
    assert opening.parameters({"name": "fitted"}, None, (3, 64)) is None


def test_images_of_the_sets() -> None:
    for name, (classes, shape) in sources.KINDS.items():
        assert opening.SETS[name][1:] == (len(classes), *shape[:2])
    x, y, _, _ = sources.mnist_subset()
    assert opening.SETS["mnist-subset"] == (len(x), len(y.unique()), *x.shape[1:3])


@pytest.fixture
def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The line on a training with these pictures, and with many where there is no time."""
    lines = []
    for root in ("photos", "parted/train", "parted/test"):
        for name in ("cat", "owl", ".hidden"):
            (tmp_path / root / name / "deeper").mkdir(parents=True)
            for file in ("a.jpg", "deeper/b.png", ".c.jpg"):
                (tmp_path / root / name / file).touch()
    tree = RECIPES["own"][1]
    for root, patience in (("photos", 9.0), ("parted", 9.0), ("photos", -1.0), ("none", 9.0)):
        monkeypatch.setattr(opening, "PATIENCE", patience)
        given = tree | {"data": tree["data"] | {"root": str(tmp_path / root)}}
        opening.first_line("train own", given, Path("runs/own"), "cpu")
        lines.append(capsys.readouterr().out)
    return lines


def test_pictures_are_counted_while_there_is_time(told: list[str]) -> None:
    start, end = f"train own: YOPO-3-3, L∞ eps {fraction(8 / 255)}, ", ", cpu; into runs/own\n"
    network = f"fitted ({695_056 + 2 * 129:,} parameters)"
    assert told == [
        f"{start}folder (4 images, 2 classes), {network}{end}",
        f"{start}folder (4 images, 2 classes), {network}{end}",
        f"{start}folder (2 classes), {network}{end}",
        f"{start}folder, fitted{end}",
    ]


@pytest.mark.parametrize(
    "threat", [{}, {"name": "l2"}, {"name": "linf"}, {"name": "l2", "eps": 1.5}]
)
@pytest.mark.parametrize("name", ENTRIES)
def test_settings_that_are_not_written_are_told(
    name: str, threat: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    tree: dict[str, object] = {"method": {"name": name}, "threat": threat}
    opening.first_line("train own", tree, Path("runs/own"), "cpu")
    whole = validate(tree)
    label, ball = said(whole.method.model_dump()), norm(build_threat(whole.threat))
    line = f"train own: {label}, {ball.replace(', eps =', ' eps')}, cpu; into runs/own\n"
    assert capsys.readouterr().out == line


def test_where_it_will_train(monkeypatch: pytest.MonkeyPatch) -> None:
    device = opening.likely_device()
    if torch.version.cuda is None and torch.version.hip is None:
        assert device == "cpu"
    elif torch.cuda.is_available():
        assert device in (None, torch.cuda.get_device_name())
    monkeypatch.setattr("yopo.cli.opening.PathFinder.find_spec", lambda _: None)
    assert opening.likely_device() is None
