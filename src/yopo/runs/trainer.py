"""The training loop: one clock, held-out robust accuracy, a collapse guard, exact resume.

Everything random in a step (order, augmentation, starts, dropout) is a function of seed, epoch,
step and process, so a resumed run is the run that was never stopped.
"""

import math
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import yopo
from yopo.core.digest import weights_digest
from yopo.core.tensor_files import Tensors
from yopo.data.augment import Augment
from yopo.data.source import Feed
from yopo.evaluation.card import hardware, provenance
from yopo.runs import distributed, state
from yopo.runs.asking import Asking
from yopo.runs.epoch_end import EpochEnd
from yopo.runs.folder import BEST, LAST, STATE, RunFolder
from yopo.runs.glance import Glance
from yopo.runs.guard import learnt, nothing_learnt
from yopo.runs.images import DataSet, split, workers
from yopo.runs.keeper import Keeper
from yopo.runs.learner import Learner
from yopo.runs.measure import accuracies, commonest
from yopo.runs.progress import Progress, StopRequested, Watcher
from yopo.runs.schedule import TrainingPhase, phase
from yopo.runs.settings import Config

CHECK_EVERY = 50  # steps between looks at the loss; a look waits for the device


class _Asked(Exception):  # noqa: N818
    """To stop, in the middle of an attack."""


class Trainer:
    """One run in one folder.

    `learner` is what changes, `epoch_end` judges it, `keeper` saves it and brings it back, `files`
    is the run's folder, and `progress`, which all of them share, says where the run is.
    """

    def __init__(
        self, config: Config, data: DataSet, out: Path, watcher: Watcher, device: torch.device
    ) -> None:
        began = time.perf_counter()
        self.config, self.progress = config, Progress()
        self.stop = False  # set from a signal handler
        begins = not state.saved(out / STATE)
        self.learner = Learner(config, data, watcher, device, begins=begins)
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None  # of the epoch to come
        self._phase: TrainingPhase | None = None  # the one that all is ready for
        first = self.learner.rank == 0
        images = {"classes": list(data.names), "shape": list(data.pictures.shape)}
        self.files = RunFolder(out, watcher, writes=first, images=images)
        self.images, d = split(data, config), config.data
        self.loader = self.images.batches(
            Feed(
                batch=self.learner.batch,
                seed=config.seed,
                device=device,
                rank=self.learner.rank,
                world=self.learner.world,
                augment=Augment(d.crop, d.flip, d.cutout, d.jitter),
                workers=workers(config.data),
                say=watcher.say,
                size=lambda epoch: phase(config, epoch).size,
            )
        )
        _check_same(len(self.loader))
        self.keeper = Keeper(
            config, self.learner, self.files, self.progress, self.images.identity, self.loader
        )
        self.epoch_end = EpochEnd(
            config, self.learner, self.images, self.files, self.keeper, self._tell
        )
        self.seconds = {"warmup_seconds": 0.0, "prepare_seconds": time.perf_counter() - began}

    def about(self) -> str:
        """The data, the network and the device, in a sentence."""
        images = self.images
        weights = sum(p.numel() for p in self.learner.model.parameters())
        kept = f"{len(images.held):,} held out, {len(images.test):,} to test"
        many = images.many or len(self.loader) * self.learner.batch
        size = f"brought to {s}x{s} pixels (--data.size), " if (s := self.config.data.size) else ""
        text = f"{many:,} training images of {images.classes} classes, {size}{kept}; "
        text += f"{weights:,} parameters; epochs: {self.config.epochs}, "
        text += f"steps of each: {len(self.loader)}; {hardware(self.learner.device)}"
        return text + ("; compiling first" if self.learner.engine else "")

    def resume(self) -> bool:
        """Go on from the newest sound checkpoint in the folder; say whether there was one."""
        return self.keeper.resume()

    def run(self) -> dict[str, Any]:
        """Train to the end; return what the test set showed."""
        self.learner.try_sizes(self.images.checked().held.shape)  # before any writing, as the next
        self._warm_up()
        p, world = self.progress, self.learner.world
        self.keeper.begin()
        here = (f"{world} × " if world > 1 else "") + hardware(self.learner.device)
        if here not in p.hardware:
            p.hardware.append(here)
        if not p.saves:
            self.keeper.keep_good()  # what a collapse in the first epoch goes back to
            self.keeper.save(compared=True)
        try:
            while p.epoch < self.config.epochs:
                if self._phase != phase(self.config, p.epoch):
                    self._warm_up()
                reason = self._epoch()
                self.epoch_end.finish(reason)
                self._stop_if_asked()
            self.keeper.settle()
            result = self._finish()
        except _Asked:  # in the middle of an attack: what it looks at is of the state that is saved
            raise StopRequested(self.keeper.save_now()) from None
        finally:
            self.keeper.close()
            self._close()
        self._stop_if_asked()
        return result

    def _tell(self, name: str, part: float, accuracy: float) -> None:
        """How far an attack is; all processes leave it when one of them is asked to stop."""
        self.files.watch.attack(name, part, accuracy)
        if distributed.anyone(self.stop, device=self.learner.device)[0]:
            raise _Asked

    def _stop_if_asked(self) -> None:
        """A signal that came between epochs."""
        if distributed.anyone(self.stop, device=self.learner.device)[0]:
            raise StopRequested(self.keeper.save_now())

    def _warm_up(self) -> None:
        """Study, compile and capture for this epoch's phase, before the clock starts."""
        p = self.progress
        batches = self.loader.epoch(p.epoch, p.step)
        first = next(batches, None)
        if first is None:  # stopped at the end of an epoch; any batch will do
            first = next(self.loader.epoch(p.epoch))
        else:
            self._batches = chain([first], batches)
        self._phase = phase(self.config, p.epoch)
        self.learner.enter(self._phase)
        self.seconds["warmup_seconds"] += self.learner.warm_up(*first)

    def _close(self) -> None:
        """Let processes that read images end."""
        self._batches = None
        if callable(close := getattr(self.loader, "close", None)):
            close()

    def _rest(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches from here to the end of the epoch; the first may have been drawn already."""
        begun, self._batches = self._batches, None
        return begun or self.loader.epoch(self.progress.epoch, self.progress.step)

    def _epoch(self) -> str | None:
        """Train to the end of this epoch; return why it collapsed, if it did."""
        p, steps, device = self.progress, len(self.loader), self.learner.device
        every = self.config.optimizer.accumulate
        loss = torch.tensor(p.loss_sum, device=device)
        right = torch.tensor(p.right, device=device)
        self.learner.trained.train()
        self.learner.wait()
        started, used = time.perf_counter(), time.process_time()
        glance, asking = Glance(), Asking(p)

        def settle() -> None:
            nonlocal started, used
            p.loss_sum, p.right = float(loss), float(right)  # waits for the device
            p.train_seconds += time.perf_counter() - started
            p.processor_seconds += time.process_time() - used
            started, used = time.perf_counter(), time.process_time()

        for x, y in self._rest():
            out = self._step(x, y, p.step)
            loss += out.loss
            right += (out.logits.argmax(1) == y).sum()
            p.step += 1
            p.propagations += out.propagations / steps
            if p.step % every and p.step < steps:
                continue  # in the middle of an accumulated step there is nothing to save
            seen = glance.mean(loss, p.step)
            note = "" if seen is None else f"loss {seen:.3f}"
            self.files.watch.step(p.epoch, p.step, steps, note)
            # A function of the step alone: a broken loss ends an epoch here, resumed or not.
            look = p.step // CHECK_EVERY > (p.step - every) // CHECK_EVERY or p.step == steps
            # Several processes must look at the same steps.
            if look or (self.stop if self.learner.world == 1 else asking.is_due()):
                settle()
                due = self.keeper.waited > 60 * self.config.checkpoint.minutes
                broken = not math.isfinite(p.loss_sum)
                broken, stop, due = asking.ask(broken, self.stop, due, device=device)
                if broken and look:
                    return "the loss is not finite"
                self.files.watch.step(p.epoch, p.step, steps, f"loss {p.loss_sum / p.step:.3f}")
                if stop:
                    raise StopRequested(self.keeper.save_now())
                if due and p.step < steps:
                    self.keeper.save()
                    started, used = time.perf_counter(), time.process_time()
        return None

    def _step(self, x: Tensor, y: Tensor, number: int) -> yopo.Step:
        return self.learner.step(x, y, self.progress, number, len(self.loader))

    def begin(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Get ready for an epoch, and give its batches: for whoever steps by himself."""
        self.progress.epoch, self.progress.step = epoch, 0
        self._warm_up()
        return self._rest()

    def _finish(self) -> dict[str, Any]:
        """Touch the test set, once, with the best weights and the last ones."""
        began, p = time.perf_counter(), self.progress
        images, steps = len(self.images.test), self.config.evaluate.steps
        self.files.watch.say(f"attacking {images:,} test images with PGD-{steps}")
        last = self.learner.weights()  # all processes take part in what may be spread over them
        written = self.learner.rank == 0 and self._write_weights(last)
        result, digests = self._test()
        if self.learner.rank == 0:
            result |= {
                "best_epoch": p.best_epoch,
                "train_seconds": p.train_seconds,
                "evaluate_seconds": p.evaluate_seconds,
                "test_seconds": time.perf_counter() - began,
                **self.seconds,
                "propagations": p.propagations,
                "test_images": len(self.images.test),
                "test_sha256": self.images.test_digest(),
                "chance": commonest(self.images.test.labels),
                "weights_sha256": digests,
                "metrics": self.files.summary(),
                "environment": provenance(self.learner.follower, self.learner.device, [])
                | {"hardware": ", then ".join(p.hardware)},
            }
            best = result.get("best", result["last"])["clean"]
            if not learnt(best, result["chance"], result["test_images"]):
                self.files.watch.say(nothing_learnt(best, result["chance"]))
            if written:  # else the run is not finished, and can be resumed
                self.files.finish(result)
        distributed.wait_for_all()
        return result if self.learner.rank == 0 else {}

    def _write_weights(self, last: Tensors) -> bool:
        """Write the last weights and the best ones; say whether they are there."""
        settings, best = self.config.tree(), self.keeper.best
        written = self.files.save_weights(LAST, last, settings)
        if best is not None:
            return written & self.files.mend_weights(BEST, best, settings)
        # What is there is of an epoch that was lost with its checkpoint.
        (self.files.path / BEST).unlink(missing_ok=True)
        return written

    def _test(self) -> tuple[dict[str, Any], dict[str, str]]:
        """What the test set shows of the last weights and the best ones, and their digests."""
        result: dict[str, Any] = {}
        digests: dict[str, str] = {}
        follower, best_epoch = self.learner.follower, self.progress.best_epoch
        same = best_epoch == self.config.epochs
        result["last"], digests["last"] = self._measure("test" if same else "test, last")
        if same:
            result["best"], digests["best"] = result["last"], digests["last"]
        elif best_epoch >= 0:
            last = {k: v.clone() for k, v in follower.state_dict().items()}
            self.learner.load(self.keeper.best)
            try:
                result["best"], digests["best"] = self._measure("test, best")
            finally:
                follower.load_state_dict(last)
        return result, digests

    def _measure(self, shown: str = "test") -> tuple[dict[str, float], str]:
        """The followed network on the test set, which the processes share; its weights' digest."""
        follower, share = self.learner.follower, self.learner.share

        def tell(name: str, part: float, accuracy: float) -> None:
            self._tell(f"{shown} {name}", part, accuracy)

        test, readers = self.images.test, workers(self.config.data)
        clean, robust = accuracies(follower, test, self.config, share, tell, readers)
        shares = {"clean": clean, f"pgd-{self.config.evaluate.steps}": robust}
        return shares, weights_digest(follower)


def _check_same(steps: int) -> None:
    """Refuse processes with other numbers of steps an epoch."""
    each = [int(n) for n in distributed.gathered(torch.tensor([steps]))]
    if len({*each}) > 1:
        raise ValueError(
            f"expected as many training batches in each process, got {each}; some would wait "
            "for others without end"
        )
