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
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from yopo.core.checks import check_choice, check_optimizer
from yopo.core.exchange import watch
from yopo.core.parallel import unexchanged
from yopo.core.undo import surely
from yopo.engine.capture import Capture, Rehearsal
from yopo.engine.carried import Carried
from yopo.engine.ema import EMA
from yopo.engine.forms import plain_form
from yopo.engine.numbers import Numbers
from yopo.engine.ready import Options, Ready
from yopo.engine.steps import Steps
from yopo.engine.watched import Watched
from yopo.methods.base import Method, Step, plain

logger = logging.getLogger(__name__)


class Engine:
    """`engine.step(x, y)` is `method.backward(x, y)`, `optimizer.step()`, `zero_grad()`, and EMA.

    Every batch should have the shape of the first; others run plainly, until `prepare` is called
    with one. Only the first batch is checked, so that no step waits for the device. The next step
    overwrites the tensors in the answer. Schedulers work as usual; a radius that grows is
    `step(..., part=)`. `add` accumulates gradients. After `yopo.exchange_gradients(optimizer)`
    several processes compile, the first of each machine before the others, and all go on alike;
    what they exchange is part of the CUDA graph with capture_exchange alone, which was not tried on
    GPUs.
    ema: averaged after each step. precision: "bf16" casts the network's arithmetic, not its
    weights. compile, capture: False leaves compiling, or the CUDA graph, out.
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
        carried, device = Carried(method), optimizer.param_groups[0]["params"][0].device
        numbers = Numbers(optimizer, ema, device)
        self._steps = Steps(method, optimizer, numbers, carried, precision=precision)
        self._capture = Capture(Rehearsal(method, optimizer, ema, carried), optimizer, device)
        on_gpu = device.type == "cuda"
        half = precision == "bf16" and on_gpu  # where a cast pays, and a second stream
        self.options = Options(
            compile, capture and on_gpu, capture_exchange, cast=half, overlap=half
        )
        self._ready = Ready(self._steps, self._capture, self.options, self._say_once)
        self.warmup_seconds = 0.0
        self._watched: Watched | None = None

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self._steps.device

    @property
    def captured(self) -> bool:
        """Whether steps are replays of one CUDA graph."""
        return self._capture.graph is not None

    @property
    def compiled(self) -> bool:
        """Whether steps run a compiled network."""
        return self._steps.compiled

    def __repr__(self) -> str:
        """As Engine(YOPO(...), SGD, EMA(ResNet, decay=0.998), bf16, captured)."""
        how = "captured" if self.captured else "compiled" if self.compiled else "plain"
        parts = [self.method, type(self.optimizer).__name__, *([self.ema] if self.ema else [])]
        parts += [self._steps.precision, how if self._watched else "no step yet"]
        return f"Engine({', '.join(map(str, parts))})"

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """All that it goes on from besides the network and the optimizer, which have their own."""
        average = self.ema.state_dict() if self.ema else {}
        return {
            "steps": self._steps.numbers.steps,
            "method": self.method.state_dict(),
            "ema": average,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. The network and the optimizer load theirs, in any order."""
        device = self.device
        carried = {k: v.to(device, copy=True) for k, v in state["method"].items()}
        self.method.load_state_dict(carried)
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        self._steps.numbers.steps = int(state["steps"])

    # ------------------------------------------------------------ stepping

    @surely
    def step(self, x: Tensor, y: Tensor, *, part: float = 1.0, updates: int | None = None) -> Step:
        """One optimizer step on images x (B, ...) in [0, 1] with targets y.

        part: of the threat's radius and step, while it grows (a `step` that the method itself was
        given stays). updates: steps made before, for EMA; by default those of this engine.
        """
        watch(self.method.model)
        x, y = self._taken(x, y, part)
        with self._here():
            self._steps.numbers.write(part, updates)
            self._steps.carried.take()
            fast = self._is_fast(x, y)
            if fast and self.captured and not self._steps.added and not self._other_numbers():
                return self._capture.replay(x, y)
            return self._steps.take(self._steps.fast if fast else self._steps.plain, x, y)

    @surely
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
            self._steps.numbers.rehearse(part)
            self._steps.carried.take()
            form = self._steps.fast if self._is_fast(x, y) else self._steps.plain
            out = self._steps.gradients(form, x, y)
        self._steps.added += 1
        return out

    def _taken(self, x: Tensor, y: Tensor, part: float) -> tuple[Tensor, Tensor]:
        """A batch that can be run; the first makes everything ready."""
        if self._watched is None:
            self.prepare(x, y)
        assert self._watched is not None
        self._watched.check()
        self._steps.numbers.check(part)
        return plain(x), plain(y if y.is_floating_point() else y.long())

    def _is_fast(self, x: Tensor, y: Tensor) -> bool:
        """Whether the fast path was made for such a batch."""
        assert self._watched is not None
        return self._watched.is_for(x, y) and not self._changed()

    def _here(self) -> AbstractContextManager[object]:
        """The network's device as the current one: streams and kernels are those of the latter."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _changed(self) -> bool:
        """Whether the fast path was made for the network as it was before."""
        assert self._watched is not None
        fast = self.compiled or self.captured
        changed = self._watched.what_changed(fast=fast, captured=self.captured)
        if changed:
            self._say_once(
                f"plain steps: {changed} since the first step; a new Engine would compile it as it "
                "is now"
            )
        return bool(changed)

    def _other_numbers(self) -> bool:
        """Whether the optimizer has other numbers than the rate than the captured step has."""
        others = self._capture.other_numbers()
        if others:
            self._say_once(
                f"steps are no longer one CUDA graph: the optimizer's {', '.join(others)} changed "
                "(OneCycleLR does that, unless cycle_momentum=False)"
            )
        return bool(others)

    # ------------------------------------------------------------ getting ready

    @surely
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
        self._steps.let_go()
        self._capture.let_go()
        self._steps.carried.renew()
        self._watched = Watched(self.method, self.optimizer, x, y)
        self._steps.carried.take()
        self._steps.numbers.take(self.method.threat)
        self._capture.rehearsal.for_a_graph = self.options.capture
        if self.device.type == "cuda":
            self._steps.numbers.let_rates_be_tensors()
        self._steps.plain = self._steps.fast = plain_form(self.method, self._steps.numbers.ball)
        self._ready.make(x, y)
