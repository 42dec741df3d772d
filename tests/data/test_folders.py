"""Folders of pictures as people have them: split by itself, split beforehand, some broken."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from yopo.data import Arrays, load
from yopo.data.folders import TEST_PART, _place, placed
from yopo.data.formats import read_picture
from yopo.data.listing import Listed, look_into


def write(root: Path, classes: tuple[str, ...] = ("ant", "bee"), many: int = 20) -> Path:
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for i in range(many):
            Image.fromarray(rng.integers(0, 256, (4, 6, 3), np.uint8)).save(
                root / name / f"{i}.png"
            )
    return root


def images(x: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in x}


def both(arrays: Arrays) -> tuple[set[bytes], set[bytes]]:
    return images(arrays.x_train), images(arrays.x_test)


def test_a_folder_of_classes_is_split_by_itself_and_says_so(tmp_path: Path) -> None:
    arrays = load("folder", root=write(tmp_path / "photos"))
    train, test = both(arrays)
    assert not train & test
    assert len(train) + len(test) == 40
    assert 2 <= len(test) <= 16  # a fifth of 40 is 8, with a deviation of 2.5
    assert arrays.names == ("ant", "bee")
    assert {*arrays.y_test.tolist()} == {*arrays.y_train.tolist()} == {0, 1}
    assert f"{len(test)} of its 40 pictures are the test set" in arrays.notes[0]
    assert "seed 0" in arrays.notes[0]


def test_classes_with_few_test_pictures_are_named(tmp_path: Path) -> None:
    arrays = load("folder", root=write(tmp_path / "few", ("ant", "bee", "cat"), many=12))
    (said,) = arrays.notes
    counts = [arrays.y_test.tolist().count(i) for i in range(3)]
    assert min(counts) < 5
    for count, name in zip(counts, arrays.names, strict=True):
        assert (f"{count} of 12 {name}" in said) == (count < 5)
    assert "what is told of these classes" in said.replace("\n", " ")
    assert "about a fifth of each class" not in said
    arrays = load("folder", root=write(tmp_path / "more", ("ant", "bee"), many=200))
    (said,) = arrays.notes
    assert said.endswith("about a fifth of each class")
    assert all(20 <= arrays.y_test.tolist().count(i) < 80 for i in range(2))


def test_what_is_added_or_copied_never_moves_a_picture_to_the_test_set(tmp_path: Path) -> None:
    root = write(tmp_path / "photos")
    train, test = both(load("folder", root=root))
    for file in sorted((root / "ant").iterdir())[:10]:  # copies, by other names
        (root / "ant" / f"copy of {file.name}").write_bytes(file.read_bytes())
    write(tmp_path / "more", many=30)
    for file in (tmp_path / "more").rglob("*.png"):
        file.rename(root / file.parent.name / f"new {file.name}")
    root = root.rename(tmp_path / "moved")
    after = both(load("folder", root=root))
    assert train <= after[0]
    assert test <= after[1]
    assert not after[0] & after[1]


def test_each_class_has_both_however_few_there_are(tmp_path: Path) -> None:
    root = write(tmp_path / "photos", ("a", "b", "c"), many=2)
    arrays = load("folder", root=root)
    assert arrays.y_train.tolist() == arrays.y_test.tolist() == [0, 1, 2]
    (root / "b" / "0.png").unlink()
    with pytest.raises(ValueError, match=r"at least 2 pictures that can be read in .*b, got 1"):
        load("folder", root=root)


def unread(labels: list[int]) -> Listed:
    """Pictures of these classes."""
    none = np.zeros(len(labels), np.int64)
    return Listed(Path(), b"", none, none, torch.tensor(labels))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 2), st.integers(10, 19)), max_size=10),
)
def test_sides_of_any_pictures(some: list[tuple[int, int]], more: list[tuple[int, int]]) -> None:
    """Classes and contents, with copies: both sides, and what is added moves hardly any other."""

    def sides(pictures: list[tuple[int, int]]) -> list[bool]:
        rows = sorted(range(len(pictures)), key=lambda row: pictures[row][0])  # class by class
        listed = unread([pictures[row][0] for row in rows])
        train, test = placed(listed, ("a", "b", "c"), [str(pictures[row][1]) for row in rows])
        assert (train == ~test).all()
        return [bool(test[rows.index(row)]) for row in range(len(rows))]

    some = [*some, *((y, content) for y in range(3) for content in (7, 8))]  # two of each class
    test = sides(some)
    for y in range(3):
        mine = {(content, t) for (label, content), t in zip(some, test, strict=True) if label == y}
        assert {t for _, t in mine} == {False, True}
        assert len(mine) == len({content for content, _ in mine})  # copies are on one side
    after = sides(some + more)
    for y in range(3):
        moved = {
            (content, t)
            for (label, content), t, then in zip(some, test, after, strict=False)
            if label == y and t != then
        }
        # Only what stood for a side that had nothing: one content in the test set, one trained on.
        assert sorted(t for _, t in moved) in ([], [False], [True], [False, True])
        assert all(t != (_place(str(content)) < TEST_PART * 16**8) for content, t in moved)


def test_copies_alone_are_on_both_sides() -> None:
    train, test = placed(unread([0, 0, 1, 1]), ("a", "b"), ["x", "x", "y", "y"])
    assert train.tolist() == [False, True, False, True]
    assert test.tolist() == [True, False, True, False]


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    root = write(tmp_path / "photos", ("plane", "train"), many=3)
    assert load("folder", root=root).names == ("plane", "train")


def test_val_beside_test_is_said_to_be_unused(tmp_path: Path) -> None:
    for split in ("train", "test", "val"):
        write(tmp_path / split, many=1 + (split == "val"))
    arrays = load("folder", root=tmp_path)
    assert len(arrays.x_test) == 2
    assert "val is not used" in arrays.notes[0]
    (tmp_path / "test").rename(tmp_path / ".test")
    assert load("folder", root=tmp_path).notes == ()


@pytest.mark.parametrize("layout", ["one", "split"])
def test_broken_pictures_are_all_listed_at_once_or_left_out(tmp_path: Path, layout: str) -> None:
    if layout == "one":
        write(tmp_path)
    else:
        write(tmp_path / "train")
        write(tmp_path / "test")
    broken = sorted(tmp_path.rglob("ant/1*.png"))[:10]
    for file in broken:
        file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"--data\.skip_broken true") as refused:
        load("folder", root=tmp_path)
    assert all(f"cannot read {file}: " in str(refused.value) for file in broken)
    arrays = load("folder", root=tmp_path, skip_broken=True)
    there = 40 if layout == "one" else 80
    assert len(arrays.x_train) + len(arrays.x_test) == there - len(broken)
    assert f"{len(broken)} broken pictures are left out" in arrays.notes[0]
    assert "repair" not in arrays.notes[0]  # what is left out need not be
    for i in range(20):
        (tmp_path.rglob("bee").__next__() / f"{i}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=f"and {len(broken) + 20 - 10} more"):
        load("folder", root=tmp_path)
    with pytest.raises(ValueError, match=r"pictures that can be read in .*bee, got 0"):
        load("folder", root=tmp_path, skip_broken=True)


@pytest.mark.parametrize("second", ["test", "val", "valid", "validation"])
def test_a_split_may_be_called_so_in_any_case(second: str, tmp_path: Path) -> None:
    write(tmp_path / "Train")
    write(tmp_path / second.capitalize(), many=6)
    (tmp_path / "__MACOSX" / "Train").mkdir(parents=True)
    there = look_into(tmp_path)
    assert there.names == ("ant", "bee")
    assert there.test is not None
    assert (len(there.train), len(there.test)) == (40, 12)


@pytest.mark.parametrize(
    "called", [("training", "testing"), ("Train_Set", "Test_Set"), ("TRAIN-1", "VALID-1")]
)
def test_what_looks_like_a_split_is_not_taken_for_classes(
    called: tuple[str, str], tmp_path: Path
) -> None:
    """A network that tells training from test images would be trained, and look good."""
    for name in called:
        write(tmp_path / name)
    with pytest.raises(ValueError, match="to train and to test on, call them train and test"):
        look_into(tmp_path)


def test_what_a_system_leaves_is_no_picture(tmp_path: Path) -> None:
    write(tmp_path)
    there = look_into(tmp_path)
    for name in ("._1.png", ".ipynb_checkpoints/1.png", "__MACOSX/1.png"):
        (tmp_path / "ant" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "ant" / name).write_bytes(b"no picture")
    assert look_into(tmp_path).train.identity() == there.train.identity()
    (tmp_path / "ant").rename(tmp_path / "train")  # a class still, and no split
    assert look_into(tmp_path).names == ("bee", "train")


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("kind", ["jpg", "png", "tiff", "webp"])
def test_pictures_are_read_as_the_camera_was_held(turned: int, kind: str, tmp_path: Path) -> None:
    """However a file stores its rows, people see the same picture; EXIF says how to turn it."""
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:16, :24], pixels[16:, 24:] = (250, 10, 10), (10, 10, 250)
    stored = Image.fromarray(pixels)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # of pillow's Transpose, each one's inverse
    if turned > 1:
        stored = stored.transpose(Image.Transpose(undo[turned]))
    exif = Image.Exif()
    exif[0x112] = turned
    stored.save(tmp_path / f"a.{kind}", exif=exif, quality=100)  # which a PNG passes over
    seen = read_picture(tmp_path / f"a.{kind}", None).astype(int)
    assert seen.shape == pixels.shape
    assert np.abs(seen[4:12, 4:20] - pixels[4:12, 4:20]).max() < 30
    assert np.abs(seen[20:28, 28:44] - pixels[20:28, 28:44]).max() < 30
    with Image.open(tmp_path / f"a.{kind}") as opened:  # as torchvision and timm read it
        theirs = np.asarray(opened.convert("RGB"))
    assert np.array_equal(read_picture(tmp_path / f"a.{kind}", None, turned=False), theirs)
