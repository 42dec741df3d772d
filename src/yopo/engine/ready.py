"""What makes steps fast before the first: compiling and capturing, in all processes or in none."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from yopo.core.exchange import agreed, exchanges, is_first_here, withheld
from yopo.core.parallel import is_several, is_spread, parallel
from yopo.engine.capture import Capture, CutOffError
from yopo.engine.forms import compiled_form
from yopo.engine.network import Compiled
from yopo.engine.overlap import Streams
from yopo.engine.steps import Steps

T = TypeVar("T")


@dataclass
class Options:
    """How the engine runs a step. `cast` and `overlap`: see `network` and `overlap`."""

    compile: bool
    capture: bool
    capture_exchange: bool  # between several processes
    cast: bool
    overlap: bool


class Ready:
    """Makes the fast form of a method's steps; what cannot be made fast is told to `say`."""

    def __init__(
        self, steps: Steps, capture: Capture, options: Options, say: Callable[[str], None]
    ) -> None:
        self.steps, self.capture, self.options, self.say = steps, capture, options, say

    def make(self, x: Tensor, y: Tensor) -> None:
        """Compile and capture, if the network and the options allow; nothing is trained."""
        if why := self._must_be_plain():
            self.say(f"plain steps: {why}")
            return
        if self.options.compile:
            self._compile(x, y)
        if self.options.capture:
            self.record(x, y)
            torch.cuda.synchronize(self.steps.device)

    def _must_be_plain(self) -> str:
        """Where passes exchange something in their midst."""
        model = self.steps.method.model
        if parallel(model):
            return "DistributedDataParallel exchanges gradients in backward()"
        if is_spread(model):
            return "the network's weights are spread over processes"
        if is_several() and any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
            return "SyncBatchNorm exchanges its statistics in every pass"
        return ""

    def together(self, work: Callable[[], T]) -> T:
        """Do what may fail; where gradients are exchanged, an error in one process is in all."""
        done: list[T] = []
        wrong = ""
        try:
            done.append(work())
        except CutOffError:
            raise
        except Exception as error:
            wrong = _first_line(error)
        wrong = agreed(wrong) if exchanges(self.steps.optimizer) else wrong
        if wrong:
            raise _NotFastError(wrong)
        return done[0]

    def _compile(self, x: Tensor, y: Tensor) -> None:
        """Let the fast form be a compiled one; nothing is exchanged meanwhile."""
        turns = [True]
        if exchanges(self.steps.optimizer):  # others of a machine find what its first one compiled
            turns = [is_first_here(), not is_first_here()]
        try:
            for mine in turns:
                self.together(partial(self._try_form, x, y) if mine else lambda: None)
        except _NotFastError as error:
            self.steps.numbers.compile_average(False)
            self.steps.let_go()
            self.say(f"not compiled: {error}")

    def _try_form(self, x: Tensor, y: Tensor) -> None:
        steps, method = self.steps, self.steps.method
        streams = Streams(steps.device, second=self.options.overlap)
        own = {id(p) for p in method.model.parameters()}
        others = [p for p in steps.parameters if id(p) not in own]
        # Each method and network of this process counts towards one limit.
        with (
            torch._dynamo.config.patch(recompile_limit=256),
            torch._inductor.config.patch(streams.options()),
            withheld(steps.optimizer),
        ):
            steps.numbers.compile_average(True)
            steps.fast = compiled_form(
                method,
                steps.numbers.ball,
                x,
                streams=streams,
                cast=self.options.cast,
                also=[p for p in others if p.requires_grad],
            )
            assert isinstance(steps.fast.model, Compiled)
            steps.fast.model.follow(steps.optimizer, steps_inside=method.optimizer is not None)
            self.capture.rehearsal(steps.first, x, y)

    def record(self, x: Tensor, y: Tensor) -> None:
        """Let steps be replays of one CUDA graph."""
        steps = self.steps
        if not self.options.capture_exchange and exchanges(steps.optimizer) and is_several():
            self.say(
                "steps are not one CUDA graph: there are several processes, and what they exchange "
                "is not captured unless you ask for it (capture_exchange)"
            )
            return
        generator = torch.cuda.default_generators[steps.device.index or 0]
        before = generator.clone_state()
        try:
            with torch.cuda.stream(torch.cuda.current_stream(steps.device)):
                take = partial(steps.take, steps.fast)
                self.capture.record(steps.first, take, x, y, self.together)
        except CutOffError:
            raise
        except Exception as error:
            generator.graphsafe_set_state(before)  # the other still waits for its capture
            why = error if isinstance(error, _NotFastError) else _first_line(error)
            self.say(f"not captured as one CUDA graph: {why}")


class _NotFastError(Exception):
    """Why something cannot be made fast, in one process and so in all."""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
