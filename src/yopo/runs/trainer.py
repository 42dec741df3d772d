"""The training loop: one clock, held-out robust accuracy, a collapse guard, exact resume.

Everything random in a step (order, augmentation, starts, dropout) is a function of seed, epoch,
step and process, so a resumed run is the run that was never stopped.
"""

import hashlib
import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import yopo
from yopo.core import tensor_files
from yopo.core.digest import values_digest, weights_digest
from yopo.core.exchange import differing
from yopo.core.random import mix, seed_all
from yopo.core.tensor_files import Tensors
from yopo.data.loader import Augment, Loader
from yopo.data.sources import Arrays
from yopo.engine.ema import EMA
from yopo.engine.engine import Engine
from yopo.evaluation.card import hardware, provenance
from yopo.runs import checkpoint, distributed
from yopo.runs.build import build_method, build_model, build_optimizer, build_threat
from yopo.runs.folder import BEST, LAST, RunFolder
from yopo.runs.guard import Health, collapse, learnt, nothing_learnt
from yopo.runs.measure import accuracies, commonest, drift
from yopo.runs.overlay import Tree
from yopo.runs.progress import Progress, StopRequested, Watcher
from yopo.runs.schedule import rate
from yopo.runs.settings import Config, refuse_another, validate, what_counts
from yopo.runs.snapshot import Snapshot

CHECK_EVERY = 50  # steps between looks at the loss; a look waits for the device
GOES_BACK = ("epoch", "updates", "healthiest", "cleanest")  # of the progress; the rest stays so
FEW = 200  # held-out images for the guard, in epochs without a full evaluation


class Trainer:
    """One run in one folder."""

    def __init__(
        self, config: Config, data: Arrays, out: Path, watcher: Watcher, device: torch.device
    ) -> None:
        began = time.perf_counter()
        self.config, self.out, self.watch, self.device = config, out, watcher, device
        self.rank, self.world = distributed.start(device)
        self.progress = Progress()
        self.stop = False  # set from a signal handler
        self.files = RunFolder(out, watcher, writes=self.rank == 0)

        seed_all(mix(config.seed, "weights"))
        model = build_model(config.model, data.x_train, len(data.names))
        if config.sync_batchnorm and self.world > 1:
            model = distributed.synchronise_batchnorm(model)
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name!r} in the model's state_dict is no tensor (get_extra_state), and "
                    "checkpoints hold tensors alone; leave it out, or make it a buffer"
                )
        self.model = model.to(device)
        if config.model.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = build_optimizer(config, self.model)
        if self.world > 1:
            distributed.same_everywhere([*self.model.parameters(), *self.model.buffers()])
            yopo.exchange_gradients(self.optimizer)
        if config.optimizer.clip:  # after the exchange, and in each of Free's steps too
            self.optimizer.register_step_pre_hook(self._clip)
        self.method = build_method(config, self.model, self.optimizer)
        if isinstance(self.method, yopo.Free) and config.optimizer.accumulate > 1:
            raise ValueError("Free steps on every batch; use optimizer.accumulate 1 with it")
        self.ema = EMA(self.model, config.ema) if config.ema else None
        self.snapshot = Snapshot(self.model, self.ema, self.optimizer, self.method)
        self.engine = self._engine()
        self._warmup_seconds = 0.0

        sha = hashlib.sha256(repr(tuple(data.x_train.shape)).encode())
        for tensor in (data.x_train, data.y_train):
            sha.update(tensor.contiguous().numpy().tobytes())
        self._data_digest = sha.hexdigest()
        n, held = len(data.x_train), config.data.held_out
        if held >= n:
            raise ValueError(f"expected data.held_out below the {n} training images, got {held}")
        order = torch.randperm(
            n, generator=torch.Generator().manual_seed(mix(config.seed, "split"))
        )
        self._held = data.x_train[order[:held]], data.y_train[order[:held]]
        few = self._held[1][:FEW]
        self._chance = max(commonest(y) for y in (self._held[1], few))
        self._classes = len(data.names)
        self._test = data.x_test, data.y_test
        rest = order[held:].sort().values
        self.loader = Loader(
            data.x_train[rest],
            data.y_train[rest],
            batch=config.batch,
            seed=config.seed,
            device=device,
            augment=Augment(config.data.crop, config.data.flip, config.data.cutout),
            rank=self.rank,
            world=self.world,
            resident=config.data.resident,
        )
        self._share = config.batch // self.world  # of each batch, in this process
        self._saved_at, self._saved = time.monotonic(), (-1, -1)  # (lines, step)
        # What a collapse goes back to, and the best weights so far (in the first process). They are
        # in memory, and in each checkpoint, so that both are functions of the run alone: never of
        # which epochs were saved, and so of the clock, and never of what became of a file.
        self._good: tuple[Tensors, dict[str, Any]] | None = None
        self._best: Tensors | None = None
        self._prepare_seconds = time.perf_counter() - began

    def _engine(self) -> Engine | None:
        """The fast path, where it pays and is exact; None for the plain one."""
        c = self.config
        wanted = c.engine == "compiled" or (c.engine == "auto" and self.device.type == "cuda")
        if not wanted:
            return None
        if self.world > 1 or c.optimizer.accumulate > 1:
            self.watch.say("plain steps: the engine is for one process without accumulation")
            return None
        if isinstance(self.method, yopo.PMP):
            self.watch.say("plain steps: PMP runs the network layer by layer")
            return None
        return Engine(
            self.method, self.optimizer, ema=self.ema, precision=c.precision, say=self.watch.say
        )

    # ------------------------------------------------------------ running

    def run(self) -> dict[str, Any]:
        """Train to the end; return what the test set showed."""
        self._warm_up()  # before anything is written: the first batch may not fit the network
        self.files.begin(self.config, self.progress.lines)  # later lines will be written again
        here = (f"{self.world} × " if self.world > 1 else "") + hardware(self.device)
        if here not in self.progress.hardware:
            self.progress.hardware.append(here)
        if self._best is not None:  # what is in the folder may be damaged, or of a lost epoch
            self.files.mend_weights(BEST, self._best, self.config)
        if not self.progress.saves:
            self._keep_good()  # what a collapse in the first epoch goes back to
            self._save()
        while self.progress.epoch < self.config.epochs:
            reason = self._epoch()
            self._finish_epoch(reason)
            self._stop_if_asked()
        result = self._finish()
        self._stop_if_asked()
        return result

    def _stop_if_asked(self) -> None:
        """A signal that came between epochs."""
        if self._anyone(self.stop)[0]:
            there = self._saved == (self.progress.lines, self.progress.step)
            raise StopRequested(there or self._save())

    def _warm_up(self) -> None:
        """Study, compile and capture before the clock starts; trains nothing."""
        began = time.perf_counter()
        self.model.train()
        x, y = next(iter(self.loader.epoch(0)))
        (self.engine or self.method).prepare(self._laid_out(x), y)
        self._sync()
        self._warmup_seconds += time.perf_counter() - began

    def _epoch(self) -> str | None:
        """Train to the end of this epoch; return why it collapsed, if it did."""
        p, steps = self.progress, len(self.loader)
        every = self.config.optimizer.accumulate
        loss = torch.tensor(p.loss_sum, device=self.device)
        right = torch.tensor(p.right, device=self.device)
        self.model.train()
        self._sync()
        started = time.perf_counter()

        def settle() -> None:
            nonlocal started
            p.loss_sum, p.right = float(loss), float(right)  # waits for the device
            p.train_seconds += time.perf_counter() - started
            started = time.perf_counter()

        for x, y in self.loader.epoch(p.epoch, p.step):
            out = self._step(x, y, p.step)
            loss += out.loss
            right += (out.logits.argmax(1) == y).sum()
            p.step += 1
            p.propagations += out.propagations / steps
            if p.step % every and p.step < steps:
                continue  # in the middle of an accumulated step there is nothing to save
            self.watch.step(p.epoch, p.step, steps, "")
            # A function of the step alone: a broken loss ends an epoch here, resumed or not.
            look = p.step // CHECK_EVERY > (p.step - every) // CHECK_EVERY or p.step == steps
            if look or (self.stop and self.world == 1):  # several must look at the same steps
                settle()
                due = time.monotonic() - self._saved_at > 60 * self.config.checkpoint.minutes
                broken, stop, due = self._anyone(not math.isfinite(p.loss_sum), self.stop, due)
                if broken and look:
                    return "the loss is not finite"
                self.watch.step(p.epoch, p.step, steps, f"loss {p.loss_sum / p.step:.3f}")
                if stop:
                    raise StopRequested(self._save())
                if due and p.step < steps:
                    self._save()
                    started = time.perf_counter()
        return None

    def _step(self, x: Tensor, y: Tensor, step: int) -> yopo.Step:
        c, p = self.config, self.progress
        seed_all(mix(c.seed, p.epoch, step, self.rank))
        epoch = p.epoch + step / len(self.loader)
        lr = p.rate_scale * rate(c, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        part = min(1.0, (epoch + 1 / len(self.loader)) / c.eps_warmup) if c.eps_warmup else 1.0
        x = self._laid_out(x)
        if self.engine:
            p.updates += 1
            return self.engine.step(x, y, part=part, updates=p.updates - 1)
        if c.eps_warmup and isinstance(self.method, yopo.AdversarialMethod):
            self.method.threat = build_threat(c.threat, part * c.train_eps)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=c.precision == "bf16"):
            out = self.method.backward(x, y)
        every = c.optimizer.accumulate
        if (step + 1) % every == 0 or step + 1 == len(self.loader):
            grads = [q.grad for q in self.model.parameters() if q.grad is not None]
            if every > 1:
                torch._foreach_div_(grads, float(step % every + 1))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema:
                self.ema.update(p.updates)
            p.updates += 1
        return out

    def _laid_out(self, x: Tensor) -> Tensor:
        last = self.config.model.channels_last
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def _clip(self, *_: object) -> None:
        assert self.config.optimizer.clip is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)

    def measure(self, steps: int) -> tuple[float, float]:
        """Seconds a step, not counting the first, and propagations an epoch; spoils the weights."""
        self._warm_up()
        times, spent = [], 0.0
        for step, (x, y) in enumerate(self.loader.epoch(0)):
            started = time.perf_counter()
            spent = self._step(x, y, step).propagations
            self._sync()
            times.append(time.perf_counter() - started)
            if step == steps:
                break
        return mean(times[1:] or times), spent

    def _finish_epoch(self, reason: str | None) -> None:
        """Evaluate, guard, write a line, save."""
        p, c = self.progress, self.config
        self._check_same_weights()
        if self.world > 1 and not c.sync_batchnorm:
            distributed.same_everywhere(self.model.buffers())
        loss_sum, right = self._sums()
        line: dict[str, Any] = {
            "epoch": p.epoch + 1,
            "train_seconds": p.train_seconds,
            "propagations": p.propagations,
            "rate": p.rate_scale * rate(c, p.epoch),
            "loss": loss_sum / self.world / p.step,
            "train_accuracy": right / (p.step * c.batch),
        }
        if reason is None and not self.snapshot.is_finite():
            reason = "the weights are not finite"
        if reason is None:
            started = time.perf_counter()
            full = (p.epoch + 1) % c.evaluate.every == 0 or p.epoch + 1 == c.epochs
            images = c.evaluate.images if full else min(FEW, c.evaluate.images)
            clean, robust = self._evaluate(self.follower, images)
            if c.diagnose.every and (p.epoch + 1) % c.diagnose.every == 0 and self.rank == 0:
                x, y = (t[: c.diagnose.images] for t in self._held)
                try:
                    line["diagnose"] = drift(self.follower, x, y, c)
                except ValueError as error:  # such as a network that is no sequence of layers
                    self.watch.say(f"not diagnosed: {error}")
            p.evaluate_seconds += time.perf_counter() - started
            line |= {"clean": clean, "robust": robust, "images": min(images, len(self._held[0]))}
            # Natural training has no robustness to lose, or to be chosen by.
            natural = isinstance(self.method, yopo.Natural)
            score, best = (clean, -1.0) if natural else (robust, p.healthiest)
            if p.epoch < c.eps_warmup:  # trained against less than it is measured with
                best = -1.0
            shown = line["loss"], line["train_accuracy"], robust, best
            reason = collapse(Health(*shown, self._chance, clean, p.cleanest, self._classes))
            if reason is None:
                p.healthiest, p.cleanest = max(p.healthiest, robust), max(p.cleanest, clean)
            rank = score if learnt(clean, self._chance, line["images"]) else score - 2
            chosen = rank > p.best or c.evaluate.keep == "last"
            if full and reason is None and chosen:
                p.best, p.best_epoch = rank, p.epoch + 1
                if self.rank == 0:
                    state = self.follower.state_dict()
                    self._best = {k: v.to("cpu", copy=True) for k, v in state.items()}
                    self.files.save_weights(BEST, self._best, c)
        line["evaluate_seconds"] = p.evaluate_seconds
        if reason is not None:
            line["collapse"] = reason
            line["action"] = self.config.guard.action
        p.lines += 1
        self.files.add(line)
        self.watch.epoch(line)
        if reason is not None:
            if c.guard.action != "ignore":
                self._recover(reason)
                return
            self.watch.say(f"collapse: {reason}; ignored, as guard.action says")
        p.epoch, p.step, p.loss_sum, p.right = p.epoch + 1, 0, 0.0, 0.0
        self._keep_good()
        due = time.monotonic() - self._saved_at >= c.checkpoint.pause or p.epoch == c.epochs
        if self._anyone(due)[0]:
            self._save()

    def _keep_good(self) -> None:
        """Remember this state, at an epoch's end, as the one that a collapse goes back to."""
        if self.config.guard.action == "rollback":
            self._good = self.snapshot.copy(), {k: getattr(self.progress, k) for k in GOES_BACK}

    def _recover(self, reason: str) -> None:
        p, guard = self.progress, self.config.guard
        if guard.action == "stop" or p.rollbacks >= guard.most or self._good is None:
            raise RuntimeError(
                f"training collapsed in epoch {p.epoch + 1}: {reason}. To try again: a lower "
                "optimizer.lr or a longer schedule.warmup, in another folder"
            )
        tensors, known = self._good
        self.snapshot.put_back(tensors)
        for name, value in known.items():
            setattr(p, name, value)
        p.step, p.loss_sum, p.right = 0, 0.0, 0.0
        p.rate_scale, p.rollbacks = p.rate_scale * guard.shrink, p.rollbacks + 1
        where = f"the end of epoch {p.epoch}" if p.epoch else "the start"
        self.watch.say(
            f"collapse: {reason}. Back to {where}, "
            f"learning rate times {guard.shrink} (rollback {p.rollbacks} of {guard.most})"
        )
        self._save()

    @property
    def follower(self) -> nn.Module:
        """The network that is evaluated and kept: the averaged one if there is one."""
        return self.ema.model if self.ema else self.model

    def _evaluate(self, model: nn.Module, images: int) -> tuple[float, float]:
        """Clean and PGD accuracy on held-out images, by the first process."""
        found = [0.0, 0.0]
        if self.rank == 0:
            x, y = (t[:images] for t in self._held)
            found = list(accuracies(model, x, y, self.config, self._share))
        clean, robust = distributed.from_first(found)
        return clean, robust

    def _finish(self) -> dict[str, Any]:
        """Touch the test set, once, with the best weights and the last ones."""
        result: dict[str, Any] = {}
        digests: dict[str, str] = {}
        began = time.perf_counter()
        if self.rank == 0:
            written = self.files.save_weights(LAST, dict(self.follower.state_dict()), self.config)
            if self._best is not None:
                written &= self.files.mend_weights(BEST, self._best, self.config)
            else:  # what is there is of an epoch that was lost with its checkpoint
                (self.out / BEST).unlink(missing_ok=True)
            result["last"], digests["last"] = self._measure()
            if self.progress.best_epoch == self.config.epochs:
                result["best"], digests["best"] = result["last"], digests["last"]  # the same
            elif self._best is not None:
                last = {k: v.clone() for k, v in self.follower.state_dict().items()}
                self.follower.load_state_dict(self._best)
                result["best"], digests["best"] = self._measure()
                self.follower.load_state_dict(last)
            result |= {
                "best_epoch": self.progress.best_epoch,
                "train_seconds": self.progress.train_seconds,
                "evaluate_seconds": self.progress.evaluate_seconds,
                "test_seconds": time.perf_counter() - began,
                "prepare_seconds": self._prepare_seconds,
                "warmup_seconds": self._warmup_seconds,
                "propagations": self.progress.propagations,
                "test_images": len(self._test[0]),
                "test_sha256": values_digest(*self._test),
                "chance": commonest(self._test[1]),
                "weights_sha256": digests,
                "environment": provenance(self.follower, self.device, [])
                | {"hardware": ", then ".join(self.progress.hardware)},
            }
            best = result.get("best", result["last"])["clean"]
            if not learnt(best, result["chance"], result["test_images"]):
                self.watch.say(nothing_learnt(best, result["chance"]))
            if written:  # else the run is not finished, and can be resumed
                self.files.finish(result)
        if dist.is_initialized():
            dist.barrier()
        return result

    def _measure(self) -> tuple[dict[str, float], str]:
        """The followed network on the test set, and its weights' digest."""
        clean, robust = accuracies(self.follower, *self._test, self.config, self._share)
        found = {"clean": clean, f"pgd-{self.config.evaluate.steps}": robust}
        return found, weights_digest(self.follower)

    # ------------------------------------------------------------ saving

    def _check_same_weights(self) -> None:
        """End the run in all processes, before anything is written, if their weights differ."""
        if self.world == 1:
            return
        models = [self.model, *([self.ema.model] if self.ema else [])]
        others = differing(p for model in models for p in model.parameters())
        if others:
            raise RuntimeError(
                f"the weights of process {', '.join(map(str, others))} are no longer those of "
                "process 0, so nothing was written. Look for code that changes weights outside "
                "optimizer.step(), or for machines that compute differently; --resume goes on from "
                "the last checkpoint"
            )

    def _sums(self) -> tuple[float, float]:
        """This epoch's losses and right answers so far, over all processes."""
        mine = [self.progress.loss_sum, self.progress.right]
        sums = distributed.summed(torch.tensor(mine, dtype=torch.float64, device=self.device))
        return float(sums[0]), float(sums[1])

    def resume(self) -> bool:
        """Go on from the newest sound checkpoint in the folder; say whether there was one."""
        found = checkpoint.load_newest(self.out / "state", self.watch.say)
        if found is None and checkpoint.saved(self.out / "state"):
            raise ValueError(f"no checkpoint in {self.out} is sound; give another --out")
        if found is None:
            return False
        values = found.values
        if isinstance(values.get("config"), dict):
            refuse_another(self.out, _filled(values["config"]), self._identity())
        mine = partial(self.snapshot.own, rank=self.rank, world=self.world)
        try:
            p, sums, good = _restored(values)
            self.snapshot.put_back(mine(found.tensors))
        except (ValueError, RuntimeError) as error:  # of torch, where a tensor does not fit
            why = " ".join(str(error).split())[:200]
            raise ValueError(
                f"the checkpoint in {self.out} was edited or is of another version: {why}; "
                "give another --out"
            ) from None
        if len(sums) != self.world:
            sums = [[sum(column) for column in zip(*sums, strict=True)]] + [[0.0, 0.0]] * self.world
        p.loss_sum, p.right = sums[self.rank]
        self.progress, self.files.lines = p, values.get("metrics")
        if p.step == 0:
            self._keep_good()
        elif found.good is not None:
            self._good = mine(found.good), good
        elif self.config.guard.action == "rollback":
            self.watch.say(
                f"{self.out} holds no state that a collapse in this epoch can go back to"
            )
        self._take_best(found.best)
        return True

    def _take_best(self, best: Tensors | None) -> None:
        """Bring the best weights back from the checkpoint, or else from the folder."""
        p = self.progress
        if p.best_epoch >= 0 and best is None:
            try:
                best = tensor_files.load_weights(self.out / BEST)
            except (ValueError, OSError) as error:
                self.watch.say(f"the best weights so far are lost ({error}); later ones take over")
                p.best_epoch = -1
        shapes = {k: v.shape for k, v in self.follower.state_dict().items()}
        if best is not None and {k: v.shape for k, v in best.items()} != shapes:
            self.watch.say("the best weights so far are of another network; later ones take over")
            p.best_epoch = -1
        if p.best_epoch < 0:
            p.best, best = Progress.best, None
        self._best = best if self.rank == 0 else None

    def _save(self) -> bool:
        """Write a checkpoint and say whether it is there."""
        self._saved_at = time.monotonic()
        p = self.progress
        self._check_same_weights()
        p.saves += 1
        sums = torch.tensor([p.loss_sum, p.right], dtype=torch.float64)
        values: dict[str, Any] = {"progress": asdict(p), "config": self._identity()}
        values["sums"] = [one.tolist() for one in distributed.gathered(sums)]
        tensors, good = self.snapshot.gathered(self.snapshot.take()), None
        if p.step and self._good is not None:  # else this is the good one
            good, values["good"] = self.snapshot.gathered(self._good[0]), self._good[1]
        state = checkpoint.Saved(tensors, values, good, self._best)
        written = self.files.save_state(p.saves, state, self.config.checkpoint.keep)
        if not distributed.from_first([float(written)])[0]:
            return False
        self._saved = (p.lines, p.step)
        return True

    def _identity(self) -> dict[str, Any]:
        return what_counts(self.config) | {"training data": self._data_digest}

    def _anyone(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any process has it up: all act alike."""
        if self.world == 1:
            return flags
        up = distributed.summed(torch.tensor([float(f) for f in flags], device=self.device))
        return tuple(value > 0 for value in up.tolist())

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


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
    lines = values.get("metrics")
    if not isinstance(lines, list | None) or not all(isinstance(line, str) for line in lines or ()):
        raise ValueError("it has no lines of metrics")
    return p, sums, good


def _filled(identity: Tree) -> Tree:
    """With the defaults of settings that an older version did not have."""
    config = {key: value for key, value in identity.items() if key != "training data"}
    try:
        return what_counts(validate(config)) | {"training data": identity["training data"]}
    except (ValueError, KeyError):  # of another version
        return identity
