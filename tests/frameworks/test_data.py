"""Data sets and loaders of other libraries as training data, each the real package."""

import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from yopo.data import Batches, Feed, Items, Loader, Rows, Streamed
from yopo.data.batches import Opened

datasets = pytest.importorskip("datasets", reason="needs datasets")
wds = pytest.importorskip("webdataset", reason="needs webdataset")
stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

CPU = torch.device("cpu")
N = 24
pytestmark = pytest.mark.filterwarnings(  # files that webdataset leaves open; torchdata's base
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:'set_vital' is deprecated",
)


def feed(**over: Any) -> Feed:
    return replace(Feed(batch=4, seed=3, device=CPU), **over)


def images(n: int = N) -> Tensor:  # (n, 3, 4, 5) uint8; the first pixel numbers them
    x = torch.randint(0, 256, (n, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator())
    x[:, :, 0, 0] = torch.arange(n)[:, None]
    return x


def picture(x: Tensor) -> Image.Image:
    return Image.fromarray(x.permute(1, 2, 0).numpy())


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def numbers(batches: list[Any]) -> list[int]:
    return [int(i) for x, _ in batches for i in (255 * x[:, 0, 0, 0]).round()]


# ---------------------------------------------------------------- Hugging Face


def hugging() -> Any:
    pictures = [picture(x) for x in images()]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    )
    columns = {"image": pictures, "label": [i % 3 for i in range(N)]}
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_of_hugging_faces_is_its_arrays(workers: int) -> None:
    found = Items(hugging())
    expected = Loader(images(), torch.arange(N) % 3, batch=4, seed=3, device=CPU)
    assert same(list(Streamed(found, feed(workers=workers)).epoch(2)), list(expected.epoch(2)))
    assert torch.equal(found.labels, torch.arange(N) % 3)
    assert torch.equal(found.read(torch.tensor([5, 2])), images()[[5, 2]])
    assert found.shape == (3, 4, 5)


def transformed() -> tuple[Any, list[int]]:
    """A data set whose images its user's own function makes, and how many that was asked for."""
    asked: list[int] = []

    def other(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        asked.append(len(batch["image"]))
        batch["image"] = [np.array(image) for image in batch["image"]]
        batch["label"] = [2 - label for label in batch["label"]]
        return batch

    return hugging().with_transform(other), asked


def test_of_a_transformed_data_set_only_those_items_are_made_whose_labels_are_asked_for() -> None:
    data, asked = transformed()
    rows = torch.tensor([3, 20])
    held = Rows(Items(data), rows)
    assert held.labels.tolist() == [2, 0]  # as the function changes them
    assert sum(asked) == 2
    assert torch.equal(held.read(torch.arange(2)), images()[rows])
    given = Items(transformed()[0], labels=[2 - i % 3 for i in range(N)])
    assert torch.equal(given.labels, Items(data).labels)


def test_labels_of_other_formats_are_the_columns() -> None:
    for kind in ("torch", "numpy", None):
        data = hugging().with_format(kind)
        assert torch.equal(Items(data).labels, torch.arange(N) % 3)


def streamed(given: Feed, workers: int) -> Any:
    """A part for each process, with a state."""
    data = hugging().to_iterable_dataset(num_shards=4)
    if given.seed:  # with one, shards alone are shuffled
        data = data.shuffle(seed=given.seed, buffer_size=1)
    split = importlib.import_module("datasets.distributed").split_dataset_by_node
    data = split(data, given.rank, given.world)

    def prepared(item: dict[str, Any]) -> dict[str, Any]:
        array = np.array(item["image"])
        return {"image": torch.from_numpy(array).permute(2, 0, 1), "label": item["label"]}

    data = data.map(prepared)
    return stateful.StatefulDataLoader(
        data, batch_size=given.share, num_workers=workers, drop_last=True, collate_fn=collated
    )


def collated(items: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    x = [torch.as_tensor(np.asarray(item["image"]), dtype=torch.uint8) for item in items]
    return torch.stack(x), torch.tensor([item["label"] for item in items])


@pytest.mark.parametrize(("workers", "seed"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_a_stream_of_hugging_faces_resumes_by_its_state(workers: int, seed: int) -> None:
    said: list[str] = []

    def made() -> Opened:
        batches = Batches(lambda given: streamed(given, workers), images=16)
        return batches(feed(seed=seed, say=said.append))

    whole = list(made().epoch(1))
    assert len(whole) == 4
    other = made()
    rest = other.epoch(1)
    begun = [next(rest) for _ in range(2)]
    assert same(begun, whole[:2])
    state = json.loads(json.dumps(other.state()))
    assert state is not None
    again = made()
    assert again.restore(state) == ""
    assert same(list(again.epoch(1, 2)), whole[2:])
    if seed:
        assert numbers(list(made().epoch(2))) != numbers(whole)
    if not (seed and workers):
        assert not said
    for line in said:  # datasets 5.2 does not take back a shuffled stream's state in a worker
        assert "did not take its state back" in line


# ---------------------------------------------------------------- torchdata


class Counted(Dataset[Any]):
    """Says what was read, in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        self.read.append(row)
        return images()[row], row % 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_by_its_state_and_reads_nothing_again(workers: int) -> None:
    def made() -> tuple[Opened, Counted]:
        data = Counted()
        loader = stateful.StatefulDataLoader(data, 4, shuffle=True, num_workers=workers)
        return Batches(loader)(feed()), data

    whole = list(made()[0].epoch(1))
    assert sorted(numbers(whole)) == list(range(N))
    first, _ = made()
    assert list(first.epoch(0)) != []  # a whole epoch before
    rest = first.epoch(1)
    assert same([next(rest) for _ in range(4)], whole[:4])
    state = json.loads(json.dumps(first.state()))
    again, data = made()
    assert again.restore(state) == ""
    assert same(list(again.epoch(1, 4)), whole[4:])
    if workers == 0:
        assert data.read == numbers(whole[4:])
    assert same(list(again.epoch(2)), list(first.epoch(2)))
    passed, data = made()  # without the state: exact as well, and read again
    assert same(list(passed.epoch(1, 4)), whole[4:])


class Stream(IterableDataset[Any]):
    """Draws anew in each epoch that it is told of; no state of its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N, generator=torch.Generator().manual_seed(self.epoch))
        for i in order.tolist():
            yield images()[i], i % 3


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stateful_loader_goes_on_between_epochs_and_in_them(
    stream: bool, persistent: bool
) -> None:
    def made() -> Opened:
        data, shuffle = (Stream(), None) if stream else (Counted(), True)
        loader = stateful.StatefulDataLoader(
            data, 4, shuffle, num_workers=1, persistent_workers=persistent
        )
        return Batches(loader, images=N)(feed())

    first = made()
    epochs = [list(first.epoch(e)) for e in range(3)]
    assert numbers(epochs[0]) != numbers(epochs[1]) != numbers(epochs[2])
    assert same(list(made().epoch(1)), epochs[1])
    for start in (2, 6):  # in the middle, and at the end
        other = made()
        list(other.epoch(0))
        rest = other.epoch(1)
        for _ in range(start):
            next(rest)
        again = made()
        assert again.restore(json.loads(json.dumps(other.state()))) == ""
        assert same(list(again.epoch(1, start)), epochs[1][start:])
        assert same(list(again.epoch(2)), epochs[2])


# ---------------------------------------------------------------- webdataset


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    for k in range(4):
        with wds.TarWriter(str(tmp_path / f"{k}.tar")) as tar:
            for i in range(k, N, 4):
                file = io.BytesIO()
                picture(images()[i]).save(file, "png")
                tar.write({"__key__": f"{i:04d}", "png": file.getvalue(), "cls": str(i % 3)})
    return sorted(str(path) for path in tmp_path.glob("*.tar"))


def web(urls: list[str], given: Feed, workers: int) -> Any:
    kept = {"persistent_workers": True} if workers else {}
    data = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False)
    data = data.compose(wds.detshuffle(10)).decode("torchrgb8").to_tuple("png", "cls")
    return wds.WebLoader(data.batched(given.share), batch_size=None, num_workers=workers, **kept)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_shared_out_among_processes_and_workers(
    shards: list[str], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen: list[int] = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))

        def made(rank: int = rank) -> Opened:
            batches = Batches(lambda given: web(shards, given, workers), images=N)
            return batches(feed(batch=12, rank=rank, world=2))

        whole = list(made().epoch(3))
        assert len(whole) == 2
        seen += numbers(whole)
        assert same(list(made().epoch(3, 1)), whole[1:])
        opened = made()
        list(opened.epoch(5))
        assert same(list(opened.epoch(3)), whole)
        assert numbers(list(made().epoch(4))) != numbers(whole)
        assert all([int(i) % 3 for i in numbers([pair])] == pair[1].tolist() for pair in whole)
    assert sorted(seen) == list(range(N))
