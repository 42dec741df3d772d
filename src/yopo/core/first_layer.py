"""Cut any network into g ∘ f0 at a named module, without changing it.

The network is studied once: a forward pass with frozen parameters leaves an
autograd graph in which every node depends on the input, and the graph says where a cut is
possible and whether f0 is affine (`affine`).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from yopo.core.affine import Edge, gradient_is_constant, is_linear, reaches
from yopo.core.frozen import (
    Frozen,
    RngState,
    eager,
    forked_rng,
    has_compiled_parts,
    made_of,
    rng_state,
    uncompiled,
)
from yopo.core.names import module_named, named
from yopo.core.parallel import fsdp
from yopo.core.propagation import (
    NO_WAY_BACK,
    Objective,
    OtherWayError,
    Prefix,
    Propagation,
    no_logits,
    propagate,
)
from yopo.core.undo import Undo, forward_replaced, hooked, surely


@dataclass(frozen=True, slots=True)
class Cut:
    """Where f0 ends, and what kind of function it is."""

    name: str  # "": at the input itself
    module: nn.Module  # of that name
    affine: bool  # the gradient of p·f0(x + eta) is the same for every eta
    random: bool  # f0 draws random numbers (dropout)
    compiled_parts: bool = False  # the network has some, which must run eagerly to be watched


class Split:
    """The network `model` as g ∘ f0, f0 being all up to and including the module `first_layer`.

    Without a name, f0 ends at the first module with parameters (if there is none, at the first)
    that the whole input passes through, in the order in which modules finish; where there is no
    such module, as in front of two parallel stems, f0 is the identity.
    """

    def __init__(self, model: nn.Module, first_layer: str | None = None) -> None:
        self.model = model
        # The modules inside a compiled network can be watched only in the original.
        self._original = uncompiled(model)
        if first_layer is not None:
            module_named(self._original, first_layer)  # refuses a wrong name now
        self._first_layer = first_layer
        self._cuts: dict[object, Cut] = {}
        self._studied: object = None  # the network that they are of
        self._now: tuple[Cut, Frozen] | None = None  # inside `still`

    @contextmanager
    def still(self, x: Tensor) -> Iterator[None]:
        """Look at the network once: in the block it keeps its modules, hooks and modes.

        All batches in the block are like x.
        """
        cut, before = self.cut(x), self._now
        with Undo(lambda: setattr(self, "_now", before)):
            self._now = cut, Frozen(self.model if cut.affine else self._original)
            yield

    @surely
    def cut(self, x: Tensor) -> Cut:
        """Study the network on inputs like x (B, ...), once for each shape and mode."""
        if self._now is not None:
            return self._now[0]
        modules = made_of(self._original)
        hooks = [(*m._forward_pre_hooks, *m._forward_hooks) for m in modules]  # their numbers
        if (modules, hooks) != self._studied:
            self._cuts, self._studied = {}, (modules, hooks)
        key = (x.shape[1:], x.dtype, x.device, *(module.training for module in modules))
        if key not in self._cuts:
            compiled = has_compiled_parts(self._original)
            with forked_rng(x), torch.enable_grad(), eager(compiled):
                self._cuts[key] = replace(self._study(x), compiled_parts=compiled)
        return self._cuts[key]

    @surely
    def propagate(self, x: Tensor, objective: Objective, *, weights: float | None) -> Propagation:
        """One full propagation that also leaves what the inner loop on f0 needs."""
        if self._now is None:
            with self.still(x):
                return self.propagate(x, objective, weights=weights)
        cut, frozen = self._now
        if cut.affine:  # ∂loss/∂x is the inner gradient for every eta: no need of p or f0
            f = frozen.anew() if weights is None else self.model
            return propagate(f, x, objective, weights=weights)
        f = frozen.anew() if weights is None else self._original
        f0 = self.f0(x, rng_state(x) if cut.random else None)  # as it is before the pass
        with _watch_costate(cut.module) as costates, eager(cut.compiled_parts):
            out = propagate(f, x, objective, weights=weights)
        if len(costates) != 1:
            raise ValueError(f"{cut.name!r} was called {len(costates)} times in this forward pass")
        return replace(out, p=costates[0], f0=f0)

    def f0(self, x: Tensor, rng: RngState | None = None) -> Prefix:
        """f0 alone, frozen; with `rng`, every call draws the same random numbers."""
        cut = self.cut(x)
        if self._now is not None and not cut.affine:
            frozen = self._now[1].anew()
        else:
            frozen = Frozen(self._original if cut.name else cut.module)
        return _F0(cut.module, frozen, rng, cut.compiled_parts)

    def _study(self, x: Tensor) -> Cut:
        x = x.detach().clone().requires_grad_()
        calls, is_cut = _record(self._original, x)
        if self._first_layer is None:
            call = _first_cut(calls, is_cut)
            if call is None:  # the identity: ∂loss/∂x serves all steps, as for every affine f0
                return Cut("", nn.Identity(), affine=True, random=False)
        else:
            target = module_named(self._original, self._first_layer)
            call = _named_cut(calls, is_cut, self._first_layer, target)
        assert call.edge is not None
        frozen, rng = Frozen(self._original), rng_state(x)
        _F0(call.module, frozen, None)(x)
        drawn = rng_state(x)
        random = not torch.equal(rng[0], drawn[0])
        if rng[1] is not None and drawn[1] is not None:
            random = random or not torch.equal(rng[1], drawn[1])
        # Where f0 draws, another draw may take another way (stochastic depth).
        f0 = _F0(call.module, frozen, rng)
        affine = not random and is_linear(call.edge, x) and gradient_is_constant(f0, x)
        return Cut(call.name, call.module, affine, random)


@surely
def cut_names(model: nn.Module, x: Tensor) -> list[str]:
    """Every place where the network can be cut on inputs like x (B, ...), from the default on."""
    model, x = uncompiled(model), x.detach().clone().requires_grad_()
    with forked_rng(x), torch.enable_grad(), eager(has_compiled_parts(model)):
        calls, is_cut = _record(model, x)
        first = _first_cut(calls, is_cut)
        ends = {c.edge: c.name for c in reversed(calls) if is_cut(c)}  # one name for each value
    names = [c.name for c in calls if ends.get(c.edge) == c.name]
    return names[names.index(first.name) :] if first and first.name in names else names


# ---------------------------------------------------------------- running f0 and watching p


class Stopped(BaseException):
    """A pass was left half-way. Not an Exception: user code must not swallow it."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


@dataclass(frozen=True, slots=True)
class _F0:
    """The network run until `module` has finished."""

    module: nn.Module
    frozen: Frozen
    rng: RngState | None  # where every call starts drawing from; None: the global stream
    eager: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return self.frozen.run(lambda model: self._run(model, x), afresh=True)

    def pull_back(self, p: Tensor, x: Tensor) -> Tensor:
        """∇x p·f0(x), cheaper than differentiating the product."""
        x = x.detach().requires_grad_()

        def work(model: nn.Module) -> Tensor:
            with torch.enable_grad():
                (grad,) = torch.autograd.grad(self._run(model, x), x, p)
            return grad

        return self.frozen.run(work, afresh=True)

    def _run(self, model: nn.Module, x: Tensor) -> Tensor:
        def stop(_module: nn.Module, _args: object, output: Tensor) -> NoReturn:
            raise Stopped(output)

        rng = forked_rng(x, self.rng) if self.rng else nullcontext()
        ending = _ending_properly(self.frozen.modules, self.module)
        with rng, hooked(self.module, stop), ending, eager(self.eager):
            try:
                model(x.clone())  # a copy: see propagate
            except Stopped as reached:
                return reached.output
        raise OtherWayError(
            "the first layer was not called in this forward pass: the network takes another way "
            "for other images; name a layer that all of them go through, as "
            'nn.Sequential(OrderedDict(first=nn.Identity(), net=model)) with first_layer="first"'
        )


@contextmanager
def _ending_properly(modules: list[nn.Module], module: nn.Module) -> Iterator[None]:
    """Let what FSDP2 does after a forward pass be done around `module`, too, when it is left.

    Each module around it that FSDP2 gathers returns the value, as if it were its own; once torch
    has seen to its weights, the value goes further out.
    """
    with ExitStack() as stack:
        for around in fsdp(modules):
            if around is not module and any(m is module for m in around.modules()):
                stack.enter_context(_passing_on(around))
        yield


@contextmanager
def _passing_on(around: nn.Module) -> Iterator[None]:
    forward, stopped = around.forward, False

    def caught(*args: object, **kwargs: object) -> object:
        nonlocal stopped
        stopped = False
        try:
            return forward(*args, **kwargs)
        except Stopped as reached:
            stopped = True
            return reached.output

    def further(_module: nn.Module, _args: object, output: Tensor) -> None:
        if stopped:
            raise Stopped(output)

    with forward_replaced(around, caught), hooked(around, further):
        yield


@contextmanager
def _watch_costate(module: nn.Module) -> Iterator[list[Tensor]]:
    """Passes in the block put p = ∂loss/∂f0 into the list on their way back."""
    costates: list[Tensor] = []

    # A hook on the tensor, not .retain_grad(): the next module may overwrite f0's output in
    # place, and p belongs to the value before that.
    def watch(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        output = own(output)
        output.register_hook(costates.append)
        return output

    with hooked(module, watch):
        yield costates


def own(output: Tensor) -> Tensor:
    """The value itself, not a view: writing into a view in place would change its history."""
    return output.clone() if output._is_view() else output


# ---------------------------------------------------------------- finding the cut


@dataclass(frozen=True, slots=True)
class _Call:
    """A module that finished during the study pass."""

    name: str
    module: nn.Module
    edge: Edge | None  # its output in the graph; None if that does not depend on the input
    is_tensor: bool


IsCut = Callable[[_Call], bool]


def _record(model: nn.Module, x: Tensor) -> tuple[list[_Call], IsCut]:
    """Run the frozen model once; list the calls in the order they finish."""
    calls: list[_Call] = []

    def note(name: str, module: nn.Module, _args: object, output: object) -> object:
        edge = None
        if isinstance(output, Tensor):
            output = own(output)
            edge = (output.grad_fn, output.output_nr) if output.grad_fn else None
        calls.append(_Call(name, module, edge, isinstance(output, Tensor)))
        return output

    with ExitStack() as hooks:
        for name, module in named(model):
            if name:  # the whole network is no first layer
                hooks.enter_context(hooked(module, partial(note, name)))
        # The clone gives the input a node of its own, so that an identity layer has one too.
        logits = Frozen(model)(x.clone())
    if not isinstance(logits, Tensor):
        raise ValueError(no_logits(logits))
    if logits.grad_fn is None or not reaches(end := (logits.grad_fn, logits.output_nr), x):
        raise ValueError(NO_WAY_BACK)

    def is_cut(call: _Call, _alive: Tensor = logits) -> bool:  # nodes may not outlive the graph
        if call.edge is None:
            return False
        if call.edge == end and not is_linear(end, x):  # f0 would be the whole network
            return False
        alone = sum(other.module is call.module for other in calls) == 1
        return alone and not reaches(end, x, without=call.edge)

    return calls, is_cut


def _first_cut(calls: list[_Call], is_cut: IsCut) -> _Call | None:
    with_parameters = (c for c in calls if next(c.module.parameters(), None) is not None)
    return next(filter(is_cut, with_parameters), None) or next(filter(is_cut, calls), None)


def _named_cut(calls: list[_Call], is_cut: IsCut, name: str, target: nn.Module) -> _Call:
    mine = [call for call in calls if call.module is target]
    if len(mine) == 1 and is_cut(mine[0]):
        return mine[0]
    if not mine:
        why = "is never called in forward"
    elif len(mine) > 1:
        why = f"is called {len(mine)} times in forward, so it does not end f0 at one place"
    elif not mine[0].is_tensor:
        why = "does not return a tensor"
    elif mine[0].edge is None:
        why = "does not see the input: its output does not depend on it"
    elif mine[0] is calls[-1]:
        why = "gives the logits, so that f0 would be the whole network"
    else:
        why = "does not see the whole input: part of it takes another way to the output"
    around = [c for c in calls if name.startswith(c.name + ".") and is_cut(c)]
    instead = around[0] if around else _first_cut(calls, is_cut)
    advice = f"; name {instead.name!r} instead" if instead else ""
    raise ValueError(f"first_layer={name!r} cannot end f0: it {why}{advice}")
