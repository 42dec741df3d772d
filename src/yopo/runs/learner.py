"""What a run trains: network, method and optimizer, and how they make one step."""

import time
from typing import Any

import torch
from torch import Tensor, nn

import yopo
from yopo.core.exchange import differing
from yopo.core.parallel import is_shard, spread_like, unexchanged, whole
from yopo.core.random import mix, seed_all
from yopo.core.tensor_files import Tensors
from yopo.engine.ema import EMA
from yopo.engine.engine import Engine
from yopo.methods.base import count_classes
from yopo.runs import distributed, exchanging
from yopo.runs.build import build_method, build_model, build_optimizer, build_threat
from yopo.runs.fitting import misfits_in_a_sentence, shared_out
from yopo.runs.images import DataSet, look
from yopo.runs.overlay import flat
from yopo.runs.progress import Progress, Watcher
from yopo.runs.schedule import TrainingPhase, rate
from yopo.runs.settings import Config, what_counts
from yopo.runs.snapshot import Snapshot
from yopo.runs.starting import begin_with


class Learner:
    """The parts that change while a run trains, in one of its processes.

    `model` is the network itself, which is kept and compared; `trained` is what passes run: the
    same, or DistributedDataParallel around it. FSDP2 spreads the weights of the network itself.
    begins: whether no checkpoint will give it its weights.
    """

    def __init__(
        self,
        config: Config,
        data: DataSet,
        watcher: Watcher,
        device: torch.device,
        *,
        begins: bool = True,
    ) -> None:
        self.config, self.device = config, device
        self.rank, self.world = distributed.start(device)
        if self.world > 1:
            _refuse_other_settings(config)
        if self.parallel != "flat":
            exchanging.check(config)
        self.batch = shared_out(config, data, self.world)
        if self.batch != config.batch:
            watcher.say(
                f"batches of {self.batch} images: {self.world} processes cannot share "
                f"{config.batch} evenly"
            )
        seed_all(mix(config.seed, "weights"))
        self.model = self._network(data, watcher, begins=begins)
        if self.world > 1:
            distributed.same_everywhere([*self.model.parameters(), *self.model.buffers()])
        self.ema = EMA(self.model, config.ema) if config.ema else None  # of whole weights
        self.trained = self._shared_out()
        self.optimizer = build_optimizer(config, self.model)
        if self.world > 1 and self.parallel == "flat":
            yopo.exchange_gradients(self.optimizer)
        if config.optimizer.clip:  # after the exchange, and in each of Free's steps too
            self.optimizer.register_step_pre_hook(self._clip)
        self.method = build_method(config, self.trained, self.optimizer)
        if self.method.optimizer is not None and config.optimizer.accumulate > 1:
            name = type(self.method).__name__
            raise ValueError(f"{name} steps on every batch; use optimizer.accumulate 1 with it")
        self.snapshot = Snapshot(self.model, self.ema, self.optimizer, self.method)
        self.engine = self._engine(watcher)

    @property
    def parallel(self) -> str:
        """How several processes share the work."""
        return self.config.parallel if self.world > 1 else "flat"

    def _network(self, data: DataSet, watcher: Watcher, *, begins: bool) -> nn.Module:
        """The network, on its device."""
        config = self.config
        model = build_model(config.model, look(data, config.model), len(data.names))
        if begins and config.model.start is not None:
            watcher.say(begin_with(model, config.model, data))
        if config.sync_batchnorm and self.world > 1:
            model = distributed.synchronise_batchnorm(model)
        for name, value in model.state_dict().items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{name!r} in the model's state_dict is no tensor (get_extra_state), and "
                    "checkpoints hold tensors alone; leave it out, or make it a buffer"
                )
        model = model.to(self.device)
        if config.model.channels_last and self.parallel == "fsdp":
            watcher.say(
                "weights are not laid out channels_last: --parallel fsdp cannot spread such"
            )
        elif config.model.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _shared_out(self) -> nn.Module:
        """What passes run, in the way that was asked for."""
        if self.parallel == "ddp":
            return exchanging.wrapped(self.model)
        if self.parallel == "fsdp":
            for model in (self.model, *([self.ema.model] if self.ema else [])):
                exchanging.spread(model)
        return self.model

    def _engine(self, watcher: Watcher) -> Engine | None:
        """The fast path, where it pays and is exact; None for the plain one."""
        c = self.config
        if c.engine == "plain" or (c.engine == "auto" and self.device.type != "cuda"):
            return None
        why = None
        if self.parallel != "flat":
            why = f"--parallel {self.parallel} exchanges within the passes"
        elif c.sync_batchnorm and self.world > 1:
            why = "BatchNorm's statistics are exchanged in every pass"
        elif self.method.layer_by_layer:
            why = f"{type(self.method).__name__} runs the network layer by layer"
        if why is not None:
            watcher.say(f"plain steps: {why}")
            return None
        alone = c.optimizer.accumulate == 1
        if not alone and self.device.type == "cuda":
            watcher.say("steps are compiled, but no CUDA graph: gradients are accumulated")
        return Engine(
            self.method,
            self.optimizer,
            ema=self.ema,
            precision=c.precision,
            capture=alone,
            capture_exchange=c.engine == "captured",
            say=watcher.say,
        )

    @property
    def follower(self) -> nn.Module:
        """The network that is evaluated and kept: the averaged one if there is one."""
        return self.ema.model if self.ema else self.model

    @property
    def share(self) -> int:
        """Images of each batch in this process."""
        return self.batch // self.world

    def weights(self) -> Tensors:
        """Those of the followed network, whole; all processes must ask."""
        return {k: whole(v) for k, v in self.follower.state_dict().items()}

    def load(self, weights: Tensors | None) -> None:
        """Let the followed network have whole weights, the first process's, in all processes."""
        there = self.follower.state_dict()
        empty = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in there.items()}
        given = {k: (weights or empty)[k].to(self.device).contiguous() for k in there}
        if self.world > 1:
            distributed.same_everywhere(given.values())
        self.follower.load_state_dict({k: spread_like(v, there[k]) for k, v in given.items()})

    def try_sizes(self, shape: tuple[int, ...]) -> None:
        """See that the network takes the pictures (C, H, W) of all phases; trains nothing."""
        for side in self.config.schedule.sizes:
            small = (shape[0], side, side)
            with misfits_in_a_sentence(self.config, small):
                count_classes(self.model, torch.zeros(2, *small, device=self.device))

    def enter(self, phase: TrainingPhase) -> None:
        """Train as this phase has it, from the next warm-up on."""
        if self.config.schedule.m:
            method: Any = self.method
            method.m = phase.m or self.config.method.model_dump()["m"]

    def warm_up(self, x: Tensor, y: Tensor) -> float:
        """Study, compile and capture; trains nothing. The seconds that it took."""
        began = time.perf_counter()
        self.trained.train()
        (self.engine or self.method).prepare(self._laid_out(x), y)
        self.wait()
        return time.perf_counter() - began

    def step(self, x: Tensor, y: Tensor, p: Progress, number: int, steps: int) -> yopo.Step:
        """Step `number` of the epoch's `steps`: a function of seed, epoch, step and process."""
        c = self.config
        seed_all(mix(c.seed, p.epoch, number, self.rank))
        epoch = p.epoch + number / steps
        lr = p.rate_scale * rate(c, epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        part = min(1.0, (epoch + 1 / steps) / c.eps_warmup) if c.eps_warmup else 1.0
        x = self._laid_out(x)
        every = c.optimizer.accumulate
        last = (number + 1) % every == 0 or number + 1 == steps
        if self.engine:
            if not last:
                return self.engine.add(x, y, part=part)
            p.updates += 1
            return self.engine.step(x, y, part=part, updates=p.updates - 1)
        if c.eps_warmup and self.method.threat is not None:
            self.method.threat = build_threat(c.threat, part * c.train_eps)
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=c.precision == "bf16")
        with half, unexchanged(self.trained, not last):
            out = self.method.backward(x, y)
        if last:
            grads = [q.grad for q in self.model.parameters() if q.grad is not None]
            if every > 1:
                torch._foreach_div_(grads, float(number % every + 1))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema:
                self.ema.update(p.updates)
            p.updates += 1
        return out

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_same_weights(self) -> None:
        """End the run in all processes, before anything is written, if their weights differ."""
        if self.world == 1:
            return
        models = [self.model, *([self.ema.model] if self.ema else [])]
        held = [p for model in models for p in model.parameters()]
        others = differing(p for p in held if not is_shard(p))  # of parts there is but one
        if others:
            raise RuntimeError(
                f"the weights of process {', '.join(map(str, others))} are no longer those of "
                "process 0, so nothing was written. Look for code that changes weights outside "
                "optimizer.step(), or for machines that compute differently; --resume goes on from "
                "the last checkpoint"
            )

    def _laid_out(self, x: Tensor) -> Tensor:
        last = self.config.model.channels_last
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def _clip(self, *_: object) -> None:
        assert self.config.optimizer.clip is not None
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)


def _refuse_other_settings(config: Config) -> None:
    """Of parts of the weights nobody could see that processes train them in other ways."""
    also = {"parallel": config.parallel, "diagnose": config.diagnose.model_dump()}
    first, *others = map(flat, distributed.told_to_all(what_counts(config) | also))
    for rank, other in enumerate(others, 1):
        if names := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            raise ValueError(
                f"process {rank} was given other settings than process 0 ({', '.join(names)}); "
                "start all of them with the same command"
            )
