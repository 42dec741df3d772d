"""A map-style data set, torch's or Hugging Face's, as a run takes it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from yopo.core.random import mix
from yopo.data.formats import of_8_bits


class MapStyle(Protocol):
    """A data set with items that have numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...  # noqa: ANN401


class Items:
    """Pictures from `dataset`, of (image, label) or {"image": ..., "label": ...}.

    An image is a tensor (C, H, W), uint8 or floating point in [0, 1], an array (H, W) or (H, W, C)
    of uint8, or one of pillow's. Whatever the data set draws at random is a function of seed, epoch
    and item alone, so resuming is exact, with any number of workers and processes. Images to test
    on, or held out, are always drawn alike; let a data set for them draw nothing.

    labels: those of all items, if the data set does not say them as `targets`, `labels` or a column
    `label` that no `with_transform` may change; else items are read for theirs, where these are
    asked for. pair: makes (image, label) of an item of another kind.
    """

    def __init__(
        self,
        dataset: MapStyle,
        labels: Sequence[int] | Tensor | None = None,
        pair: Callable[[Any], tuple[Any, Any]] | None = None,
    ) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ValueError(
                f"expected a data set with len() and items by number, got {type(dataset).__name__};"
                " of one that can only be gone through yopo.data.Batches(...) makes a source"
            )
        self.dataset, self._labels, self._pair = dataset, labels, pair or pair_of
        self._seen = torch.empty(0, dtype=torch.int64)  # labels read so far; -1 where not

    def __len__(self) -> int:
        """The number of images."""
        return len(self.dataset)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of one image (C, H, W)."""
        return tuple(self._drawn(torch.zeros(1, dtype=torch.long), 0)[0].shape[1:])

    @property
    def labels(self) -> Tensor:
        """The labels (N,)."""
        return self.labels_of(torch.arange(len(self)))

    def labels_of(self, rows: Tensor) -> Tensor:
        """The labels (B,) of some; of these alone items are read, where nothing tells them."""
        if self._known is not None:
            return self._known[rows]
        if not len(self._seen):
            self._seen = torch.full((len(self),), -1)
        unseen = rows[self._seen[rows] < 0].unique()
        for first in range(0, len(unseen), 256):
            self._drawn(unseen[first : first + 256], 0)
        return self._seen[rows]

    @cached_property
    def _known(self) -> Tensor | None:
        for said in self._said():
            if said is None or len(said) != len(self):
                continue
            try:
                return class_numbers(said, len(self))
            except ValueError:
                if said is self._labels:
                    raise  # what the data set has of that name may be something else
        return None

    def _said(self) -> Iterator[Any]:
        """What may be the labels, where the data set or its owner says them."""
        yield self._labels
        if self._pair is not pair_of:
            return  # it may change them
        if "label" in (getattr(self.dataset, "column_names", None) or ()) and not self._transforms:
            yield list(self.dataset["label"])  # type: ignore[index]
        if getattr(self.dataset, "target_transform", None) is None:
            yield from (getattr(self.dataset, name, None) for name in ("targets", "labels"))
        yield (getattr(self.dataset, "tensors", None) or (None,))[-1]

    @property
    def _transforms(self) -> bool:
        """Whether a function of its user's makes the items: Hugging Face's with_transform.

        It would be called for each row of a column, images and all, and may change labels.
        """
        how = getattr(self.dataset, "format", None)
        return isinstance(how, dict) and how.get("type") == "custom"

    def read(self, rows: Tensor) -> Tensor:
        """Images (B, C, H, W) uint8 of these rows (B,)."""
        x = self._drawn(rows, 0)[0]
        if x.dtype == torch.uint8:
            return x
        if not 0 <= float(x.min()) <= float(x.max()) <= 1:
            raise ValueError(
                f"expected images in [0, 1], got values from {float(x.min()):.3g} to "
                f"{float(x.max()):.3g}; leave the normalisation to the network: "
                "--model.normalize true, or yopo.Normalize"
            )
        return (x * 255).round().to(torch.uint8)

    def vary(self, rows: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,) as the data set draws them in this epoch."""
        return self._drawn(rows, mix(seed, epoch))

    def _drawn(self, rows: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        images, labels = [], []
        with streams_left_alone():
            for row in rows.tolist():
                seed_host(mix(seed, row))
                image, label = self._pair(self.dataset[row])
                images.append(tensor_of(image))
                labels.append(int(class_numbers(label, 1)))
        shapes = {(tuple(image.shape), image.dtype) for image in images}
        if len(shapes) > 1:
            several = " and ".join(sorted(f"{shape} of {kind}" for shape, kind in shapes)[:2])
            raise ValueError(f"expected images of one shape and type, got {several}; resize them")
        y = torch.tensor(labels, dtype=torch.int64)
        if self._known is not None and not torch.equal(self._known[rows], y):
            at = int((self._known[rows] != y).nonzero()[0])
            raise ValueError(
                f"item {int(rows[at])} has the label {labels[at]}, where the data set's list of "
                f"labels has {int(self._known[rows[at]])}; give labels= as the items have them"
            )
        if seed == 0 and len(self._seen):
            self._seen[rows] = y
        return torch.stack(images), y


def pair_of(item: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Image and label of an item."""
    if isinstance(item, dict) and {"image", "label"} <= item.keys():
        return item["image"], item["label"]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    shown = f"a dict with {', '.join(map(str, item))}" if isinstance(item, dict) else type(item)
    raise ValueError(
        f"expected items (image, label) or {{'image': ..., 'label': ...}}, got {shown}; give "
        "pair=, a function that makes (image, label) of an item"
    )


def class_numbers(labels: Any, many: int) -> Tensor:  # noqa: ANN401  # (N,) int64
    """Labels of so many images, one whole number each, whatever they are kept in."""
    try:
        y = torch.as_tensor(labels).reshape(many)
        whole = y.to(torch.int64)
        if not y.is_floating_point() or bool((whole == y).all()):
            return whole
        shown = "parts of one"
    except (TypeError, ValueError, RuntimeError):
        shown = str(tuple(labels.shape)) if hasattr(labels, "shape") else repr(labels)[:40]
    of = "an image's label" if many == 1 else f"labels of {many} images"
    raise ValueError(
        f"expected a whole number, that of a class, as {of}, got {shown}; pair= makes (image, "
        "label) of an item"
    )


def tensor_of(image: Any) -> Tensor:  # noqa: ANN401  # (C, H, W)
    """An image as a tensor."""
    if hasattr(image, "convert"):  # pillow's
        image = np.asarray(of_8_bits(image, "RGB"))
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3):
            raise ValueError(
                f"expected arrays of uint8, (H, W) or (H, W, C), got {image.dtype} {image.shape}"
            )
        image = torch.from_numpy(image.reshape(*image.shape[:2], -1).copy()).permute(2, 0, 1)
    if not isinstance(image, Tensor) or image.dim() != 3:
        got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
        raise ValueError(f"expected images (C, H, W), arrays (H, W, C) or pillow's, got {got}")
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise ValueError(f"expected images of uint8 or floating point, got {image.dtype}")
    return image


def seed_host(seed: int) -> None:
    """The streams that a data set may draw from; those of GPUs stay as they are."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def streams_left_alone() -> Iterator[None]:
    """What is drawn in the block leaves the streams of torch, Python and NumPy as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
