"""Networks that no run of ours made: `yopo eval --model.name NAME --weights FILE`."""

import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import yopo
from tests.cli.test_commands import yopo as command
from yopo.core import seals
from yopo.data.prepared import Preparation, pictures_to_test_on
from yopo.runs.api import evaluate_run
from yopo.runs.borrowed import borrow, unwrapped
from yopo.runs.overlay import Tree

pytestmark = pytest.mark.usefixtures("float32")
OPTIONS = {"width": 4, "blocks": [1, 1, 1, 1]}
CLASSES = ("cat", "dog", "owl")
SIDES = [(40, 60), (61, 40), (37, 50), (80, 33), (33, 33), (120, 45)]  # width, height
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures of several sizes, in val/ alone; the classes do not come in their order."""
    draw = np.random.default_rng(0)
    for name in reversed(CLASSES):
        folder = tmp_path / "photos" / "val" / name
        folder.mkdir(parents=True)
        for k, (width, height) in enumerate(SIDES):
            pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
    return tmp_path / "photos"


@pytest.fixture
def net() -> nn.Module:
    """A network with torchvision's names; its BatchNorm has seen something."""
    torch.manual_seed(0)
    made = yopo.models.resnet50(len(CLASSES), width=4, blocks=(1, 1, 1, 1))
    made(torch.rand(8, 3, 32, 32))
    return made.eval()


def by_hand(photos: Path) -> tuple[Tensor, Tensor]:
    """As torchvision's Resize(36), CenterCrop(32) and ToTensor do it, written out."""
    x, y = [], []
    for label, name in enumerate(CLASSES):
        for file in sorted((photos / "val" / name).iterdir()):
            with Image.open(file) as opened:
                image = opened.convert("RGB")
            w, h = image.size
            wide, high = (36, int(36 * h / w)) if w <= h else (int(36 * w / h), 36)
            image = image.resize((wide, high), Image.Resampling.BILINEAR)
            top, left = round((high - 32) / 2.0), round((wide - 32) / 2.0)
            image = image.crop((left, top, left + 32, top + 32))
            x.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255)
            y.append(label)
    return torch.stack(x), torch.tensor(y)


def settings(photos: Path, **over: Any) -> Tree:
    return {
        "model": {"name": "resnet50", "options": OPTIONS, "normalize": "imagenet"},
        "data": {"name": "folder", "root": str(photos), "size": 32, "resize": 36},
        "threat": {"eps": 2 / 255},
        **over,
    }


def test_it_is_attacked_as_by_hand(net: nn.Module, photos: Path, tmp_path: Path) -> None:
    """The oracle: PIL and torch written out, and `yopo.evaluate` on the network itself."""
    file = tmp_path / "net.pth"
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{k}": t for k, t in net.state_dict().items()}}, file
    )
    x, y = by_hand(photos)
    whole = nn.Sequential(OrderedDict(normalize=yopo.Normalize(MEAN, STD), net=net))
    attacks = ("clean", "pgd-5")
    mine = yopo.evaluate(whole, (x, y), yopo.Linf(2 / 255), attacks, batch=250)
    done = evaluate_run(file, attacks, settings=settings(photos), device="cpu")
    assert done.result.accuracy == mine.accuracy
    for name, outcome in mine.outcomes.items():
        assert done.result.outcomes[name].correct.equal(outcome.correct)
    assert done.result.about["weights_sha256"] == mine.about["weights_sha256"]
    assert done.files.values == tmp_path / "net.eval.json"
    about = seals.read_json(done.files.values)["about"]
    assert about["model"].startswith("resnet50 (")
    assert about["model"].endswith(" parameters, trained elsewhere)")
    assert about["weights"] == "net.pth, its state_dict"
    assert "trained with" not in done.files.card.read_text()


def test_pictures_are_prepared_pixel_by_pixel(photos: Path) -> None:
    data = pictures_to_test_on(photos, Preparation(36, 32))
    x, y = by_hand(photos)
    assert (data.test.read(torch.arange(len(y))).float() / 255).equal(x)
    assert data.test.labels.equal(y)
    assert tuple(data.names) == CLASSES
    other = pictures_to_test_on(photos, Preparation(36, 32, "bicubic"))
    assert not other.test.read(torch.arange(len(y))).equal(data.test.read(torch.arange(len(y))))


def test_the_command(
    net: nn.Module,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "net.safetensors"
    save_file(dict(net.state_dict()), file)
    words = ["eval", "--model.name", "resnet50", "--weights", file, "--attacks", "clean"]
    words += ["--device", "cpu", "--data.name", "folder", "--data.size=32", "--data.resize", "36"]
    words += ["--model.options.width", "4", "--model.options.blocks", "[1,1,1,1]"]
    numbers = ",".join(map(str, (*MEAN, *STD)))
    words += ["--model.normalize", numbers, "--threat.eps", "4/255"]
    assert command(monkeypatch, *words, "--data.root", photos) == 0
    assert f"card: {tmp_path / 'net.eval.md'}" in capsys.readouterr().out.replace("\n", "")
    values = seals.read_json(tmp_path / "net.eval.json")
    x, y = by_hand(photos)
    right = (net((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))).argmax(
        1
    )
    assert values["attacks"]["clean"]["accuracy"] == float((right == y).double().mean())
    assert values["about"]["threat"] == "L∞, eps = 4/255"
    for typed, why in (
        (["eval", "--attacks", "clean"], "expected a RUN, or a network of someone else's"),
        ([*words, "--data.root", tmp_path / "none"], "no folder"),
        ([*words, "--data.root", photos, "--method.name", "pgd"], "got method; leave it out"),
        (
            [*words, "--data.root", photos, "--data.resize", "30"],
            "resize of at least data.size, 32",
        ),
        (["eval", tmp_path, "--weights", "x.pth"], "expected --weights best or last of a run"),
    ):
        assert command(monkeypatch, *typed) == 2
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrap", "entry"),
    [
        (lambda state: state, ""),
        (lambda state: {"state_dict": state, "optimizer": {"lr": 0.1}}, "state_dict"),
        (lambda state: {"model": {"state_dict": state}, "epoch": 1}, "model.state_dict"),
        (lambda state: {"state_dict": {}, "state_dict_ema": state}, "state_dict_ema"),
        (lambda state: {f"_orig_mod.module.{k}": t for k, t in state.items()}, ""),
    ],
)
def test_weights_are_found_in_what_training_scripts_write(
    net: nn.Module, wrap: Any, entry: str
) -> None:
    own = dict(net.state_dict())
    state, where = unwrapped(wrap(own))
    assert where == entry
    assert state.keys() == own.keys()
    assert all(state[name].equal(own[name]) for name in own)


def test_a_network_that_is_called_module_keeps_its_name() -> None:
    state = {"module.weight": torch.zeros(1), "head.weight": torch.zeros(1)}
    assert unwrapped(state)[0] == state


class Touch:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_a_file_of_weights_runs_no_code(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Touch()}, "zip.pth")
    Path("old.pth").write_bytes(pickle.dumps(Touch()))
    torch.save({"state_dict": {}, "args": Namespace(lr=0.1)}, "args.pth")
    Path("junk.pth").write_bytes(b"junk")
    torch.save([torch.zeros(1)], "list.pth")
    for name in ("zip.pth", "old.pth", "args.pth", "junk.pth"):
        with pytest.raises(ValueError, match=f"{name} was not read: .*Expected tensors alone"):
            borrow(Path(name), settings(photos))
    with pytest.raises(ValueError, match=r"expected a dictionary of tensors in list.pth, got list"):
        borrow(Path("list.pth"), settings(photos))
    assert not Path("ran").exists()


def test_weights_of_another_network_are_named(net: nn.Module, photos: Path, tmp_path: Path) -> None:
    save_file(dict(net.state_dict()), tmp_path / "net.safetensors")
    other = settings(photos, model={"name": "resnet50", "options": {**OPTIONS, "width": 8}})
    with pytest.raises(
        ValueError, match=r"is of another architecture than resnet50 with 3 classes"
    ):
        evaluate_run(tmp_path / "net.safetensors", "clean", settings=other, device="cpu")


def test_normalisation_needs_a_number_for_each_channel() -> None:
    from yopo.runs.build import build_model
    from yopo.runs.settings import validate

    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    for given, why in (("imagenet", "1 means and 1 deviations"), ([0.5, 0.2], None)):
        model = validate({"model": {"name": "fitted", "normalize": given}}).model
        if why is None:
            assert build_model(model, x, 3).get_buffer("normalize.mean").flatten().tolist() == [0.5]
        else:
            with pytest.raises(ValueError, match=why):
                build_model(model, x, 3)
    for wrong in ("imagnet", [0.1, 0.2, 0.3], "0.1,a"):
        with pytest.raises(ValueError, match=r"model.normalize"):
            validate({"model": {"normalize": wrong}})
