"""The fast path: a method's whole optimizer step, compiled and captured in one CUDA graph.

The methods stay as they are. The engine runs their own code on a compiled network, with radius and
learning rate as tensors, and replays what that did on the device: noise, propagations, inner
updates, weight update and averaging. What cannot be compiled or captured runs plainly, and a line
says why.
"""

import copy
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Optimizer, RAdam, RMSprop
from torch.utils.hooks import RemovableHandle

from yopo.core.checks import check_choice, check_optimizer
from yopo.core.exchange import exchanges, watch
from yopo.core.first_layer import Cut, Split
from yopo.core.frozen import eval_mode, forked_rng, parallel, uncompiled
from yopo.core.threat import L2, Linf, unchecked
from yopo.engine.compiled import Compiled, CompiledSplit, inductor_options
from yopo.engine.ema import EMA
from yopo.methods.base import AdversarialMethod, Method, Step, plain
from yopo.methods.free import Free
from yopo.methods.pmp import PMP
from yopo.methods.trades_yopo import TRADESYOPO
from yopo.methods.yopo import YOPO
from yopo.models.normalize import Normalize
from yopo.pmp.layers import in_a_row

WARM_UP = 3  # steps before the capture, as torch asks for


class Engine:
    """`engine.step(x, y)` is `method.backward(x, y)`, `optimizer.step()`, `zero_grad()`, and EMA.

    Every batch should have the shape of the first; others run plainly. Only the first batch is
    checked, so that no step waits for the device. The next step overwrites the tensors in the
    answer. Schedulers work as usual; a radius that grows is `step(..., part=)`.
    say: gets the line that says what could not be made fast.
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
        check_choice("precision", precision, ("float32", "bf16"))
        given: object = method
        if not isinstance(given, Method):
            raise TypeError(f"expected a method, as yopo.YOPO(...), got {type(method).__name__}")
        self.method, self.optimizer, self.ema, self.say = method, optimizer, ema, say
        self.precision, self.compile = precision, compile
        self.parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        check_optimizer(optimizer, method.model)
        if isinstance(method, Free) and method.optimizer is not optimizer:
            raise ValueError("expected the optimizer that Free was given, got another one")
        self.device = self.parameters[0].device
        self.capture = capture and self.device.type == "cuda"
        self._cast = precision == "bf16" and self.device.type == "cuda"  # where it pays
        self._overlap = self._cast  # gains 6% (records/speed.md)
        self.warmup_seconds = 0.0
        self._plain = self._fast = method
        self._shape: torch.Size | None = None  # of the batches that the fast path takes
        self._graph: torch.cuda.CUDAGraph | None = None
        # Numbers that change from step to step, where the device reads them.
        self._rates = [
            torch.tensor(float(g["lr"]), dtype=torch.float32, device=self.device)  # fused SGD's
            for g in self._groups
        ]
        self._ema_weight = torch.ones((), device=self.device)
        self._average: Callable[[Tensor], None] | None = ema.move if ema else None
        self._full: Linf | L2 | None = None  # the threat, and the one with tensors
        self._threat: Any = None
        self._eta: Tensor | None = None  # Free's, carried over
        self._hooks: list[RemovableHandle] = []
        self._rebinds = False
        self._told: set[str] = set()
        self._made = 0  # steps
        self._flags: list[bool] = []

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def captured(self) -> bool:
        """Whether steps are replays of one CUDA graph."""
        return self._graph is not None

    @property
    def compiled(self) -> bool:
        """Whether steps run a compiled network."""
        return isinstance(self._fast.model, Compiled)

    # ------------------------------------------------------------ stepping

    def step(self, x: Tensor, y: Tensor, *, part: float = 1.0, updates: int | None = None) -> Step:
        """One optimizer step on images x (B, ...) in [0, 1] with targets y.

        part: of the threat's radius and step, while it grows (a `step` that the method itself was
        given stays). updates: steps made before, for EMA; by default those of this engine.
        """
        watch(self.method.model)
        if self._shape is None:
            self.prepare(x, y)
        x, y = plain(x), plain(y if y.is_floating_point() else y.long())
        self._check_unchanged(part)
        with self._here():
            self._set_numbers(part, self._made if updates is None else updates)
            self._made += 1
            targets = y.shape, y.dtype
            if x.shape != self._shape or targets != self._targets or self._changed():
                return self._work(self._plain, x, y)
            if self._graph is None or self._other_numbers():
                return self._work(self._fast, x, y)
            if self.optimizer.state is not self._recorded:
                self._take_over_state()
            self._x.copy_(x, non_blocking=True)
            self._y.copy_(y, non_blocking=True)
            self._graph.replay()
            return self._out

    def _check_unchanged(self, part: float) -> None:
        """The method's parts and settings are those that the fast path was made from."""
        threat, loss, settings = self._made_for
        if getattr(self.method, "threat", None) is not threat or self.method.loss is not loss:
            raise ValueError(
                "the method's threat or loss was exchanged after the first step; make a new "
                "Engine, or let the radius grow with step(..., part=)"
            )
        for name, value in settings.items():
            if (now := getattr(self.method, name)) != value:
                raise ValueError(
                    f"the method's {name} was {value} at the first step and is {now} now; make a "
                    "new Engine"
                )
        if part != 1 and threat is not None and self._full is None:
            raise ValueError(f"part= is for yopo.Linf and yopo.L2, not {type(threat).__name__}")
        if len(self._groups) != len(self._rates):
            raise ValueError("the optimizer has other parameter groups now; make a new Engine")

    def _here(self) -> AbstractContextManager[object]:
        """The network's device as the current one: streams and kernels are those of the latter."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _changed(self) -> bool:
        """Whether the fast path was made for another setting of the network's flags."""
        if self._read_flags() == self._flags:
            return False
        self._say_once(
            "plain steps: train() or requires_grad of the network changed since the first step; "
            "a new Engine would compile it as it is now"
        )
        return True

    def _other_numbers(self) -> bool:
        """Whether the optimizer has other numbers than the rate than the captured step has."""
        other = [k for k, v in self._numbers().items() if self._captured_numbers[k] != v]
        if other:
            self._say_once(
                f"steps are no longer one CUDA graph: the optimizer's {', '.join(other)} changed "
                "(OneCycleLR does that, unless cycle_momentum=False)"
            )
        return bool(other)

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.say(text)

    def _numbers(self) -> dict[str, list[Any]]:
        """Momentum and the like, group by group; rates are read anew at each step."""
        kinds = (int, float, tuple)
        names = [k for k, v in self.optimizer.defaults.items() if type(v) in kinds and k != "lr"]
        return {name: [group[name] for group in self._groups] for name in names}

    def _read_flags(self) -> list[bool]:
        parameters, modules = self._watched
        return [*(p.requires_grad for p in parameters), *(m.training for m in modules)]

    def _take_over_state(self) -> None:
        """A state was loaded into the optimizer; the captured step knows the tensors before it."""
        loaded = self.optimizer.state
        for p, state in self._recorded.items():
            for name, value in state.items():
                new = loaded.get(p, {}).get(name)
                if not isinstance(value, Tensor):
                    state[name] = new
                elif new is None:
                    value.zero_()
                else:
                    value.copy_(new)
        self.optimizer.state = self._recorded

    def _set_numbers(self, part: float, updates: int) -> None:
        if self._full is not None:
            self._threat.eps.fill_(part * self._full.eps)
            self._threat.step.fill_(part * self._full.step)
        if self.ema:
            self._ema_weight.fill_(self.ema.weight(updates))
        if self.device.type == "cuda":
            for group, rate in zip(self._groups, self._rates, strict=True):
                if group["lr"] is not rate:  # set anew since the last step
                    rate.fill_(group["lr"])
                    group["lr"] = rate
        if isinstance(self.method, Free) and self._eta is not None:
            if self.method.eta is None:  # set anew, as by a checkpoint
                self._eta.zero_()
            elif self.method.eta is not self._eta:
                self._eta.copy_(self.method.eta)
            self.method.eta = self._eta

    def _work(self, method: Method, x: Tensor, y: Tensor) -> Step:
        if isinstance(method.model, Compiled):
            method.model.refresh()
        bf16 = self.precision == "bf16"
        # No cache: casts kept across a capture would be those of old weights.
        try:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False
            ):
                out = method._run(x, y, None)
        except BaseException:  # as out of memory: half a gradient must not join the next
            self.optimizer.zero_grad()
            raise
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._average:
            self._average(self._ema_weight)
        if isinstance(method, Free):
            self._carry(method)
        return out

    def _carry(self, method: Free) -> None:
        """Put Free's perturbation where the next replay will read it."""
        assert method.eta is not None
        if self._eta is None:
            self._eta = torch.zeros_like(method.eta)
        if self._eta.shape == method.eta.shape:
            self._eta.copy_(method.eta)
        else:  # a batch of another shape; a captured step knows this tensor by its address
            self._eta.copy_(method._carried(self._eta))
        for each in (self.method, self._plain, self._fast):
            assert isinstance(each, Free)
            each.eta = self._eta

    # ------------------------------------------------------------ getting ready

    def prepare(self, x: Tensor, y: Tensor) -> None:
        """Check the batch, compile and capture. Nothing is trained."""
        began = time.perf_counter()
        x, y = plain(x), plain(y if y.is_floating_point() else y.long())
        cudnn = torch.backends.cudnn
        search = cudnn.benchmark
        if self._cast and not cudnn.deterministic:
            cudnn.benchmark = True  # gains 4% there (records/speed.md)
        try:
            with self._here():
                self._prepare(x, y)
        finally:
            cudnn.benchmark = search
        self.warmup_seconds += time.perf_counter() - began

    def _prepare(self, x: Tensor, y: Tensor) -> None:
        self.method.prepare(x, y)
        self._shape, self._targets = x.shape, (y.shape, y.dtype)
        threat: Any = getattr(self.method, "threat", None)
        kinds = (int, float, str)
        settings = {k: v for k, v in vars(self.method).items() if isinstance(v, kinds)}
        self._made_for = threat, self.method.loss, settings
        self._watched = list(self.method.model.parameters()), list(self.method.model.modules())
        self._flags = self._read_flags()
        self._eta = self.method.eta if isinstance(self.method, Free) else None
        if type(threat) in (Linf, L2):
            self._full, self._threat = threat, _on_device(threat, self.device, self.compile)
        if self.device.type == "cuda":
            self._let_rates_be_tensors()
        self._plain = self._fast = self._variant(self.method.model)
        if self.ema:
            self.ema.pair()  # the network may have been converted since
        if parallel(self.method.model):
            self.say("plain steps: DistributedDataParallel exchanges gradients in backward()")
            return
        if exchanges(self.optimizer):
            self.say("plain steps: gradients are exchanged between processes before each step")
            return
        if self.compile:
            self._try_to_compile(x, y)
        if self.capture:
            self._try_to_capture(x, y)
            torch.cuda.synchronize(self.device)

    def _let_rates_be_tensors(self) -> None:
        for group in self._groups:
            if isinstance(self.optimizer, SGD):
                group["fused"], group["foreach"] = True, False
            elif "capturable" in group:  # Adam and its kin, which count steps on the device then
                group["capturable"] = True
                for p in group["params"]:
                    state = self.optimizer.state.get(p, {})  # [p] would make one
                    if isinstance(count := state.get("step"), Tensor):
                        state["step"] = count.to(self.device)

    def _try_to_compile(self, x: Tensor, y: Tensor) -> None:
        try:
            # Each method and network of this process counts towards one limit.
            with (
                torch._dynamo.config.patch(recompile_limit=256),
                torch._inductor.config.patch(inductor_options(self._overlap)),
            ):
                if self.ema:
                    self._average = torch.compile(self.ema.move, dynamic=False)
                self._fast = self._compiled(x)
                self._rehearse(x, y)
        except Exception as error:
            self._average = self.ema.move if self.ema else None
            for hook in self._hooks:
                hook.remove()
            if self._full is not None:
                self._threat = _on_device(self._full, self.device, False)
            self._plain = self._fast = self._variant(self.method.model)
            self.say(f"not compiled: {_first_line(error)}")

    def _try_to_capture(self, x: Tensor, y: Tensor) -> None:
        generator = torch.cuda.default_generators[self.device.index or 0]
        before = generator.clone_state()
        try:
            if not begins_at_zero(self.optimizer):
                raise ValueError(f"{type(self.optimizer).__name__} may not begin at zero")
            with torch.cuda.stream(torch.cuda.current_stream(self.device)):
                self._record(x, y)
        except Exception as error:
            self._graph = None
            generator.graphsafe_set_state(before)  # the other still waits for its capture
            self.say(f"not captured as one CUDA graph: {_first_line(error)}")

    def _compiled(self, x: Tensor) -> Method:
        """The method on the compiled network; where f0 is a function of its own, on two parts."""
        model, method = uncompiled(self.method.model), self.method
        if isinstance(method, PMP):
            raise ValueError("PMP runs the network layer by layer, not as a whole")
        if not isinstance(method, YOPO | TRADESYOPO):
            return self._variant(self._network(model))
        eval_attack = isinstance(method, TRADESYOPO) and method.attack_mode == "eval"
        with eval_mode(model, eval_attack):
            cut = method.split.cut(x)
        if cut.affine:
            return self._variant(self._network(model), cut)
        parts = cut_in_two(model, cut.name)
        if parts is None:
            raise ValueError(
                f"f0, up to {cut.name!r}, is not affine, and the network no plain sequence of "
                "modules; an affine first_layer can be compiled, such as an nn.Identity() before "
                "the network"
            )
        for part in parts:
            part.training = model.training
        network = self._network(*parts)
        cut = replace(cut, name="0", module=network.parts[0])
        fast = self._variant(network, cut)
        if isinstance(fast, YOPO | TRADESYOPO) and not cut.random and not _has_state(parts[0]):
            # The plain ascent: the compiler takes it into the function it makes.
            ascend = type(method.threat).ascend
            fast.split = CompiledSplit(network, parts[0], known=cut, ascend=ascend)
        return fast

    def _network(self, *parts: nn.Module) -> Compiled:
        own = {id(p) for p in self.method.model.parameters()}
        also = [p for p in self.parameters if p.requires_grad and id(p) not in own]
        return Compiled(*parts, cast=self._cast, overlap=self._overlap, also=also)

    def _variant(self, model: nn.Module, cut: Cut | None = None) -> Method:
        """The method on another form of the network, with the threat's numbers on the device."""
        method = copy.copy(self.method)
        method.model = model
        if isinstance(method, AdversarialMethod) and self._full is not None:
            method.threat = self._threat
            if not isinstance(model, Compiled):  # it may meet batches of any shape
                method.threat = unchecked(type(self._full), self._threat.eps, self._threat.step)
        if isinstance(method, YOPO | TRADESYOPO) and cut is not None:
            method.split = Split(model, known=cut)
        if isinstance(model, Compiled):
            method.loss = torch.compile(method.loss, dynamic=False)
            # Hooks, since Free steps inside a batch. Before others: one of them may clip gradients.
            at = weakref.proxy(model)  # the optimizer may outlive this engine
            settle = self.optimizer.register_step_pre_hook(lambda *_: at.settle())
            hooks: Any = self.optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(settle.id, last=False)
            self._hooks = [settle]
            if isinstance(method, Free):  # else once, before the step
                refresh = self.optimizer.register_step_post_hook(lambda *_: at.refresh())
                self._hooks.append(refresh)
            for hook in self._hooks:
                weakref.finalize(model, hook.remove)
        return method

    def _rehearse(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """One step that leaves no trace; its loss, and the weights it led to."""
        with self._no_trace(x):
            self._set_numbers(1.0, 0)
            loss = self._work(self._fast, x, y).loss
            return loss.clone(), self._weights()

    def _weights(self) -> Tensor:
        """All that is trained, as one vector of its own."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    def _record(self, x: Tensor, y: Tensor) -> None:
        """Capture one step, and see that its replay does what the step does."""
        self._x, self._y = x.clone(), y.clone()
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                expected, there = self._rehearse(self._x, self._y)
        torch.cuda.current_stream(self.device).wait_stream(side)
        if self._rebinds:
            raise ValueError("the network puts new tensors in the place of its buffers")
        graph = torch.cuda.CUDAGraph()
        record = torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local")
        with self._no_trace(x), record:
            self._out = self._work(self._fast, self._x, self._y)
        with self._no_trace(x):
            graph.replay()
            loss = self._out.loss.clone()
            reached = self._weights()
        if not torch.allclose(loss, expected, rtol=1e-2, atol=1e-3, equal_nan=True):
            raise RuntimeError(
                f"its replay has loss {float(loss):.4g} where the step has {float(expected):.4g}"
            )
        start = self._weights()
        off, way = (reached - there).norm(), (there - start).norm()
        if off > 0.5 * way and way > 1e-6 * start.norm():  # less may be rounding
            raise RuntimeError("its replay moves the weights otherwise than the step does")
        self._graph, self._recorded = graph, self.optimizer.state
        self._captured_numbers = self._numbers()

    @contextmanager
    def _no_trace(self, x: Tensor) -> Iterator[None]:
        """Put weights, statistics, momentum, averages and random numbers back after the block."""
        models = [self.method.model, *([self.ema.model] if self.ema else [])]
        modules = [m for model in models for m in model.modules()]
        buffers = [(m, k, b) for m in modules for k, b in m._buffers.items() if b is not None]
        parameters = [*self.parameters, *(p for model in models for p in model.parameters())]
        kept = [*parameters, *(b for *_, b in buffers), *self._state()]
        saved = [t.detach().clone() for t in kept]
        states = {p: dict(state) for p, state in self.optimizer.state.items()}
        grads = [p.grad for p in parameters]
        carried = self._eta is not None
        own = getattr(self.method, "generator", None)
        drawn = own.get_state() if own else None
        for p in parameters:
            p.grad = None
        try:
            with forked_rng(x):
                yield
        finally:
            for module, name, buffer in buffers:
                self._rebinds |= module._buffers[name] is not buffer
                module._buffers[name] = buffer
            with torch.no_grad():
                for tensor, value in zip(kept, saved, strict=True):
                    tensor.copy_(value)
            self._forget(states)
            if self._eta is not None and not carried:
                self._eta.zero_()
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad
            if own and drawn is not None:
                own.set_state(drawn)

    def _forget(self, states: dict[Tensor, dict[str, Any]]) -> None:
        """Put the optimizer's state back; what was made since begins at zero, or anew."""
        stays = self.capture and begins_at_zero(self.optimizer)  # a graph needs it to be there
        for p, state in list(self.optimizer.state.items()):
            before = states.get(p, {})
            for name, value in list(state.items()):
                if before.get(name) is not None:
                    state[name] = before[name]
                elif stays and isinstance(value, Tensor):
                    value.zero_()
                else:
                    del state[name]
            if not state:
                del self.optimizer.state[p]

    def _state(self) -> list[Tensor]:
        """Tensors that the optimizer and Free carry from step to step."""
        states = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        tensors = [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return tensors + ([] if self._eta is None else [self._eta])


def begins_at_zero(optimizer: Optimizer) -> bool:
    """Whether its first step is the one that it makes from a state of zeros."""
    if type(optimizer) is SGD:
        return all(not g["momentum"] or not g["dampening"] for g in optimizer.param_groups)
    return type(optimizer) in (Adam, AdamW, Adamax, RMSprop, Adagrad, Adadelta, RAdam)


def cut_in_two(model: nn.Module, name: str) -> tuple[nn.Sequential, nn.Sequential] | None:
    """(f0, g) if the model is a sequence of modules, perhaps nested, and f0 ends after `name`."""
    flat = in_a_row(model)
    inside = [i for i, (path, _) in enumerate(flat) if f"{path}.".startswith(f"{name}.")]
    if not inside:
        return None
    modules = [module for _, module in flat]
    return nn.Sequential(*modules[: inside[-1] + 1]), nn.Sequential(*modules[inside[-1] + 1 :])


def _has_state(module: nn.Module) -> bool:
    """Whether a pass may change buffers, as BatchNorm and spectral_norm do; Normalize's stay."""
    others = (m for m in module.modules() if not isinstance(m, Normalize))
    return any(next(m.buffers(recurse=False), None) is not None for m in others)


def _on_device(threat: Linf | L2, device: torch.device, compiled: bool) -> Linf | L2:
    """The threat with radius and step as tensors; its ascent is one kernel where compiled."""
    kind: Any = type(threat)
    eps, step = (torch.tensor(v, device=device) for v in (threat.eps, threat.step))
    return unchecked(_compiled_kind(kind) if compiled else kind, eps, step)


@cache
def _compiled_kind(kind: Any) -> Any:  # noqa: ANN401
    ascend = torch.compile(kind.ascend, dynamic=False)
    return type(f"Compiled{kind.__name__}", (kind,), {"__slots__": (), "ascend": ascend})


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
