"""Images read when their turn comes: the loader's batches, from worker processes, and its own."""

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from tests.data.test_loader import CPU, FULL, assert_equal, images, loader
from tests.tiny import PATIENCE, wait_until
from yopo.data import Feed, InMemory, Items, Rows, Sources, Streamed
from yopo.data.formats import read_picture


def pictures(n: int = 22) -> InMemory:
    return InMemory(images(n), torch.arange(n))


def feed(**over: Any) -> Feed:
    return replace(Feed(batch=8, seed=3, device=CPU, augment=FULL), **over)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_loaders_bit_for_bit(workers: int) -> None:
    made = Streamed(pictures(), feed(workers=workers))
    assert len(made) == len(loader()) == 2
    for epoch in (0, 1, 0):  # the same workers
        assert_equal(list(made.epoch(epoch)), list(loader().epoch(epoch)))
    for start in range(3):
        assert_equal(list(made.epoch(2, start)), list(loader().epoch(2, start)))
    with pytest.raises(ValueError, match="expected start from 0 to 2 steps, got 3"):
        made.epoch(0, 3)


def test_ranks_together_have_the_loaders_batch() -> None:
    parts = [list(Streamed(pictures(), feed(rank=r, world=2)).epoch(1)) for r in (0, 1)]
    joined = [tuple(map(torch.cat, zip(*both, strict=True))) for both in zip(*parts, strict=True)]
    assert_equal(joined, list(loader().epoch(1)))  # type: ignore[arg-type]


def test_workers_stay_and_an_epoch_left_early_spoils_no_other() -> None:
    made = Streamed(InMemory(images(64), torch.arange(64)), feed(workers=2))
    batches = made.epoch(0)
    expected = next(batches)
    first = workers_of(made, batches)
    del batches
    again = made.epoch(0)
    assert_equal([next(again)], [expected])
    assert workers_of(made, again) == first
    other = made.epoch(5)  # while that one goes on: with workers of its own
    assert_equal(list(other), list(loader(n=64).epoch(5)))
    assert_equal([*again], list(loader(n=64).epoch(0))[1:])


def workers_of(made: Streamed, batches: Iterator[tuple[Tensor, Tensor]]) -> list[int]:
    kept = batches.gi_frame.f_locals["kept"]  # type: ignore[attr-defined]
    return [worker.pid for worker in kept.loader._iterator._workers]


def test_workers_do_not_hear_the_signals_of_the_run() -> None:
    heard: list[int] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda *_: heard.append(1))
    try:
        made = Streamed(pictures(64), feed(workers=1))
        batches = made.epoch(0)
        next(batches)
        (pid,) = workers_of(made, batches)
        shell = [f"kill -{number.name[3:]} {pid}" for number in before]
        subprocess.run(["sh", "-c", "; ".join(shell)], check=True)  # from another process
        assert len([*batches]) == 7  # it works on
        worker = made._idle.loader._iterator._workers[0]  # type: ignore[union-attr]
        assert worker.is_alive()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    worker.terminate()
    wait_until(lambda: not worker.is_alive())
    assert worker.exitcode == 0
    assert not heard


class Drawing:
    """A data set that draws from three streams."""

    def __init__(self, n: int = 16) -> None:
        self.read: list[int] = []
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.read.append(row)
        numbers = [float(torch.rand(())), random.random(), np.random.rand()]
        return torch.tensor(numbers, dtype=torch.float32).view(3, 1, 1).expand(3, 2, 2), row % 4


def items(workers: int = 0, start: int = 0, epoch: int = 1) -> list[tuple[Tensor, Tensor]]:
    given = Feed(batch=4, seed=0, device=CPU, workers=workers)
    return list(Streamed(Items(Drawing()), given).epoch(epoch, start))


def test_what_a_data_set_draws_is_a_function_of_seed_epoch_and_item() -> None:
    streams = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    whole = items()
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert repr(np.random.get_state()) == streams[2]
    random.seed(5)
    assert_equal(items(workers=2), whole)
    assert_equal(items(start=2), whole[2:])
    assert not torch.equal(items(epoch=2)[0][0], whole[0][0])
    x = torch.cat([x for x, _ in whole])
    assert len(x.flatten(1).unique(dim=0)) == 16


def test_labels_that_nothing_tells_are_read_by_rows_and_once() -> None:
    dataset = Drawing(1000)
    found = Items(dataset)
    held = Rows(found, torch.tensor([7, 5, 998]))
    assert held.labels.tolist() == [3, 1, 2]
    assert sorted(dataset.read) == [5, 7, 998]
    held.read(torch.arange(3))
    assert held.labels.tolist() == [3, 1, 2]
    assert len(dataset.read) == 6
    told = Items(dataset, labels=[9] * 1000)
    assert told.labels_of(torch.tensor([4])).tolist() == [9]
    assert len(dataset.read) == 6


class Transformed(Drawing):
    """As Hugging Face's with_transform: a column calls its user's function for each row."""

    column_names = ("image", "label")

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.format = {"type": kind}

    def __getitem__(self, row: int | str) -> Any:
        if row == "label":
            return [self[i]["label"] for i in range(len(self))]
        image, label = super().__getitem__(int(row))
        return {"image": image, "label": label}


def test_a_column_that_is_made_row_by_row_is_not_asked_for() -> None:
    for kind, many in (("custom", 2), (None, 16)):
        dataset = Transformed(kind)
        assert Items(dataset).labels_of(torch.tensor([7, 5])).tolist() == [3, 1]
        assert len(dataset.read) == many


@dataclass
class Bad:
    """Items of one kind."""

    item: object
    targets: None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> object:
        return self.item


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ((torch.full((1, 2, 2), 2.0), 0), r"in \[0, 1\], got values from 2 to 2; .*Normalize"),
        ((torch.zeros(2, 2), 0), r"images \(C, H, W\).*got \(2, 2\)"),
        ((np.zeros((2, 2, 3)), 0), "arrays of uint8"),
        (({"a": 1}), r"expected items \(image, label\).* a dict with a; give pair="),
        ((torch.zeros(1, 2, 2, dtype=torch.int64), 0), "uint8 or floating point"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(item: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Items(Bad(item)).read(torch.arange(2))
    given = Feed(batch=2, seed=0, device=CPU, workers=1)
    if "Normalize" not in words:  # which training refuses by itself
        with pytest.raises(ValueError, match=words):
            next(Streamed(Items(Bad((torch.zeros(1, 2, 2), 0))), given).epoch(0)) and next(
                Streamed(InMemoryShape(Items(Bad(item))), given).epoch(0)  # type: ignore[arg-type]
            )


class Labelled(Bad):
    """What its items say is another thing than its `targets`."""

    def __init__(self, label: object, targets: object = None) -> None:
        super().__init__((torch.zeros(1, 2, 2), label))
        self.targets = targets  # type: ignore[assignment]


@pytest.mark.parametrize(
    "label",
    [3, 3.0, np.int64(3), np.array([3]), np.array([3], np.uint16), torch.tensor(3), [3]],
)
def test_a_label_is_one_whole_number_whatever_it_is_kept_in(label: Any) -> None:
    rows = torch.arange(4)
    assert Items(Labelled(label)).vary(rows, 0, 0)[1].tolist() == [3] * 4
    columns: list[Any] = [[label] * 4]
    columns += [np.stack([label] * 4)] if isinstance(label, np.ndarray) else []
    for column in columns[-1:]:
        assert Items(Labelled(7, column)).labels.tolist() == [3] * 4
        assert Items(Labelled(7), labels=column).labels.tolist() == [3] * 4


@pytest.mark.parametrize(
    "label", [0.5, torch.tensor(2.5), float("nan"), "cat", None, np.eye(3)[1], torch.eye(3)[1]]
)
def test_what_is_no_whole_number_is_refused_as_a_label(label: Any) -> None:
    words = "expected a whole number, that of a class"
    with pytest.raises(ValueError, match=words):
        Items(Labelled(label)).vary(torch.arange(4), 0, 0)
    column = np.stack([label] * 4) if isinstance(label, np.ndarray) else [label] * 4
    with pytest.raises(ValueError, match=words):
        _ = Items(Labelled(1), labels=column).labels  # type: ignore[arg-type]
    assert Items(Labelled(1, column)).labels.tolist() == [1] * 4  # which may be of another kind


@dataclass
class InMemoryShape:
    """Items whose shape is known without reading one."""

    of: Items
    shape: tuple[int, ...] = (1, 2, 2)

    def __len__(self) -> int:
        return len(self.of)

    def vary(self, rows: Tensor, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        return self.of.vary(rows, seed, epoch)


@pytest.mark.parametrize("part", ["test", "held"])
def test_a_part_without_images_is_refused(part: str) -> None:
    given = {"train": pictures(), "test": pictures(), "names": "ab", "identity": "x"}
    with pytest.raises(ValueError, match=f"expected at least one image in {part}, got none"):
        Sources(**(given | {part: Items([])}))  # type: ignore[arg-type]


LEAVES = """
import torch
from tests.data.test_streamed import feed, pictures
from yopo.data import Streamed
batches = Streamed(pictures(64), feed(workers=2)).epoch(0)
next(batches)
print("read", flush=True)
"""


def test_a_process_that_leaves_in_an_epoch_ends_its_workers_in_silence() -> None:
    words = [sys.executable, "-c", LEAVES]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("read\n", "")


def test_16_bits_of_grey_are_scaled_as_in_files(tmp_path: Path) -> None:
    """pillow's convert() would make all above 255 white."""
    grey = np.tile(np.linspace(0, 65535, 32), (32, 1)).astype(np.uint16)
    picture = Image.fromarray(grey)
    picture.save(tmp_path / "grey.png")
    expected = torch.from_numpy(read_picture(tmp_path / "grey.png", None).copy()).permute(2, 0, 1)
    for given in (picture, Image.open(tmp_path / "grey.png")):
        assert torch.equal(Items([(given, 0)]).read(torch.tensor([0]))[0], expected)
    assert expected.double().mean() == pytest.approx(127.5, abs=1)
    with pytest.raises(ValueError, match="no known range"):
        Items([(Image.new("F", (4, 4)), 0)]).read(torch.tensor([0]))


class Remapped(Dataset[Any]):
    """Its items have other labels than its list."""

    targets = (0, 1, 2, 3)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 8, 8, dtype=torch.uint8), 3 - self.targets[row]


def test_labels_that_contradict_each_other_are_refused() -> None:
    """Else it would be trained on the items' and measured on the list's."""
    for read in (Items.read, lambda items, rows: items.vary(rows, 0, 0)):
        with pytest.raises(ValueError, match="item 1 has the label 2, where the data set's list"):
            read(Items(Remapped()), torch.tensor([1, 2]))
    given = Items(Remapped(), labels=[3, 2, 1, 0])
    assert given.vary(torch.arange(4), 0, 0)[1].tolist() == given.labels.tolist() == [3, 2, 1, 0]
