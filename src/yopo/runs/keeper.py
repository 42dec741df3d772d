"""What is kept of a run so that it can go on: its checkpoints, its best weights, the way back."""

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from yopo.core import tensor_files
from yopo.core.digest import values_digest
from yopo.core.tensor_files import Tensors
from yopo.data.source import Source
from yopo.runs import distributed, state
from yopo.runs.folder import BEST, STATE, RunFolder
from yopo.runs.learner import Learner
from yopo.runs.overlay import Tree
from yopo.runs.progress import Progress, Watcher
from yopo.runs.settings import Config, refuse_another, validate, what_counts
from yopo.runs.writing import Writing

GOES_BACK = ("epoch", "updates", "healthiest", "cleanest")  # of the progress; the rest stays so


class Keeper:
    """Saves a run, resumes it, and brings it back from a collapse.

    What a collapse goes back to (`good`) and the best weights so far (`best`, in the first process)
    are in memory, and in each checkpoint, so that both are functions of the run alone: never of
    which epochs were saved, and so of the clock, and never of what became of a file.
    """

    def __init__(
        self,
        config: Config,
        learner: Learner,
        files: RunFolder,
        progress: Progress,
        data: Tree,
        source: Source,
    ) -> None:
        self.config, self.learner, self.files, self.progress = config, learner, files, progress
        self.source = source  # of training batches; it may know where it is
        self.identity: Tree = what_counts(config) | data
        self.good: tuple[Tensors, dict[str, Any]] | None = None
        self.best: Tensors | None = None
        self.writing = Writing(learner)
        self._good_of_all: tuple[Tensors, Tensors] | None = None  # of which it was made, and it
        self._room, self._good_room = Tensors(), Tensors()  # for copies

    @property
    def watch(self) -> Watcher:
        """Who hears of it."""
        return self.files.watch

    @property
    def waited(self) -> float:
        """Seconds since the last checkpoint."""
        return time.monotonic() - self.writing.begun_at

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint is of this very step."""
        return self.writing.has((self.progress.lines, self.progress.step))

    def save(self, *, compared: bool = False) -> bool:
        """Write a checkpoint and say whether it is there; `compared`: the weights just were.

        A large one is only begun: from a copy, so that training goes on meanwhile.
        """
        self.settle()
        self.writing.begun_at = time.monotonic()
        p, snapshot = self.progress, self.learner.snapshot
        if not compared:
            self.learner.check_same_weights()
        p.saves += 1
        sums = torch.tensor([p.loss_sum, p.right], dtype=torch.float64)
        values: dict[str, Any] = {"progress": asdict(p), "config": self.identity}
        values["sums"] = [one.tolist() for one in distributed.gathered(sums)]
        values |= {"metrics": self.files.lines, "batch": self.learner.batch}
        if hasattr(self.source, "state") and p.step:  # an epoch begins anew
            values["source"] = distributed.told_to_all(self.source.state())
        good = None
        if p.step == 0 and self.good is not None:  # this is the good one
            everything = self._all_good(self.good[0])
        else:
            mine = snapshot.copy(self._room) if self.writing.is_beside else snapshot.take()
            everything = snapshot.gathered(mine)
            if self.good is not None:
                good, values["good"] = self._all_good(self.good[0]), self.good[1]
        checkpoint = state.Checkpoint(everything, values, good, self.best)
        work = partial(self.files.save_state, p.saves, checkpoint, self.config.checkpoint.keep)
        if snapshot.is_sharded:
            work = partial(work, group=self.writing.group)
        return self.writing.begin(work, (p.lines, p.step))

    def _all_good(self, mine: Tensors) -> Tensors:
        """The good state with what is each process's own; it is brought together once."""
        if self._good_of_all is None or self._good_of_all[0] is not mine:
            self._good_of_all = mine, self.learner.snapshot.gathered(mine)
        return self._good_of_all[1]

    def save_now(self) -> bool:
        """See to it that this very step is in a checkpoint; say whether it is."""
        return self.is_saved or (self.save() and self.settle())

    def settle(self) -> bool:
        """Wait for the checkpoint that was begun; say whether the newest is there."""
        return self.writing.settle()

    def close(self) -> None:
        """Wait until nothing more is written, whatever happened; the others need not be there."""
        self.writing.close()

    def keep_good(self) -> None:
        """Remember this state, at an epoch's end, as the one that a collapse goes back to."""
        if self.config.guard.action == "rollback":
            known = {k: getattr(self.progress, k) for k in GOES_BACK}
            self.settle()  # the checkpoint that is being written may hold the last one
            self.good = self.learner.snapshot.copy(self._good_room), known

    def keep_best(self) -> None:
        """Remember the weights as the best so far, and write them."""
        weights = self.learner.weights()  # all processes take part
        if self.learner.rank == 0:
            self.best = {k: v.to("cpu", copy=True) for k, v in weights.items()}
            self.files.save_weights(BEST, self.best, self.config.tree())

    def recover(self, reason: str) -> None:
        """Go back from a collapse, with a lower rate; raise where there is no way back."""
        p, guard = self.progress, self.config.guard
        if guard.action == "stop" or p.rollbacks >= guard.most or self.good is None:
            raise RuntimeError(
                f"training collapsed in epoch {p.epoch + 1}: {reason}. To try again: a lower "
                "optimizer.lr or a longer schedule.warmup, in another folder"
            )
        tensors, known = self.good
        self.learner.snapshot.put_back(tensors)
        for name, value in known.items():
            setattr(p, name, value)
        p.step, p.loss_sum, p.right = 0, 0.0, 0.0
        p.rate_scale, p.rollbacks = p.rate_scale * guard.shrink, p.rollbacks + 1
        where = f"the end of epoch {p.epoch}" if p.epoch else "the start"
        self.watch.say(
            f"collapse: {reason}. Back to {where}, "
            f"learning rate times {guard.shrink} (rollback {p.rollbacks} of {guard.most})"
        )
        self.save()

    def resume(self) -> bool:
        """Go on from the newest sound checkpoint in the folder; say whether there was one."""
        out, learner = self.files.path, self.learner
        newest = state.load_newest(out / STATE, self.watch.say, self._reading())
        if newest is None:
            return False
        values = newest.values
        if isinstance(values.get("config"), dict):
            refuse_another(out, _filled(values["config"], self.identity), self.identity)
        mine = partial(learner.snapshot.own, rank=learner.rank, world=learner.world)
        try:
            p, sums, good = _restored(values)
            tensors = mine(newest.tensors)
            learner.snapshot.put_back(tensors)
        except (ValueError, RuntimeError) as error:  # of torch, where a tensor does not fit
            why = " ".join(str(error).split())[:200]
            raise ValueError(
                f"the checkpoint in {out} was edited or is of another version: {why}; "
                "give another --out"
            ) from None
        if len(tensors) < sum(not name.startswith("rank-") for name in newest.tensors):
            self.watch.say(
                "what the method keeps of each image cannot be shared out: it begins anew"
            )
        if len(sums) != learner.world:
            loss, right = (sum(column) for column in zip(*sums, strict=True))
            loss *= learner.world / len(sums)  # each has the mean over its share
            sums = [[loss, right]] + [[0.0, 0.0]] * learner.world
        p.loss_sum, p.right = sums[learner.rank]
        begins = p.step == 0
        self._in_steps_of(values.get("batch", self.config.batch), p)
        self._put_back_source(values.get("source"))
        self.progress.become(p)
        self.files.lines = values.get("metrics")
        if begins:
            self.keep_good()
        elif newest.good is not None:
            self.good = mine(newest.good), good
        elif self.config.guard.action == "rollback":
            self.watch.say(f"{out} holds no state that a collapse in this epoch can go back to")
        self._take_best(newest.best)
        return True

    def begin(self) -> None:
        """Begin to write, once all processes go on from one place; all must see what is written."""
        settings = self.config.tree()
        self._check_place()
        self.files.begin(settings, self.progress.lines)  # later ones will come again
        if self.best is not None:  # the file may be damaged, or of a lost epoch
            self.files.mend_weights(BEST, self.best, settings)
        state.check_shared(self.files.path / STATE, self._reading())

    def _check_place(self) -> None:
        """Refuse processes of which one would train on from elsewhere, or other weights."""
        p = self.progress
        place = [p.epoch, p.step, p.updates, p.rate_scale, p.best, p.best_epoch, p.saves]
        told = distributed.told_to_all([*place, values_digest(self.identity)])
        if others := [str(rank) for rank, other in enumerate(told) if other != told[0]]:
            raise RuntimeError(
                f"process {', '.join(others)} would not train on from where process 0 does, or on "
                "other data; give all of them the same --out, data and command"
            )
        self.learner.check_same_weights()

    def _reading(self) -> state.Reading:
        learner = self.learner
        return state.Reading(
            learner.snapshot.layout(), learner.rank, learner.world, distributed.told_to_all
        )

    def _put_back_source(self, states: Any) -> None:  # noqa: ANN401
        """Let the training data go on where they were, in this epoch."""
        put_back = getattr(self.source, "restore", None)
        if not isinstance(states, list) or put_back is None:
            return
        if len(states) != self.learner.world:
            self.watch.say(
                f"where the training data were is known for {len(states)} processes, not for "
                f"{self.learner.world}: the rest of this epoch may not be exactly what it would "
                "have been"
            )
        elif (state := states[self.learner.rank]) is not None and (said := put_back(state)):
            self.watch.say(said)

    def _in_steps_of(self, before: int, p: Progress) -> None:
        """Count the epoch's steps in batches of now, where other processes shared other batches.

        The order of its images is the same, so it goes on about where it was: at a step that this
        run saves at, and not at the beginning, which would be another epoch.
        """
        batch, every, steps = self.learner.batch, self.config.optimizer.accumulate, p.step
        if batch == before or not steps:
            return
        p.step = min(steps * before // batch // every * every or every, len(self.source))
        p.loss_sum *= p.step / steps
        p.right *= p.step * batch / (steps * before)
        self.watch.say(
            f"{steps} steps with batches of {before} images are counted as {p.step} with {batch}"
        )

    def _take_best(self, best: Tensors | None) -> None:
        """Bring the best weights back from the checkpoint, or else from the folder."""
        p, learner = self.progress, self.learner
        if p.best_epoch >= 0 and best is None and learner.rank == 0:
            try:
                best = tensor_files.load_weights(self.files.path / BEST)
            except (ValueError, OSError) as error:
                self.watch.say(f"the best weights so far are lost ({error}); later ones take over")
                p.best_epoch = -1
        shapes = {k: v.shape for k, v in learner.follower.state_dict().items()}
        if best is not None and {k: v.shape for k, v in best.items()} != shapes:
            self.watch.say("the best weights so far are of another network; later ones take over")
            p.best_epoch = -1
        p.best_epoch = int(distributed.from_first([p.best_epoch])[0])  # which alone needs them
        if p.best_epoch < 0:
            p.best, best = Progress.best, None
        self.best = best if learner.rank == 0 else None


def _restored(values: dict[str, Any]) -> tuple[Progress, list[list[float]], dict[str, Any]]:
    """Where a checkpoint's run was, the sums of each process, and where a collapse goes back to."""
    p = Progress.restored(values.get("progress"))
    sums, good = values.get("sums", [[p.loss_sum, p.right]]), values.get("good", {})
    pairs = sums if isinstance(sums, list) and sums else [None]
    if not all(isinstance(pair, list) and [*map(type, pair)] == [float] * 2 for pair in pairs):
        raise ValueError("it has no sums of each process")
    if not isinstance(good, dict) or not {*good} <= {*GOES_BACK}:
        raise ValueError("it has no place that a collapse goes back to")
    Progress.restored(good)
    if type(batch := values.get("batch", 1)) is not int or batch < 1:
        raise ValueError("it has no batch")
    lines = values.get("metrics")
    if not isinstance(lines, list | None) or not all(isinstance(line, str) for line in lines or ()):
        raise ValueError("it has no lines of metrics")
    return p, sums, good


def _filled(identity: Tree, mine: Tree) -> Tree:
    """With the defaults of settings, and with my numbers of images, where an older one has none."""
    data = {key: value for key, value in mine.items() if key not in Config.model_fields}
    config = {key: value for key, value in identity.items() if key not in data}
    try:
        data |= {key: identity[key] for key in data if key in identity or key == "training data"}
        return what_counts(validate(config)) | data
    except (ValueError, KeyError):  # of another version
        return identity
