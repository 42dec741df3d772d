"""The learning rate as a function of the epoch."""

import math

from yopo.runs.settings import Config


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
            return peak * float(c.factor ** sum(epoch >= drop for drop in c.drops))
        case "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * done))
        case "onecycle":
            return peak * (1 - done)
