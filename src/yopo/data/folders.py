"""Folders of pictures: DIR/train/CLASS and DIR/test/CLASS (or val), or DIR/CLASS, split here."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yopo.core.files import check_unpacked, file_digest
from yopo.data.formats import PICTURES, Bytes, read_picture

TEST_PART, SPLIT_SEED = 0.2, 0
NAMED = 10  # broken pictures that are named
LAYOUTS = (
    "folders CLASS, train/CLASS and test/CLASS, or train/CLASS and val/CLASS, with pictures in them"
)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of one split. Rows count them."""

    images: list[Bytes]  # (H, W, 3) each
    labels: list[int]
    files: list[Path]

    def tensors(self) -> tuple[Tensor, Tensor]:  # (N, 3, H, W) uint8, (N,)
        """As a run takes them."""
        x = np.stack(self.images).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(x)), torch.tensor(self.labels)

    def rows(self, chosen: list[bool]) -> "Pictures":
        """Some of them."""
        columns = (self.images, self.labels, self.files)
        images, labels, files = (
            [value for value, take in zip(column, chosen, strict=True) if take]
            for column in columns
        )
        return Pictures(images, labels, files)  # type: ignore[arg-type]


def read_folder(
    root: Path, size: int | None, skip_broken: bool
) -> tuple[Pictures, Pictures, tuple[str, ...], list[str]]:
    """Training and test pictures, the names of the classes, and what a user should know."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"no folder {root.absolute()}; name one with --data.root, which has {LAYOUTS}"
        )
    broken: list[str] = []
    if not any(_is_split(root / name) for name in ("train", "test", "val")):
        names = _classes(root)
        found = _read(root, names, size, broken)
        notes = _left_out(broken, skip_broken)
        _check_classes(root, found, names, least=2)
        train, test = _split(found)
        notes.append(
            f"{root} has no train/ and test/: {len(test.files)} of its {len(found.files)} pictures "
            f"are the test set,\ndrawn by their content with seed {SPLIT_SEED}, about a fifth of "
            "each class, the same ones in every run"
        )
        return train, test, names, notes
    second = next((root / s for s in ("test", "val") if (root / s).is_dir()), root / "test")
    for folder in (root / "train", second):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder.absolute()}; expected in {root} (--data.root) {LAYOUTS}"
            )
    names, others = _classes(root / "train"), _classes(second)
    if only := set(names) ^ set(others):
        raise ValueError(
            f"expected the same classes in {root / 'train'} and {second}, got only in one of them: "
            f"{', '.join(sorted(only))}"
        )
    train, test = (_read(folder, names, size, broken) for folder in (root / "train", second))
    notes = _left_out(broken, skip_broken)
    for folder, part in ((root / "train", train), (second, test)):
        _check_classes(folder, part, names, least=1)
    if train.images[0].shape != test.images[0].shape:
        raise ValueError(
            f"expected pictures of one size, got {train.images[0].shape[:2]} in {root / 'train'} "
            f"and {test.images[0].shape[:2]} in {second}; give --data.size 64"
        )
    if second.name == "test" and (root / "val").is_dir():
        notes.append(
            f"{root / 'val'} is not used: the test set is {second}, and weights are chosen by "
            "images held out of train/ (--data.held_out)"
        )
    return train, test, names, notes


def _is_split(folder: Path) -> bool:
    """Whether it holds classes, and is no class of that name itself."""
    return folder.is_dir() and any(f.is_dir() for f in folder.iterdir())


def _classes(folder: Path) -> tuple[str, ...]:
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not names:
        raise ValueError(
            f"expected a folder for each class in {folder}, got none; --data.root names a folder "
            f"which has {LAYOUTS}"
        )
    return tuple(names)


def _read(folder: Path, names: tuple[str, ...], size: int | None, broken: list[str]) -> Pictures:
    """The pictures of all classes; what is wrong with broken ones is added to `broken`."""
    found = Pictures([], [], [])
    packed = 0
    for label, name in enumerate(names):
        pictures = sorted(f for f in (folder / name).rglob("*") if f.suffix.lower() in PICTURES)
        if not pictures:
            raise ValueError(f"expected pictures in {folder / name}, got none; add some")
        for file in pictures:
            try:
                image = read_picture(file, size)
            except ValueError as error:
                broken.append(str(error))
                continue
            if found.images and image.shape != found.images[0].shape:
                raise ValueError(
                    f"expected pictures of one size, got {found.images[0].shape[:2]} and "
                    f"{image.shape[:2]} ({file}); give --data.size 64"
                )
            found.images.append(image)
            found.labels.append(label)
            found.files.append(file)
            packed += file.stat().st_size
            check_unpacked(folder, len(found.images) * image.nbytes, packed)
    return found


def _left_out(broken: list[str], skip: bool) -> list[str]:
    """Refuse broken pictures, all at once, or say that they are left out."""
    if not broken:
        return []
    more = [f"and {len(broken) - NAMED} more"] if len(broken) > NAMED else []
    listed = "\n".join([*broken[:NAMED], *more])
    if not skip:
        joint = ", or" if len(broken) == 1 else "\nor"
        raise ValueError(f"{listed}{joint} leave out what is broken: --data.skip_broken true")
    return [f"{len(broken)} broken pictures are left out (--data.skip_broken):\n{listed}"]


def _check_classes(folder: Path, found: Pictures, names: tuple[str, ...], least: int) -> None:
    for label, name in enumerate(names):
        if (many := found.labels.count(label)) < least:
            raise ValueError(
                f"expected at least {least} pictures that can be read in {folder / name}, got "
                f"{many}; add some"
            )


def _split(found: Pictures) -> tuple[Pictures, Pictures]:
    """Training and test pictures; of each class at least one in both.

    A picture's own content says where it belongs: copies of it come to the same side, and others
    that are added later do not move it into the test set of a network that was trained on it.
    """
    places = [
        int(hashlib.sha256(f"{SPLIT_SEED}/{file_digest(file)}".encode()).hexdigest()[:8], 16)
        for file in found.files
    ]
    test = [place < TEST_PART * 16**8 for place in places]
    for label in {*found.labels}:
        rows = sorted((i for i, y in enumerate(found.labels) if y == label), key=places.__getitem__)
        test[rows[0]], test[rows[-1]] = True, False
    return found.rows([not t for t in test]), found.rows(test)
