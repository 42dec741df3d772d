"""What a run asks of a data set that need not be in memory: batches to train on, and pictures."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """Training images. `Loader` is one."""

    def __len__(self) -> int:
        """Steps in an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch from step `start` on: x (B, ...) float32 in [0, 1] and y (B,), on the device."""


class Pictures(Protocol):
    """Images that are read when they are looked at: held out, or to test."""

    @property
    def labels(self) -> Tensor:
        """The labels (N,) int64, in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image (C, H, W)."""

    def __len__(self) -> int:
        """The number of images."""

    def read(self, rows: Tensor) -> Tensor:
        """Images (B, C, H, W) uint8 of these rows (B,), on the CPU."""
