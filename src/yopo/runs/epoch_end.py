"""The end of an epoch: evaluate, score, guard, write."""

import time
from typing import Any

import torch

from yopo.core.parallel import gathered
from yopo.data.source import Rows
from yopo.evaluation.suite import Tell
from yopo.runs import distributed
from yopo.runs.folder import RunFolder
from yopo.runs.guard import Health, collapse, learnt
from yopo.runs.images import FEW, Images, workers
from yopo.runs.keeper import Keeper
from yopo.runs.learner import Learner
from yopo.runs.measure import accuracies, drift
from yopo.runs.progress import Progress
from yopo.runs.schedule import phase, rate
from yopo.runs.settings import Config

Line = dict[str, Any]  # of the metrics


class EpochEnd:
    """Looks at the network after an epoch, and decides how the run goes on."""

    def __init__(
        self,
        config: Config,
        learner: Learner,
        images: Images,
        files: RunFolder,
        keeper: Keeper,
        tell: Tell,
    ) -> None:
        self.config, self.learner, self.images = config, learner, images
        self.files, self.keeper, self.tell = files, keeper, tell

    @property
    def progress(self) -> Progress:
        """Where the run is."""
        return self.keeper.progress

    def finish(self, reason: str | None) -> None:
        """Write the epoch's line; go on, or back where it collapsed: for `reason`, if given."""
        p, c = self.progress, self.config
        self.learner.check_same_weights()
        if self.learner.world > 1 and not c.sync_batchnorm:
            distributed.same_everywhere(self.learner.model.buffers())
        line = self._trained()
        if reason is None and not self.learner.snapshot.is_finite():
            reason = "the weights are not finite"
        if reason is None:
            self._measure(line)
            reason = self._judge(line)
        line["evaluate_seconds"] = p.evaluate_seconds
        if reason is not None:
            line |= {"collapse": reason, "action": c.guard.action}
        p.lines += 1
        self.files.add(line)
        self.files.watch.epoch(line)
        if reason is not None:
            if c.guard.action != "ignore":
                self.keeper.recover(reason)
                return
            self.files.watch.say(f"collapse: {reason}; ignored, as guard.action says")
        p.epoch, p.step, p.loss_sum, p.right = p.epoch + 1, 0, 0.0, 0.0
        self.keeper.keep_good()
        due = self.keeper.waited >= c.checkpoint.pause or p.epoch == c.epochs
        if distributed.anyone(due, device=self.learner.device)[0]:
            self.keeper.save(compared=True)

    def _trained(self) -> Line:
        """What training itself showed, over all processes."""
        p, c, device = self.progress, self.config, self.learner.device
        mine = torch.tensor([p.loss_sum, p.right], dtype=torch.float64, device=device)
        loss_sum, right = distributed.summed(mine).tolist()
        now, scheduled = phase(c, p.epoch), Line()
        if c.schedule.sizes:
            scheduled["size"] = now.size or self.images.held.shape[-1]
        if c.schedule.m:
            scheduled["m"] = now.m or c.method.model_dump()["m"]
        line = {
            "epoch": p.epoch + 1,
            "train_seconds": p.train_seconds,
            "processor_seconds": p.processor_seconds,
            "propagations": p.propagations,
            "rate": p.rate_scale * rate(c, p.epoch),
            "loss": loss_sum / self.learner.world / p.step,
            "train_accuracy": right / (p.step * self.learner.batch),
        }
        return line | scheduled

    def _is_full(self, epoch: int) -> bool:
        """Whether all images of an evaluation are due, and the best weights may be chosen."""
        return (epoch + 1) % self.config.evaluate.every == 0 or epoch + 1 == self.config.epochs

    def _due(self, epoch: int) -> int:
        """Held-out images to attack after an epoch."""
        most = self.config.evaluate.images
        return min(len(self.images.held), most if self._is_full(epoch) else min(FEW, most))

    def attacked(self) -> int:
        """Held-out images that are attacked in all."""
        return sum(map(self._due, range(self.config.epochs)))

    def _measure(self, line: Line) -> None:
        """Attack held-out images; look at the co-states where that is asked for."""
        p, c = self.progress, self.config
        started = time.perf_counter()
        images = self._due(p.epoch)
        clean, robust = self.evaluate(images)
        looks = c.diagnose.every and (p.epoch + 1) % c.diagnose.every == 0
        if looks:
            with gathered(self.learner.follower):
                self._diagnose(line)
        p.evaluate_seconds += time.perf_counter() - started
        line |= {"clean": clean, "robust": robust, "images": images}

    def _diagnose(self, line: Line) -> None:
        """The drift of co-states, in the first process."""
        c, held = self.config, self.images.held
        if self.learner.rank == 0:
            few = torch.arange(min(len(held), c.diagnose.images))
            x, y = held.read(few), held.labels[few]
            try:
                line["diagnose"] = drift(self.learner.follower, x, y, c)
            except ValueError as error:  # such as a network that is no sequence of layers
                self.files.watch.say(f"not diagnosed: {error}")

    def evaluate(self, images: int) -> tuple[float, float]:
        """Clean and PGD accuracy on so many held-out images; the processes share them out."""
        held, learner = self.images.held, self.learner

        def tell(name: str, part: float, accuracy: float) -> None:
            self.tell(f"held-out {name}", part, accuracy)

        few = Rows(held, torch.arange(min(len(held), images)))
        readers = workers(self.config.data)
        return accuracies(learner.follower, few, self.config, learner.share, tell, readers)

    def _judge(self, line: Line) -> str | None:
        """Why the epoch is a collapse; if it is none, remember the best of it."""
        p, c = self.progress, self.config
        clean, robust = line["clean"], line["robust"]
        # Natural training has no robustness to lose, or to be chosen by.
        natural = self.learner.method.threat is None
        score, best = (clean, -1.0) if natural else (robust, p.healthiest)
        if p.epoch < c.eps_warmup:  # trained against less than it is measured with
            best = -1.0
        reason = collapse(
            Health(
                loss=line["loss"],
                train=line["train_accuracy"],
                robust=robust,
                best=best,
                chance=self.images.chance,
                clean=clean,
                cleanest=p.cleanest,
                classes=self.images.classes,
            )
        )
        if reason is not None:
            return reason
        p.healthiest, p.cleanest = max(p.healthiest, robust), max(p.cleanest, clean)
        if not learnt(clean, self.images.chance, line["images"]):
            score -= 2  # below all that have learnt something
        if self._is_full(p.epoch) and (score > p.best or c.evaluate.keep == "last"):
            p.best, p.best_epoch = score, p.epoch + 1
            self.keeper.keep_best()
        return None
