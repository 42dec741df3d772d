"""Folders of pictures: DIR/train/CLASS and DIR/test/CLASS (or val), or DIR/CLASS; names alone."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from yopo.data.formats import PICTURES, REPAIR

Chosen = NDArray[np.bool_]  # (N,) of pictures
SECOND = ("test", "val", "valid", "validation")  # the first that is there is the test set
SPLIT = re.compile("train|test|val", re.IGNORECASE)  # in the name of what is no class
NAMED = 10  # broken pictures that are named
LAYOUTS = (
    "folders CLASS, train/CLASS and test/CLASS, or train/CLASS and val/CLASS, with pictures in them"
)


@dataclass(frozen=True, slots=True)
class Listed:
    """Pictures of one folder: class by class, sorted.

    Names are in one piece: worker processes share its memory, of a list they would copy page by
    page.
    """

    folder: Path
    names: bytes  # below it, one after the other
    ends: NDArray[np.int64]  # (N,) of each of them
    sizes: NDArray[np.int64]  # (N,) of the files, in bytes
    labels: Tensor  # (N,)

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.ends)

    def name(self, row: int) -> bytes:
        """Of one picture."""
        return self.names[self.ends[row - 1] if row else 0 : self.ends[row]]

    def path(self, row: int) -> Path:
        """Of one picture."""
        return self.folder / os.fsdecode(self.name(row))

    @property
    def files(self) -> Iterator[str]:
        """Names of all, one after the other."""
        return (os.fsdecode(self.name(row)) for row in range(len(self)))

    def rows(self, chosen: Chosen) -> "Listed":
        """Some of them."""
        rows = np.flatnonzero(chosen)
        names, ends = _in_one_piece([self.name(row) for row in rows.tolist()])
        return Listed(self.folder, names, ends, self.sizes[rows], self.labels[rows])

    def identity(self) -> str:
        """A digest of names and sizes."""
        sha = hashlib.sha256()
        for row, size in enumerate(self.sizes):
            sha.update(b"%s %d\n" % (self.name(row), size))
        return sha.hexdigest()


def _in_one_piece(names: Sequence[bytes]) -> tuple[bytes, NDArray[np.int64]]:
    """Names one after the other, and where each ends."""
    return b"".join(names), np.fromiter(map(len, names), np.int64, len(names)).cumsum()


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
    parts = {f.name.lower(): f for f in _folders(root)}
    if not any(name in parts and _is_split(parts[name]) for name in ("train", *SECOND)):
        names = classes_in(root)
        if all(SPLIT.search(name) and _is_split(root / name) for name in names):
            raise ValueError(
                f"expected classes in {root}, got the folders {', '.join(names)} with folders in "
                "them; if these are images to train and to test on, call them train and test"
            )
        return Splits(names, list_pictures(root, names), None)
    seconds = [parts[name] for name in SECOND if name in parts]
    first, second = parts.get("train", root / "train"), next(iter(seconds), root / "test")
    for folder in (first, second):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder.absolute()}; expected in {root} (--data.root) {LAYOUTS}"
            )
    names, others = classes_in(first), classes_in(second)
    if only := set(names) ^ set(others):
        raise ValueError(
            f"expected the same classes in {first} and {second}, got only in one of them: "
            f"{', '.join(sorted(only))}"
        )
    notes = [
        f"{folder} is not used: the test set is {second}, and weights are chosen by images held "
        "out of train/ (--data.held_out)"
        for folder in seconds[1:]
    ]
    return Splits(names, list_pictures(first, names), list_pictures(second, names), tuple(notes))


def _folders(folder: Path) -> Iterator[Path]:
    """Those that a person put there: none of a system's own."""
    return (f for f in folder.iterdir() if f.is_dir() and not _is_hidden(f.name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _is_split(folder: Path) -> bool:
    """Whether it holds classes, and is no class of that name itself."""
    return folder.is_dir() and any(True for _ in _folders(folder))


def classes_in(folder: Path) -> tuple[str, ...]:
    """The names of its folders, sorted; two classes are needed."""
    names = sorted(f.name for f in _folders(folder))
    if len(names) < 2:
        got = f"only {names[0]}" if names else "none"
        raise ValueError(
            f"expected a folder for each of two classes or more in {folder}, got {got}; "
            f"--data.root names a folder which has {LAYOUTS}"
        )
    return tuple(names)


def list_pictures(folder: Path, names: tuple[str, ...]) -> Listed:
    """All pictures of these classes; none is opened."""
    files: list[bytes] = []
    ends: list[NDArray[np.int64]] = []
    sizes: list[NDArray[np.int64]] = []
    for name in names:  # packed class by class: all names as objects would take much memory
        inside = sorted(_below(folder, name), key=lambda file: file[0].replace(os.sep, "\0"))
        if not inside:
            raise ValueError(f"expected pictures in {folder / name}, got none; add some")
        packed, where = _in_one_piece([os.fsencode(file) for file, _ in inside])
        ends.append(where + sum(map(len, files)))
        files.append(packed)
        sizes.append(np.array([size for _, size in inside]))
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor([len(s) for s in sizes]))
    return Listed(folder, b"".join(files), np.concatenate(ends), np.concatenate(sizes), labels)


def _below(folder: Path, name: str) -> Iterator[tuple[str, int]]:
    """Files that are named as pictures, however deep; a link to a folder is not followed."""
    folders = []
    with os.scandir(folder / name) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if os.path.splitext(entry.name)[1].lower() in PICTURES:
                yield name + os.sep + entry.name, _size(entry)
            if entry.is_dir(follow_symlinks=False):
                folders.append(name + os.sep + entry.name)
    for deeper in folders:
        yield from _below(folder, deeper)


def _size(entry: "os.DirEntry[str]") -> int:
    """In bytes; a link to nothing is named when its picture's turn comes."""
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def left_out(broken: list[str], skip: bool) -> list[str]:
    """Refuse broken pictures, all at once, or say that they are left out."""
    if not broken:
        return []
    more = [f"and {len(broken) - NAMED} more"] if len(broken) > NAMED else []
    first = [line.removesuffix(REPAIR) if skip else line for line in broken[:NAMED]]
    listed = "\n".join([*first, *more])
    if not skip:
        joint = ", or" if len(broken) == 1 else "\nor"
        raise ValueError(f"{listed}{joint} leave out what is broken: --data.skip_broken true")
    return [f"{len(broken)} broken pictures are left out (--data.skip_broken):\n{listed}"]


def check_classes(listed: Listed, names: tuple[str, ...], least: int) -> None:
    """Refuse a class with too few pictures."""
    for name, many in zip(names, counts(listed.labels, names), strict=True):
        if many < least:
            raise ValueError(
                f"expected at least {least} pictures that can be read in {listed.folder / name}, "
                f"got {many}; add some"
            )


def counts(labels: Tensor, names: Sequence[str]) -> list[int]:
    """How many there are of each class."""
    return labels.bincount(minlength=len(names)).tolist()
