"""What a run asks of a data set: batches to train on, and pictures to look at.

A data set that is in memory is `Arrays`, any other `Sources`. Both have `names` of classes,
`notes`, `pictures` (training images as they are, without augmentation) and `test`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from yopo.data.augment import Augment


class Source(Protocol):
    """Training images. `Loader` is one.

    It may say how many batches it makes `ahead` of those that were asked for. It may also have
    `state()`, values for JSON that are kept in checkpoints, and `restore(state)`, which returns "",
    or a line that says why what follows is not exactly what would have been.
    """

    def __len__(self) -> int:
        """Steps in an epoch."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch from step `start` on: x (B, ...) float32 in [0, 1] and y (B,), on the device."""


class Pictures(Protocol):
    """Images that are read when they are looked at."""

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


class Sizable(Pictures, Protocol):
    """Images that can be had in another size."""

    def sized(self, side: int) -> Pictures:
        """The same, square, of that side."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What a run tells whoever makes its training batches."""

    batch: int  # images of a step, over all processes
    seed: int  # of the run
    device: torch.device  # where batches go
    rank: int = 0  # of this process
    world: int = 1  # processes
    augment: Augment = Augment()  # noqa: RUF009  # what is drawn of each image: shifts, flips, ...
    workers: int = 0  # processes that decode
    say: Callable[[str], None] = lambda _: None  # to the one who watches
    size: Callable[[int], int | None] = lambda _: None  # side in an epoch; None: as they are

    @property
    def share(self) -> int:
        """Images of a step in this process."""
        return self.batch // self.world


Opens = Callable[[Feed], Source]


@dataclass(frozen=True, slots=True)
class Sources:
    """A data set that need not be in memory; what a `build_data` of your own returns."""

    train: Source | Opens | Pictures  # of pictures, batches are made as of arrays in memory
    test: Pictures  # looked at once, at the end
    names: Sequence[str]  # of the classes; their order gives the labels
    identity: str  # whatever tells it from another data set: a version, a digest of file names
    held: Pictures | None = None  # not trained on; drawn from `train` where that is pictures
    notes: Sequence[str] = ()  # what a user should know of it
    images: int | None = None  # training images, where `train` does not tell

    def __post_init__(self) -> None:
        if not (can_read(self.train) or hasattr(self.train, "epoch") or callable(self.train)):
            raise ValueError(
                "expected train to have epoch(epoch, start), or labels, shape and read(rows), got "
                f"{type(self.train).__name__}; see docs/data.md for what makes one of it"
            )
        for name, part in (("test", self.test), ("held", self.held)):
            if not can_read(part) and (part is not None or name == "test"):
                raise ValueError(
                    f"expected {name} to have labels, shape and read(rows), got "
                    f"{type(part).__name__}; yopo.data.Items(...) makes that of a torch Dataset"
                )
            if part is not None and not len(part):
                raise ValueError(f"expected at least one image in {name}, got none")
        if self.held is None and not can_read(self.train):
            raise ValueError(
                "expected held, images that are not trained on: they are drawn only from a train "
                "that can be read by rows; give yopo.data.Sources(held=...)"
            )
        if not self.identity or not isinstance(self.identity, str):
            raise ValueError(
                "expected identity, words that tell this data set from another, got "
                f"{self.identity!r}; its place or version will do"
            )

    @property
    def pictures(self) -> Pictures:
        """Training images as they are, or where they cannot be read by rows, those held out."""
        if can_read(self.train):
            return self.train
        assert self.held is not None
        return self.held

    @property
    def many(self) -> int | None:
        """Training images, held out or not, if that is known."""
        if can_read(self.train):
            return len(self.train)
        return self.images or getattr(self.train, "images", None)


def can_read(given: object) -> TypeGuard[Pictures]:
    """Whether these are pictures; what they hold is not looked at."""
    return hasattr(given, "read") and not hasattr(given, "epoch")


@dataclass(frozen=True, slots=True)
class InMemory:
    """Pictures that are arrays."""

    x: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image (C, H, W)."""
        return tuple(self.x.shape[1:])

    def __len__(self) -> int:
        """The number of images."""
        return len(self.x)

    def read(self, rows: Tensor) -> Tensor:
        """Images of these rows."""
        return self.x[rows]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some of other pictures."""

    of: Pictures
    rows: Tensor  # (N,)

    @property
    def labels(self) -> Tensor:
        """Theirs; of others none is read."""
        some: Callable[[Tensor], Tensor] | None = getattr(self.of, "labels_of", None)
        return self.of.labels[self.rows] if some is None else some(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image (C, H, W)."""
        return self.of.shape

    def __len__(self) -> int:
        """The number of images."""
        return len(self.rows)

    def read(self, rows: Tensor) -> Tensor:
        """Images of these rows."""
        return self.of.read(self.rows[rows])


def can_be_sized(given: object) -> TypeGuard[Sizable]:
    """Whether they can be had in another size."""
    while isinstance(given, Rows):
        given = given.of
    return hasattr(given, "sized")


def sized(pictures: Pictures, side: int | None) -> Pictures:
    """The same in another size, if one is given."""
    if side is None:
        return pictures
    if isinstance(pictures, Rows):
        return Rows(sized(pictures.of, side), pictures.rows)
    assert can_be_sized(pictures)
    return pictures.sized(side)


def is_in_memory(pictures: Pictures) -> bool:
    """Whether reading them only copies."""
    while isinstance(pictures, Rows):
        pictures = pictures.of
    return isinstance(pictures, InMemory)
