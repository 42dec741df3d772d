"""What is a function of the epoch: the learning rate, and in which phase training is."""

import math
from typing import NamedTuple

from yopo.runs.settings import Config

NEAR = 1e-6  # epochs: 6.000000001, which a change of epochs makes of 6, is 6


class TrainingPhase(NamedTuple):
    """Epochs that are trained alike, but for the rate and eps."""

    first: int
    end: int  # the epoch after its last
    size: int | None  # side of training pictures; None: as data.size has it
    m: int | None  # propagations; None: as method.m has it

    @property
    def epochs(self) -> int:
        """How many."""
        return self.end - self.first


def phases(config: Config) -> list[TrainingPhase]:
    """Those that a run has, in order. An epoch belongs to the last one that has begun by then."""
    c = config.schedule
    later = [min(math.ceil(begin - NEAR), config.epochs) for begin in c.phases]
    begins, ends = [0, *later], [*later, config.epochs]
    sizes, m = ([*values, None] if values else [None] * len(ends) for values in (c.sizes, c.m))
    rows = zip(begins, ends, sizes, m, strict=True)
    return [TrainingPhase(*row) for row in rows if row[0] < row[1]]


def phase(config: Config, epoch: int) -> TrainingPhase:
    """The one of an epoch, counted from 0; after the last epoch still the last."""
    return next(p for p in reversed(phases(config)) if p.first <= epoch)


def rate(config: Config, epoch: float) -> float:
    """The rate at `epoch`, a real number from 0 to config.epochs."""
    c, peak, end = config.schedule, config.optimizer.lr, config.epochs
    warmup = c.warmup or (0.3 * end if c.name == "onecycle" else 0.0)
    if epoch < warmup:
        return peak * (epoch + 1e-3) / (warmup + 1e-3)
    done = (epoch - warmup) / max(end - warmup, 1e-9)
    match c.name:
        case "constant":
            return peak
        case "piecewise":
            return peak * float(c.factor ** sum(epoch >= drop - NEAR for drop in c.drops))
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "onecycle":
            return peak * (1 - done)
