"""Networks that no run of ours made: `yopo eval --model.name NAME --weights FILE`."""

import io
import pickle
import warnings
import zipfile
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
from tests.fuzzing import (
    ODD_NAMES,
    OTHER_KINDS,
    archive_bombs,
    little_memory,
    records_of,
    within,
)
from yopo.core import seals
from yopo.data.formats import read_picture
from yopo.data.prepared import Preparation, pictures_to_test_on
from yopo.runs.api import evaluate_run
from yopo.runs.borrowed import borrow, unwrapped
from yopo.runs.overlay import Tree
from yopo.runs.saved import load_data, load_model

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


@pytest.mark.parametrize("sides", [(6_200, 4_100), (4_100, 6_200)])
@pytest.mark.parametrize("resize", [36, 2_050])
def test_a_phones_pictures_are_prepared_in_little_memory(
    sides: tuple[int, int], resize: int, tmp_path: Path
) -> None:
    """As from the whole picture, but for what a decoder that halves them rounds otherwise."""
    draw = np.random.default_rng(0)
    small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), np.uint8))
    small.resize(sides, Image.Resampling.BICUBIC).save(tmp_path / "x.jpg", quality=95)
    how = Preparation(resize, 32)
    mine = how.of(tmp_path / "x.jpg")
    with pytest.raises(ValueError, match="save it smaller"):
        read_picture(tmp_path / "x.jpg", None)
    with Image.open(tmp_path / "x.jpg") as opened:
        whole = opened.convert("RGB")
    scale = resize / min(sides)
    whole = whole.resize((int(sides[0] * scale), int(sides[1] * scale)), Image.Resampling.BILINEAR)
    left, top = (round((side - 32) / 2) for side in whole.size)
    expected = np.asarray(whole.crop((left, top, left + 32, top + 32)))
    assert np.abs(mine.astype(int) - expected).max() <= 6


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
    Path("empty.pth").write_bytes(b"")
    for name in ("zip.pth", "old.pth", "args.pth", "junk.pth", "empty.pth"):
        with pytest.raises(ValueError, match=f"{name} was not read: .*Expected tensors") as said:
            borrow(Path(name), settings(photos))
        assert "set to `False`" not in str(said.value)  # as torch would have it
    with pytest.raises(ValueError, match=r"expected a dictionary of tensors in list.pth, got list"):
        borrow(Path("list.pth"), settings(photos))
    assert not Path("ran").exists()


DIGITS: Tree = {"model": {"name": "smallcnn", "options": {"width": 2, "hidden": 4}}}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_only_numbers_in_memory_are_weights(kind: str, tmp_path: Path) -> None:
    """Whatever else a file has in a tensor's place is named, or read as the same numbers."""
    own = dict(yopo.models.SmallCNN(width=2, hidden=4).state_dict())
    with warnings.catch_warnings(action="ignore"):  # some kinds are prototypes
        torch.save(
            own | {"conv1.weight": OTHER_KINDS[kind](own["conv1.weight"])}, tmp_path / "x.pt"
        )
    if kind == "of a class":  # nn.Buffer is a tensor in all but its name
        assert load(tmp_path / "x.pt")["conv1.weight"].equal(own["conv1.weight"])
        return
    with pytest.raises(ValueError, match=r"conv1\.weight|was not read: .*Expected tensors alone"):
        load(tmp_path / "x.pt")


def load(file: Path) -> dict[str, Tensor]:
    saved = borrow(file, DIGITS)
    return dict(load_model(saved, load_data(saved)).state_dict())


@pytest.mark.parametrize("zipped", [True, False])
def test_names_are_words_and_entries_end(zipped: bool, tmp_path: Path) -> None:
    own, file = dict(yopo.models.SmallCNN(width=2, hidden=4).state_dict()), tmp_path / "x.pt"
    torch.save(own, file, _use_new_zipfile_serialization=zipped)
    assert all(own[name].equal(tensor) for name, tensor in load(file).items())
    cycle: dict[str, Any] = {"epoch": 1}
    cycle["model"] = {"state_dict": cycle}
    deep: dict[str, Any] = own
    for _ in range(30):
        deep = {"model": deep}
    for name in ODD_NAMES:
        named = dict[Any, Any](own) | {name: torch.zeros(2)}
        torch.save(named, file, _use_new_zipfile_serialization=zipped)
        with pytest.raises(ValueError, match=r"of type|is of another architecture"):
            load(file)
    others: tuple[dict[str, Any], ...] = (cycle, deep, {}, {"state_dict": {}})
    for tree in others:
        torch.save(tree, file, _use_new_zipfile_serialization=zipped)
        with within(5), pytest.raises(ValueError, match="expected a network's tensors"):
            load(file)


def test_archives_that_unpack_to_more_are_refused_before(tmp_path: Path) -> None:
    """Also those that torch and Python would list otherwise, and files of holes."""
    file = tmp_path / "x.pt"
    bombs = archive_bombs(100)
    for bomb, why in zip(
        bombs, ("would unpack to", "bytes of its tensors, more than"), strict=True
    ):
        assert len(bomb) < 1 << 20
        file.write_bytes(bomb)
        with little_memory(50 << 20), pytest.raises(ValueError, match=why):
            borrow(file, DIGITS)
    torch.save({"w": torch.zeros(4)}, file)
    sound = file.read_bytes()
    assert borrow(file, DIGITS).state is not None
    listed = bombs[0][-98 - int.from_bytes(bombs[0][-58:-50], "little") : -98]
    for other in (
        zip_again(sound),
        sound + b"more",
        sound[:-98] + listed + sound[-98:],
        sound[:-98] + sound[-98:-42] + sound[-98:],
        sound[:-2] + b"\1\0x",
    ):
        file.write_bytes(other)
        with pytest.raises(ValueError, match=r"an archive, but none that torch.save made"):
            borrow(file, DIGITS)
    with file.open("wb") as old:
        old.write(b"\x80\x02")
        old.truncate(1 << 40)
    with pytest.raises(ValueError, match="would unpack to"):
        borrow(file, DIGITS)


def zip_again(content: bytes) -> bytes:
    """As another program would pack it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, record in records_of(content).items():
            archive.writestr(name, record)
    return buffer.getvalue()


def test_a_network_with_another_shortcut_is_named(tmp_path: Path) -> None:
    """RobustBench's names, as ours with the one word between: they would load once renamed."""
    state = yopo.models.preactresnet18(2, width=4).state_dict()
    theirs = {name.replace("shortcut.", "shortcut.0."): tensor for name, tensor in state.items()}
    assert theirs.keys() != state.keys()
    torch.save({"state_dict": theirs}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"their shortcuts see x, those of .* relu\(bn\(x\)\)"):
        borrow(tmp_path / "x.pt", {"model": {"name": "preactresnet18"}})


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
