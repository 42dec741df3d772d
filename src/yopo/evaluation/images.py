"""The images of an evaluation: in memory, or read when an attack comes to them.

What is read must be the same each time, in the same order; `Repeated` sees to it for batches.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from yopo.core.checks import check_at_least, check_images
from yopo.core.crew import ALONE, Crew
from yopo.core.digest import parts_digest, values_digest
from yopo.core.random import image_keys
from yopo.evaluation.network import Network

if TYPE_CHECKING:
    from yopo.data.source import Pictures  # its room loads more than `import yopo` may

Labelled = Iterable[Sequence[Tensor]]  # batches of images and labels
BLOCK = 2**26  # bytes of images that are hashed in one piece
HOLD = 2**30  # bytes of images of batches that are kept in memory; more are read in every pass
CURE = (
    "attacks come back to images that do not fit into memory: give a loader without shuffle and "
    "random transforms, or list(loader) to hold all of them"
)


@dataclass(slots=True)
class Data:
    """Images and labels, wherever they are; batches of them where the network is."""

    pictures: "Pictures"
    y: Tensor  # (N,) int64
    device: torch.device
    dtype: torch.dtype
    workers: int = 0  # processes that read ahead what is not in memory

    @classmethod
    def of(cls, net: Network, pictures: "Pictures", workers: int = 0) -> "Data":
        """For that network."""
        if isinstance(pictures, Repeated):  # a loader, which may have workers, and they none
            workers = 0
        return cls(pictures, pictures.labels, net.device, net.dtype, workers)

    def __len__(self) -> int:
        """The number of images."""
        return len(self.y)

    def images(self, rows: Tensor) -> Tensor:
        """Images of these rows as numbers in [0, 1]."""
        return self._ready(self.pictures.read(rows))

    def batches(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        """Images of each of these parts, which ascend; the next ones are read meanwhile."""
        return map(self._ready, self._read(parts))

    def labels(self, rows: Tensor) -> Tensor:
        """Labels of these rows."""
        return self.y[rows.to(self.y.device)].to(self.device)

    def digest(self, batch: int, crew: Crew = ALONE) -> str:
        """SHA-256 of all images and labels, whatever the size of batches; they are checked, too.

        It is `values_digest`'s of up to BLOCK bytes of images, of more the digest of such blocks'
        digests, which the processes of a crew deal out: each reads its own.
        """
        with crew.all_or_none():
            each = self.pictures.read(torch.arange(1))
            many = max(1, BLOCK // max(1, each.numel() * each.element_size()))
            blocks = torch.arange(len(self)).split(many)
            if len(blocks) == 1:
                return self._of_block(blocks[0], self._checked(blocks[0].split(batch)))
        mine = crew.share(blocks)
        parts = self._checked([part for rows in mine for part in rows.split(batch)])
        made: list[Tensor] = []

        def digests() -> Iterator[int]:
            for rows in mine:
                told = self._of_block(rows, islice(parts, len(rows.split(batch))))
                made.append(torch.tensor([[*bytes.fromhex(told)]], dtype=torch.int32))
                yield 0

        for _ in crew.rounds(len(blocks), digests()):
            pass
        places = crew.share(torch.arange(len(blocks)).split(1))
        return values_digest(crew.rows(made, places, len(blocks), torch.int32), len(self))

    def looks(self) -> str:
        """A digest of the labels and the first images: by it a process has other data than one."""
        return values_digest(self.y, self.pictures.read(torch.arange(min(len(self), 8))))

    def _of_block(self, rows: Tensor, parts: Iterator[Tensor]) -> str:
        return parts_digest(len(rows), parts, self.y[rows])

    def _checked(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        for x in self._read(parts):
            if x.dtype != torch.uint8:
                check_images(x, nn.Identity())
            yield x

    def _read(self, parts: Sequence[Tensor]) -> Iterator[Tensor]:
        from yopo.data.streamed import read_ahead

        return read_ahead(self.pictures, parts, self.workers)

    def _ready(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype) / 255 if x.dtype == torch.uint8 else x.to(self.dtype)
        return x.to(self.device)


def gather(data: "Labelled | tuple[Tensor, Tensor] | Pictures", samples: int | None) -> "Pictures":
    """The first `samples` images and their labels, or all."""
    from yopo.data.items import streams_left_alone
    from yopo.data.source import InMemory, Rows, can_read

    if samples is not None:
        check_at_least("samples", samples, 1)
    if can_read(data):
        rows = _first(samples, len(data))
        return data if samples is None else Rows(data, rows)
    batches: Any = data
    if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor):
        batches = [data]
    again = not isinstance(batches, Iterator)
    xs: list[Tensor] = []
    ys: list[Tensor] = []
    keys: list[Tensor] = []
    size = 0
    with streams_left_alone():  # a loader draws a seed in each pass, shuffled or not
        for x, y in _checked(batches, samples):
            ys.append(y)
            if keys:
                keys.append(image_keys(x).cpu())
                continue
            xs.append(x)
            size += x.numel() * x.element_size()
            if again and size > HOLD and len(xs) > 1:
                keys, xs = [image_keys(x).cpu() for x in xs], []
    rows = _first(samples, sum(map(len, ys)))
    y = torch.cat(ys)[rows]
    if keys:
        return Repeated(batches, y, torch.cat(keys)[rows])
    x = xs[0] if len(xs) == 1 else torch.cat(xs)
    return InMemory(x[: len(rows)], y)


def _checked(
    batches: Iterable[object], samples: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images and labels, until there are `samples` images."""
    n, shapes = 0, set()
    for item in batches:
        if not (isinstance(item, tuple | list) and len(item) == 2 and _fits(*item)):
            raise ValueError(
                "expected batches of images (B, ...) and labels (B,) of one length, got "
                f"{_shown(item)}; each batch should be a pair of tensors"
            )
        x, y = item
        shapes.add(tuple(x.shape[1:]))
        if len(shapes) > 1:
            raise ValueError(f"expected images of one shape, got {' and '.join(map(str, shapes))}")
        yield x.detach(), y
        n += len(y)
        if samples is not None and n >= samples:
            return


def _first(samples: int | None, n: int) -> Tensor:
    if n == 0:
        raise ValueError("expected at least one image, got none; check the data set")
    if samples is not None and n < samples:
        raise ValueError(f"expected at most {n} samples, the images there are, got {samples}")
    return torch.arange(n if samples is None else samples)


class Repeated:
    """Images of batches that come anew, in the same order, each time they are gone over.

    Rows are read in ascending order; one that was passed begins another pass. `keys` (N,) are those
    of the first one, and an image that has another is refused.
    """

    def __init__(self, batches: Iterable[object], labels: Tensor, keys: Tensor) -> None:
        self.batches, self.labels, self.keys = batches, labels, keys
        self._begin()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return tuple(self._x.shape[1:])

    def __len__(self) -> int:
        """The number of images."""
        return len(self.labels)

    def read(self, rows: Tensor) -> Tensor:
        """Images (B, ...) of these rows (B,), which ascend."""
        if len(rows) and int(rows[0]) < self._at:
            self._begin()
        parts = [self._x[:0]]
        while len(rows):
            inside = rows[rows < self._at + len(self._x)]
            parts.append(self._x[inside - self._at])
            rows = rows[len(inside) :]
            if len(rows):
                self._next()
        return torch.cat(parts) if len(parts) > 2 else parts[-1]

    def _begin(self) -> None:
        self._pass, self._at, self._x = _checked(self.batches), 0, torch.empty(0)
        self._next()

    def _next(self) -> None:
        from yopo.data.items import streams_left_alone

        self._at += len(self._x)
        try:
            with streams_left_alone():
                self._x = next(self._pass)[0]
        except StopIteration:
            raise ValueError(
                f"expected {len(self):,} images in every pass, as there were in the first, got "
                f"{self._at:,}; {CURE}"
            ) from None
        keys = self.keys[self._at : self._at + len(self._x)]
        same = image_keys(self._x).cpu()[: len(keys)] == keys
        if not same.all():
            row = self._at + int((~same).nonzero()[0])
            raise ValueError(
                f"expected the same images in every pass, but image {row:,} is another; {CURE}"
            )


def _fits(x: object, y: object) -> bool:
    return isinstance(x, Tensor) and isinstance(y, Tensor) and y.dim() == 1 and len(x) == len(y)


def _shown(item: object) -> str:
    parts = item if isinstance(item, tuple | list) else [item]
    shown = (tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts)
    return " and ".join(map(str, shown))
