"""A look at a number on the device that does not wait for the device."""

import math
import time

import torch
from torch import Tensor

EVERY = 0.5  # seconds between copies from a GPU


class Glance:
    """The mean loss for people to watch: of this step on a CPU, a little older on a GPU."""

    def __init__(self) -> None:
        self._seen: float | None = None
        self._coming: tuple[Tensor, torch.cuda.Event, int] | None = None
        self._asked = -math.inf

    def mean(self, total: Tensor, count: int) -> float | None:
        """total / count as of late; None before the first is here, or where that would wait."""
        if total.device.type == "cpu":
            return float(total) / count
        if self._coming is not None and self._coming[1].query():
            value, _, of = self._coming
            self._seen, self._coming = float(value) / of, None
        now = time.monotonic()
        if total.is_cuda and self._coming is None and now - self._asked > EVERY:
            here = torch.empty_like(total, device="cpu", pin_memory=True)
            here.copy_(total, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._coming, self._asked = (here, arrived, count), now
        return self._seen
