"""Reading data sets: every layout gives the same arrays, and what is wrong is named."""

import gzip
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from yopo.data import Arrays, default_root, load, mnist_subset
from yopo.data.formats import read_batch
from yopo.data.pictures import read_or_list
from yopo.data.prepared import Preparation, pictures_to_test_on
from yopo.data.sources import CIFAR10, CIFAR_BATCHES, DIGITS, IDX_FILES, KEYS

Raw = dict[str, NDArray[Any]]
RNG = np.random.default_rng(0)
MNIST: Raw = {
    "x_train": RNG.integers(0, 256, (12, 28, 28), np.uint8),
    "y_train": np.arange(12, dtype=np.uint8) % 10,
    "x_test": RNG.integers(0, 256, (5, 28, 28), np.uint8),
    "y_test": np.arange(5, dtype=np.uint8),
}
CIFAR: Raw = {  # NCHW
    "x_train": RNG.integers(0, 256, (10, 3, 32, 32), np.uint8),
    "y_train": np.arange(10)[::-1].copy(),
    "x_test": RNG.integers(0, 256, (2, 3, 32, 32), np.uint8),
    "y_test": np.array([3, 8]),
}


def assert_holds(arrays: Arrays, raw: Raw, names: tuple[str, ...]) -> None:
    assert arrays.names == names
    for key in KEYS:
        tensor, expected = getattr(arrays, key), raw[key]
        assert tensor.is_contiguous()
        if key.startswith("x"):
            assert tensor.dtype == torch.uint8
            expected = expected[:, None] if expected.ndim == 3 else expected
        else:
            assert tensor.dtype == torch.int64
        assert np.array_equal(tensor.numpy(), expected)


def idx(values: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_idx(folder: Path, *, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, key in zip(IDX_FILES, KEYS, strict=True):
        content = idx(MNIST[key])
        file = folder / (f"{name}.gz" if zipped else name)
        file.write_bytes(gzip.compress(content) if zipped else content)


def python2_pickle(x: NDArray[np.uint8], y: list[int]) -> bytes:
    """The bytes that Python 2 wrote for {"data": x, "labels": y}, as in the original archive."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    rows, columns = x.shape
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + text("b") + b"tR"
    dtype = b"cnumpy\ndtype\n(" + text("u1") + b"K\0K\1tR(K\3" + text("|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    shape = b"(K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"t"
    values = b"T" + struct.pack("<I", x.size) + x.tobytes()
    data = empty + b"(K\1" + shape + dtype + b"\x89" + values + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in y) + b"e"
    return b"\x80\2}(" + text("data") + data + text("labels") + labels + b"u."


def write_batches(folder: Path, write: Callable[[NDArray[np.uint8], list[int]], bytes]) -> None:
    folder.mkdir()
    for k, name in enumerate(CIFAR_BATCHES):
        split, rows = (
            ("test", slice(0, 2)) if name == "test_batch" else ("train", slice(2 * k, 2 * k + 2))
        )
        x, y = CIFAR[f"x_{split}"][rows], CIFAR[f"y_{split}"][rows]
        (folder / name).write_bytes(write(x.reshape(2, -1), y.tolist()))


def test_the_embedded_digits_have_a_name_too() -> None:
    arrays = load("mnist-subset")
    tensors = (arrays.x_train, arrays.y_train, arrays.x_test, arrays.y_test)
    assert all(map(torch.equal, tensors, mnist_subset()))
    assert arrays.names == DIGITS


@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_from_idx_files(tmp_path: Path, folder: str, zipped: bool) -> None:
    write_idx(tmp_path / folder, zipped=zipped)
    assert_holds(load("mnist", root=tmp_path), MNIST, DIGITS)


def test_mnist_from_npz(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "mnist.npz", **MNIST)  # type: ignore[arg-type]
    assert_holds(load("mnist", root=tmp_path), MNIST, DIGITS)


def test_cifar10_from_npz_with_channels_last_and_labels_in_a_column(tmp_path: Path) -> None:
    raw = {k: v.transpose(0, 2, 3, 1) if v.ndim == 4 else v[:, None] for k, v in CIFAR.items()}
    np.savez(tmp_path / "cifar10.npz", **raw)  # type: ignore[arg-type]
    assert_holds(load("cifar10", root=tmp_path), CIFAR, CIFAR10)


def test_cifar10_from_the_original_pickles(tmp_path: Path) -> None:
    write_batches(tmp_path / "cifar-10-batches-py", python2_pickle)
    assert_holds(load("cifar10", root=tmp_path), CIFAR, CIFAR10)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("key", [str, str.encode])
def test_cifar10_from_pickles_of_python_3(
    tmp_path: Path, protocol: int, key: Callable[[str], str | bytes]
) -> None:
    def write(x: NDArray[np.uint8], y: list[int]) -> bytes:
        batch = {key("data"): x, key("labels"): y, key("filenames"): [b"a.png"] * len(y)}
        return pickle.dumps(batch, protocol)

    write_batches(tmp_path / "cifar-10-batches-py", write)
    assert_holds(load("cifar10", root=tmp_path), CIFAR, CIFAR10)


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'touch pwned'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfromstring\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05numpy\x94\x8c\x0endarray.ctypes\x94\x93.",
        pickle.dumps(Path("x")),
    ],
)
def test_pickles_that_call_anything_else_are_refused(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(pickle.UnpicklingError, match="refused to load"):
        read_batch(tmp_path / "batch")
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", r"cannot use .*data_batch_1: refused to load os\.system"),
        (b"", "cannot use .*data_batch_1: EOFError"),
        (b"junk", "cannot use .*data_batch_1"),
        (pickle.dumps([1]), "expected a dict, got list"),
        (pickle.dumps({"data": np.zeros(2)}), "expected 'data' and 'labels', got data"),
        (pickle.dumps({"data": [1], "labels": [1]}), "expected uint8 images in 'data'"),
    ],
)
def test_damaged_batches_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder, python2_pickle)
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(MNIST["y_train"])[:-1], r"expected \[12\] values, got 11; the file is cut short"),
        (b"<html>", "expected an IDX file"),
        (b"", "expected an IDX file"),
        (idx(MNIST["y_train"][:-1]), "one label for each of 12 images"),
        (idx(MNIST["y_train"] + np.uint8(1)), "expected labels from 0 to 9, got 10"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load("mnist", root=tmp_path)


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    write_idx(tmp_path, zipped=True)
    file = tmp_path / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cannot use .*t10k-images-idx3-ubyte\.gz"):
        load("mnist", root=tmp_path)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_nothing_there_says_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"run `yopo data get {name}`, or put .*{name}.npz"):
        load(name, root=tmp_path)


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("YOPO_DATA", str(tmp_path))
    assert default_root() == tmp_path
    write_idx(tmp_path)
    assert_holds(load("mnist"), MNIST, DIGITS)
    monkeypatch.delenv("YOPO_DATA")
    assert default_root() == Path.home() / ".cache" / "yopo"


def own(**changes: NDArray[Any]) -> Raw:
    return {
        "x_train": RNG.integers(0, 256, (4, 5, 6, 3), np.uint8),
        "y_train": np.array([0, 1, 2, 0]),
        "x_test": RNG.integers(0, 256, (2, 5, 6, 3), np.uint8),
        "y_test": np.array([1, 3]),
        **changes,
    }


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NHW"])
def test_npz_layouts(tmp_path: Path, layout: str) -> None:
    raw = own()
    expected = {k: v.transpose(0, 3, 1, 2) if v.ndim == 4 else v for k, v in raw.items()}
    if layout == "NCHW":
        raw = expected
    if layout == "NHW":
        raw = expected = {k: v[..., 0] if v.ndim == 4 else v for k, v in raw.items()}
    np.savez(tmp_path / "own.npz", **raw)  # type: ignore[arg-type]
    assert_holds(load("npz", path=tmp_path / "own.npz"), expected, tuple("0123"))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 2, 3, 1], "the label 0, for which the network has an output all the same"),
        ([0, 3, 3, 0], "the label 1, 2, for which the network has outputs all the same"),
        ([9, 8, 9, 9], "the label 0, 1, 2, 3, 4 and 3 more, for which"),
        ([0, 1, 2, 3], ""),
    ],
)
def test_a_class_without_training_images_is_told(
    tmp_path: Path, labels: list[int], said: str
) -> None:
    raw = own(y_train=np.array(labels), y_test=np.array([labels[0], labels[1]]))
    np.savez(tmp_path / "own.npz", **raw)  # type: ignore[arg-type]
    notes = load("npz", path=tmp_path / "own.npz").notes
    assert len(notes) == bool(said)
    assert all(said in note and "np.unique" in note for note in notes)


def zeros(*shape: int) -> NDArray[np.uint8]:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"x_train": zeros(1, 2, 2)}, "got x_train; add y_train, x_test, y_test"),
        (own(x_train=np.zeros((4, 5, 6, 3))), r"x_train as uint8 .*got float64; .*\(x \* 255\)"),
        (own(x_test=np.zeros((2, 5, 6, 3), np.int32)), "x_test as uint8 .*got int32"),
        (own(x_test=np.zeros((2, 5, 6, 3), bool)), r"got bool; .*astype\('uint8'\) \* 255"),
        (own(y_train=np.arange(3)), r"y_train with one label for each of 4 images.*\(3,\)"),
        (own(y_test=np.array([0, -1])), "labels from 0 up in y_test, got -1"),
        (own(y_test=np.array([0.0, 1.0])), r"whole numbers, got float64; use y\.astype"),
        (own(y_test=np.array([0.0, 0.5])), r"whole numbers, got float64; use np\.unique"),
        (own(y_test=np.array(["a", "b"])), r"whole numbers, got <U1; use np\.unique"),
        (own(y_test=np.eye(2)), r"one label for each of 2 images, .* use y\.argmax\(1\)"),
        (own(x_test=zeros(2, 6, 6, 3)), r"images like x_train's, \(3, 5, 6\), got \(3, 6, 6\)"),
        (own(x_train=zeros(4, 3)), r"shape NHW, NHWC or NCHW .*got \(4, 3\)"),
        (own(x_train=zeros(0, 5, 6, 3), y_train=zeros(0)), "at least one image"),
        (own(x_train=zeros(4, 3, 6, 3)), "cannot tell NHWC from NCHW in x_train"),
        (own(x_train=np.array([{}, 1], object)), "allow_pickle"),
    ],
)
def test_bad_npz_is_refused(tmp_path: Path, raw: Raw, message: str) -> None:
    np.savez(tmp_path / "own.npz", **raw)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"cannot use .*own\.npz: .*{message}"):
        load("npz", path=tmp_path / "own.npz")


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.npz"
    with pytest.raises(FileNotFoundError, match=r"no file .*own\.npz; give the path"):
        load("npz", path=file)
    raw = own()
    np.savez(file, **raw)  # type: ignore[arg-type]
    whole, own_bytes = file.read_bytes(), raw["x_test"].tobytes()
    with file.open("wb") as stream:
        np.save(stream, zeros(3))
    for content in (whole[: len(whole) // 2], b"", b"junk", file.read_bytes()):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot use .*own\.npz: expected an npz"):
            load("npz", path=file)
    changed = bytearray(whole)
    changed[whole.index(own_bytes) + 5] ^= 1  # one bit of one pixel
    file.write_bytes(changed)
    with pytest.raises(ValueError, match=r"cannot use .*own\.npz: Bad CRC"):
        load("npz", path=file)


def test_named_data_sets_have_their_shape(tmp_path: Path) -> None:
    np.savez(tmp_path / "mnist.npz", **own(y_test=np.array([1, 1])))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected images of shape \(1, 28, 28\).*\(3, 5, 6\)"):
        load("mnist", root=tmp_path)


def picture(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes; pictures 6 wide and 4 high."""
    for split in ("train", "test"):
        picture(tmp_path / split / "cat" / "b.png", (200, 0, 0))
        picture(tmp_path / split / "cat" / "a.bmp", (100, 0, 0))
        picture(tmp_path / split / "ant" / "deeper" / "a.PNG", (0, 50, 7))
        (tmp_path / split / "cat" / "notes.txt").write_text("not a picture")
        (tmp_path / split / ".hidden").mkdir()
    return tmp_path


@pytest.mark.parametrize("second", ["test", "val"])
def test_folder(pictures: Path, second: str) -> None:
    (pictures / "test").rename(pictures / second)
    arrays = load("folder", root=pictures)
    assert arrays.names == ("ant", "cat")
    assert arrays.x_train.shape == arrays.x_test.shape == (3, 3, 4, 6)
    assert arrays.x_train[:, :, 0, 0].tolist() == [[0, 50, 7], [100, 0, 0], [200, 0, 0]]
    assert arrays.y_train.tolist() == arrays.y_test.tolist() == [0, 1, 1]


def test_folder_size_resizes_the_shorter_side_and_keeps_the_centre(tmp_path: Path) -> None:
    stripes = np.repeat(np.arange(9, dtype=np.uint8) * 20, 4)  # 36 columns in 9 stripes
    for split, turned in (("train", False), ("test", True)):
        image = np.broadcast_to(stripes[None, :, None], (12, 36, 3))
        for file in (tmp_path / split / name / "x.png" for name in "cd"):
            file.parent.mkdir(parents=True)
            pixels = np.ascontiguousarray(image.swapaxes(0, 1) if turned else image)
            Image.fromarray(pixels).save(file)
    whole = load("folder", root=tmp_path, size=12)  # nothing to resize: stripes 3 to 5
    assert whole.x_train[0, 0, 0].tolist() == [60] * 4 + [80] * 4 + [100] * 4
    assert torch.equal(whole.x_test, whole.x_train.mT)
    smaller = load("folder", root=tmp_path, size=3)
    assert smaller.x_train.shape == (2, 3, 3, 3)
    assert smaller.x_train[0, 0, 1].tolist() == pytest.approx([60, 80, 100], abs=6)
    assert load("folder", root=tmp_path, size=24).x_test.shape == (2, 3, 24, 24)


@pytest.mark.parametrize("end", ["png", "pgm"])
def test_pictures_of_16_bits_are_scaled(end: str, tmp_path: Path) -> None:
    grey = np.array([[0, 257, 300], [32768, 65535, 128 * 257]], np.uint16)
    for folder in ("train/a", "test/a", "train/b", "test/b"):
        (tmp_path / folder).mkdir(parents=True)
        Image.fromarray(grey).save(tmp_path / folder / f"0.{end}")
    x = load("folder", root=tmp_path).x_train
    assert x[0, 0].tolist() == [[0, 1, 1], [128, 255, 128]]
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "train" / "a" / "1.tiff")
    with pytest.raises(ValueError, match=r"1\.tiff: its pixels have no known range"):
        load("folder", root=tmp_path)


def test_folder_makes_rgb_of_other_modes(tmp_path: Path) -> None:
    for split in ("train/c", "test/c", "train/d", "test/d"):
        for name, mode, colour in (("a", "L", 9), ("b", "RGBA", (1, 2, 3, 4)), ("c", "P", 0)):
            file = tmp_path / split / f"{name}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new(mode, (2, 2), colour).save(file)
    x = load("folder", root=tmp_path).x_train
    assert x[:2, :, 0, 0].tolist() == [[9, 9, 9], [1, 2, 3]]


def broken(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda r: picture(r / "train/cat/z.png", (0, 0, 0), (5, 4)),
            r"one size, .*z\.png.*--data\.size",
        ),
        (lambda r: picture(r / "test/dog/a.png", (0, 0, 0)), "same classes .*only in one.*: dog"),
        (lambda r: (r / "train/cat/b.png").write_bytes(b""), r"cannot read .*b\.png"),
        (lambda r: broken(r / "train/cat/b.png"), r"cannot read .*b\.png"),
        (lambda r: (r / "test/ant/deeper/a.PNG").unlink(), "pictures in .*ant, got none"),
        (lambda r: (r / "test").rename(r / "other"), "no folder .*test"),
        (lambda r: (r / "train").rename(r / "other"), "no folder .*train"),
    ],
)
def test_bad_folders_are_refused(
    pictures: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(pictures)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load("folder", root=pictures)


@pytest.mark.parametrize("layout", ["", "test", "val"])
def test_one_class_is_refused(layout: str, tmp_path: Path) -> None:
    """All readers of folders: of a run, of one that is too large for memory, of a test alone."""
    for split in ("train", layout) if layout else ("",):
        picture(tmp_path / split / "photos" / "cat" / "a.png", (0, 0, 0))

    readings: list[Callable[[], object]] = [
        lambda: read_or_list(tmp_path, None, skip_broken=False, resident=True, area=1.0),
        lambda: read_or_list(tmp_path, None, skip_broken=False, resident=False, area=1.0),
        lambda: pictures_to_test_on(tmp_path, Preparation()),
    ]
    for reading in readings:
        with pytest.raises(ValueError, match=r"two classes or more in .*, got only photos; --data"):
            reading()


@pytest.mark.parametrize("label", [0, 4])
def test_arrays_of_one_class_are_refused(label: int, tmp_path: Path) -> None:
    raw = own(y_train=np.full(4, label), y_test=np.full(2, label))
    np.savez(tmp_path / "own.npz", **raw)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"labels of two classes or more, got {label} for every"):
        load("npz", path=tmp_path / "own.npz")


def test_splits_of_two_sizes_are_refused(tmp_path: Path) -> None:
    for name in "cd":
        picture(tmp_path / "train" / name / "a.png", (0, 0, 0), (6, 4))
        picture(tmp_path / "test" / name / "a.png", (0, 0, 0), (6, 5))
    with pytest.raises(
        ValueError, match=r"\(4, 6\) in .*train and \(5, 6\) in .*test; give --data\.size 64"
    ):
        load("folder", root=tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load("cifar-10"), "unknown data set 'cifar-10'; did you mean cifar10"),
        (lambda: load("mnits"), "did you mean mnist"),
        (lambda: load("xyzzy"), "did you mean mnist-subset or mnist or cifar10 or npz or folder"),
        (lambda: load("npz"), "expected path.*--data.path"),
        (lambda: load("folder"), "expected root.*--data.root"),
        (lambda: load("imagenet"), "--data.name folder --data.root DIR --data.size 64"),
        (lambda: load("TinyImageNet"), "--data.name folder --data.root DIR --data.size 64"),
        (lambda: load("folder", root=Path(), size=0), "size from 1 to 5,000, got 0"),
        (
            lambda: load("mnist", path=Path("x")),
            "expected path with 'npz' only.*leave out --data.path",
        ),
        (lambda: load("mnist", size=3), "expected size with 'folder' only.*leave out --data.size"),
    ],
)
def test_bad_calls_are_refused(call: Callable[[], Arrays], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
