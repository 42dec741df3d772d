"""The images of a run: those it trains on, those held out, and the test set."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from yopo.core.digest import raw
from yopo.core.random import mix
from yopo.data.sources import Arrays
from yopo.runs.measure import commonest
from yopo.runs.settings import Config

FEW = 200  # held-out images for the guard, in epochs without a full evaluation
Labelled = tuple[Tensor, Tensor]  # (N, C, H, W) uint8, (N,)


@dataclass(slots=True)
class Images:
    """A data set as a run uses it."""

    train: Labelled
    held: Labelled  # not trained on: the best weights are chosen by them
    test: Labelled  # looked at once, at the end
    chance: float  # what always giving the same answer has on the held-out images
    classes: int
    digest: str  # SHA-256 of the whole training set


def held_out(n: int, config: Config) -> int:
    """How many of n training images are held out."""
    given = config.data.held_out
    out = given if isinstance(given, int) else max(1, round(given * n))
    if out >= n:
        advice = f"; give --data.held_out {max(1, n // 5)}" if n > 1 else ""
        raise ValueError(f"expected data.held_out below the {n} training images, got {out}{advice}")
    return out


def split(data: Arrays, config: Config) -> Images:
    """Hold images out of the training set, drawn with the run's seed."""
    sha = hashlib.sha256(repr(tuple(data.x_train.shape)).encode())
    for tensor in (data.x_train, data.y_train):
        sha.update(raw(tensor))
    n = len(data.x_train)
    out = held_out(n, config)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(mix(config.seed, "split")))
    rest, held = order[out:].sort().values, order[:out]
    labels = data.y_train[held]
    return Images(
        train=(data.x_train[rest], data.y_train[rest]),
        held=(data.x_train[held], labels),
        test=(data.x_test, data.y_test),
        chance=max(commonest(y) for y in (labels, labels[:FEW])),
        classes=len(data.names),
        digest=sha.hexdigest(),
    )
