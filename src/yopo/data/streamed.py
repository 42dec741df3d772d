"""Batches of pictures that are read when their turn comes, ahead of it, by worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from yopo.data.augment import apply, draw, generator
from yopo.data.loader import check_batch, share
from yopo.data.source import Feed, Pictures, Rows, is_in_memory

AHEAD = 2  # batches that each worker has ready


def read_ahead(pictures: Pictures, parts: Sequence[Tensor], workers: int) -> Iterator[Tensor]:
    """Images of these parts of the rows, as they are; worker processes read the next ones.

    What is in memory is not sent between processes.
    """
    if not workers or len(parts) < 2 or is_in_memory(pictures):
        yield from map(pictures.read, parts)
        return
    batches = DataLoader(
        _Read(pictures),
        sampler=list(parts),
        batch_size=None,
        num_workers=min(workers, len(parts)),
        prefetch_factor=AHEAD,
        generator=torch.Generator(),  # else the global stream moves
    )
    for x, wrong in batches:
        if wrong:
            raise ValueError(wrong)
        yield x


@dataclass(frozen=True, slots=True)
class _Read(Dataset[tuple[Tensor, str]]):
    """Images as a worker reads them, or why there are none."""

    pictures: Pictures

    def __getitem__(self, rows: Tensor) -> tuple[Tensor, str]:
        try:
            return self.pictures.read(rows), ""
        except ValueError as error:  # its traceback in a worker would hide the sentence
            return torch.empty(0), str(error)


class Drawn(NamedTuple):
    """A batch to train on, as a worker hands it over."""

    x: Tensor  # (B, C, H, W), uint8 or floating point in [0, 1]
    y: Tensor  # (B,)
    notes: tuple[str, ...] = ()  # what a user should know of it
    wrong: str = ""  # why there is none


class Streamed:
    """`Loader` for pictures that are not in memory: the same batches, bit for bit.

    Order and augmentation are functions of seed, epoch and step alone: not of the number of
    workers, and not of the number of processes, which each read their own share.
    """

    def __init__(self, pictures: Pictures, feed: Feed) -> None:
        check_batch(len(pictures), batch=feed.batch, rank=feed.rank, world=feed.world)
        self.pictures, self.feed = pictures, feed

    def __len__(self) -> int:
        """Steps in an epoch; the images left over have their turn in another."""
        return len(self.pictures) // self.feed.batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from step `start` on, as if the earlier ones had been drawn."""
        if not 0 <= start <= len(self):
            raise ValueError(f"expected start from 0 to {len(self)} steps, got {start}")
        f, n, (height, width) = self.feed, len(self.pictures), self.pictures.shape[1:]
        order = torch.randperm(n, generator=generator(f.seed, epoch, "order"))
        numbers = draw(f.augment, n=n, height=height, width=width, seed=f.seed, epoch=epoch)
        shares = [share(step, f.batch, f.rank, f.world) for step in range(start, len(self))]
        return self._steps(epoch, [order[s] for s in shares], [numbers[s] for s in shares])

    def _steps(
        self, epoch: int, rows: list[Tensor], numbers: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        f, device = self.feed, self.feed.device
        batches = DataLoader(
            _Batches(self.pictures, f.seed, epoch),
            sampler=rows,
            batch_size=None,
            num_workers=min(f.workers, len(rows)),
            prefetch_factor=AHEAD if f.workers and rows else None,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else the global stream moves
        )
        for drawn, row in zip(batches, numbers, strict=True):
            x, y, notes, wrong = drawn
            if wrong:
                raise ValueError(wrong)
            for note in notes:
                f.say(note)
            x = apply(f.augment, x.to(device, non_blocking=True), row.to(device))
            x = x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.to(torch.float32)
            yield x, y.to(device, torch.int64, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Batches(Dataset[Drawn]):
    """What a worker reads of an epoch."""

    pictures: Pictures
    seed: int
    epoch: int

    def __getitem__(self, rows: Tensor) -> Drawn:
        try:
            return drawn(self.pictures, rows, self.seed, self.epoch)
        except ValueError as error:  # its traceback in a worker would hide the sentence
            nothing = torch.empty(0)
            return Drawn(nothing, nothing, wrong=str(error))


def drawn(pictures: Pictures, rows: Tensor, seed: int, epoch: int) -> Drawn:
    """Images to train on: as they are, or as pictures that vary give them in this epoch."""
    if isinstance(pictures, Rows):
        return drawn(pictures.of, pictures.rows[rows], seed, epoch)
    if (vary := getattr(pictures, "vary", None)) is not None:
        return Drawn(*vary(rows, seed, epoch))
    return Drawn(pictures.read(rows), pictures.labels[rows])
