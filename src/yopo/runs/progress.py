"""Where a run is, what it tells the outside, and how the outside stops it."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Any, Protocol


class Watcher(Protocol):
    """What the loop tells the outside."""

    def begin(self, epochs: int) -> None:
        """So many epochs it will be, now that the images are known."""

    def say(self, text: str) -> None:
        """A line for the log."""

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """A step is done."""

    def attack(self, name: str, part: float, accuracy: float) -> None:
        """An attack on images kept aside has come so far, and left this accuracy."""

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch is done; `line` is what the metrics got."""


class Logged:
    """A watcher for whoever gave none: what is said goes to Python's logger `yopo`."""

    def begin(self, epochs: int) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """A line for the log."""
        logging.getLogger("yopo").info(text)

    def step(self, epoch: int, step: int, steps: int, note: str) -> None:
        """Nothing."""

    def attack(self, name: str, part: float, accuracy: float) -> None:
        """Nothing."""

    def epoch(self, line: dict[str, Any]) -> None:
        """Its numbers."""
        self.say(str(line))


class StopRequested(Exception):  # noqa: N818
    """The run was asked to stop; `saved` says whether its state could be written."""

    def __init__(self, saved: bool) -> None:
        super().__init__()
        self.saved = saved


@dataclass
class Progress:
    """Where the run is. All of it is saved and restored."""

    epoch: int = 0
    step: int = 0  # batches done in this epoch
    updates: int = 0  # optimizer steps so far
    train_seconds: float = 0.0
    processor_seconds: float = 0.0  # of this process meanwhile, all its threads together
    evaluate_seconds: float = 0.0
    propagations: float = 0.0  # per training image
    loss_sum: float = 0.0  # of this epoch
    right: float = 0.0
    # Held-out robust accuracy of the best weights (clean in natural training); 2 less if they have
    # learnt nothing.
    best: float = -3.0
    healthiest: float = -1.0  # the best of all evaluations, also the small ones
    cleanest: float = -1.0  # the same of clean accuracy
    best_epoch: int = -1
    rate_scale: float = 1.0
    rollbacks: int = 0
    lines: int = 0  # of the metrics
    saves: int = 0  # checkpoints written
    hardware: list[str] = field(default_factory=list)  # of all its parts

    def become(self, other: "Progress") -> None:
        """Take another's place; whoever holds this one sees it."""
        vars(self).update(vars(other))

    @classmethod
    def restored(cls, saved: object) -> "Progress":
        """From the values of a checkpoint; what an earlier version did not write is as at first."""
        progress = cls()
        for name, first in ((f.name, getattr(progress, f.name)) for f in fields(cls)):
            value = saved.get(name, first) if isinstance(saved, dict) else None
            if isinstance(first, list):
                fits = isinstance(value, list) and all(isinstance(word, str) for word in value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                fits = False
            else:
                whole = isinstance(value, int) and min(first, 0) <= value < 10**9
                fits = whole or isinstance(first, float)
            if not fits:
                raise ValueError(f"it has {repr(value)[:40]} for {name}")
            setattr(progress, name, value)
        return progress


@contextmanager
def stopped_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks to stop; a later Ctrl-C ends at once.

    torchrun passes a signal on that its processes may have had already, so what comes again within
    a second is the same one. Outside the main thread Python hears no signals, nor do we.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first: float | None = None

    def heard(number: int, _frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - first > 1:
            raise KeyboardInterrupt
        ask()

    listening = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        listening.append(signal.SIGHUP)  # the terminal was closed; under nohup that means nothing
    before = {number: signal.signal(number, heard) for number in listening}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
