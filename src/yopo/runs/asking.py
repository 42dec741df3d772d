"""How often the processes of a run ask each other whether one of them is to stop."""

import torch
import torch.distributed as dist

from yopo.core.crew import summed
from yopo.core.parallel import in_group
from yopo.runs.progress import Progress

SECONDS = 5.0  # about, between two questions


class Asking:
    """When to ask in an epoch, from its first step on, and what was answered.

    All must ask at the same steps, so the first one's clock counts: with each question it tells the
    others how long its steps took.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step, self._seconds = progress.step, progress.train_seconds  # of the last question
        self._steps = 1  # from there to the next

    def is_due(self) -> bool:
        """Whether it is time, in each of several processes."""
        return self._progress.step - self._step >= self._steps

    def ask(self, *flags: bool, device: torch.device) -> tuple[bool, ...]:
        """For each flag, whether any process has it up."""
        if not in_group():
            return flags
        p = self._progress
        took = (p.train_seconds - self._seconds) / (p.step - self._step)
        mine = [*map(float, flags), 0.0 if dist.get_rank() else took]
        *up, took = summed(torch.tensor(mine, device=device)).tolist()
        self._step, self._seconds = p.step, p.train_seconds
        self._steps = max(1, int(SECONDS / max(took, 1e-6)))
        return tuple(value > 0 for value in up)
