"""One optimizer step as a CUDA graph: rehearsed without a trace, recorded, compared, replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop

from yopo.core.exchange import exchanges, withheld
from yopo.core.frozen import fill, forked_rng
from yopo.core.parallel import is_several
from yopo.core.undo import Undo
from yopo.engine.carried import Carried
from yopo.engine.ema import EMA
from yopo.methods.base import Method, Step

WARM_UP = 3  # steps before the capture, as torch asks for
Work = Callable[[Tensor, Tensor], Step]
T = TypeVar("T")


class CutOffError(RuntimeError):
    """It may not have sent what others wait for, so that nothing more can be agreed on."""


class Agree(Protocol):
    """Does what may fail; an error in one process is raised in all, but one that cut it off."""

    def __call__(self, work: Callable[[], T]) -> T:
        """What work finds."""


class Rehearsal:
    """Steps that leave no trace: they compile, warm up, and show what a step does."""

    def __init__(
        self, method: Method, optimizer: Optimizer, ema: EMA | None, carried: Carried
    ) -> None:
        self._method, self._optimizer, self._ema, self.carried = method, optimizer, ema, carried
        self.for_a_graph = False  # which needs the optimizer's state to be there before it
        self.exchanges_buffers = False  # a module put a new tensor in the place of one

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer trains now."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def __call__(self, work: Work, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The step's loss, and the weights it led to."""
        with self.no_trace(x):
            loss = work(x, y).loss
            return loss.clone(), self.weights()

    def weights(self) -> Tensor:
        """All that is trained, as one vector of its own."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    @contextmanager
    def no_trace(self, x: Tensor) -> Iterator[None]:
        """Put weights, statistics, momentum, averages and random numbers back after the block."""
        models: list[nn.Module] = [self._method.model, *([self._ema.model] if self._ema else [])]
        modules = [m for model in models for m in model.modules()]
        buffers = [(m, dict(m._buffers.items())) for m in modules]
        parameters = [*self.parameters, *(p for model in models for p in model.parameters())]
        there = dict(self.carried.tensors)
        values = (b for _, own in buffers for b in own.values() if b is not None)
        kept = [*parameters, *values, *self._state()]
        saved = [t.detach().clone() for t in kept]
        states = {p: dict(state) for p, state in self._optimizer.state.items()}
        grads = [p.grad for p in parameters]
        own = self._method.generator
        drawn = own.get_state() if own else None

        def put_back() -> None:
            for module, before in buffers:
                now = dict(module._buffers.items())
                same = now.keys() == before.keys() and all(now[k] is before[k] for k in now)
                self.exchanges_buffers |= not same
                fill(module._buffers, before)
            with torch.no_grad():
                for tensor, value in zip(kept, saved, strict=True):
                    tensor.copy_(value)
            self._forget(states)
            self.carried.go_on_from(there)
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad
            if own and drawn is not None:
                own.set_state(drawn)

        with Undo(put_back), forked_rng(x):
            for p in parameters:
                p.grad = None
            yield

    def _forget(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Put the optimizer's state back; what is new since begins at zero, or anew."""
        stays = self.for_a_graph and begins_at_zero(self._optimizer)
        for p, state in list(self._optimizer.state.items()):
            before = states.get(p, {})
            for name, value in list(state.items()):
                if before.get(name) is not None:
                    state[name] = before[name]
                elif stays and isinstance(value, Tensor):
                    value.zero_()
                else:
                    del state[name]
            if not state:
                del self._optimizer.state[p]

    def _state(self) -> list[Tensor]:
        """Tensors that the optimizer and the method carry from step to step."""
        state = self._optimizer.state
        states = [state[p] for p in self.parameters if p in state]
        tensors = [t for each in states for t in each.values() if isinstance(t, Tensor)]
        return tensors + list(self.carried.tensors.values())


class Capture:
    """The graph, the tensors that it reads and writes, and what it was recorded with."""

    def __init__(self, rehearsal: Rehearsal, optimizer: Optimizer, device: torch.device) -> None:
        self.rehearsal, self._optimizer, self._device = rehearsal, optimizer, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self._x = self._y = torch.empty(0)
        self._out: Step | None = None
        self._state: Any = None  # the optimizer's
        self._numbers: dict[str, list[Any]] = {}

    def record(self, rehearse: Work, work: Work, x: Tensor, y: Tensor, agree: Agree) -> None:
        """Capture one step, and see that its replay does what the step does.

        Of several processes all go from one stage to the next, or none: nothing is sent before all
        have warmed up, and nothing while they record; then all replay what is sent in between.
        """
        if not begins_at_zero(self._optimizer):
            raise ValueError(f"{type(self._optimizer).__name__} may not begin at zero")
        rehearsal = self.rehearsal
        self._x, self._y = x.clone(), y.clone()
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))

        def warm_up() -> None:
            with withheld(self._optimizer), torch.cuda.stream(side):
                for _ in range(WARM_UP - 1):
                    rehearsal(rehearse, self._x, self._y)
            if rehearsal.exchanges_buffers:
                raise ValueError("the network puts new tensors in the place of its buffers")

        def expect() -> tuple[Tensor, Tensor]:
            with torch.cuda.stream(side), self._sending():
                return rehearsal(rehearse, self._x, self._y)

        def capture() -> torch.cuda.CUDAGraph:
            torch.cuda.current_stream(self._device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            recording = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
            with rehearsal.no_trace(x):
                rehearsal.carried.fix()  # not in the recording: what it copies differs
                with recording:
                    self._out = work(self._x, self._y)
            return graph

        agree(warm_up)
        expected, there = agree(expect)
        graph = agree(capture)
        agree(lambda: self._compare(graph, x, expected, there))
        self.keep(graph)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """The block exchanges gradients; what fails in it, the other processes cannot be told."""
        try:
            yield
        except Exception as error:
            if not (exchanges(self._optimizer) and is_several()):
                raise
            raise CutOffError(
                f"a step failed where the processes exchange gradients ({error}), and the others "
                "may wait for what it did not send; start again without capture_exchange"
            ) from error

    def _compare(
        self, graph: torch.cuda.CUDAGraph, x: Tensor, expected: Tensor, there: Tensor
    ) -> None:
        """Refuse a graph that does not lead to this loss and these weights."""
        assert self._out is not None
        rehearsal = self.rehearsal
        with rehearsal.no_trace(x):
            rehearsal.carried.fix()
            with self._sending():
                graph.replay()
            loss = self._out.loss.clone()
            reached = rehearsal.weights()
        if not torch.allclose(loss, expected, rtol=1e-2, atol=1e-3, equal_nan=True):
            raise RuntimeError(
                f"its replay has loss {float(loss):.4g} where the step has {float(expected):.4g}"
            )
        start = rehearsal.weights()
        off, way = (reached - there).norm(), (there - start).norm()
        if off > 0.5 * way and way > 1e-6 * start.norm():  # less may be rounding
            raise RuntimeError("its replay moves the weights otherwise than the step does")

    def let_go(self) -> None:
        """Forget the graph; its memory is free for another."""
        self.graph = self._out = None
        self._x = self._y = torch.empty(0)

    def keep(self, graph: torch.cuda.CUDAGraph) -> None:
        """From now on steps are replays of it."""
        self.graph, self._state, self._numbers = graph, self._optimizer.state, self._read_numbers()

    def replay(self, x: Tensor, y: Tensor) -> Step:
        """The step on this batch."""
        assert self.graph is not None
        assert self._out is not None
        if self._optimizer.state is not self._state:
            self.take_over_state()
        self.rehearsal.carried.fix()
        self._x.copy_(x, non_blocking=True)
        self._y.copy_(y, non_blocking=True)
        self.graph.replay()
        return self._out

    def other_numbers(self) -> list[str]:
        """Which numbers of the optimizer, but for the rate, are others than those recorded."""
        return [k for k, v in self._read_numbers().items() if self._numbers[k] != v]

    def take_over_state(self) -> None:
        """A state was loaded into the optimizer; the graph knows the tensors before it."""
        loaded = self._optimizer.state
        for p, state in self._state.items():
            for name, value in state.items():
                new = loaded.get(p, {}).get(name)
                if not isinstance(value, Tensor):
                    state[name] = new
                elif new is None:
                    value.zero_()
                else:
                    value.copy_(new)
        self._optimizer.state = self._state

    def _read_numbers(self) -> dict[str, list[Any]]:
        """Momentum and the like, group by group; rates are read anew at each step."""
        optimizer, kinds = self._optimizer, (int, float, tuple)
        names = [k for k, v in optimizer.defaults.items() if type(v) in kinds and k != "lr"]
        return {name: [group[name] for group in optimizer.param_groups] for name in names}


def begins_at_zero(optimizer: Optimizer) -> bool:
    """Whether its first step is the one that it makes from a state of zeros."""
    if type(optimizer) is SGD:
        return all(not g["momentum"] or not g["dampening"] for g in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW, Adamax, RMSprop, Adagrad, Adadelta, RAdam)
