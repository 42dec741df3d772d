"""Images and labels from what is on disk: `load("cifar10")`, your own arrays or folders."""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yopo.data.folders import read_folder
from yopo.data.formats import check_side, read_batch, read_idx_file, read_npz, said
from yopo.data.listing import look_into
from yopo.data.source import InMemory

SPLITS = ("train", "test")
KEYS = ("x_train", "y_train", "x_test", "y_test")
NAMES = ("mnist-subset", "mnist", "cifar10", "npz", "folder")
DIGITS = tuple("0123456789")
CIFAR10 = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
KINDS = {"mnist": (DIGITS, (1, 28, 28)), "cifar10": (CIFAR10, (3, 32, 32))}  # classes, images
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR_BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
FEWEST = 1000  # classes that any data set may have; else it has no more of them than images
PLACES = {
    "mnist": "mnist.npz, the four *-ubyte files (.gz or not), or torchvision's folder MNIST",
    "cifar10": "cifar10.npz or torchvision's folder cifar-10-batches-py",
}


@dataclass(frozen=True, slots=True)
class Arrays:
    """A data set in memory."""

    x_train: Tensor  # (N, C, H, W) uint8
    y_train: Tensor  # (N,) int64
    x_test: Tensor  # as those
    y_test: Tensor  # as those
    names: tuple[str, ...]  # of the classes; its length is their number
    notes: tuple[str, ...] = ()  # what a user should know of them

    @property
    def pictures(self) -> InMemory:
        """Those to train on."""
        return InMemory(self.x_train, self.y_train)

    @property
    def test(self) -> InMemory:
        """Those to test on."""
        return InMemory(self.x_test, self.y_test)

    @property
    def many(self) -> int:
        """Training images."""
        return len(self.x_train)


def default_root() -> Path:
    """The folder where data sets lie: $YOPO_DATA, or ~/.cache/yopo."""
    return Path(os.environ.get("YOPO_DATA") or "~/.cache/yopo").expanduser()


def load(
    name: str,
    *,
    root: Path | None = None,
    path: Path | None = None,
    size: int | None = None,
    skip_broken: bool = False,
) -> Arrays:
    """A data set by name. Nothing is downloaded; `yopo.data.get` does that.

    - "mnist-subset": the embedded digits.
    - "mnist", "cifar10": from `root`, in any of the usual layouts (see `PLACES`).
    - "npz": from the file `path` with uint8 images x_train, x_test (NHW, NHWC or NCHW) and labels
      y_train, y_test.
    - "folder": from root/train/CLASS/*.png and root/test/CLASS/*.png (or root/val), as RGB, or
      from root/CLASS/*.png, of which a fixed fifth becomes the test set. `size` resizes the shorter
      side and cuts out the centre; `skip_broken` leaves out what cannot be read.
    """
    if name not in NAMES:
        if re.search("image|picture|photo|folder", name.lower()):
            raise ValueError(
                f"no data set {name!r} is built in; what lies on this computer as folders of "
                "pictures is --data.name folder --data.root DIR --data.size 64"
            )
        near = difflib.get_close_matches(name, NAMES, n=2, cutoff=0.4) or NAMES
        raise ValueError(
            f"unknown data set {name!r}; did you mean {' or '.join(near)}? One of your own is "
            "my_module:build_data"
        )
    if path is not None and name != "npz":
        raise ValueError(
            f"expected path with 'npz' only, got path={path} with {name!r}; "
            "leave out --data.path, or say --data.name npz"
        )
    if size is not None and name != "folder":
        raise ValueError(
            f"expected size with 'folder' only, got size={size} with {name!r}; "
            "leave out --data.size"
        )
    if name == "mnist-subset":
        return Arrays(*mnist_subset(), DIGITS)
    if name == "npz":
        if path is None:
            raise ValueError(
                "expected path, the npz file to read, got None; name it with --data.path"
            )
        return _from_npz(Path(path))
    if name == "folder":
        if root is None:
            raise ValueError(
                "expected root, a folder with a folder of pictures for each class, got None; name "
                "it with --data.root"
            )
        return _from_folder(Path(root), size, skip_broken)
    root = default_root() if root is None else Path(root)
    place = find(name, root)
    if place is None:
        raise FileNotFoundError(
            f"no {name} under {root}; run `yopo data get {name}`, or put there {PLACES[name]}"
        )
    return _read_original(name, place)


def find(name: str, root: Path) -> Path | None:
    """The file or folder that `load` reads "mnist" or "cifar10" from, if there is one."""
    npz = root / f"{name}.npz"
    if npz.is_file():
        return npz
    if name == "cifar10":
        folder = root / "cifar-10-batches-py"
        return folder if all((folder / batch).is_file() for batch in CIFAR_BATCHES) else None
    for folder in (root, root / "mnist", root / "MNIST" / "raw"):
        if all(_idx_file(folder, file).is_file() for file in IDX_FILES):
            return folder
    return None


def mnist_subset() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Real MNIST digits: x_train, y_train, x_test, y_test.

    6,000 training and 2,000 test images (uint8, (N, 1, 28, 28)), the same number of each digit,
    the test images from the official test set. For demos and tests, not for results.
    """
    with (
        (files("yopo.data") / "mnist_subset.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        x_train, y_train, x_test, y_test = (torch.from_numpy(arrays[key]) for key in KEYS)
    return x_train[:, None], y_train.long(), x_test[:, None], y_test.long()


# --- arrays: every source but the folder ends here


def checked(arrays: Mapping[str, NDArray[Any]], names: tuple[str, ...] | None) -> Arrays:
    """x_train, y_train, x_test, y_test as tensors, or a ValueError that says what is wrong.

    Without `names` the classes are 0 to the largest label.
    """
    x_train, x_test = (_images(f"x_{s}", arrays[f"x_{s}"]) for s in SPLITS)
    y_train, y_test = (_labels(f"y_{s}", arrays[f"y_{s}"], arrays[f"x_{s}"]) for s in SPLITS)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(
            f"expected x_test with images like x_train's, {tuple(x_train.shape[1:])}, "
            f"got {tuple(x_test.shape[1:])}; bring both to one size"
        )
    there = torch.cat([y_train, y_test]).unique()
    largest = int(there[-1])
    if len(there) < 2:
        raise ValueError(
            f"expected labels of two classes or more, got {largest} for every image; one class "
            "alone leaves nothing to tell apart"
        )
    if names is None:
        if largest >= max(FEWEST, len(y_train) + len(y_test)):
            raise ValueError(
                f"expected no more classes than images, got the label {largest}; renumber the "
                "labels with np.unique(y, return_inverse=True)[1]"
            )
        names = tuple(map(str, range(largest + 1)))
    if largest >= len(names):
        raise ValueError(
            f"expected labels from 0 to {len(names) - 1}, got {largest}; renumber the labels"
        )
    return Arrays(x_train, y_train, x_test, y_test, names, tuple(_dead(y_train, names)))


def _dead(y_train: Tensor, names: tuple[str, ...]) -> Iterator[str]:
    """What to say of classes that no training image has."""
    there = {*y_train.unique().tolist()}
    if dead := [name for label, name in enumerate(names) if label not in there]:
        more = f" and {len(dead) - 5} more" if len(dead) > 5 else ""
        yield (
            f"no training image has the label {', '.join(dead[:5])}{more}, for which the network "
            f"has {'an output' if len(dead) == 1 else 'outputs'} all the same; to count the labels "
            "from 0 without gaps: np.unique(y, return_inverse=True)[1]"
        )


def _images(key: str, x: NDArray[Any]) -> Tensor:  # (N, H, W), (N, H, W, C) or (N, C, H, W)
    if x.dtype != np.uint8:
        fixes = {"f": "(x * 255).round().astype('uint8')", "b": "x.astype('uint8') * 255"}
        fix = fixes.get(x.dtype.kind, "x.astype('uint8')")
        raise ValueError(
            f"expected {key} as uint8 from 0 to 255, got {x.dtype}; if its values allow, use {fix}"
        )
    if x.ndim not in (3, 4) or x.size == 0:
        raise ValueError(
            f"expected {key} of shape NHW, NHWC or NCHW with at least one image, got {x.shape}"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.shape[3] < x.shape[1]:  # an image has fewer channels than rows or columns
        x = x.transpose(0, 3, 1, 2)
    elif x.shape[3] == x.shape[1]:
        raise ValueError(
            f"cannot tell NHWC from NCHW in {key} of shape {x.shape}; expected images with fewer "
            "channels than rows and columns"
        )
    return torch.from_numpy(np.require(x, requirements=["C", "W"]))


def _labels(key: str, y: NDArray[Any], x: NDArray[Any]) -> Tensor:
    if y.shape[1:] not in ((), (1,)):
        raise ValueError(
            f"expected {key} with one label for each of {len(x)} images, got shape {y.shape}; "
            "of one-hot rows use y.argmax(1)"
        )
    if y.dtype.kind not in "iu":
        whole = y.dtype.kind == "b" or (y.dtype.kind == "f" and bool((y == np.round(y)).all()))
        fix = "y.astype('int64')" if whole else "np.unique(y, return_inverse=True)[1]"
        raise ValueError(f"expected {key} as whole numbers, got {y.dtype}; use {fix}")
    if y.shape not in ((len(x),), (len(x), 1)):
        raise ValueError(
            f"expected {key} with one label for each of {len(x)} images, got shape {y.shape}"
        )
    for label in (int(y.min()), int(y.max())):
        if not 0 <= label < 2**63:
            raise ValueError(f"expected labels from 0 up in {key}, got {label}; renumber them")
    return torch.from_numpy(y.reshape(-1).astype(np.int64))


def _from_npz(path: Path, names: tuple[str, ...] | None = None) -> Arrays:
    if not path.is_file():
        raise FileNotFoundError(
            f"no file {path.absolute()}; give the path of an npz with {', '.join(KEYS)} "
            "(--data.path)"
        )
    try:
        return checked(read_npz(path, KEYS), names)
    except Exception as error:  # what numpy and zipfile raise on damaged files can be anything
        raise ValueError(f"cannot use {path}: {said(error)}") from error


# --- MNIST and CIFAR-10


def _read_original(name: str, place: Path) -> Arrays:
    names, shape = KINDS[name]
    if place.is_file():
        arrays = _from_npz(place, names)
    else:
        arrays = checked((_read_mnist if name == "mnist" else _read_cifar10)(place), names)
    if (got := tuple(arrays.x_train.shape[1:])) != shape:
        raise ValueError(
            f"expected images of shape {shape} in {place}, got {got}; "
            "read your own data with the data set 'npz'"
        )
    return arrays


def _read_mnist(place: Path) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    for key, name in zip(KEYS, IDX_FILES, strict=True):
        file = _idx_file(place, name)
        try:
            arrays[key] = read_idx_file(file)
        except Exception as error:  # of gzip
            raise ValueError(f"cannot use {file}: {said(error)}") from error
    return arrays


def _idx_file(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def _read_cifar10(place: Path) -> dict[str, NDArray[Any]]:
    images, labels = [], []
    for name in CIFAR_BATCHES:
        try:
            batch = read_batch(place / name)
        except Exception as error:  # of pickle
            raise ValueError(f"cannot use {place / name}: {said(error)}") from error
        images.append(batch[0])
        labels.append(batch[1])
    x, y = np.concatenate(images), np.concatenate(labels)
    n = len(x) - len(images[-1])
    return dict(zip(KEYS, (x[:n], y[:n], x[n:], y[n:]), strict=True))


# --- folders of pictures


def _from_folder(root: Path, size: int | None, skip_broken: bool) -> Arrays:
    check_side(size)
    train, test, names, notes = read_folder(look_into(root), size, skip_broken)
    return Arrays(*train.tensors(), *test.tensors(), names, tuple(notes))
