"""Test pictures of a folder, prepared as networks of torchvision and timm expect them."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from yopo.core.digest import values_digest
from yopo.data.formats import PIXELS, Bytes, check_side, read_picture
from yopo.data.listing import Listed, check_classes, classes_in, list_pictures
from yopo.data.source import Sources


@dataclass(frozen=True, slots=True)
class Preparation:
    """The shorter side is brought to `resize`, then the centre is cut out."""

    resize: int = 256
    size: int = 224
    interpolation: str = "bilinear"  # or "bicubic"

    def __post_init__(self) -> None:
        check_side(self.resize)
        if self.resize < self.size:
            raise ValueError(
                f"expected data.resize of at least data.size, {self.size}, got {self.resize}"
            )

    def of(self, file: Path) -> Bytes:  # (size, size, 3)
        """One picture, as torchvision's Resize and CenterCrop make it, pixel by pixel.

        They pass over what a file says of how the camera was held, and so does this. A JPEG that
        is too large for memory is made smaller before, while it is decoded.
        """
        from PIL import Image

        image = Image.fromarray(read_picture(file, None, least=self.resize, turned=False))
        short, long = sorted(image.size)
        longer = int(self.resize * long / short)
        if self.resize * longer > PIXELS:
            raise ValueError(f"{file} would be {self.resize}x{longer}; cut it first")
        sides = (self.resize, longer) if image.width <= image.height else (longer, self.resize)
        image = image.resize(sides, getattr(Image.Resampling, self.interpolation.upper()))
        left, top = (round((side - self.size) / 2.0) for side in image.size)
        return np.asarray(image.crop((left, top, left + self.size, top + self.size)))


class Prepared:
    """The pictures of a list, decoded when they are read."""

    def __init__(self, listed: Listed, how: Preparation) -> None:
        self.listed, self.how = listed, how
        self.labels = listed.labels

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image (C, H, W)."""
        return (3, self.how.size, self.how.size)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    def read(self, rows: Tensor) -> Tensor:
        """Images (B, 3, size, size) uint8 of these rows."""
        x = torch.empty(len(rows), *self.shape, dtype=torch.uint8)
        for place, row in enumerate(rows.tolist()):
            pixels = self.how.of(self.listed.path(row))
            x[place] = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
        return x


def pictures_to_test_on(root: Path, how: Preparation) -> Sources:
    """All pictures in root/test/CLASS, root/val/CLASS or root/CLASS, none of which is trained on.

    Classes are counted in the order of their names, as torchvision does.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root.absolute()}; name one with --data.root")
    parts = [root / name for name in ("test", "val")]
    folder = next((p for p in parts if p.is_dir() and any(f.is_dir() for f in p.iterdir())), root)
    names = classes_in(folder)
    listed = list_pictures(folder, names)
    check_classes(listed, names, least=1)
    pictures = Prepared(listed, how)
    identity = values_digest(str(how), *listed.files)
    return Sources(train=pictures, test=pictures, names=names, identity=identity)
