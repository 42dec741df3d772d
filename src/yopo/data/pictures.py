"""A folder of pictures that are decoded when their turn comes."""

import copy
import hashlib
import math
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from yopo.core.random import mix
from yopo.data.folders import check_sizes, placed, said_of_split
from yopo.data.formats import REPAIR, Box, Bytes, check_side, read_picture
from yopo.data.listing import Chosen, Listed, look_into
from yopo.data.source import Sources
from yopo.data.sources import Arrays, load
from yopo.data.streamed import Drawn

ASPECT = 4 / 3  # of the sides of a part that is cut out, at most, one way or the other
FEW = 512 << 20  # bytes of decoded pictures that are kept in memory
TRIES = 10  # at a part that lies inside the picture


class Folder:
    """Pictures of one folder, class by class, as RGB.

    area: training pictures are parts of that share of the whole at least, cut out anew in
    every epoch by seed, epoch and picture. replaces: another picture of the class stands for one
    that cannot be read; else that one is named in a ValueError.
    """

    def __init__(
        self,
        listed: Listed,
        sides: tuple[int, int],
        size: int | None,
        *,
        area: float = 1.0,
        replaces: bool = False,
    ) -> None:
        self.labels, self.identity = listed.labels, listed.identity()
        self._listed = replace(listed, sizes=listed.sizes[:0].copy())  # which nobody asks for again
        self._size, self._area, self._replaces = size, area, replaces
        self.shape = (3, *sides)

    def __len__(self) -> int:
        """The number of pictures."""
        return len(self.labels)

    def path(self, row: int) -> Path:
        """Of one picture."""
        return self._listed.path(row)

    def sized(self, side: int) -> "Folder":
        """The same pictures, brought to another side."""
        other = copy.copy(self)  # names and labels are shared
        other._size, other.shape = side, (3, side, side)
        return other

    def read(self, rows: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) uint8 of these rows (B,): the shorter side to size, the centre."""
        return self._drawn(rows, None).x

    def vary(self, rows: Tensor, seed: int, epoch: int) -> Drawn:
        """The same to train on: parts of them, and what a user should know."""
        return self._drawn(rows, mix(seed, epoch) if self._area < 1 else None)

    def _drawn(self, rows: Tensor, seed: int | None) -> Drawn:
        x = np.empty((len(rows), *self.shape), np.uint8)
        notes: list[str] = []
        for i, row in enumerate(rows.tolist()):
            x[i] = self._decoded(row, seed, notes).transpose(2, 0, 1)
        return Drawn(torch.from_numpy(x), self.labels[rows], tuple(notes))

    def _decoded(self, row: int, seed: int | None, notes: list[str]) -> Bytes:  # (H, W, 3)
        """A picture, or the next of its class that can be read."""
        cut = None if seed is None else Part(self._area, mix(seed, row))
        try:
            return self._fitting(self.path(row), cut)
        except ValueError as error:
            if not self._replaces:
                raise
            why = str(error).removesuffix(REPAIR)
            notes.append(f"{why}; another picture of its class stands for it")
        alike = (self.labels == self.labels[row]).nonzero().flatten().tolist()
        at = alike.index(row)
        for other in alike[at + 1 :] + alike[:at]:
            try:
                return self._fitting(self.path(other), cut)
            except ValueError:
                continue
        raise ValueError(f"no picture can be read of the class of {self.path(row)}; add some")

    def _fitting(self, file: Path, cut: "Part | None") -> Bytes:
        image = read_picture(file, self._size, cut=cut)
        if image.shape[:2] != self.shape[1:]:
            raise ValueError(
                f"expected pictures of one size, got {self.shape[1:]} and {image.shape[:2]} "
                f"({file}); give --data.size 64"
            )
        return image


class Part:
    """Chooses a part of a picture, of at least a share `area` of it, anywhere in it."""

    def __init__(self, area: float, seed: int) -> None:
        self.area, self.seed = area, seed

    def __call__(self, width: int, height: int) -> Box:
        """Left, top, right and bottom; where none was met, the largest in the centre that fits."""
        random = Random(self.seed)
        for _ in range(TRIES):
            pixels = width * height * random.uniform(self.area, 1)
            aspect = math.exp(random.uniform(-math.log(ASPECT), math.log(ASPECT)))
            w, h = round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect))
            if 0 < w <= width and 0 < h <= height:
                left, top = random.randint(0, width - w), random.randint(0, height - h)
                return left, top, left + w, top + h
        w, h = min(width, round(height * ASPECT)), min(height, round(width * ASPECT))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def split_by_name(listed: Listed, names: tuple[str, ...]) -> tuple[Chosen, Chosen]:
    """As `split` of all contents, without reading any: names and sizes say where a file belongs."""
    told = (f"{file}/{size}" for file, size in zip(listed.files, listed.sizes, strict=True))
    return placed(listed, names, (hashlib.sha256(os.fsencode(t)).hexdigest() for t in told))


def read_or_list(
    root: Path, size: int | None, *, skip_broken: bool, resident: bool | None, area: float
) -> Arrays | Sources:
    """A folder of pictures: in memory if they are few, else as they are needed.

    resident: one way or the other, however many there are. area: see `Folder`.
    """
    if resident and area < 1:
        raise ValueError(
            "data.area cuts parts out of pictures while they are decoded, which with "
            "data.resident they are once; leave one of them out"
        )
    check_side(size)
    there = look_into(root)
    parts = [there.train, *([there.test] if there.test else [])]
    sides = (size, size) if size else _sides(there.train)
    unpacked = sum(map(len, parts)) * 3 * sides[0] * sides[1]
    if resident or (resident is None and area == 1 and unpacked <= FEW):
        return load("folder", root=root, size=size, skip_broken=skip_broken)
    notes = list(there.notes)
    if there.test is None:
        everything = there.train
        chosen = split_by_name(everything, there.names)
        train, test = (everything.rows(rows) for rows in chosen)
        notes.append(said_of_split(everything, test, there.names, "names and sizes"))
    else:
        train, test = there.train, there.test
        check_sizes(train, sides, test, (size, size) if size else _sides(test))
    trained = Folder(train, sides, size, area=area, replaces=skip_broken)
    notes.append(
        f"{len(train) + len(test):,} pictures would take {unpacked / 2**20:,.0f} MiB "
        "decoded, so they are read when their turn comes"
    )
    return Sources(
        train=trained,
        test=Folder(test, sides, size),
        names=there.names,
        identity=trained.identity,
        notes=notes,
    )


def _sides(listed: Listed) -> tuple[int, int]:
    """Height and width of a folder's first picture."""
    height, width, _ = read_picture(listed.path(0), None).shape
    return height, width
