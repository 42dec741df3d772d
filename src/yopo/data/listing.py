"""Folders of pictures: DIR/train/CLASS and DIR/test/CLASS (or val), or DIR/CLASS; names alone."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yopo.data.formats import PICTURES

NAMED = 10  # broken pictures that are named
LAYOUTS = (
    "folders CLASS, train/CLASS and test/CLASS, or train/CLASS and val/CLASS, with pictures in them"
)


@dataclass(frozen=True, slots=True)
class Listed:
    """Pictures of one folder: class by class, sorted."""

    folder: Path
    files: list[str]  # below it
    labels: list[int]

    def path(self, row: int) -> Path:
        """Of one picture."""
        return self.folder / self.files[row]

    def rows(self, chosen: Sequence[bool]) -> "Listed":
        """Some of them."""
        files = [f for f, take in zip(self.files, chosen, strict=True) if take]
        labels = [y for y, take in zip(self.labels, chosen, strict=True) if take]
        return Listed(self.folder, files, labels)


@dataclass(frozen=True, slots=True)
class Splits:
    """What lies in a folder."""

    names: tuple[str, ...]
    train: Listed  # all of them, where there is no test set
    test: Listed | None
    notes: tuple[str, ...] = ()


def look_into(root: Path) -> Splits:
    """The classes and files of a folder; none is opened."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"no folder {root.absolute()}; name one with --data.root, which has {LAYOUTS}"
        )
    if not any(_is_split(root / name) for name in ("train", "test", "val")):
        names = classes_in(root)
        return Splits(names, list_pictures(root, names), None)
    second = next((root / s for s in ("test", "val") if (root / s).is_dir()), root / "test")
    for folder in (root / "train", second):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder.absolute()}; expected in {root} (--data.root) {LAYOUTS}"
            )
    names, others = classes_in(root / "train"), classes_in(second)
    if only := set(names) ^ set(others):
        raise ValueError(
            f"expected the same classes in {root / 'train'} and {second}, got only in one of them: "
            f"{', '.join(sorted(only))}"
        )
    notes = []
    if second.name == "test" and (root / "val").is_dir():
        notes.append(
            f"{root / 'val'} is not used: the test set is {second}, and weights are chosen by "
            "images held out of train/ (--data.held_out)"
        )
    return Splits(
        names, list_pictures(root / "train", names), list_pictures(second, names), tuple(notes)
    )


def _is_split(folder: Path) -> bool:
    """Whether it holds classes, and is no class of that name itself."""
    return folder.is_dir() and any(f.is_dir() for f in folder.iterdir())


def classes_in(folder: Path) -> tuple[str, ...]:
    """The names of its folders, sorted; two classes are needed."""
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if len(names) < 2:
        got = f"only {names[0]}" if names else "none"
        raise ValueError(
            f"expected a folder for each of two classes or more in {folder}, got {got}; "
            f"--data.root names a folder which has {LAYOUTS}"
        )
    return tuple(names)


def list_pictures(folder: Path, names: tuple[str, ...]) -> Listed:
    """All pictures of these classes; none is opened."""
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        inside = sorted(_below(folder, name), key=lambda file: file.split(os.sep))
        if not inside:
            raise ValueError(f"expected pictures in {folder / name}, got none; add some")
        files += inside
        labels += [label] * len(inside)
    return Listed(folder, files, labels)


def _below(folder: Path, name: str) -> list[str]:
    """Files that are named as pictures, however deep; a link to a folder is not followed."""
    pictures, folders = [], []
    with os.scandir(folder / name) as entries:
        for entry in entries:
            if os.path.splitext(entry.name)[1].lower() in PICTURES:
                pictures.append(os.path.join(name, entry.name))
            if entry.is_dir(follow_symlinks=False):
                folders.append(os.path.join(name, entry.name))
    for deeper in folders:
        pictures += _below(folder, deeper)
    return pictures


def left_out(broken: list[str], skip: bool) -> list[str]:
    """Refuse broken pictures, all at once, or say that they are left out."""
    if not broken:
        return []
    more = [f"and {len(broken) - NAMED} more"] if len(broken) > NAMED else []
    listed = "\n".join([*broken[:NAMED], *more])
    if not skip:
        joint = ", or" if len(broken) == 1 else "\nor"
        raise ValueError(f"{listed}{joint} leave out what is broken: --data.skip_broken true")
    return [f"{len(broken)} broken pictures are left out (--data.skip_broken):\n{listed}"]


def check_classes(folder: Path, labels: Sequence[int], names: tuple[str, ...], least: int) -> None:
    """Refuse a class with too few pictures."""
    counts = Counter(labels)
    for label, name in enumerate(names):
        if (many := counts[label]) < least:
            raise ValueError(
                f"expected at least {least} pictures that can be read in {folder / name}, got "
                f"{many}; add some"
            )
