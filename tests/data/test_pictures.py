"""Folders of pictures that are decoded when their turn comes, beside those in memory."""

import hashlib
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from tests.data.test_folders import write
from tests.data.test_loader import CPU, assert_equal
from yopo.core.random import mix
from yopo.data import Arrays, Augment, Feed, Loader, Rows, Sources, Streamed, pictures
from yopo.data.formats import read_picture
from yopo.data.listing import classes_in, list_pictures
from yopo.data.pictures import Folder, Part, read_or_list
from yopo.data.source import can_read


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, to train on and to test on; sides of 4 and 6."""
    for split, many in (("train", 12), ("test", 3)):
        write(tmp_path / split, many=many)
    return tmp_path


def listed(root: Path, size: int | None = 4, area: float = 1.0, skip: bool = False) -> Sources:
    found = read_or_list(root, size, skip_broken=skip, resident=False, area=area)
    assert isinstance(found, Sources)
    return found


def in_memory(root: Path, size: int | None = 4) -> Arrays:
    found = read_or_list(root, size, skip_broken=False, resident=None, area=1)
    assert isinstance(found, Arrays)
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [4, None])
def test_batches_are_those_of_the_pictures_in_memory(
    photos: Path, size: int | None, workers: int
) -> None:
    augment = Augment(crop=1, flip=True, jitter=0.3)
    lazy, held = listed(photos, size), in_memory(photos, size)
    assert can_read(lazy.train)
    feed = Feed(batch=8, seed=1, device=CPU, augment=augment, workers=workers)
    plain = Loader(held.x_train, held.y_train, batch=8, seed=1, device=CPU, augment=augment)
    assert_equal(list(Streamed(lazy.train, feed).epoch(3)), list(plain.epoch(3)))
    assert torch.equal(lazy.test.read(torch.arange(6)), held.x_test)
    assert torch.equal(lazy.test.labels, held.y_test)
    assert tuple(lazy.test.shape) == tuple(held.x_test.shape[1:])
    assert lazy.names == held.names
    assert "30 pictures would take 0 MiB decoded" in lazy.notes[0]


def test_many_pictures_are_not_kept_in_memory(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bytes_, kind in ((30 * 3 * 16, Arrays), (30 * 3 * 16 - 1, Sources)):
        monkeypatch.setattr(pictures, "FEW", bytes_)
        found = read_or_list(photos, 4, skip_broken=False, resident=None, area=1)
        assert isinstance(found, kind)
    found = read_or_list(photos, 4, skip_broken=False, resident=True, area=1)
    assert isinstance(found, Arrays)
    with pytest.raises(ValueError, match=r"data\.area cuts .* which with data\.resident"):
        read_or_list(photos, 4, skip_broken=False, resident=True, area=0.5)


def test_names_and_sizes_tell_data_apart_and_no_picture_is_read(photos: Path) -> None:
    before = listed(photos)
    file = photos / "train" / "ant" / "3.png"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert listed(photos).identity == before.identity
    file.write_bytes(b"\0" * (1 + file.stat().st_size))
    assert listed(photos).identity != before.identity
    file.unlink()
    assert listed(photos).identity != before.identity
    again = listed(photos)
    tested = again.test.identity  # type: ignore[attr-defined]
    (photos / "test" / "ant" / "0.png").unlink()  # the training data are the same
    assert listed(photos).identity == again.identity
    assert listed(photos).test.identity != tested  # type: ignore[attr-defined]


def test_a_list_holds_names_sizes_and_classes_in_order(tmp_path: Path) -> None:
    names = [b"bee/1.png", b"ant/9/2.jpg", b"ant/9.jpg", b"ant/10.png", b"ant/9 b/1.JPG"]
    names += [b"ant/\xff.png", "ant/\u00e9.png".encode()]
    for size, name in enumerate(names):
        path = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (tmp_path / "ant" / "notes.txt").touch()
    (tmp_path / "bee" / "2.png").symlink_to(tmp_path / "nowhere")
    found = list_pictures(tmp_path, ("ant", "bee"))
    expected = sorted([*map(os.fsdecode, names), "bee/2.png"], key=lambda name: name.split("/"))
    assert list(found.files) == expected
    assert [found.path(row) for row in range(len(found))] == [tmp_path / name for name in expected]
    assert found.labels.tolist() == [0] * 6 + [1] * 2
    sizes = {os.fsdecode(name): size for size, name in enumerate(names)}
    assert found.sizes.tolist() == [sizes.get(name, 0) for name in expected]
    told = b"".join(b"%s %d\n" % (os.fsencode(n), sizes.get(n, 0)) for n in expected)
    assert found.identity() == hashlib.sha256(told).hexdigest()
    some = found.rows(np.array([False, True] * 4))
    assert list(some.files) == expected[1::2]
    assert some.sizes.tolist() == found.sizes.tolist()[1::2]
    assert some.labels.tolist() == [0, 0, 0, 1]


def test_a_large_folder_is_listed_once_and_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(40):
        (tmp_path / f"{k:02d}").mkdir()
        for i in range(100):
            (tmp_path / f"{k:02d}" / f"{i:010d}.png").touch()
    looked, real = list[object](), os.stat

    def stat(path: Any, **how: Any) -> os.stat_result:
        looked.append(path)
        return real(path, **how)

    monkeypatch.setattr(os, "stat", stat)
    names = classes_in(tmp_path)
    tracemalloc.start()
    try:
        found = Folder(list_pictures(tmp_path, names), (4, 4), 4)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not [path for path in looked if str(path).endswith(".png")]
    assert len(found) == 4000
    assert kept / 4000 < 17 + 8 + 7  # a name and where it ends; a size would be 8 more
    assert peak / 4000 < 100  # as objects, names alone are more


def test_a_folder_without_a_split_is_split_by_names_and_sizes(tmp_path: Path) -> None:
    root = write(tmp_path / "photos", many=30)
    for file in root.rglob("*.png"):
        file.write_bytes(b"not looked at")

    def names(split: object) -> set[Path]:
        assert isinstance(split, Folder)
        return {split.path(row).relative_to(root) for row in range(len(split))}

    data = listed(root)
    train, test = names(data.train), names(data.test)
    assert len(train | test) == 60
    assert not train & test
    assert 4 <= len(test) <= 24
    assert "drawn by their names and sizes" in data.notes[0]
    for i in range(30):
        (root / "ant" / f"new {i}.png").write_bytes(b"more")
    assert train <= names(listed(root).train)
    assert test <= names(listed(root).test)


def test_a_broken_picture_is_named_or_replaced_by_one_of_its_class(photos: Path) -> None:
    data = listed(photos)
    assert isinstance(data.train, Folder)
    whole = data.train.read(torch.arange(24))
    last, first = (photos / "train" / "ant" / f"{i}.png" for i in (9, 0))  # 0, 1, 10, 11, 2, …
    for file in (last, first):
        file.write_bytes(b"broken")
    with pytest.raises(ValueError, match=rf"cannot read {first}: .*repair or remove it"):
        data.train.read(torch.arange(2))
    feed = Feed(batch=24, seed=0, device=CPU, workers=1)
    with pytest.raises(ValueError, match=r"cannot read .*ant"):
        next(Streamed(data.train, feed).epoch(0))
    said: list[str] = []
    train = listed(photos, skip=True).train
    assert isinstance(train, Folder)
    assert train.path(0) == first
    assert train.path(11) == last
    replaced = train.read(torch.tensor([0, 11, 5]))
    assert torch.equal(replaced, whole[[1, 1, 5]])  # past the last one comes the first
    feed = Feed(batch=24, seed=0, device=CPU, workers=1, say=said.append)
    made = Streamed(train, feed)
    for epoch in (0, 1):
        next(made.epoch(epoch))
    assert len(said) == 2
    assert all("another picture of its class stands for it" in line for line in said)
    assert not any("repair" in line for line in said)
    (photos / "test" / "bee" / "1.png").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot read"):  # no test picture is replaced
        listed(photos, skip=True).test.read(torch.arange(6))
    for file in (photos / "train" / "ant").iterdir():
        file.write_bytes(b"broken")
    with pytest.raises(ValueError, match="no picture can be read of the class of"):
        train.read(torch.tensor([3]))


def test_another_size_is_refused_when_it_is_met(photos: Path) -> None:
    Image.new("RGB", (9, 9)).save(photos / "train" / "bee" / "5.png")
    with pytest.raises(ValueError, match=r"got \(4, 6\) and \(9, 9\) .*5\.png.*--data\.size 64"):
        listed(photos, size=None).pictures.read(torch.arange(24))
    Image.new("RGB", (9, 9)).save(photos / "test" / "ant" / "0.png")
    with pytest.raises(ValueError, match=r"one size, got \(4, 6\) in .* and \(9, 9\)"):
        listed(photos, size=None)
    with pytest.raises(ValueError, match="expected size from 1 to 5,000, got 0"):
        listed(photos, size=0)


# ---------------------------------------------------------------- parts


@given(
    width=st.integers(1, 400),
    height=st.integers(1, 400),
    area=st.floats(0.05, 1),
    seed=st.integers(0, 2**40),
)
def test_a_part_lies_inside_and_is_large_enough(
    width: int, height: int, area: float, seed: int
) -> None:
    left, top, right, bottom = Part(area, seed)(width, height)
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert (left, top, right, bottom) == Part(area, seed)(width, height)
    if min(width, height) > 100 and 0.75 <= width / height <= 4 / 3:
        w, h = right - left, bottom - top
        assert w * h >= 0.95 * area * width * height or (w, h) == (width, height)
        assert 0.74 <= w / h <= 1.35


def test_parts_are_a_function_of_seed_epoch_and_picture(photos: Path) -> None:
    train = listed(photos, area=0.1).train
    assert isinstance(train, Folder)
    rows = torch.tensor([3, 17])
    x, y, _, _ = train.vary(rows, 5, 2)
    expected = []
    for row in rows.tolist():
        box = Part(0.1, mix(mix(5, 2), row))(6, 4)
        picture = Image.open(train.path(row)).resize((4, 4), Image.Resampling.BILINEAR, box=box)
        expected.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    assert torch.equal(x, torch.stack(expected))
    assert y.tolist() == [0, 1]
    assert torch.equal(train.vary(rows.flip(0), 5, 2).x, x.flip(0))
    for seed, epoch in ((5, 3), (6, 2)):
        assert not torch.equal(train.vary(rows, seed, epoch).x, x)
    centre = torch.from_numpy(read_picture(train.path(3), 4).copy()).permute(2, 0, 1)
    assert torch.equal(train.read(rows)[0], centre)  # as it is, where nothing is trained


def steps(photos: Path, workers: int, start: int = 0) -> list[tuple[Tensor, Tensor]]:
    train = listed(photos, area=0.3).train
    assert isinstance(train, Folder)
    feed = Feed(batch=4, seed=0, device=CPU, workers=workers, augment=Augment(jitter=0.4))
    return list(Streamed(train, feed).epoch(1, start))


def test_an_epoch_of_parts_goes_on_where_it_was(photos: Path) -> None:
    whole = steps(photos, 0)
    assert_equal(steps(photos, 2, start=3), whole[3:])


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_have_their_sizes(photos: Path, workers: int) -> None:
    """The batches of a folder of that size: held-out and test pictures keep theirs."""
    sides = {0: 3, 1: 8, 2: None}
    data = listed(photos, 4, area=0.3)
    assert isinstance(data.train, Folder)
    feed = Feed(batch=4, seed=0, device=CPU, workers=workers, augment=Augment(flip=True))
    grows = Streamed(Rows(data.train, torch.arange(20)), replace(feed, size=sides.__getitem__))
    for epoch, side in sides.items():
        alike = listed(photos, side or 4, area=0.3).train
        assert isinstance(alike, Folder)
        expected = list(Streamed(Rows(alike, torch.arange(20)), feed).epoch(epoch, 1))
        assert expected[0][0].shape[2:] == (side or 4, side or 4)
        assert_equal(list(grows.epoch(epoch, 1)), expected)
    assert data.train.shape == (3, 4, 4)
    assert data.train.read(torch.arange(1)).shape == (1, 3, 4, 4)
