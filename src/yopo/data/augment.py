"""What is done to training images, drawn for a whole epoch and applied to a batch at once."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

SHADES = 1 << 16
PLACES = ("crop down", "crop right", "flip", "cutout top", "cutout left")
FACTORS = ("brightness", "contrast", "saturation")
GREY = (0.299, 0.587, 0.114)  # of red, green and blue


@dataclass(frozen=True, slots=True)
class Augment:
    """What is done to training images: shades first, then in this order."""

    crop: int = 0  # random shift by up to this many pixels, zero padding
    flip: bool = False  # mirror horizontally with probability 1/2
    cutout: int = 0  # side of a square set to 0, its centre anywhere in the image
    jitter: float = 0.0  # brightness, contrast and saturation times 1 - jitter to 1 + jitter

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"expected jitter from 0 to 1, got {self.jitter}; 0 is off")
        for name in ("crop", "cutout"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"expected {name} of at least 0 pixels, got {getattr(self, name)}; 0 is off"
                )


def used(augment: Augment) -> list[str]:
    """What is drawn for each image, in the order of columns."""
    wanted = {"crop": augment.crop, "flip": augment.flip, "cutout": augment.cutout}
    return [name for name in (*PLACES, *FACTORS) if wanted.get(name.split()[0], augment.jitter)]


def draw(augment: Augment, *, n: int, height: int, width: int, seed: int, epoch: int) -> Tensor:
    """Random numbers for the n images of an epoch: columns as `used` has them.  # (n, K) int32

    Pixels, mirrored or not, and shades in parts of SHADES. Each is drawn from its own generator,
    so that one augmentation does not change another's.
    """
    c, half = augment.crop, augment.cutout // 2
    ranges = {
        "crop down": (-c, c + 1),
        "crop right": (-c, c + 1),
        "flip": (0, 2),
        "cutout top": (-half, height - half),
        "cutout left": (-half, width - half),
        **dict.fromkeys(FACTORS, (-SHADES, SHADES + 1)),
    }
    columns = used(augment)
    numbers = torch.empty(n, len(columns), dtype=torch.int32)
    for column, purpose in enumerate(columns):
        stream = generator(seed, epoch, purpose)
        numbers[:, column] = torch.randint(*ranges[purpose], (n,), generator=stream)
    return numbers


def apply(augment: Augment, x: Tensor, numbers: Tensor) -> Tensor:  # (B, C, H, W), (B, K)
    """Shade, shift, mirror and cut out all images at once, where x is.

    Pixel (i, j) of the result is pixel (i + down, j' + right) of the image, with j' = W - 1 - j
    where it is mirrored; 0 outside the image and in the square.
    """
    if augment == Augment():
        return x
    height, width = x.shape[2:]
    if augment.jitter:
        x = shaded(x, 1 + augment.jitter * numbers[:, -3:].float() / SHADES)
    drawn = dict(zip(used(augment), numbers[:, :, None].unbind(1), strict=True))  # (B, 1) each
    none = numbers.new_zeros(len(numbers), 1)
    down, right, mirrored, top, left = (drawn.get(name, none) for name in PLACES)
    i, j = (torch.arange(side, device=x.device)[None] for side in (height, width))
    keep = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)
    if augment.crop or augment.flip:
        rows = i + down  # (B, H)
        columns = torch.where(mirrored == 1, width - 1 - j, j) + right  # (B, W)
        keep = _inside(rows, 0, height)[:, :, None] & _inside(columns, 0, width)[:, None]
        place = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
        place = place.flatten(1)[:, None].expand(-1, x.shape[1], -1)  # (B, C, H * W)
        x = x.flatten(2).gather(2, place).view_as(x)
    if augment.cutout:
        square = _inside(i, top, top + augment.cutout)[:, :, None]
        keep = keep & ~(square & _inside(j, left, left + augment.cutout)[:, None])
    return x * keep[:, None]


def shaded(x: Tensor, factors: Tensor) -> Tensor:  # (B, C, H, W), (B, 3)
    """Images of other brightness, contrast (from their mean grey) and saturation (from grey)."""
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)
    whole = x.dtype == torch.uint8
    most = 255 if whole else 1
    y = (x.float() * brightness).clamp(0, most)
    # Of whole numbers, so that the sum is the same whatever adds them up in which order.
    mean = (_grey(y) * (255 / most)).round().to(torch.int64).sum((1, 2, 3), keepdim=True)
    mean = mean.float() * (most / 255 / x[0, 0].numel())
    y = (mean + (y - mean) * contrast).clamp(0, most)
    grey = _grey(y)
    y = (grey + (y - grey) * saturation).clamp(0, most)
    return y.round().to(torch.uint8) if whole else y.to(x.dtype)


def _grey(x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, 1, H, W)
    """As pillow has it; of other than three channels, their mean."""
    weights = GREY if x.shape[1] == 3 else (1 / x.shape[1],) * x.shape[1]
    parts = (w * channel for w, channel in zip(weights, x.split(1, 1), strict=True))
    return torch.stack(list(parts)).sum(0)


def _inside(values: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    return (values >= low) & (values < high)


def generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose in one epoch; nearby seeds have nothing in common."""
    key = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
