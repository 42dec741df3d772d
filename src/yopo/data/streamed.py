"""Batches of pictures that are read when their turn comes, ahead of it, by worker processes."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from threading import Thread
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from yopo.data.augment import apply, draw, generator
from yopo.data.loader import check_batch, share
from yopo.data.source import Feed, Pictures, Rows, is_in_memory, sized

AHEAD = 2  # batches that each worker has ready
Turn = tuple[int, int | None, Tensor]  # an epoch, its side, and the rows (B,) of a batch


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
        worker_init_fn=Deaf(),
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

    feed: what the run wants.

    Order and augmentation are functions of seed, epoch and step alone: not of the number of
    workers, and not of the number of processes, which each read their own share.
    """

    def __init__(self, pictures: Pictures, feed: Feed) -> None:
        check_batch(len(pictures), batch=feed.batch, rank=feed.rank, world=feed.world)
        self.pictures, self.feed = pictures, feed
        self._said: set[str] = set()
        self._idle: _Kept | None = None  # a loader whose workers wait for another epoch

    def __len__(self) -> int:
        """Steps in an epoch; the images left over have their turn in another."""
        return len(self.pictures) // self.feed.batch

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch from step `start` on, as if the earlier ones had been drawn."""
        if not 0 <= start <= len(self):
            raise ValueError(f"expected start from 0 to {len(self)} steps, got {start}")
        f, n, side = self.feed, len(self.pictures), self.feed.size(epoch)
        height, width = sized(self.pictures, side).shape[1:]
        order = torch.randperm(n, generator=generator(f.seed, epoch, "order"))
        numbers = draw(f.augment, n=n, height=height, width=width, seed=f.seed, epoch=epoch)
        shares = [share(step, f.batch, f.rank, f.world) for step in range(start, len(self))]
        return self._steps([(epoch, side, order[s]) for s in shares], [numbers[s] for s in shares])

    @property
    def ahead(self) -> int:
        """Batches that workers make before they are asked for."""
        return AHEAD * min(self.feed.workers, len(self))

    def close(self) -> None:
        """End the workers; another epoch starts others."""
        self._idle = None

    def _steps(self, turns: list[Turn], numbers: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        f, device = self.feed, self.feed.device
        (kept, self._idle) = (self._idle or self._kept(), None)
        kept.turns[:] = turns
        try:
            for drawn, row in zip(kept.loader, numbers, strict=True):
                x, y, notes, wrong = drawn
                if wrong:
                    raise ValueError(wrong)
                for note in notes:
                    if note not in self._said:
                        f.say(note)
                self._said.update(notes)
                x = apply(f.augment, x.to(device, non_blocking=True), row.to(device))
                whole = x.dtype == torch.uint8
                x = x.to(torch.float32).div_(255) if whole else x.to(torch.float32)
                yield x, y.to(device, torch.int64, non_blocking=True)
        finally:
            self._idle = kept

    def _kept(self) -> "_Kept":
        """A loader that reads the turns that it is told of."""
        turns: list[Turn] = []
        workers = min(self.feed.workers, len(self))
        return _Kept(
            turns,
            DataLoader(
                _Batches(self.pictures, self.feed.seed),
                sampler=turns,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=AHEAD if workers else None,
                persistent_workers=workers > 0,
                worker_init_fn=Deaf(),
                pin_memory=self.feed.device.type == "cuda",
                generator=torch.Generator(),  # else the global stream moves
            ),
        )


class _Kept(NamedTuple):
    """A loader, and the list that it goes through."""

    turns: list[Turn]
    loader: DataLoader[Drawn]


class Deaf:
    """What a worker begins with: signals are its run's affair, which ends it in its own time.

    Ctrl-C and a closed terminal reach workers as well, and a scheduler sends SIGTERM to all that a
    job has started: then the run finishes its step and saves, for which it needs them.
    """

    def __init__(self, then: Callable[[int], None] | None = None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """In the worker."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            Thread(target=_end_when_the_run_says, daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _end_when_the_run_says() -> None:
    """SIGTERM ends a worker if it is the run's own, in silence, as torch's workers do."""
    run = parent_process()
    while run is not None:
        if signal.sigwaitinfo({signal.SIGTERM}).si_pid == run.pid:
            os._exit(0)


@dataclass(frozen=True, slots=True)
class _Batches(Dataset[Drawn]):
    """What a worker reads."""

    pictures: Pictures
    seed: int

    def __getitem__(self, turn: Turn) -> Drawn:
        epoch, side, rows = turn
        try:
            return drawn(sized(self.pictures, side), rows, self.seed, epoch)
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
