"""Folders of pictures as arrays, and which of them are the test set where nobody has said so."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from yopo.core.files import check_unpacked, file_digest
from yopo.data.formats import Bytes, read_picture
from yopo.data.listing import Chosen, Listed, Splits, check_classes, counts, left_out

TEST_PART, SPLIT_SEED = 0.2, 0
FEW, MOST = 5, 5  # test pictures of a class that say little of it; such classes that are named


@dataclass(frozen=True, slots=True)
class Read:
    """Pictures of one split, decoded. Rows count them."""

    images: list[Bytes]  # (H, W, 3) each
    listed: Listed

    def tensors(self) -> tuple[Tensor, Tensor]:  # (N, 3, H, W) uint8, (N,)
        """As a run takes them."""
        x = np.stack(self.images).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(x)), self.listed.labels

    def rows(self, chosen: Chosen) -> "Read":
        """Some of them."""
        images = [image for image, take in zip(self.images, chosen, strict=True) if take]
        return Read(images, self.listed.rows(chosen))


def read_folder(
    there: Splits, size: int | None, skip_broken: bool
) -> tuple[Read, Read, tuple[str, ...], list[str]]:
    """Training and test pictures, the names of the classes, and what a user should know."""
    broken: list[str] = []
    names = there.names
    if there.test is None:
        everything = _read(there.train, size, broken)
        notes = left_out(broken, skip_broken)
        train, test = (everything.rows(chosen) for chosen in split(everything.listed, names))
        said = said_of_split(everything.listed, test.listed, names)
        return train, test, names, [*notes, said]
    train, test = (_read(listed, size, broken) for listed in (there.train, there.test))
    notes = left_out(broken, skip_broken)
    for part in (train, test):
        check_classes(part.listed, names, least=1)
    check_sizes(train.listed, train.images[0].shape, test.listed, test.images[0].shape)
    return train, test, names, [*notes, *there.notes]


def check_sizes(train: Listed, one: tuple[int, ...], test: Listed, other: tuple[int, ...]) -> None:
    """Refuse pictures to train on and to test on that differ in their sides."""
    if one != other:
        raise ValueError(
            f"expected pictures of one size, got {one[:2]} in {train.folder} "
            f"and {other[:2]} in {test.folder}; give --data.size 64"
        )


def _read(listed: Listed, size: int | None, broken: list[str]) -> Read:
    """The pictures of all classes; what is wrong with broken ones is added to `broken`."""
    images: list[Bytes] = []
    sound, packed = np.zeros(len(listed), np.bool_), 0
    for row in range(len(listed)):
        file = listed.path(row)
        try:
            image = read_picture(file, size)
        except ValueError as error:
            broken.append(str(error))
            continue
        if images and image.shape != images[0].shape:
            raise ValueError(
                f"expected pictures of one size, got {images[0].shape[:2]} and "
                f"{image.shape[:2]} ({file}); give --data.size 64"
            )
        images.append(image)
        sound[row] = True
        packed += int(listed.sizes[row])
        check_unpacked(listed.folder, len(images) * image.nbytes, packed)
    return Read(images, listed.rows(sound))


def split(listed: Listed, names: tuple[str, ...]) -> tuple[Chosen, Chosen]:
    """Which pictures are to train on, and which to test; of each class at least one in both.

    A picture's own content says where it belongs: copies of it come to the same side, and others
    that are added later do not move it into the test set of a network that was trained on it. Only
    where that would leave a class nothing on one side, what comes nearest to it is put there.
    """
    with ThreadPoolExecutor() as pool:
        files = map(listed.path, range(len(listed)))
        return placed(listed, names, pool.map(file_digest, files, chunksize=64))


def placed(listed: Listed, names: tuple[str, ...], digests: Iterable[str]) -> tuple[Chosen, Chosen]:
    """The same by digests of whatever says where a picture belongs."""
    check_classes(listed, names, least=2)
    places = np.fromiter(map(_place, digests), np.int64, len(listed))
    test = places < TEST_PART * 16**8
    end = 0
    for many in counts(listed.labels, names):
        of_class, end = slice(end, end + many), end + many
        lowest = places[of_class] == places[of_class].min()  # with its copies
        if lowest.all():  # a class of copies alone has them on both sides
            lowest[1:] = False
        test[of_class] = lowest | (test[of_class] & (places[of_class] != places[of_class].max()))
    return ~test, test


def said_of_split(listed: Listed, test: Listed, names: tuple[str, ...], by: str = "content") -> str:
    """How it was split, and which classes have too few test pictures to be judged by themselves."""
    said = (
        f"{listed.folder} has no train/ and test/: {len(test)} of its {len(listed)} pictures "
        f"are the test set,\ndrawn by their {by} with seed {SPLIT_SEED}, the same ones in every "
        "run"
    )
    drawn, whole = (counts(part.labels, names) for part in (test, listed))
    parts = zip(drawn, whole, names, strict=True)
    few = sorted(p for p in parts if p[0] < TEST_PART * p[1] / 2 or p[0] < FEW)
    if not few:
        return f"{said}, about a fifth of each class"
    some = ", ".join(f"{n} of {all_} {name}" for n, all_, name in few[:MOST])
    more = f" and {len(few) - MOST} more classes" if len(few) > MOST else ""
    return (
        f"{said}.\nOf some classes there are few test pictures ({some}{more}); what is told of "
        "these classes\nalone says little. More pictures, or a test/ of your own, mend that"
    )


def _place(digest: str) -> int:
    return int(hashlib.sha256(f"{SPLIT_SEED}/{digest}".encode()).hexdigest()[:8], 16)
