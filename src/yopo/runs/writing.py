"""Checkpoints are written one after the other; large ones beside the training."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from yopo.core.parallel import in_group
from yopo.runs import distributed
from yopo.runs.learner import Learner

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LARGE = 20_000_000  # parameters, from which on a checkpoint is written while training goes on
At = tuple[int, int]  # lines of metrics and steps of the epoch


class Writing:
    """At most one checkpoint that is being written, and which was the last that is whole."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.begun_at = time.monotonic()  # when the last one was begun
        self._begun: tuple[Future[bool], At] | None = None  # and what it will be of
        self._last: At = (-1, -1)
        self._thread: ThreadPoolExecutor | None = None

    @cached_property
    def is_beside(self) -> bool:
        """Whether training goes on meanwhile."""
        parameters = sum(p.numel() for p in self.learner.model.parameters())
        return parameters > LARGE or self.learner.snapshot.is_sharded

    @cached_property
    def group(self) -> "ProcessGroup | None":
        """For what processes tell each other of checkpoints, beside the exchanges of training."""
        if not in_group():
            return None
        from yopo.runs import meeting

        return meeting.another_group()

    def begin(self, work: Callable[[], bool], at: At) -> bool:
        """Write the next one, of that moment; say whether it is there, or begun."""
        if self.is_beside:
            self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
            self._begun = self._thread.submit(work), at
            return True
        done: Future[bool] = Future()
        done.set_result(work())
        self._begun = done, at
        return self.settle()

    def settle(self) -> bool:
        """Wait for the one that was begun; say whether the newest is there."""
        if self._begun is not None:
            (written, at), self._begun = self._begun, None
            if not distributed.from_first([float(written.result())])[0]:
                return False
            self._last = at
        return True

    def has(self, at: At) -> bool:
        """Whether the newest is of that moment."""
        self.settle()
        return self._last == at

    def close(self) -> None:
        """Wait until nothing more is written, whatever happened; the others need not be there."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if (group := self.__dict__.pop("group", None)) is not None:
            dist.destroy_process_group(group)  # its threads end here, and not while Python ends
