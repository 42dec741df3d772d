"""A trained network in one line, and its answers to pictures."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import yopo
from tests.cli.test_commands import yopo as command
from tests.runs.test_own import COLOURS, over, photos
from tests.runs.test_strangers import write
from tests.tiny import Silent
from yopo.core import tensor_files
from yopo.data import load as load_data
from yopo.runs import exporting, folder, saved
from yopo.runs.api import configure, evaluate_run, train_run
from yopo.runs.sections import DataConfig
from yopo.runs.settings import validate

pytestmark = pytest.mark.usefixtures("float32")
__all__ = ["photos"]


@pytest.fixture(scope="module")
def project(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the photos, and a run that names them from there; colours are soon learnt."""
    root = tmp_path_factory.mktemp("project")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(shutil.copytree(photos.parent, root / "work"))
        # Enough for red, green and blue, with a network that no chance leaves at chance level.
        train_run(configure("own", over(Path("photos"), epochs=12)), Path("run"), watch=Silent())
    torch.set_default_dtype(before)
    return root / "work"


def test_a_run_is_loaded_in_one_line_without_its_data(project: Path, tmp_path: Path) -> None:
    expected = folder.read_result(project / "run")["best"]
    data = load_data("folder", root=project / "photos", size=16)
    run = shutil.copytree(project / "run", tmp_path / "elsewhere")
    for net in (yopo.load(run), yopo.load(str(run / "model.safetensors"))):
        assert not any(module.training for module in net.modules())
        assert net.class_names == ("cat", "dog", "owl")
        assert net.image_shape == (3, 16, 16)
        names = [name for name, _ in net.named_children()]
        assert names == ["normalize", "net"]
        right = net(data.x_test / 255).argmax(1) == data.y_test
        assert float(right.double().mean()) == pytest.approx(expected["clean"])
    last = tensor_files.load_weights(run / "model-last.safetensors")
    assert all(torch.equal(v, last[k]) for k, v in yopo.load(run, "last").state_dict().items())
    with pytest.raises(ValueError, match="weights to be best or last, got 'lsat'"):
        yopo.load(run, "lsat")


def test_predict_answers_with_names_and_confidence(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    pictures = [f"photos/{name}/0.jpg" for name in COLOURS]
    assert command(monkeypatch, "predict", "run", *pictures) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == pictures
    for line in lines:
        words = line.split(": ")[1].split(", ")
        shares = [float(word.split()[1].rstrip("%")) for word in words]
        assert {word.split()[0] for word in words} == {*COLOURS}
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(100, abs=0.2)
    Path("broken.jpg").write_bytes(b"")
    assert (
        command(monkeypatch, "predict", "run", "broken.jpg", pictures[0], "no.jpg", "photos") == 2
    )
    said = capsys.readouterr()
    assert said.out == lines[0] + "\n"
    assert "cannot read broken.jpg" in said.err
    *_, missing, whole = said.err.splitlines()
    assert missing == "no file no.jpg"
    assert whole == "photos is a folder; name its pictures, as photos/*.jpg"
    assert command(monkeypatch, "predict", "run", pictures[0], "--top", "1") == 0
    assert capsys.readouterr().out == lines[0].split(",")[0] + "\n"
    assert command(monkeypatch, "predict", "run", pictures[0], "--top", "0") == 2


def test_a_grey_network_sees_a_grey_picture(tmp_path: Path) -> None:
    """The embedded digits; this run says nothing of its images, as those before did."""
    net = yopo.load(write(tmp_path / "run"))
    assert net.class_names == tuple("0123456789")
    assert net.image_shape == (1, 28, 28)
    Image.new("RGB", (60, 40), (255, 0, 0)).save(tmp_path / "red.png")
    from yopo.runs.loading import classify

    (name, share), *_ = classify(net, tmp_path / "red.png")
    grey = torch.full((1, 1, 28, 28), 76 / 255)
    expected = net(grey)[0].softmax(0).detach()
    assert int(name) == expected.argmax()
    assert share == pytest.approx(float(expected.max()), abs=1e-5)


def test_an_answer_that_is_no_number_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "run") / "model.safetensors"
    state, words = tensor_files.load_weights(file), tensor_files.load_metadata(file)
    broken = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
    tensor_files.save_weights(file, broken, words)
    Image.new("L", (28, 28)).save(tmp_path / "x.png")
    assert command(monkeypatch, "predict", file, tmp_path / "x.png") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "is not finite: its weights are broken" in " ".join(said.err.split())


def test_data_are_found_where_the_run_moved_with_them_or_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = folder.read_result(project / "run")["best"]["clean"]
    moved = shutil.copytree(project, tmp_path / "a" / "moved")
    assert evaluate_run(moved / "run", "clean").result.accuracy["clean"] == expected
    moved.joinpath("photos").rename(tmp_path / "pictures")
    with pytest.raises(ValueError, match=r"or say where they are: --data\.root DIR"):
        evaluate_run(moved / "run", "clean")
    found = evaluate_run(moved / "run", "clean", data_root=Path("pictures")).result
    assert found.accuracy["clean"] == expected
    words = ("--attacks", "clean", "--data.root", "pictures")
    assert command(monkeypatch, "eval", moved / "run", *words) == 0
    few = ("--images", "4", "--m", "1", "--data.root", "pictures")
    assert command(monkeypatch, "diagnose", moved / "run", *few) == 0


def test_a_run_with_the_name_of_its_data_is_not_taken_for_them(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project / "run", tmp_path / "r" / "photos")
    for cwd, run in (("", "r/photos"), ("r", "photos"), ("r/photos", ".")):
        monkeypatch.chdir(tmp_path / cwd)
        with pytest.raises(ValueError, match=r"^no (folder|data in).*--data\.root DIR") as refused:
            evaluate_run(Path(run), "clean")
        assert "state" not in str(refused.value)


NAMES = st.lists(st.sampled_from(["anna", "otto"]), min_size=1, max_size=3).map("/".join)


@given(first=NAMES, second=NAMES, data=NAMES, named=NAMES)
def test_data_that_are_found_are_no_run_whatever_the_names(
    first: str, second: str, data: str, named: str
) -> None:
    """Runs and data that share names, seen from a folder where there is neither."""
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        top = Path(made).resolve()
        runs = [top / "anna" / first, top / second]
        for place in (*runs, top / data, top / "elsewhere"):
            place.mkdir(parents=True, exist_ok=True)
        for run in runs:
            (run / "config.yaml").touch()
        patch.chdir(top / "elsewhere")
        patch.setattr(saved, "build_data", lambda config: config)
        config = validate({"data": {"name": "folder", "root": named}})
        weights = runs[0] / "model.safetensors"
        found = saved.load_data(saved.Saved(config, weights, trusted=True, trusted_data=True))
        place = cast(DataConfig, found).root or top
        apart = not any(
            a.is_relative_to(b) for r in runs for a, b in ((r, top / data), (top / data, r))
        )
        if place == Path(named):  # where it is not: the sentence says so
            assert not (apart and top / data in [f / named for f in runs[0].parents])
            return
        assert place in [folder / named for folder in runs[0].parents]
        assert not place.is_relative_to(runs[0])
        assert not runs[0].is_relative_to(place)
        assert not any(place in (run, run.parent) for run in runs)


def test_loading_follows_the_rule_of_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w')")
    picture = tmp_path / "x.png"
    Image.new("RGB", (28, 28)).save(picture)
    run = write(tmp_path / "run", {"name": "evil:build"})
    with pytest.raises(ValueError, match="--trust"):
        yopo.load(run)
    for words in (("predict", run, picture), ("export", run, "--to", "pt2")):
        assert command(monkeypatch, *words) == 2
        assert "--trust" in capsys.readouterr().err
    assert not (run / "model.pt2").exists()
    assert not (tmp_path / "ran").exists()
    large = write(tmp_path / "large", {"name": "smallcnn", "options": {"width": 10**6}})
    with pytest.raises(ValueError, match="cannot be built"):
        yopo.load(large)
    pickle = tmp_path / "model.safetensors"
    torch.save({"w": torch.zeros(2)}, pickle)
    with pytest.raises(ValueError, match="is a pickle"):
        yopo.load(pickle)
    with pytest.raises(ValueError, match="no run folder and no weights file"):
        yopo.load("nothing")


@pytest.mark.parametrize(
    "told",
    [
        [],
        "x",
        {},
        {"classes": [], "shape": [1, 28, 28]},
        {"classes": ["a"] * 10, "shape": [1, 28]},
        {"classes": ["a"] * 10, "shape": [1, 28, 0]},
        {"classes": ["a"] * 10, "shape": [1, 60_000, 60_000]},
        {"classes": ["a"] * 10, "shape": [1, 10**30, 1]},
        {"classes": ["a"] * 10, "shape": [2, 28, 28]},
        {"classes": ["a"] * 9, "shape": [1, 28, 28]},
        {"classes": [1] * 10, "shape": [1, 28, 28]},
        {"classes": ["a" * 1001] * 10, "shape": [1, 28, 28]},
    ],
    ids=lambda told: str(told)[:40],
)
def test_what_a_file_says_of_its_images_is_checked(told: object, tmp_path: Path) -> None:
    file = write(tmp_path / "run") / "model.safetensors"
    words = tensor_files.load_metadata(file)
    state = tensor_files.load_weights(file)
    tensor_files.save_weights(file, state, words | {"images": json.dumps(told)})
    with pytest.raises(ValueError, match=r"model\.safetensors|cannot be built"):
        yopo.load(file)
    good = {"classes": list("abcdefghij"), "shape": [1, 28, 28]}
    tensor_files.save_weights(file, state, words | {"images": json.dumps(good)})
    assert yopo.load(file).class_names == tuple("abcdefghij")


def test_pictures_that_are_not_square_need_the_networks_own_size(tmp_path: Path) -> None:
    from yopo.runs.loading import classify

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 4 * 6, 2)).float()
    net.class_names, net.image_shape = ("a", "b"), (3, 4, 6)  # type: ignore[assignment]
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(tmp_path / "fits.png")
    assert len(classify(net, tmp_path / "fits.png")) == 2
    Image.fromarray(np.zeros((6, 4, 3), np.uint8)).save(tmp_path / "turned.png")
    with pytest.raises(ValueError, match=r"expected a picture of 6x4 pixels.*got 4x6"):
        classify(net, tmp_path / "turned.png")


def renamed(project: Path, to: Path, names: dict[str, str]) -> Path:
    """The photos, with some classes called otherwise."""
    there = shutil.copytree(project / "photos", to)
    for old, new in names.items():
        (there / old).rename(there / new)
    return there


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"cat": "pet"}, "class 0 is cat there and dog here"),  # dog and owl would be 0 and 1
        ({"owl": "zebra"}, "class 2 is owl there and zebra here"),
    ],
)
def test_data_of_other_classes_are_refused(
    names: dict[str, str], words: str, project: Path, tmp_path: Path
) -> None:
    """Labels are numbers in the order of names: of other names they mean other classes."""
    there = renamed(project, tmp_path / "photos", names)
    with pytest.raises(ValueError, match=words):
        evaluate_run(project / "run", ["clean"], data_root=there)
    with pytest.raises(ValueError, match=words):
        exporting.export_run(project / "run", "pt2", tmp_path / "n.pt2", check=4, data_root=there)


def test_names_in_another_form_of_unicode_are_the_same(project: Path, tmp_path: Path) -> None:
    saved._check_classes(["caf\u00e9", "tea"], ["cafe\u0301", "tea"])
    saved._check_classes(["0", "1"], ["zero", "one"])  # arrays have no names
    with pytest.raises(ValueError, match="class 1 is tea there and none here"):
        saved._check_classes(["caf\u00e9", "tea"], ["caf\u00e9"])


def codes(run: Path, data: Path, **more: object) -> list[str]:
    made = evaluate_run(run, ["pgd-1"], data_root=data, device="cpu", **more)  # type: ignore[arg-type]
    written = json.loads(made.files.values.read_text())["warnings"]
    found = [doubt.code for doubt in made.result.warnings]
    assert found == [doubt["code"] for doubt in written]
    return [code for code in found if code.startswith("other-")]


def test_test_images_that_may_have_been_trained_on_are_told(project: Path, tmp_path: Path) -> None:
    run = shutil.copytree(project / "run", tmp_path / "run")
    assert codes(run, project / "photos") == []
    there = shutil.copytree(project / "photos", tmp_path / "photos")
    for file in sorted((there / "cat").iterdir())[:6]:  # the split goes by contents
        file.unlink()
    assert codes(run, there) == ["other-images"]
    assert codes(run, there, samples=3) == []  # of drawn ones nothing is known


def test_exchanged_weights_are_told(project: Path, tmp_path: Path) -> None:
    run = shutil.copytree(project / "run", tmp_path / "run")
    state = tensor_files.load_weights(run / "model.safetensors")
    net = yopo.load(run)
    with torch.no_grad():
        next(net.parameters()).add_(1)
    words = tensor_files.load_metadata(run / "model.safetensors")
    tensor_files.save_weights(run / "model.safetensors", dict(net.state_dict()), words)
    assert state.keys() == net.state_dict().keys()
    assert codes(run, project / "photos") == ["other-weights"]


def test_an_evaluation_of_other_images_is_kept(project: Path, tmp_path: Path) -> None:
    run = shutil.copytree(project / "run", tmp_path / "run")
    evaluate_run(run, ["clean"], samples=4, data_root=project / "photos", device="cpu")
    rng, other = np.random.default_rng(1), tmp_path / "others"
    for file in sorted((project / "photos").rglob("*.jpg")):
        place = other / file.relative_to(project / "photos")
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), np.uint8)).save(place)
    made = evaluate_run(run, ["clean"], samples=4, data_root=other, device="cpu")
    assert made.aside is not None
    assert made.aside.exists()
