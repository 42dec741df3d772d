"""Loaders of the user's own as training batches: order, skipping, state, and what is refused."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from tests.data.test_loader import CPU, assert_equal
from tests.tiny import as_one_of, in_two
from yopo.data import Batches, Feed
from yopo.data.batches import Opened

SEVEN: Any = 7
IMAGES = torch.zeros(4, 1, 2, 2)


def feed(**over: Any) -> Feed:
    return replace(Feed(batch=4, seed=3, device=CPU), **over)


class Noisy(TensorDataset):
    """Labels number the images; what is drawn is in the pixels."""

    def __init__(self, n: int = 18) -> None:
        super().__init__(torch.zeros(n, 1, 2, 2), torch.arange(n))

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        drawn = float(torch.rand(())) + random.random() + np.random.rand()
        return torch.full((1, 2, 2), drawn / 3), self.tensors[1][row]


def opened(workers: int = 0, **how: Any) -> Opened:
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers, **how)
    return Batches(loader)(feed())


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_a_function_of_seed_and_epoch_and_its_rest_is_its_rest(workers: int) -> None:
    made = opened(workers)
    assert len(made) == 4
    whole = list(made.epoch(1))
    assert len({int(i) for _, y in whole for i in y}) == 16  # two are left over, others each time
    torch.manual_seed(99)
    random.seed(99)
    before = torch.get_rng_state(), random.getstate()
    assert_equal(list(opened(workers).epoch(1, 3)), whole[3:])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert_equal(list(made.epoch(1)), whole)
    assert not torch.equal(next(made.epoch(2))[1], whole[0][1])
    assert not [*made.epoch(1, 4)]


class Told(IterableDataset[Any]):
    """Draws anew in each epoch that it is told of."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch))
        for i in order.tolist():
            yield torch.rand(1, 2, 2), i


class Wrapped:
    """A loader inside another's, as webdataset has it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.pipeline = [loader]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.pipeline[0])


KEPT: dict[str, Callable[..., Any]] = {
    "rows": lambda **how: DataLoader(Noisy(24), 4, shuffle=True, **how),
    "stream": lambda **how: DataLoader(Told(), 4, **how),
    "wrapped": lambda **how: Wrapped(DataLoader(Told(), 4, **how)),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KEPT)
def test_workers_that_are_to_stay_draw_what_fresh_ones_draw(kind: str, workers: int) -> None:
    def made(persistent: bool = True) -> Opened:
        loader = KEPT[kind](num_workers=workers, persistent_workers=persistent)
        return Batches(loader, images=24)(feed())

    other = made()
    list(other.epoch(0))
    next(other.epoch(4))  # left early
    whole = list(other.epoch(1))
    assert_equal(list(made().epoch(1)), whole)
    assert_equal(list(made(persistent=False).epoch(1)), whole)
    resumed = made()
    list(resumed.epoch(3))
    assert_equal(list(resumed.epoch(1, 2)), whole[2:])
    assert_differ(list(other.epoch(2)), whole)


def assert_differ(one: list[Any], other: list[Any]) -> None:
    for part in (0, 1):
        assert not torch.equal(
            *(torch.cat([batch[part] for batch in all_]) for all_ in (one, other))
        )


def test_a_generator_of_the_loaders_own_is_seeded_too() -> None:
    def again() -> list[tuple[Tensor, Tensor]]:
        return list(opened(generator=torch.Generator()).epoch(5))

    assert_equal(again(), again())


def test_samplers_hear_of_the_epoch_and_processes_share_the_images() -> None:
    def make(given: Feed) -> DataLoader[Any]:
        data = Noisy(16)
        sampler: Any = DistributedSampler(data, given.world, given.rank)
        return DataLoader(data, given.share, sampler=sampler)

    both = [Batches(make)(feed(rank=r, world=2)) for r in (0, 1)]
    seen = [[int(i) for made in both for _, y in made.epoch(e) for i in y] for e in (0, 1)]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(16))
    assert seen[0] != seen[1]
    with pytest.raises(ValueError, match="each of 2 processes would train on the same images"):
        Batches(DataLoader(Noisy(), 2))(feed(world=2))


INSIDE: dict[str, Callable[[Any], Any]] = {
    "told": lambda data: DistributedSampler(data, 1, 0),
    "seeded": lambda data: RandomSampler(data, generator=torch.Generator()),
}


@pytest.mark.parametrize("around", [lambda loader: loader, Wrapped])
@pytest.mark.parametrize("kind", INSIDE)
def test_a_sampler_inside_a_batch_sampler_hears_of_the_epoch(kind: str, around: Any) -> None:
    def made() -> Opened:
        data = Noisy(16)
        batches = BatchSampler(INSIDE[kind](data), 4, drop_last=True)
        return Batches(around(DataLoader(data, batch_sampler=batches)), images=16)(feed())

    one = made()
    first, second = list(one.epoch(0)), list(one.epoch(1))
    assert_differ(first, second)
    assert_equal(list(made().epoch(1)), second)


class Endless(IterableDataset[Any]):
    """Without length; 10 images in a pass, and a state of its own."""

    def __init__(self, n: int = 10) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.n):
            yield {"image": torch.full((1, 2, 2), 255, dtype=torch.uint8), "label": i}


def test_a_loader_without_length_needs_images_and_begins_again_when_it_ends() -> None:
    loader = DataLoader(Endless(), 4)
    with pytest.raises(ValueError, match="expected images, how many an epoch has"):
        Batches(loader)(feed())
    made = Batches(loader, images=20)(feed())
    assert len(made) == 5
    batches = list(made.epoch(0))
    assert [y.tolist() for _, y in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]
    assert all(x.dtype == torch.float32 and bool((x == 1).all()) for x, _ in batches)
    with pytest.raises(ValueError, match="the loader gave no batch of 4 images"):
        next(Batches(DataLoader(Endless(3), 4), images=8)(feed()).epoch(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Batches(SEVEN), "expected a loader of batches, or a function"),
        (lambda: Batches(lambda _: SEVEN)(feed()), "expected a loader of batches, got int"),
        (lambda: Batches(DataLoader(Noisy(3), 4))(feed()), "at least one batch of 4 images"),
        (
            lambda: next(Batches(DataLoader(Noisy(), 6), images=18)(feed()).epoch(0)),
            "expected batches of 4 images in each process, got 6; give --batch 6",
        ),
        (
            lambda: next(Batches([(torch.zeros(4, 2), torch.zeros(4))])(feed()).epoch(0)),
            r"shapes \(4, 2\) and \(4,\); pair= makes",
        ),
        (
            lambda: next(Batches([(IMAGES, torch.arange(4) / 2)])(feed()).epoch(0)),
            "expected a whole number, .* as labels of 4 images, got parts of one",
        ),
        (
            lambda: next(Batches([(IMAGES, ["cat"] * 4)])(feed()).epoch(0)),
            "expected a whole number, .* as labels of 4 images, got .'cat'",
        ),
    ],
)
def test_what_is_no_loader_of_such_batches_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_labels_may_be_a_column() -> None:
    made = Batches([(IMAGES, torch.arange(4.0)[:, None])])(feed())
    assert next(made.epoch(0))[1].tolist() == [0, 1, 2, 3]


class Stateful:
    """A loader that knows where it is, and does not repeat itself."""

    def __init__(self, odd: Any = 0) -> None:
        self.at, self.started, self.odd = 0, 0, odd

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.started += 1
        while self.at < 5:
            self.at += 1
            yield torch.zeros(4, 1, 2, 2), torch.full((4,), self.at)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at), "odd": self.odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


def test_a_loader_with_a_state_goes_on_without_drawing_again() -> None:
    said: list[str] = []
    made = Batches(Stateful())(feed(say=said.append))
    batches = made.epoch(2)
    assert made.state() is None
    next(batches), next(batches)
    state = json.loads(json.dumps(made.state()))
    other = Batches(Stateful())(feed())
    assert other.restore(state) == ""
    assert [int(y[0]) for _, y in other.epoch(2, 2)] == [3, 4, 5]
    elsewhere = Batches(Stateful())(feed())
    elsewhere.restore(state)
    assert [int(y[0]) for _, y in elsewhere.epoch(2, 3)] == [4, 5]  # passed over, not restored
    assert "no load_state_dict" in opened().restore(state)
    with pytest.raises(ValueError, match="no place in the training data"):
        other.restore({"a": 1})
    unkept = Batches(Stateful(odd=object()))(feed(say=said.append))
    next(unkept.epoch(0))
    assert unkept.state() is None
    assert said == [
        "the state of Stateful is not kept (it holds a object): --resume draws the batches of the "
        "epoch so far again"
    ]


def test_a_loader_that_does_not_take_its_state_back_draws_again() -> None:
    class Forgets(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise IndexError("a page\nlist index out of range")

    said: list[str] = []
    made = Batches(Forgets())(feed(say=said.append))
    rest = made.epoch(0)
    next(rest), next(rest)
    again = Batches(Forgets())(feed(say=said.append))
    again.restore(made.state())
    assert [int(y[0]) for _, y in again.epoch(0, 2)] == [3, 4, 5]
    assert said == [
        "Forgets did not take its state back (list index out of range); the batches of the epoch "
        "so far are drawn again"
    ]


# ---------------------------------------------------------------- two processes


class Shard(IterableDataset[Any]):
    """Each `step`-th image from `first` on, noisy or not."""

    def __init__(self, first: int, step: int, noise: float) -> None:
        self.first, self.step, self.noise = first, step, noise

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.first, 32, self.step):
            yield torch.full((1, 2, 2), i / 32) + self.noise * torch.rand(1, 2, 2), i % 7


def first_epochs(given: Feed, split: bool, noise: float) -> list[int]:
    """Labels of two epochs."""
    shard = Shard(given.rank, given.world, noise) if split else Shard(0, 1, noise)
    made = Batches(DataLoader(shard, given.share), images=16)(given)
    return [int(i) for epoch in (0, 1) for _, y in made.epoch(epoch) for i in y]


def share_out(rank: int, port: int, out: str) -> None:
    """In one of two: what is said of streams that are shared out, and of others."""
    as_one_of(2, rank, port)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for split, noise in itertools.product((True, False), (0.0, 0.1)):
        said: list[str] = []
        try:
            found[f"{split} {noise}"] = first_epochs(
                feed(rank=rank, world=2, say=said.append), split, noise
            )
        except ValueError as error:
            said.append(f"refused: {error}")
        found[f"said {split} {noise}"] = said
    torch.save(found, f"{out}/{rank}.pt")
    dist.destroy_process_group()


def test_a_stream_that_all_processes_would_go_through_is_refused(tmp_path: Path) -> None:
    both = in_two(share_out, tmp_path)
    for noise in (0.0, 0.1):
        assert not any(each[f"said True {noise}"] for each in both)
        assert both[0][f"True {noise}"] != both[1][f"True {noise}"]
    for each in both:
        (refused,) = each["said False 0.0"]
        assert refused.startswith("refused: processes 0 and 1 have the same images")
        assert "split_dataset_by_node" in refused
        (said,) = each["said False 0.1"]  # varied by chance: their labels tell, once
        assert said.startswith("processes 0 and 1 have the same labels in their first batch")
        assert len(each["False 0.1"]) == 16
