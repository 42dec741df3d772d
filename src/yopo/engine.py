"""The fast path: a method's whole optimizer step, compiled and captured in one CUDA graph.

The methods stay as they are. The engine runs their own code on a compiled network, with radius and
learning rate as tensors, and replays what that did on the device: noise, propagations, inner
updates, weight update and averaging. What cannot be compiled or captured runs plainly, and a line
says why.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from yopo.ema import EMA
from yopo.frozen import eval_mode, forked_rng
from yopo.methods.base import AdversarialMethod, Method, Step
from yopo.methods.free import Free
from yopo.methods.trades_yopo import TRADESYOPO
from yopo.methods.yopo import YOPO
from yopo.split import Cut, Split
from yopo.threat import L2, Linf

WARM_UP = 3  # steps before the capture, as torch asks for


class Engine:
    """`engine.step(x, y)` is `method.backward(x, y)`, `optimizer.step()`, `zero_grad()`, and EMA.

    Every batch should have the shape of the first; others run plainly. Only the first batch is
    checked, so that no step waits for the device. The next step overwrites the tensors in the
    answer. Schedulers work as usual. say: gets the line that says what could not be made fast.
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
        say: Callable[[str], None] = print,
    ) -> None:
        self.method, self.optimizer, self.ema, self.say = method, optimizer, ema, say
        self.precision, self.compile, self.capture = precision, compile, capture
        self.warmup_seconds = 0.0
        self.parameters = [p for g in optimizer.param_groups for p in g["params"]]
        self.device = self.parameters[0].device
        self._rates = [torch.tensor(float(g["lr"]), device=self.device) for g in self._groups]
        self._ema_weight = torch.ones((), device=self.device)
        self._shape: torch.Size | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    # ------------------------------------------------------------ stepping

    def step(self, x: Tensor, y: Tensor, *, part: float = 1.0, updates: int = 0) -> Step:
        """One optimizer step on images x (B, ...) in [0, 1] with targets y.

        part: of the threat's radius and step, while it grows. updates: steps made before, for EMA.
        """
        if self._shape is None:
            self.prepare(x, y)
        self._set_numbers(part, updates)
        if x.shape != self._shape:
            return self._work(self._plain, x, y)
        if self._graph is None:
            return self._work(self._fast, x, y)
        self._x.copy_(x, non_blocking=True)
        self._y.copy_(y, non_blocking=True)
        self._graph.replay()
        return self._out

    def _set_numbers(self, part: float, updates: int) -> None:
        """Write what changes from step to step to where the device reads it."""
        if self._threat is not None:
            self._threat.eps.fill_(part * self._full.eps)  # type: ignore[attr-defined]
            self._threat.step.fill_(part * self._full.step)  # type: ignore[attr-defined]
        if self.ema:
            self._ema_weight.fill_(self.ema.weight(updates))
        for group, rate in zip(self._groups, self._rates, strict=True):
            if group["lr"] is not rate:  # set anew since the last step
                rate.fill_(group["lr"])
                group["lr"] = rate

    def _work(self, method: Method, x: Tensor, y: Tensor) -> Step:
        bf16 = self.precision == "bf16"
        # No cache: casts kept across a capture would be those of old weights.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            out = method._run(x, y, None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ema:
            self.ema.move(self._ema_weight)
        if isinstance(method, Free):
            self._carry(method)
        return out

    def _carry(self, method: Free) -> None:
        """Put Free's perturbation where the next replay will read it."""
        assert method.eta is not None
        if self._eta is None or self._eta.shape != method.eta.shape:
            self._eta = torch.zeros_like(method.eta)
        self._eta.copy_(method.eta)
        for each in (self.method, self._plain, self._fast):
            each.eta = self._eta  # type: ignore[attr-defined]

    # ------------------------------------------------------------ getting ready

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Check the batch, compile and capture. Nothing is trained."""
        began = time.perf_counter()
        self.method.prepare(x, y)
        self._shape = x.shape
        self._eta = self.method.eta if isinstance(self.method, Free) else None
        self._threat = self._full = None
        if isinstance(self.method, AdversarialMethod) and type(self.method.threat) in (Linf, L2):
            self._full = self.method.threat
            self._threat = _on_device(self._full, self.device, self.compile)
        for group in self._groups:
            if isinstance(self.optimizer, SGD) and self.device.type == "cuda":
                group["fused"], group["foreach"] = True, False  # takes the rate as a tensor
        self._plain = self._fast = self._variant(self.method.model)
        if self.compile:
            try:
                # Each method and network of this process counts towards one limit.
                with torch._dynamo.config.patch(recompile_limit=256):
                    self._fast = self._compiled(x)
                    self._rehearse(x, y)
            except Exception as error:
                self._fast = self._plain
                self.say(f"not compiled: {_first_line(error)}")
        if self.capture and self.device.type == "cuda":
            try:
                self._record(x, y)
            except Exception as error:
                self._graph = None
                self.say(f"not captured as one CUDA graph: {_first_line(error)}")
            torch.cuda.synchronize(self.device)
        self.warmup_seconds += time.perf_counter() - began

    def _variant(self, model: nn.Module, cut: Cut | None = None) -> Method:
        """The method on another form of the network, with the threat's numbers on the device."""
        method = copy.copy(self.method)
        method.model = model
        if isinstance(method, AdversarialMethod) and self._threat is not None:
            method.threat = self._threat
        if isinstance(method, YOPO | TRADESYOPO) and cut is not None:
            method.split = Split(model, known=cut)
        return method

    def _compiled(self, x: Tensor) -> Method:
        """The method on the compiled network; where f0 is a function of its own, on two parts."""
        model, method = self.method.model, self.method
        if not isinstance(method, YOPO | TRADESYOPO):
            return self._variant(_compile(model))
        attack = isinstance(method, TRADESYOPO) and method.attack_mode == "eval"
        with eval_mode(model, attack):
            cut = method.split.cut(x)
        if cut.affine:
            return self._variant(_compile(model), cut)
        parts = cut_in_two(model, cut.name)
        if parts is None:
            raise ValueError(
                f"f0 ends at {cut.name!r} inside a network that is no plain sequence of modules"
            )
        f0, g = map(_compile, parts)
        whole = nn.Sequential(f0, g).train(model.training)
        return self._variant(whole, replace(cut, name="0", module=f0))

    def _rehearse(self, x: Tensor, y: Tensor) -> Tensor:
        """One step that leaves no trace; its loss."""
        with self._no_trace(x):
            self._set_numbers(1.0, 0)
            return self._work(self._fast, x, y).loss.clone()

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Capture one step, and see that its replay does what the step does."""
        self._x, self._y = x.clone(), y.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                expected = self._rehearse(self._x, self._y)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with self._no_trace(x):
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._out = self._work(self._fast, self._x, self._y)
        with self._no_trace(x):
            graph.replay()
            loss = self._out.loss.clone()
        if not torch.allclose(loss, expected, rtol=1e-2, atol=1e-3, equal_nan=True):
            raise RuntimeError(
                f"the replayed step has loss {float(loss):.4g}, the step itself {float(expected):.4g}"
            )
        self._graph = graph

    @contextmanager
    def _no_trace(self, x: Tensor) -> Iterator[None]:
        """Put weights, statistics, momentum, averages and random numbers back after the block."""
        modules = [self.method.model, *([self.ema.model] if self.ema else [])]
        kept = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        kept += [t for p in self.parameters for t in _tensors(self.optimizer.state.get(p))]
        kept += [] if self._eta is None else [self._eta]
        saved = [t.detach().clone() for t in kept]
        try:
            with forked_rng(x):
                yield
        finally:
            known = {id(t) for t in kept}
            new = [t for p in self.parameters for t in _tensors(self.optimizer.state.get(p))]
            new += [] if self._eta is None else [self._eta]
            with torch.no_grad():
                for tensor, value in zip(kept, saved, strict=True):
                    tensor.copy_(value)
                for tensor in new:  # what the block made: momentum begins at zero
                    if id(tensor) not in known:
                        tensor.zero_()
            self.optimizer.zero_grad()


def cut_in_two(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module] | None:
    """(f0, g) if the model is a sequence of modules, perhaps nested, and f0 ends after `name`."""
    flat = list(_flat(model, ""))
    inside = [i for i, (path, _) in enumerate(flat) if f"{path}.".startswith(f"{name}.")]
    if not inside:
        return None
    modules = [module for _, module in flat]
    return nn.Sequential(*modules[: inside[-1] + 1]), nn.Sequential(*modules[inside[-1] + 1 :])


def _flat(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run one after the other, with their names."""
    plain = type(model).forward is nn.Sequential.forward
    if not plain or model._forward_hooks or model._forward_pre_hooks:
        yield path, model
        return
    for name, module in model.named_children():
        yield from _flat(module, f"{path}.{name}" if path else name)


def _compile(model: nn.Module) -> nn.Module:
    compiled: nn.Module = torch.compile(model, dynamic=False)
    return compiled


def _on_device(threat: Linf | L2, device: torch.device, compiled: bool) -> Linf | L2:
    """The threat with radius and step as tensors; its ascent is one kernel where compiled."""
    kind = _compiled_kind(type(threat)) if compiled else type(threat)
    eps, step = (torch.tensor(v, device=device) for v in (threat.eps, threat.step))
    return kind(eps, step)  # type: ignore[arg-type]


@cache
def _compiled_kind(kind: type[Linf] | type[L2]) -> type[Linf] | type[L2]:
    ascend = torch.compile(kind.ascend, dynamic=False)
    return type(f"Compiled{kind.__name__}", (kind,), {"__slots__": (), "ascend": ascend})


def _tensors(state: Any) -> list[Tensor]:  # noqa: ANN401
    return [t for t in (state or {}).values() if isinstance(t, Tensor)]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
