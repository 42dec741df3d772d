"""The images of a run: those it trains on, those held out, and the test set."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from yopo.core.checks import check_targets
from yopo.core.digest import raw, values_digest
from yopo.core.random import mix
from yopo.data.batches import Batches
from yopo.data.loader import Loader
from yopo.data.source import (
    Feed,
    InMemory,
    Opens,
    Pictures,
    Rows,
    Source,
    Sources,
    can_be_sized,
    can_read,
)
from yopo.data.sources import Arrays
from yopo.data.streamed import Streamed
from yopo.runs.measure import commonest
from yopo.runs.overlay import Tree
from yopo.runs.sections import DataConfig, ModelConfig
from yopo.runs.settings import Config

SAMPLE = 64  # images by which a network normalises, where not all are in memory
MOST = 16  # processes that decode, by default
FEW = 200  # held-out images for the guard, in epochs without a full evaluation
DataSet = Arrays | Sources


@dataclass
class Images:
    """A data set as a run uses it."""

    batches: Opens  # makes batches of those to train on
    many: int | None  # to train on, if that is known before
    held: Pictures  # not trained on: the best weights are chosen by them
    test: Pictures  # looked at once, at the end
    classes: int
    digest: str  # SHA-256 of the whole training set, or of what tells it from another
    test_digest: Callable[[], str]

    @property
    def identity(self) -> Tree:
        """What a resumed run must have, too: with other numbers it would hold other images out."""
        return {
            "training data": self.digest,
            "training images": self.many,
            "held-out images": len(self.held),
        }

    def checked(self) -> "Images":
        """The same; what measuring would refuse after the last epoch is refused now, if cheap."""
        given = [part for part in (self.held, self.test) if not isinstance(part, Rows)]
        for pictures in given:  # Rows are of those to train on
            pictures.read(torch.zeros(1, dtype=torch.long))
            # Of all where they are in memory; else images may have to be decoded for theirs.
            first = Rows(pictures, torch.zeros(1, dtype=torch.long))
            y = first.labels if hasattr(pictures, "labels_of") else pictures.labels
            check_targets(y, y, self.classes)
        return self

    @cached_property
    def chance(self) -> float:
        """What always giving the same answer has on the held-out images."""
        y = self.held.labels
        return max(commonest(part) for part in (y, y[:FEW]))


def look(data: DataSet, model: ModelConfig) -> Tensor:  # (N, C, H, W) uint8
    """Training images by which the network is built: those that it normalises by."""
    pictures = data.pictures
    if isinstance(pictures, InMemory):
        return pictures.x
    many = min(len(pictures), SAMPLE) if model.normalize is True else 0
    if not many:
        return torch.empty(0, *pictures.shape, dtype=torch.uint8)
    return pictures.read(torch.arange(many) * len(pictures) // many)


def held_out(n: int, config: Config) -> int:
    """How many of n training images are held out."""
    given = config.data.held_out
    out = given if isinstance(given, int) else max(1, round(given * n))
    if out >= n:
        advice = f"; give --data.held_out {max(1, n // 5)}" if n > 1 else ""
        raise ValueError(f"expected data.held_out below the {n} training images, got {out}{advice}")
    return out


def to_train_on(data: DataSet, config: Config) -> int | None:
    """How many images are trained on, if that is known before their batches are."""
    if data.many is None or (isinstance(data, Sources) and data.held is not None):
        return data.many
    return data.many - held_out(data.many, config)


def split(data: DataSet, config: Config) -> Images:
    """Hold images out of the training set, drawn with the run's seed."""
    _check_heeded(data, config.data)
    if config.schedule.sizes:
        _check_sizable(data, config.data)
    if isinstance(data, Sources):
        return _of_sources(data, config)
    sha = hashlib.sha256(repr(tuple(data.x_train.shape)).encode())
    for tensor in (data.x_train, data.y_train):
        sha.update(raw(tensor))
    rest, held = _drawn(len(data.x_train), config)
    x, y = data.x_train[rest], data.y_train[rest]
    resident = config.data.resident is not False

    def of_arrays(feed: Feed) -> Loader:
        return Loader(
            x,
            y,
            batch=feed.batch,
            seed=feed.seed,
            device=feed.device,
            augment=feed.augment,
            rank=feed.rank,
            world=feed.world,
            resident=resident,
        )

    kept = InMemory(data.x_train[held], data.y_train[held])
    test = data.test
    return Images(
        batches=of_arrays,
        many=len(rest),
        held=kept,
        test=test,
        classes=len(data.names),
        digest=sha.hexdigest(),
        test_digest=lambda: values_digest(test.x, test.labels),
    )


def _check_heeded(data: DataSet, c: DataConfig) -> None:
    """Refuse settings that these data would not heed."""
    if isinstance(data, Arrays) and c.workers is not None:
        raise ValueError(
            f"data.workers decode images that are read when their turn comes, and those of {c.name}"
            " are in memory; leave it out"
            + (", or say --data.resident false" if c.name == "folder" else "")
        )
    if isinstance(data, Arrays) or not (
        isinstance(data.train, Batches) or hasattr(data.train, "epoch")
    ):
        return
    given = {
        "jitter": c.jitter,
        "crop": c.crop,
        "flip": c.flip,
        "cutout": c.cutout,
        "workers": c.workers or 0,
    }
    if unheard := [f"--data.{name}" for name, value in given.items() if value]:
        raise ValueError(
            f"the training batches of {c.name} come from a source that makes them itself, and "
            f"would not heed {', '.join(unheard)}; leave that out, or let the source do it"
        )


def _check_sizable(data: DataSet, c: DataConfig) -> None:
    """Refuse a schedule of sizes for images that have but one."""
    if isinstance(data, Sources) and can_be_sized(data.train):
        return
    why, advice = "have one size", "leave it out, or give the pictures a method sized(side)"
    if isinstance(data, Arrays):
        why, advice = "are in memory in one size", "leave it out"
        if c.name == "folder":
            advice = "say --data.resident false, or leave it out"
    raise ValueError(
        "schedule.sizes decodes training pictures in another size in each phase, and those of "
        f"{c.name} {why}; {advice}"
    )


def _of_sources(data: Sources, config: Config) -> Images:
    train, held = data.train, data.held
    if held is None:
        assert can_read(train)  # as its own check has it
        rest, out = _drawn(len(train), config)
        train, held = Rows(train, rest), Rows(train, out)

    def test_digest() -> str:
        told = getattr(data.test, "identity", data.identity)
        return values_digest("identity", told, data.test.labels)

    return Images(
        batches=_opens(train),
        many=to_train_on(data, config),
        held=held,
        test=data.test,
        classes=len(data.names),
        digest=values_digest("identity", data.identity),
        test_digest=test_digest,
    )


def _opens(train: Source | Opens | Pictures) -> Opens:
    """Who makes batches of it."""
    if can_read(train):
        return lambda feed: Streamed(train, feed)
    if hasattr(train, "epoch"):
        return lambda feed: _the_only_one(cast(Source, train), feed)
    return cast(Opens, train)


def _the_only_one(train: Source, feed: Feed) -> Source:
    """Batches that were made before anyone said which process they are for."""
    if feed.world > 1:
        raise ValueError(
            f"{feed.world} processes would train on the same batches: train was made without a "
            "Feed; give yopo.data.Sources(train=open), where open(feed) returns the batches of "
            "process feed.rank of feed.world"
        )
    return train


def _drawn(n: int, config: Config) -> tuple[Tensor, Tensor]:
    """Rows to train on, in order, and rows to hold out."""
    out = held_out(n, config)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(mix(config.seed, "split")))
    held = order[:out].clone()  # a view would keep all of it in memory
    is_left = torch.ones(n, dtype=torch.bool).index_fill_(0, held, False)
    return is_left.nonzero()[:, 0], held


def workers(config: DataConfig) -> int:
    """Processes that decode for this one; by default the machine's cores are shared out."""
    if config.workers is not None:
        return config.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MOST, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
