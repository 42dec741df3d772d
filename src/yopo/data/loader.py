"""Batches from arrays on the device: shuffled, augmented, the same for every world size."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from yopo.data.augment import Augment, apply, draw, generator


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

    @property
    def ahead(self) -> int:
        """Batches that are fetched before they are asked for."""
        return 0 if self.resident else 1

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from step `start` on, as if the earlier ones had been drawn."""
        if not 0 <= start <= len(self):
            raise ValueError(f"expected start from 0 to {len(self)} steps, got {start}")
        n, (height, width) = len(self.y), self.x.shape[2:]
        order = torch.randperm(n, generator=generator(self.seed, epoch, "order"))
        numbers = draw(self.augment, n=n, height=height, width=width, seed=self.seed, epoch=epoch)
        steps = range(start, len(self))
        shares = [share(step, self.batch, self.rank, self.world) for step in steps]
        return self._steps(order, numbers, shares)

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
    if y.shape != (len(x),) or y.is_floating_point():
        raise ValueError(
            f"expected a whole-number label for each of {len(x)} images, "
            f"got {y.dtype} of shape {tuple(y.shape)}; x and y must have one length"
        )
    check_batch(len(x), batch=batch, rank=rank, world=world)


def share(step: int, batch: int, rank: int, world: int) -> slice:
    """Where a rank's part of a global batch lies in the epoch."""
    share = batch // world
    first = step * batch + rank * share
    return slice(first, first + share)


def check_batch(n: int, *, batch: int, rank: int, world: int) -> None:
    """Refuse a batch that n images and so many processes do not allow."""
    if n == 0:
        raise ValueError("expected at least one image, got none; check the data set")
    if batch < 1:
        raise ValueError(f"expected batch of at least 1, got {batch}; give a positive number")
    if batch > n:
        raise ValueError(
            f"expected batch of at most {n}, the number of images, got {batch}; "
            f"use a smaller batch: --batch {n}"
        )
    if not 0 <= rank < world:
        raise ValueError(f"expected rank from 0 to {world - 1}, got {rank}; world is {world}")
    if batch % world:
        raise ValueError(
            f"expected batch, counted over all processes, to be a multiple of world={world}, "
            f"got {batch}; use --batch {max(batch // world, 1) * world}"
        )
