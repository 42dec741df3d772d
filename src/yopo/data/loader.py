"""Batches from arrays on the device: shuffled, augmented, the same for every world size."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Augment:
    """What is done to training images, in this order."""

    crop: int = 0  # random shift by up to this many pixels, zero padding
    flip: bool = False  # mirror horizontally with probability 1/2
    cutout: int = 0  # side of a square set to 0, its centre anywhere in the image

    def __post_init__(self) -> None:
        for name in ("crop", "cutout"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"expected {name} of at least 0 pixels, got {getattr(self, name)}; 0 is off"
                )


def draw(augment: Augment, *, n: int, height: int, width: int, seed: int, epoch: int) -> Tensor:
    """Random numbers for the n images of an epoch: down, right, mirrored, top, left.  # (n, 5)

    Each is drawn from its own generator, so that one augmentation does not change another's.
    """
    c, half = augment.crop, augment.cutout // 2
    ranges = {
        "crop down": (-c, c + 1),
        "crop right": (-c, c + 1),
        "flip": (0, 1 + augment.flip),
        "cutout top": (-half, height - half),
        "cutout left": (-half, width - half),
    }
    columns = [
        torch.randint(low, high, (n,), generator=generator(seed, epoch, purpose))
        for purpose, (low, high) in ranges.items()
    ]
    return torch.stack(columns, 1)


def apply(augment: Augment, x: Tensor, numbers: Tensor) -> Tensor:  # (B, C, H, W) uint8, (B, 5)
    """Shift, mirror and cut out all images at once, where x is.

    Pixel (i, j) of the result is pixel (i + down, j' + right) of the image, with j' = W - 1 - j
    where it is mirrored; 0 outside the image and in the square.
    """
    if augment == Augment():
        return x
    height, width = x.shape[2:]
    down, right, mirrored, top, left = numbers[:, :, None].unbind(1)  # (B, 1) each
    i, j = (torch.arange(side, device=x.device)[None] for side in (height, width))
    keep = torch.ones((), dtype=torch.bool, device=x.device)
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


def _inside(values: Tensor, low: Tensor | int, high: Tensor | int) -> Tensor:
    return (values >= low) & (values < high)


def generator(seed: int, epoch: int, purpose: str) -> torch.Generator:
    """A CPU generator for one purpose in one epoch; nearby seeds have nothing in common."""
    key = hashlib.sha256(f"{seed}/{epoch}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)


class Loader:
    """Batches of (x float32 in [0, 1], y int64) on the device.

    Order and augmentation are functions of seed, epoch and step alone. `batch` is the global batch:
    rank r of `world` gets its contiguous share of each, and the shares of all ranks together are
    the single process's batch, bit for bit.

    With `resident`, x lives on the device as uint8, everything runs there, and no step waits for
    the device. Otherwise x stays where it is (it may be a memory map) and a thread fetches one
    batch ahead. Both give the same batches.
    """

    def __init__(
        self,
        x: Tensor,  # (N, C, H, W) uint8
        y: Tensor,  # (N,)
        *,
        batch: int,
        seed: int,
        device: torch.device,
        augment: Augment = Augment(),  # noqa: B008
        rank: int = 0,
        world: int = 1,
        resident: bool = True,
    ) -> None:
        _check(x, y, batch=batch, rank=rank, world=world)
        self.x = x.to(device) if resident else x
        self.y = y.to(device, torch.int64)
        self.batch, self.seed, self.device = batch, seed, torch.device(device)
        self.augment, self.rank, self.world, self.resident = augment, rank, world, resident

    def __len__(self) -> int:
        """Steps in an epoch; the images left over have their turn in another."""
        return len(self.y) // self.batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from step `start` on, as if the earlier ones had been drawn."""
        if not 0 <= start <= len(self):
            raise ValueError(f"expected start from 0 to {len(self)} steps, got {start}")
        n, (height, width) = len(self.y), self.x.shape[2:]
        order = torch.randperm(n, generator=generator(self.seed, epoch, "order"))
        numbers = draw(self.augment, n=n, height=height, width=width, seed=self.seed, epoch=epoch)
        shares = [self._share(step) for step in range(start, len(self))]
        return self._steps(order, numbers, shares)

    def _share(self, step: int) -> slice:
        """Where this rank's part of a global batch lies in the epoch."""
        share = self.batch // self.world
        first = step * self.batch + self.rank * share
        return slice(first, first + share)

    def _steps(
        self, order: Tensor, numbers: Tensor, shares: list[slice]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        places = self._to_device(order)  # once an epoch, so that no step copies anything
        numbers = self._to_device(numbers)
        images = (
            (self.x[places[share]] for share in shares)
            if self.resident
            else self._fetched([order[share] for share in shares])
        )
        for share, x in zip(shares, images, strict=True):
            x = apply(self.augment, x, numbers[share])
            yield x.to(torch.float32).div_(255), self.y[places[share]]

    def _fetched(self, orders: list[Tensor]) -> Iterator[Tensor]:
        """Images from the host, the next batch being read while this one is in use."""
        with ThreadPoolExecutor(1) as pool:
            submitted = (pool.submit(self._read, order) for order in orders)  # when asked for
            ahead = next(submitted, None)
            while ahead is not None:
                x, ahead = ahead.result(), next(submitted, None)
                yield x.to(self.device, non_blocking=True)

    def _read(self, order: Tensor) -> Tensor:
        shape = (len(order), *self.x.shape[1:])
        x = torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return torch.index_select(self.x, 0, order, out=x)

    def _to_device(self, values: Tensor) -> Tensor:
        values = values.pin_memory() if self.device.type == "cuda" else values
        return values.to(self.device, non_blocking=True)


def _check(x: Tensor, y: Tensor, *, batch: int, rank: int, world: int) -> None:
    if x.dim() != 4 or x.dtype != torch.uint8:
        raise ValueError(
            f"expected uint8 images (N, C, H, W), got {x.dtype} of shape {tuple(x.shape)}; "
            "keep pixels from 0 to 255, the loader divides by 255"
        )
    if len(x) == 0:
        raise ValueError("expected at least one image, got none; check the data set")
    if y.shape != (len(x),) or y.is_floating_point():
        raise ValueError(
            f"expected a whole-number label for each of {len(x)} images, "
            f"got {y.dtype} of shape {tuple(y.shape)}; x and y must have one length"
        )
    if batch < 1:
        raise ValueError(f"expected batch of at least 1, got {batch}; give a positive number")
    if batch > len(x):
        raise ValueError(
            f"expected batch of at most {len(x)}, the number of images, got {batch}; "
            f"use a smaller batch: --batch {len(x)}"
        )
    if not 0 <= rank < world:
        raise ValueError(f"expected rank from 0 to {world - 1}, got {rank}; world is {world}")
    if batch % world:
        raise ValueError(
            f"expected batch, counted over all processes, to be a multiple of world={world}, "
            f"got {batch}; use --batch {max(batch // world, 1) * world}"
        )
