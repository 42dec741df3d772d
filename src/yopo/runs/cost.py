"""What a training would take here: a few steps of each of its phases, timed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from torch import Tensor

from yopo.core.propagation import ATTACK_ONLY, FORWARD
from yopo.runs.distributed import anyone
from yopo.runs.schedule import TrainingPhase, phases
from yopo.runs.settings import Config
from yopo.runs.trainer import Trainer

STEPS = 5  # that are timed, at least
LONG = 30.0  # seconds after which no more are timed than must be


class Measured(NamedTuple):
    """What a step took in a phase."""

    phase: TrainingPhase
    seconds: float
    propagations: float  # for an image


@dataclass(frozen=True, slots=True)
class Cost:
    """What a training would take here."""

    config: Config  # with the batch and the epochs that the images need
    notes: list[str]  # what a user should know of the images
    steps: int  # an epoch
    batch: int  # as many processes share it
    phases: list[Measured]
    held: int  # images that are attacked between epochs, all epochs together
    test: int  # those that are attacked at the end

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return sum(self.steps * p.phase.epochs * p.seconds for p in self.phases)

    @property
    def propagations(self) -> float:
        """Per training image."""
        return sum(p.phase.epochs * p.propagations for p in self.phases)

    @property
    def evaluations(self) -> float:
        """Propagations of the attacks that follow training, per training image."""
        each = FORWARD + self.config.evaluate.steps * ATTACK_ONLY
        return (self.held + self.test) * each / (self.steps * self.batch)


def cost_of(trainer: Trainer, notes: list[str]) -> Cost:
    """Measure it; what the trainer had learnt is spoilt."""
    trainer.learner.try_sizes(trainer.images.held.shape)
    return Cost(
        trainer.config,
        notes,
        len(trainer.loader),
        trainer.learner.batch,
        [_measured(trainer, phase) for phase in phases(trainer.config)],
        trainer.epoch_end.attacked(),
        len(trainer.images.test),
    )


def _measured(trainer: Trainer, phase: TrainingPhase) -> Measured:
    """The mean over some steps, the waiting for their images included."""
    learner, many, numbers = trainer.learner, len(trainer.loader), count()
    batches = _without_end(trainer, phase.first)

    def step() -> float:
        out = learner.step(*next(batches), trainer.progress, next(numbers) % many, many)
        learner.wait()
        return out.propagations

    def enough() -> bool:
        """Each worker should have its turn, as far as that does not take too long."""
        more = made < STEPS or (made < ahead and time.perf_counter() - began < LONG)
        return not anyone(more, device=learner.device)[0]

    spent = step()  # the first allocates
    ahead = getattr(trainer.loader, "ahead", 0)
    for _ in range(ahead):  # these came sooner than batches do in the long run
        next(batches)
    began, made = time.perf_counter(), 0
    while not enough():
        step()
        made += 1
    return Measured(phase, (time.perf_counter() - began) / made, spent)


def _without_end(trainer: Trainer, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch, again and again."""
    yield from trainer.begin(epoch)
    while True:
        yield from trainer.loader.epoch(epoch)
