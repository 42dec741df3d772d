"""Images that are read when an attack comes to them: the same results, and no more memory."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import yopo
from benchmarks.cost import peak_bytes
from tests.robust import EPS, trained
from yopo import Linf
from yopo.core.digest import parts_digest, values_digest
from yopo.data.source import InMemory, Pictures, Rows
from yopo.evaluation import images
from yopo.evaluation.images import Data, Repeated, gather
from yopo.runs import evaluating

evaluate = partial(yopo.evaluate, checks=False)
Found = dict[str, Tensor]


class Kept:
    """Pictures that say which rows were read, and how often."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.labels = x, y
        self.shape, self.reads = tuple(x.shape[1:]), list[list[int]]()

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> Tensor:
        self.reads.append(rows.tolist())
        return self.x[rows]


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if next to nothing could be held in memory."""
    monkeypatch.setattr(images, "HOLD", 1)


def digits(n: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = trained()
    return model, (255 * x[:n]).round().byte(), y[:n]


def loader(x: Tensor, y: Tensor, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=16, **options)


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loader": loader,
    "list": lambda x, y: list(zip(x.split(7), y.split(7), strict=True)),
    "pictures": Kept,
    "rows": lambda x, y: Rows(Kept(x.flip(0), y.flip(0)), torch.arange(len(y)).flip(0)),
}


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_gives_the_same_result_as_what_is_held(way: str, tmp_path: Path) -> None:
    model, x, y = digits()
    go = partial(evaluate, model, threat=Linf(EPS), attacks=["pgd-2-2"], batch=13)
    expected = go(data=(x, y), examples=True)
    data = WAYS[way](x, y)
    assert not isinstance(gather(data, None), InMemory)
    found = go(data=data, examples=True, state=tmp_path)
    for name, outcome in expected.outcomes.items():
        ours = found.outcomes[name]
        assert torch.equal(ours.correct, outcome.correct)
        assert ours.images is None or torch.equal(ours.images, outcome.images)  # type: ignore[arg-type]
    assert found.about["images_sha256"] == values_digest(x, y) == expected.about["images_sha256"]
    part = go(data=data, samples=20).correct["pgd-2-2"]
    assert torch.equal(part, go(data=(x, y), samples=20).correct["pgd-2-2"])


@pytest.mark.usefixtures("streamed")
def test_a_digest_is_one_of_the_images_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what fits into one block it is that of all values, as it always was."""
    _, x, y = digits()
    digests: dict[int, set[str]] = {}
    for each in (7, 59, 60, 1000):
        monkeypatch.setattr(images, "BLOCK", each * x[0].numel())
        of = partial(Data, device=torch.device("cpu"), dtype=torch.float32)
        digests[each] = {
            of(gather(data(x, y), None), y).digest(batch)
            for data in (*WAYS.values(), InMemory)
            for batch in (1, 13, 100)
        }
        assert len(digests[each]) == 1
    assert digests[60] == digests[1000] == {values_digest(x, y)}
    assert len(set.union(*digests.values())) == 3
    monkeypatch.setattr(images, "BLOCK", 7 * x[0].numel())
    for row in (0, 30, 59):
        other, labels = x.clone(), y.clone()
        other[row, 0, 3, 3] += 1
        labels[row] += 1
        for data in (InMemory(other, y), InMemory(x, labels)):
            assert of(data, data.labels).digest(13) not in digests[7]


def test_workers_read_what_is_read_without_them() -> None:
    model, x, y = digits()
    results = [
        evaluate(model, Kept(x, y), Linf(EPS), "pgd-2", batch=13, workers=workers)
        for workers in (0, 2)
    ]
    assert torch.equal(results[0].correct["pgd-2"], results[1].correct["pgd-2"])
    assert results[0].about["images_sha256"] == results[1].about["images_sha256"]


@pytest.mark.usefixtures("streamed")
def test_a_loader_that_has_workers_is_not_read_by_others() -> None:
    model, x, y = digits()
    found = evaluate(model, loader(x, y, num_workers=1), Linf(EPS), "pgd-1", batch=30, workers=1)
    want = evaluate(model, Kept(x, y), Linf(EPS), "pgd-1", batch=30)
    assert torch.equal(found.correct["pgd-1"], want.correct["pgd-1"])


class Unreadable(Kept):
    def read(self, rows: Tensor) -> Tensor:
        if 30 in rows.tolist():
            raise ValueError("photos/30.jpg is damaged")
        return super().read(rows)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_cannot_be_read_is_said_in_its_own_words(workers: int) -> None:
    model, x, y = digits()
    with pytest.raises(ValueError, match=r"^photos/30.jpg is damaged$"):
        evaluate(model, Unreadable(x, y), Linf(EPS), "pgd-2", batch=13, workers=workers)


def test_only_what_stands_and_was_asked_for_is_read() -> None:
    model, x, y = digits()
    kept = Kept(x, y)
    result = evaluate(model, kept, Linf(EPS), "pgd-1", samples=40, batch=10)
    assert max(map(max, kept.reads)) == 39
    standing = result.correct["clean"].nonzero()[:, 0].tolist()
    read = [row for rows in kept.reads for row in rows]
    assert read[-len(standing) :] == standing


def test_images_are_drawn_before_any_is_read() -> None:
    _, x, y = digits()
    kept = Kept(x, y)
    drawn, words = evaluating.choose_images(kept, 7, seed=3)
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(3))[:7].sort().values
    assert not kept.reads
    assert torch.equal(drawn.read(torch.arange(7)), x[rows])
    assert torch.equal(drawn.labels, y[rows])
    assert sorted(kept.reads[0]) == rows.tolist()
    assert words == ", drawn from 60 with seed 3"


class Made:
    """So many pictures out of nothing, as large as memory never has to be."""

    shape = (3, 32, 32)

    def __init__(self, n: int) -> None:
        self.labels = torch.arange(n) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, rows: Tensor) -> Tensor:
        shade = (rows % 200 + 20 * (rows % 2)).byte()
        return shade.view(-1, 1, 1, 1).expand(len(rows), *self.shape).contiguous()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.arange(len(self)).split(20):
            yield self.read(rows), self.labels[rows]


class Batches:
    """The same, as batches alone."""

    def __init__(self, n: int) -> None:
        self.made = Made(n)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.made)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("kind", [Made, Batches])
def test_memory_does_not_grow_with_the_images(kind: type[Made | Batches]) -> None:
    """What grows is one number each: labels, keys, logits; a picture has 3,072 bytes."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 2))

    def peak(n: int) -> int:
        data: Any = kind(n)
        return peak_bytes(lambda: evaluate(net, data, Linf(EPS), "pgd-1", batch=20))

    few, many = peak(80), peak(800)
    assert many - few < 720 * 200 < 720 * 3072


@pytest.mark.usefixtures("streamed")
def test_batches_in_another_order_are_refused() -> None:
    model, x, y = digits()
    shuffled = loader(x, y, shuffle=True, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"same images in every pass.* without shuffle"):
        evaluate(model, shuffled, Linf(EPS), "pgd-1")

    class Fewer:
        def __init__(self) -> None:
            self.left = 4

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.left -= 1
            return iter([*zip(x.split(10), y.split(10), strict=True)][: self.left])

    with pytest.raises(ValueError, match=r"expected 30 images in every pass, .* got 20"):
        evaluate(model, Fewer(), Linf(EPS), "pgd-1", batch=10)


def test_what_is_small_or_comes_once_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = digits()
    expected = evaluate(model, (x, y), Linf(EPS), "pgd-2").accuracy
    assert evaluate(model, loader(x, y, shuffle=True), Linf(EPS), "pgd-2").accuracy == expected
    monkeypatch.setattr(images, "HOLD", 1)
    once = ((a, b) for a, b in zip(x.split(9), y.split(9), strict=True))
    assert evaluate(model, once, Linf(EPS), "pgd-2").accuracy == expected


@pytest.mark.usefixtures("streamed")
def test_rows_of_passes_are_those_of_the_images() -> None:
    x, y = torch.rand(50, 2, 3), torch.zeros(50, dtype=torch.long)
    passes = gather([(a, b) for a, b in zip(x.split(8), y.split(8), strict=True)], None)
    assert isinstance(passes, Repeated)
    assert passes.shape == (2, 3)
    for rows in ([0], [0, 1, 2], [5, 17, 49], [3], [], [4, 40], [41], [41, 42]):
        chosen = torch.tensor(rows, dtype=torch.long)
        assert torch.equal(passes.read(chosen), x[chosen])


def test_a_digest_of_parts_is_that_of_the_whole() -> None:
    x, y = torch.rand(11, 2, 3), torch.arange(11)
    for size in (1, 4, 11):
        assert parts_digest(11, x.split(size), y, "a") == values_digest(x, y, "a")


def pictures(_: Pictures) -> None:
    """What stands here is what evaluations take; mypy compares."""


pictures(Kept(torch.zeros(1, 1), torch.zeros(1)))


def test_loaders_leave_the_random_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader draws a seed in every pass: a training that evaluates would go on otherwise."""
    data = TensorDataset(torch.rand(12, 3, 4, 4), torch.arange(12) % 3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    for hold in (images.HOLD, 1):  # in memory, and read in every pass
        monkeypatch.setattr(images, "HOLD", hold)
        before = torch.get_rng_state()
        yopo.evaluate(net, DataLoader(data, batch_size=5), yopo.Linf(0.1), ["pgd-2"])
        assert torch.equal(torch.get_rng_state(), before)
