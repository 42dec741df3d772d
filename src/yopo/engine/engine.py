"""The fast path: a method's whole optimizer step, compiled and captured in one CUDA graph.

The methods stay as they are. The engine runs their own code on a compiled network (`forms`), with
radius and learning rate as tensors (`numbers`), and replays what that did on the device
(`capture`): noise, propagations, inner updates, weight update and averaging. What cannot be
compiled or captured runs plainly, and a line says why.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from yopo.core.checks import check_choice, check_optimizer
from yopo.core.exchange import agreed, exchanges, is_first_here, watch, withheld
from yopo.core.parallel import is_several, is_spread, parallel, unexchanged
from yopo.engine.capture import Capture, Rehearsal
from yopo.engine.carried import Carried
from yopo.engine.ema import EMA
from yopo.engine.forms import compiled_form, plain_form
from yopo.engine.network import Compiled
from yopo.engine.numbers import Numbers
from yopo.engine.overlap import Streams
from yopo.engine.watched import Watched
from yopo.methods.base import Method, Step, plain

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Options:
    """How the engine runs a step. `cast` and `overlap`: see `network` and `overlap`."""

    precision: Literal["float32", "bf16"]
    compile: bool
    capture: bool
    capture_exchange: bool  # between several processes
    cast: bool
    overlap: bool


class Engine:
    """`engine.step(x, y)` is `method.backward(x, y)`, `optimizer.step()`, `zero_grad()`, and EMA.

    Every batch should have the shape of the first; others run plainly, until `prepare` is called
    with one. Only the first batch is checked, so that no step waits for the device. The next step
    overwrites the tensors in the answer. Schedulers work as usual; a radius that grows is
    `step(..., part=)`. `add` accumulates gradients. After `yopo.exchange_gradients(optimizer)`
    several processes compile, the first of each machine before the others, and all go on alike;
    what they exchange is part of the CUDA graph with capture_exchange alone, which was not tried on
    GPUs.
    say: gets the line that says what could not be made fast; the log by default.
    """

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        *,
        ema: EMA | None = None,
        precision: Literal["float32", "bf16"] = "float32",
        compile: bool = True,
        capture: bool = True,
        capture_exchange: bool = False,
        say: Callable[[str], None] = logger.warning,
    ) -> None:
        check_choice("precision", precision, ("float32", "bf16"))
        given: object = method
        if not isinstance(given, Method):
            raise TypeError(f"expected a method, as yopo.YOPO(...), got {type(method).__name__}")
        check_optimizer(optimizer, method.model)
        if method.optimizer is not None and method.optimizer is not optimizer:
            raise ValueError(
                f"expected the optimizer that {type(method).__name__} was given, got another one"
            )
        self.method, self.optimizer, self.ema = method, optimizer, ema
        self._say_once = cache(say)
        self._carried = Carried(method)
        rehearsal = Rehearsal(method, optimizer, ema, self._carried)
        device = rehearsal.parameters[0].device
        self._numbers = Numbers(optimizer, ema, device)
        self._capture = Capture(rehearsal, optimizer, device)
        on_gpu = device.type == "cuda"
        half = precision == "bf16" and on_gpu  # where a cast pays, and a second stream
        self.options = Options(
            precision, compile, capture and on_gpu, capture_exchange, cast=half, overlap=half
        )
        self.warmup_seconds = 0.0
        self._plain = self._fast = method
        self._watched: Watched | None = None
        self._added = 0  # batches whose gradients wait for the next step

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._capture.rehearsal.parameters[0].device

    @property
    def captured(self) -> bool:
        """Whether steps are replays of one CUDA graph."""
        return self._capture.graph is not None

    @property
    def compiled(self) -> bool:
        """Whether steps run a compiled network."""
        return isinstance(self._fast.model, Compiled)

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """All that it goes on from besides the network and the optimizer, which have their own."""
        average = self.ema.state_dict() if self.ema else {}
        return {"steps": self._numbers.steps, "method": self.method.state_dict(), "ema": average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. The network and the optimizer load theirs, in any order."""
        device = self.device
        carried = {k: v.to(device, copy=True) for k, v in state["method"].items()}
        self.method.load_state_dict(carried)
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        self._numbers.steps = int(state["steps"])

    # ------------------------------------------------------------ stepping

    def step(self, x: Tensor, y: Tensor, *, part: float = 1.0, updates: int | None = None) -> Step:
        """One optimizer step on images x (B, ...) in [0, 1] with targets y.

        part: of the threat's radius and step, while it grows (a `step` that the method itself was
        given stays). updates: steps made before, for EMA; by default those of this engine.
        """
        watch(self.method.model)
        x, y = self._taken(x, y, part)
        with self._here():
            self._numbers.write(part, updates)
            self._carried.take()
            fast = self._is_fast(x, y)
            if fast and self.captured and not self._added and not self._other_numbers():
                return self._capture.replay(x, y)
            return self._work(self._fast if fast else self._plain, x, y)

    def add(self, x: Tensor, y: Tensor, *, part: float = 1.0) -> Step:
        """Gradients of a batch for the next `step`, which takes the mean over all of them.

        Such steps are compiled, but not captured.
        """
        if self.method.optimizer is not None:
            name = type(self.method).__name__
            raise ValueError(f"{name} steps on every batch; call step alone")
        watch(self.method.model)
        x, y = self._taken(x, y, part)
        if self.captured:
            self._say_once("steps are not one CUDA graph where gradients are accumulated")
        with self._here(), unexchanged(self.method.model):
            self._numbers.rehearse(part)
            self._carried.take()
            out = self._run(self._fast if self._is_fast(x, y) else self._plain, x, y)
        self._added += 1
        return out

    def _taken(self, x: Tensor, y: Tensor, part: float) -> tuple[Tensor, Tensor]:
        """A batch that can be run; the first makes everything ready."""
        if self._watched is None:
            self.prepare(x, y)
        assert self._watched is not None
        self._watched.check()
        self._numbers.check(part)
        return plain(x), plain(y if y.is_floating_point() else y.long())

    def _is_fast(self, x: Tensor, y: Tensor) -> bool:
        """Whether the fast path was made for such a batch."""
        assert self._watched is not None
        return self._watched.is_for(x, y) and not self._changed()

    def _here(self) -> AbstractContextManager[object]:
        """The network's device as the current one: streams and kernels are those of the latter."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _changed(self) -> bool:
        """Whether the fast path was made for another setting of the network's flags."""
        assert self._watched is not None
        changed = self._watched.has_other_flags()
        if changed:
            self._say_once(
                "plain steps: train() or requires_grad of the network changed since the first "
                "step; a new Engine would compile it as it is now"
            )
        return changed

    def _other_numbers(self) -> bool:
        """Whether the optimizer has other numbers than the rate than the captured step has."""
        others = self._capture.other_numbers()
        if others:
            self._say_once(
                f"steps are no longer one CUDA graph: the optimizer's {', '.join(others)} changed "
                "(OneCycleLR does that, unless cycle_momentum=False)"
            )
        return bool(others)

    def _work(self, method: Method, x: Tensor, y: Tensor) -> Step:
        """One step of the method in one of its forms."""
        out = self._run(method, x, y)
        if self._added:
            self._take_mean()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._numbers.move_average()
        return out

    def _run(self, method: Method, x: Tensor, y: Tensor) -> Step:
        """Its gradients are added to .grad."""
        method.load_state_dict(self._carried.tensors)
        if isinstance(method.model, Compiled):
            method.model.refresh()
        bf16 = self.options.precision == "bf16"
        # No cache: casts kept across a capture would be those of old weights.
        try:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False
            ):
                out = method.run(x, y)
        except BaseException:  # as out of memory: half a gradient must not join the next
            self.optimizer.zero_grad()
            self._added = 0
            raise
        self._carried.keep(method)
        return out

    @torch.no_grad()
    def _take_mean(self) -> None:
        """Of the gradients of all batches since the last step."""
        if isinstance(self._fast.model, Compiled):
            self._fast.model.streams.settle()
        grads = [p.grad for p in self._capture.rehearsal.parameters if p.grad is not None]
        torch._foreach_div_(grads, self._added + 1.0)
        self._added = 0

    # ------------------------------------------------------------ getting ready

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Check the batch, compile and capture. Nothing is trained.

        Called again, it does so for batches like this one, and the method as it is set now, in
        place of the earlier ones; several processes must all call it.
        """
        began = time.perf_counter()
        x, y = plain(x), plain(y if y.is_floating_point() else y.long())
        cudnn = torch.backends.cudnn
        search = cudnn.benchmark
        if self.options.cast and not cudnn.deterministic:
            cudnn.benchmark = True  # gains 4% there (records/speed.md)
        try:
            with self._here():
                self._prepare(x, y)
        finally:
            cudnn.benchmark = search
        self.warmup_seconds += time.perf_counter() - began

    def _prepare(self, x: Tensor, y: Tensor) -> None:
        self.method.prepare(x, y)
        if isinstance(self._fast.model, Compiled):
            self._fast.model.let_go()
        self._capture.let_go()
        self._carried.renew()
        self._watched = Watched(self.method, x, y)
        self._carried.take()
        self._numbers.take(self.method.threat)
        self._capture.rehearsal.for_a_graph = self.options.capture
        if self.device.type == "cuda":
            self._numbers.let_rates_be_tensors()
        self._plain = self._fast = plain_form(self.method, self._numbers.ball)
        if self.ema:
            self.ema.pair()  # the network may have been converted since
        if parallel(self.method.model):
            self._say_once("plain steps: DistributedDataParallel exchanges gradients in backward()")
            return
        if is_spread(self.method.model):
            self._say_once("plain steps: the network's weights are spread over processes")
            return
        modules = self.method.model.modules()
        if is_several() and any(isinstance(m, nn.SyncBatchNorm) for m in modules):
            self._say_once("plain steps: SyncBatchNorm exchanges its statistics in every pass")
            return
        if self.options.compile:
            self._try_to_compile(x, y)
        if self.options.capture:
            self._try_to_capture(x, y)
            torch.cuda.synchronize(self.device)

    def _together(self, work: Callable[[], T]) -> T:
        """Do what may fail; where gradients are exchanged, an error in one process is in all."""
        done: list[T] = []
        wrong = ""
        try:
            done.append(work())
        except Exception as error:
            wrong = _first_line(error)
        wrong = agreed(wrong) if exchanges(self.optimizer) else wrong
        if wrong:
            raise _NotFastError(wrong)
        return done[0]

    def _try_to_compile(self, x: Tensor, y: Tensor) -> None:
        turns = [True]
        if exchanges(self.optimizer):  # the others of a machine find what its first one compiled
            turns = [is_first_here(), not is_first_here()]
        try:
            for mine in turns:
                self._together(partial(self._compile, x, y) if mine else lambda: None)
        except _NotFastError as error:
            self._numbers.compile_average(False)
            if isinstance(self._fast.model, Compiled):
                self._fast.model.let_go()
            self._fast = self._plain
            self._say_once(f"not compiled: {error}")

    def _compile(self, x: Tensor, y: Tensor) -> None:
        """Make the fast form, and try it; nothing is exchanged meanwhile."""
        streams = Streams(self.device, second=self.options.overlap)
        own = {id(p) for p in self.method.model.parameters()}
        others = [p for p in self._capture.rehearsal.parameters if id(p) not in own]
        # Each method and network of this process counts towards one limit.
        with (
            torch._dynamo.config.patch(recompile_limit=256),
            torch._inductor.config.patch(streams.options()),
            withheld(self.optimizer),
        ):
            self._numbers.compile_average(True)
            self._fast = compiled_form(
                self.method,
                self._numbers.ball,
                x,
                streams=streams,
                cast=self.options.cast,
                also=[p for p in others if p.requires_grad],
            )
            assert isinstance(self._fast.model, Compiled)
            inside = self.method.optimizer is not None
            self._fast.model.follow(self.optimizer, steps_inside=inside)
            self._rehearse(x, y)

    def _rehearse(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """One fast step that leaves no trace; its loss, and the weights it led to."""
        return self._capture.rehearsal(self._first_work, x, y)

    def _first_work(self, x: Tensor, y: Tensor) -> Step:
        """A fast step with the numbers of the first."""
        self._numbers.rehearse()
        self._carried.take()
        return self._work(self._fast, x, y)

    def _try_to_capture(self, x: Tensor, y: Tensor) -> None:
        apart = not self.options.capture_exchange
        if apart and exchanges(self.optimizer) and is_several():
            self._say_once(
                "steps are not one CUDA graph: there are several processes, and what they exchange "
                "is not captured unless you ask for it (capture_exchange)"
            )
            return
        generator = torch.cuda.default_generators[self.device.index or 0]
        before = generator.clone_state()
        try:
            with torch.cuda.stream(torch.cuda.current_stream(self.device)):
                self._capture.record(
                    self._first_work,
                    lambda x, y: self._work(self._fast, x, y),
                    x,
                    y,
                    self._together,
                )
        except Exception as error:
            generator.graphsafe_set_state(before)  # the other still waits for its capture
            why = error if isinstance(error, _NotFastError) else _first_line(error)
            self._say_once(f"not captured as one CUDA graph: {why}")


class _NotFastError(Exception):
    """Why something cannot be made fast, in one process and so in all."""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
