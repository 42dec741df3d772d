"""Cut any network into g ∘ f0 at a named module, without changing it.

The network is studied once, on two samples: a forward pass with frozen parameters leaves an
autograd graph in which every node depends on the input, and the graph says where a cut is
possible and whether f0 is affine.
"""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from yopo.frozen import Network, RngState, forked_rng, frozen, rng_state
from yopo.propagation import Objective, Propagation, propagate

Edge = tuple[Node, int]  # a value in the autograd graph: the node and which of its outputs


@dataclass(frozen=True, slots=True)
class Cut:
    """Where f0 ends, and what kind of function it is."""

    name: str
    module: nn.Module
    affine: bool  # the gradient of p·f0(x + eta) is the same for every eta
    random: bool  # f0 draws random numbers (dropout)


class Split:
    """The network as g ∘ f0, f0 being all up to and including the module `first_layer`.

    Without a name, f0 ends at the first module with parameters that the whole input passes
    through, in the order in which modules finish.
    """

    def __init__(self, model: nn.Module, first_layer: str | None = None) -> None:
        self.model = model
        # The modules inside a compiled network can be watched only in the original.
        self._original: nn.Module = getattr(model, "_orig_mod", model)
        self._target = None if first_layer is None else _submodule(self._original, first_layer)
        self._first_layer = first_layer
        self._cuts: dict[object, Cut] = {}

    def cut(self, x: Tensor) -> Cut:
        """Study the network on inputs like x (B, ...), once for each shape and mode."""
        key = (x.shape[1:], x.dtype, x.device, self.model.training)
        if key not in self._cuts:
            with forked_rng(x), torch.enable_grad():
                self._cuts[key] = self._study(x[:2])
        return self._cuts[key]

    def propagate(self, x: Tensor, objective: Objective, *, weights: float | None) -> Propagation:
        """One full propagation that also leaves what the inner loop on f0 needs."""
        cut = self.cut(x)
        model = self.model if cut.affine else self._original
        f = frozen(model) if weights is None else model
        if cut.affine:  # ∂loss/∂x is the inner gradient for every eta: no need of p or f0
            return propagate(f, x, objective, weights=weights)
        rng = rng_state(x) if cut.random else None
        with _watch_costate(cut.module) as found:
            out = propagate(f, x, objective, weights=weights)
        if len(found) != 1:
            raise ValueError(f"{cut.name!r} was called {len(found)} times in this forward pass")
        return replace(out, p=found[0], f0=self.f0(x, rng))

    def f0(self, x: Tensor, rng: RngState | None = None) -> Network:
        """f0 alone as a function, frozen; with `rng`, every call draws the same random numbers."""
        module = self.cut(x).module
        f = frozen(self._original)

        def network(x: Tensor) -> Tensor:
            if rng is None:
                return _run_to(module, f, x)
            with forked_rng(x, rng):
                return _run_to(module, f, x)

        return network

    def _study(self, x: Tensor) -> Cut:
        x = x.detach().clone().requires_grad_()
        calls, is_cut = _record(self._original, x)
        if self._first_layer is None:
            call = _first_cut(calls, is_cut)
            if call is None:
                raise ValueError(
                    "no module of this network has the whole input pass through it, so there is "
                    "no f0; put the first operations into a module of their own"
                )
        else:
            call = _named_cut(calls, is_cut, self._first_layer, self._target)
        assert call.edge is not None
        before = rng_state(x)
        f = frozen(self._original)
        _run_to(call.module, f, x)
        random = not all(
            a is b or torch.equal(a, b)  # type: ignore[arg-type]
            for a, b in zip(before, rng_state(x), strict=True)
        )
        affine = _is_linear(call.edge) and _gradient_is_constant(call.module, f, x)
        return Cut(call.name, call.module, affine, random)


# ---------------------------------------------------------------- running f0 and watching p


class _ReachedEndOfF0(BaseException):  # not an Exception: user code must not swallow it
    def __init__(self, output: Tensor) -> None:
        self.output = output


def _run_to(module: nn.Module, f: Network, x: Tensor) -> Tensor:
    """Run f until `module` has finished and return what it gave."""

    def stop(_module: nn.Module, _args: object, output: Tensor) -> NoReturn:
        raise _ReachedEndOfF0(output)

    with _forward_hook(module, stop):
        try:
            f(x)
        except _ReachedEndOfF0 as reached:
            return reached.output
    raise ValueError("the first layer was not called in this forward pass")


@contextmanager
def _watch_costate(module: nn.Module) -> Iterator[list[Tensor]]:
    """Passes in the block put p = ∂loss/∂f0 into the list on their way back."""
    found: list[Tensor] = []

    # A hook on the tensor, not .retain_grad(): the next module may overwrite f0's output in
    # place, and p belongs to the value before that.
    def watch(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(found.append)

    with _forward_hook(module, watch):
        yield found


@contextmanager
def _forward_hook(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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
    handles = []
    for name, module in model.named_modules():

        def note(module: nn.Module, _args: object, output: object, name: str = name) -> None:
            tensor = isinstance(output, Tensor)
            node = output.grad_fn if isinstance(output, Tensor) else None
            edge = (node, output.output_nr) if node and isinstance(output, Tensor) else None
            calls.append(_Call(name, module, edge, tensor))

        if name:  # the whole network is no first layer
            handles.append(module.register_forward_hook(note))
    try:
        # The clone gives the input a node of its own, so that an identity layer has one too.
        logits = frozen(model)(x.clone())
    finally:
        for handle in handles:
            handle.remove()
    if logits.grad_fn is None:
        raise ValueError("the model's output does not depend on its input; nothing to attack")
    end = (logits.grad_fn, logits.output_nr)

    def is_cut(call: _Call) -> bool:
        alone = sum(other.module is call.module for other in calls) == 1
        return alone and call.edge is not None and not _reaches(end, x, without=call.edge)

    return calls, is_cut


def _walk(start: Edge, without: Edge | None = None) -> Iterator[Node]:
    """Every node between `start` and the input, not going through the value `without`."""
    todo, seen = [start], {start}
    while todo:
        edge = todo.pop()
        if edge == without:
            continue
        yield edge[0]
        following = {(n, i) for n, i in edge[0].next_functions if n is not None}
        todo += following - seen
        seen |= following


def _reaches(start: Edge, x: Tensor, without: Edge) -> bool:
    return any(getattr(node, "variable", None) is x for node in _walk(start, without))


def _first_cut(calls: list[_Call], is_cut: IsCut) -> _Call | None:
    with_parameters = (c for c in calls if next(c.module.parameters(), None) is not None)
    return next(filter(is_cut, with_parameters), None)


def _named_cut(calls: list[_Call], is_cut: IsCut, name: str, target: nn.Module | None) -> _Call:
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
    else:
        why = "does not see the whole input: part of it takes another way to the output"
    around = [c for c in calls if name.startswith(c.name + ".") and is_cut(c)]
    instead = around[0] if around else _first_cut(calls, is_cut)
    advice = f"; name {instead.name!r} instead" if instead else ""
    raise ValueError(f"first_layer={name!r} cannot end f0: it {why}{advice}")


def _submodule(model: nn.Module, name: str) -> nn.Module:
    names: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name and name in names:
        return names[name]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or [n for n in names if n][:3]
    raise ValueError(
        f"no module {name!r} in the model for first_layer; near names: {', '.join(near)}"
    )


# ---------------------------------------------------------------- is f0 affine?

# Autograd nodes of operations that are linear in each single input.
_LINEAR = frozenset(
    "Addmm Alias AvgPool2D AvgPool3D Bmm Clone ConstantPadNd Convolution Div Expand Flip Im2Col "
    "Mean Mm Mul Mv NativeDropout Neg Permute PixelUnshuffle ReflectionPad1D ReflectionPad2D "
    "Repeat ReplicationPad1D ReplicationPad2D ReshapeAlias Roll Rsub Select Slice Squeeze Sum T "
    "ToCopy Transpose Unfold UnsafeView Unsqueeze UpsampleBilinear2D UpsampleNearest2D View".split()
)
# Those that stay linear when several of their inputs depend on x.
_ADDITIVE = frozenset("Add Cat Stack Sub".split())


def _is_linear(edge: Edge) -> bool:
    """Whether every operation between the input and this value is linear in the input.

    An operation not known to be linear only costs speed: the inner loop is then run in full.
    """
    for node in _walk(edge):
        name = node.name()
        if name.endswith("AccumulateGrad"):
            continue
        operation = name.rstrip("0123456789").removesuffix("Backward")
        inputs = [i for i, (following, _) in enumerate(node.next_functions) if following]
        if operation in _ADDITIVE:
            continue
        if operation not in _LINEAR or len(inputs) != 1:
            return False
        if operation == "Div" and inputs != [0]:
            return False
    return True


def _gradient_is_constant(module: nn.Module, f: Network, x: Tensor) -> bool:
    """Whether ∇ p·f0 agrees at x and at a random point of the box, for one random p.

    Catches what the graph hides, such as division by a detached statistic of the input.
    """
    rng = rng_state(x)
    p: Tensor | None = None
    grads: list[Tensor] = []
    for at in (x, torch.rand_like(x)):
        at = at.detach().requires_grad_()
        with forked_rng(x, rng):
            out = _run_to(module, f, at)
        p = torch.randn_like(out) if p is None else p
        grads += torch.autograd.grad((p * out).sum(), at)
    scale = grads[0].abs().max().clamp(min=torch.finfo(x.dtype).tiny)
    return bool((grads[0] - grads[1]).abs().max() <= 1e-4 * scale)
