"""Own pictures, few of them: the recipe `own`, and what a run on them is told."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.cli.test_commands import yopo as command
from tests.tiny import BASE, Silent, tiny_data
from yopo.data import Arrays
from yopo.models import fitted as network
from yopo.runs import fitting
from yopo.runs.api import compare_runs, configure, measure_cost, train_run
from yopo.runs.fitting import STEPS, fitted, said_of
from yopo.runs.overlay import Tree, overlay
from yopo.runs.recipes import recipe
from yopo.runs.settings import Config, validate, what_counts

pytestmark = pytest.mark.usefixtures("float32")
COLOURS = {"cat": (220, 40, 40), "dog": (40, 220, 40), "owl": (40, 40, 220)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of pictures, none of which has the size of another."""
    root, rng = tmp_path_factory.mktemp("own") / "photos", np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / name).mkdir(parents=True)
        for i in range(12):
            noise = rng.normal(0, 30, (20 + i, 31 - i, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.jpg")
    return root


def over(photos: Path, **more: object) -> Tree:
    """Settings that make it quick."""
    tree: Tree = {"data": {"root": str(photos), "size": 16}, "evaluate": {"steps": 2}}
    return overlay(tree, {"model": {"options": {"width": 8}}, **more})


def test_a_folder_of_pictures_trains_with_nothing_else_said(photos: Path, tmp_path: Path) -> None:
    config, watch = configure("own", over(photos, epochs=3)), Silent()
    assert config.threat.eps == 8 / 255
    result = train_run(config, tmp_path / "run", watch=watch, device="cpu")
    assert result["test_images"] >= 3
    assert any("pictures are the test set" in line for line in watch.said)
    assert any(" classes, brought to 16x16 pixels (--data.size), " in line for line in watch.said)
    there = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (there["epochs"], there["fit"]) == (3, [])
    assert there["batch"] <= 8
    # The recipe goes on where it stopped, and so does what it wrote.
    again = train_run(config, tmp_path / "run", resume=True, watch=watch, device="cpu")
    assert again["weights_sha256"] == result["weights_sha256"]
    written = configure(tmp_path / "run" / "config.yaml")
    again = train_run(written, tmp_path / "run", resume=True, watch=watch, device="cpu")
    (tmp_path / "all").mkdir()
    (tmp_path / "run").rename(tmp_path / "all" / "run")
    assert compare_runs({"run": config}, tmp_path / "all", resume=True) == {"run": again}


def test_few_images_get_a_smaller_batch_and_more_epochs(photos: Path) -> None:
    cost = measure_cost(configure("own", over(photos)), "cpu")
    assert cost.steps * cost.config.epochs >= STEPS
    assert cost.config.schedule.warmup == pytest.approx(0.3 * cost.config.epochs)
    assert any("pictures are the test set" in line for line in cost.notes)
    kept = measure_cost(configure("own", over(photos, epochs=2, batch=20)), "cpu").config
    assert (kept.epochs, kept.batch) == (2, 20)


def some(n: int, channels: int = 3) -> Arrays:
    x = torch.zeros(n, channels, 4, 4, dtype=torch.uint8)
    return Arrays(x, torch.zeros(n).long(), x[:1], torch.zeros(1).long(), ("a",))


@pytest.mark.parametrize("n", [2, 3, 9, 50, 1000, 3000])
def test_hardly_an_image_is_left_out_of_an_epoch(n: int) -> None:
    """Of up to 3,000; a batch of 8 or more is found that leaves few."""
    config = fitted(configure("own"), some(n))
    left = n - max(1, round(0.1 * n))
    assert left % config.batch <= max(2, 0.01 * left)
    assert config.batch >= min(5, left)
    assert config.epochs <= 200


@pytest.mark.parametrize(("more", "epochs"), [([], 5), (["--propagations", "4"], 4)])
def test_epochs_are_counted_to_as_many_as_there_will_be(
    more: list[str],
    epochs: int,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The recipe says 3; few images make them more, and what may be spent decides as well."""
    monkeypatch.setattr(fitting, "EPOCHS", 5)
    few: Tree = {"epochs": 3, "schedule": {"warmup": 1}, "eps_warmup": 1}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(overlay(recipe("own"), few)))
    given = ["--data.root", photos, "--data.size", "8", "--evaluate.every", "99", *more]
    words = [tmp_path / "mine.yaml", "--methods", "natural", "--out", tmp_path / "both", *given]
    assert command(monkeypatch, "compare", *words) == 0
    shown = capsys.readouterr().out
    assert f"epochs: {epochs}, " in shown
    assert not re.search(r"\d epochs?\b", shown)  # nor another number of them
    counts = re.findall(r"epoch +(\d+)/(\d+) ", shown)
    assert counts == [(str(1 + epoch), str(epochs)) for epoch in range(epochs)]


def test_many_images_keep_what_the_recipe_says() -> None:
    config = fitted(configure("own"), some(30_000))
    assert 64 < config.batch <= 128
    assert config.epochs == 30
    demo = configure("demo")
    assert fitted(demo, some(10)) is demo


def test_what_is_left_out_and_what_does_not_fit_is_said() -> None:
    config = validate(overlay(BASE, {"batch": 16, "data": {"held_out": 20}}))
    assert said_of(config, some(120)) == [
        "each epoch takes 96 of the 100 training images in batches of 16; the 4 left over are "
        "others each time"
    ]
    strong = validate(overlay(BASE, {"threat": {"eps": 0.3}}))
    assert "76 of 255" in said_of(strong, some(120))[0]
    assert "--threat.eps 8/255" in said_of(strong, some(120))[0]
    assert said_of(strong, some(120, channels=1)) == []
    assert said_of(strong, tiny_data()) == []


MINE = """from torch import nn, zeros
def flat(features):
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 3))
def grey():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(784, 3))
def inside():
    return Inside()
class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(zeros(10, 3))
    def forward(self, x):
        return x.flatten(1) @ self.weight
def small(size):
    return Small(size)
class Small(Inside):
    def __init__(self, size):
        super().__init__()
        self.size = size
    def forward(self, x):
        assert x.shape[-1] == self.size, f"size ({x.shape[-1]}) doesn't match model ({self.size})"
def wrong():
    return Wrong()
class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(768, 3)
    def forward(self, x):
        raise RuntimeError("a mistake of its own")
"""


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "flat",
            {"features": 100},
            r"does not take images of shape \(3, 16, 16\): .*x768 and 100x3\); .*--data\.size",
        ),
        ("inside", {}, r"shape \(3, 16, 16\): .*line 13 of .*mine_that_misfits.py\)"),
        ("grey", {}, r"shape \(3, 16, 16\): .*to have 1 channels, but got 3 channels"),
        ("small", {"size": 32}, r"size \(16\) doesn't match model \(32\).*--data\.size"),
    ],
)
def test_a_network_that_does_not_fit_gets_one_sentence_with_both_shapes(
    name: str,
    options: Tree,
    words: str,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_that_misfits.py").write_text(MINE)
    base = overlay(over(photos), {"model": {"name": "smallcnn"}})  # without its options

    def named(function: str, options: Tree) -> Config:
        model = {"name": f"mine_that_misfits:{function}", "options": options}
        return configure("own", overlay(base, {"model": model}))

    config = named(name, options)
    for train in (lambda: train_run(config, tmp_path / "run"), lambda: measure_cost(config)):
        with pytest.raises(ValueError, match=words) as refused:
            train()
        said = str(refused.value)
        assert "\n" not in said
        assert (
            ("(line " in said) == ("mine_that_misfits.py)" in said) == (name in ("inside", "small"))
        )
        assert ("--data.size" in said) == (name != "grey")
    assert not (tmp_path / "run" / "config.yaml").exists()
    with pytest.raises(RuntimeError, match="a mistake of its own"):
        measure_cost(named("wrong", {}))


@pytest.mark.parametrize(
    ("given", "held"), [(500, 500), ("30", 30), ("1e2", 100), (0.25, 0.25), ("1/8", 0.125)]
)
def test_held_out_is_a_number_or_a_part(given: object, held: float) -> None:
    found = validate({"data": {"held_out": given}}).data.held_out
    assert found == held
    assert isinstance(found, type(held))


@pytest.mark.parametrize("given", [0, -3, 1.5, "many", "0", True, None, float("nan"), [3]])
def test_other_words_for_it_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"data\.held_out: expected a number of images"):
        validate({"data": {"held_out": given}})


def test_what_came_later_is_no_other_configuration() -> None:
    """Of runs before there was `fit`, `skip_broken`, or a part for `held_out`."""
    counts = what_counts(validate(BASE))
    assert "fit" not in counts
    assert "skip_broken" not in counts["data"]
    assert counts["data"]["held_out"] == 20
    assert isinstance(counts["data"]["held_out"], int)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 28, 32, 33, 64, 100, 224])
def test_the_network_fits_every_size(size: int) -> None:
    net = network(3, size=size, width=16)
    assert net(torch.rand(2, 3, size, size)).shape == (2, 3)
    side = -(-size // 2 ** (net.stages - 1))
    assert side <= 8 or net.stages == 6
    assert net.stages == 1 or side > 3
