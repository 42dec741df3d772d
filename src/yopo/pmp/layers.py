"""A network as layers f_0, …, f_{T−1}: modules in a row, or any model cut at named modules."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor, nn

from yopo.core.children import in_a_row
from yopo.core.first_layer import Cut, Split, Stopped, own
from yopo.core.frozen import (
    RngState,
    draw_from,
    eager,
    eval_mode,
    forked_rng,
    has_compiled_parts,
    rng_state,
    uncompiled,
    untouched,
)
from yopo.core.undo import hooked

Theta = Sequence[nn.Parameter]  # the parameters of one layer

NO_LAYERS = (
    "no module inside this network has the whole input pass through it, once, so it is no sequence "
    "of layers; put its first operations into a module of their own"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer in a forward pass, with an autograd graph of its own."""

    x: Tensor  # x_t (B, ...), a leaf
    out: Tensor  # f_t(x_t, θ_t), (B, ...)
    rng: RngState  # where its random numbers (dropout) began


class Layers(Protocol):
    """What the maximum principle needs of a network."""

    names: list[str]
    theta: list[list[nn.Parameter]]
    spare: list[nn.Parameter]  # used by none of them when the network was studied
    linear: list[nn.Linear | None]  # layers that are a linear module and nothing else
    model: nn.Module  # holds all of them

    def segments(self, x: Tensor) -> list[Segment]:
        """One forward pass, layer by layer."""

    def f(self, t: int, x: Tensor) -> Tensor:
        """f_t alone."""


class Chain:
    """Modules, one after the other."""

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str] | None = None) -> None:
        if not layers:
            raise ValueError("expected at least one layer, got none")
        self.layers = list(layers)
        self.names = [str(t) for t in range(len(layers))] if names is None else list(names)
        self.model: nn.Module = nn.ModuleList(layers)
        self.theta = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
        self.spare: list[nn.Parameter] = []
        self.linear: list[nn.Linear | None] = [
            layer if type(layer) is nn.Linear else None for layer in layers
        ]
        self._known = names is not None  # a network's own layers do compose
        refuse_sharing(self.names, self.theta)

    def segments(self, x: Tensor) -> list[Segment]:
        """One forward pass, layer by layer."""
        if not self._known:
            self._check(x)
        segments: list[Segment] = []
        for t in range(len(self.layers)):
            x, rng = x.detach().requires_grad_(), rng_state(x)
            segments.append(Segment(x, self.f(t, x), rng))
            x = segments[-1].out
        return segments

    def f(self, t: int, x: Tensor) -> Tensor:
        """f_t alone."""
        out: Tensor = self.layers[t](x.clone())  # a copy: see propagate
        return out

    def _check(self, x: Tensor) -> None:
        """Refuse layers whose shapes do not compose."""
        with torch.no_grad(), eval_mode(self.model), forked_rng(x):
            for t, layer in enumerate(self.layers):
                given = f"{tuple(x.shape)} of {x.dtype}"
                try:
                    out = layer(x.clone())
                except (RuntimeError, ValueError, IndexError, TypeError) as error:
                    before = f"what layer {t - 1} gives" if t else "the input"
                    raise ValueError(
                        f"layers do not compose: layer {t} ({type(layer).__name__}) cannot take "
                        f"{before}, {given}: {error}"
                    ) from None
                if not isinstance(out, Tensor) or out.dim() == 0 or len(out) != len(x):
                    got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                    raise ValueError(
                        f"expected layer {t} to return a tensor for {len(x)} samples, got {got}"
                    )
                x = out
        self._known = True


class Segmented:
    """A model cut where some modules end; the last layer ends with the model."""

    def __init__(self, model: nn.Module, x: Tensor, cuts: Sequence[Cut]) -> None:
        self.model = model
        self._ends = [cut.module for cut in cuts]
        self._eager = has_compiled_parts(model)  # no hook is heard inside those
        self._example = x[:1].detach()
        self.names = [*(cut.name for cut in cuts), "output"]
        self.linear: list[nn.Linear | None] = [None] * len(self.names)
        parameters = [p for p in model.parameters() if p.requires_grad]
        with torch.enable_grad(), forked_rng(x):  # checkpointed layers run again on the way back
            self.theta = untouched(
                model, lambda: [_used(segment.out, parameters) for segment in self.segments(x)]
            )
        used = {id(p) for theta in self.theta for p in theta}
        self.spare = [p for p in parameters if id(p) not in used]
        refuse_sharing(self.names, self.theta)

    def segments(self, x: Tensor) -> list[Segment]:
        """One forward pass of the model; each cut ends one graph and begins the next."""
        segments: list[Segment] = []
        begun = [(x.detach().requires_grad_(), rng_state(x))]

        def cut(t: int) -> Callable[..., Tensor]:
            def end(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
                if t != len(segments):
                    order = ", ".join(self.names[:-1])
                    raise ValueError(f"expected names in the order in which they run, got {order}")
                segments.append(Segment(begun[-1][0], own(output), begun[-1][1]))
                begun.append((output.detach().requires_grad_(), rng_state(output)))
                return begun[-1][0].clone()

            return end

        with ExitStack() as hooks, eager(self._eager):
            for t, module in enumerate(self._ends):
                hooks.enter_context(hooked(module, cut(t)))
            logits = self.model(begun[0][0].clone())
        segments.append(Segment(begun[-1][0], logits, begun[-1][1]))
        if len(segments) != len(self.names):
            raise ValueError(f"only {len(segments)} of {len(self.names)} layers ran in this pass")
        return segments

    def f(self, t: int, x: Tensor) -> Tensor:
        """f_t alone: the model run on anything up to x_t, from there on x_t.

        It draws the random numbers that f_t alone would; those of the way there are put back.
        """
        grad, rng = torch.is_grad_enabled(), rng_state(x)

        def enter(_module: nn.Module, _args: object, _output: Tensor) -> Tensor:
            torch.set_grad_enabled(grad)
            draw_from(rng, x)
            return x.clone()

        def leave(_module: nn.Module, _args: object, output: Tensor) -> NoReturn:
            raise Stopped(output)

        with ExitStack() as stack, eager(self._eager):
            given = x.clone()
            if t > 0:
                shape = (len(x), *self._example.shape[1:])
                given = self._example.to(x.device).expand(shape).clone()
                stack.enter_context(hooked(self._ends[t - 1], enter))
                stack.enter_context(torch.no_grad())
            if t < len(self._ends):
                stack.enter_context(hooked(self._ends[t], leave))
            try:
                logits: Tensor = self.model(given)
            except Stopped as left:
                return left.output
        return logits


def layers_of(model: nn.Module, x: Tensor, names: Sequence[str] | None = None) -> Layers:
    """The model, for inputs like x (B, ...), as layers that end at the modules `names`.

    Without names, an nn.Sequential is cut after each of its children (those before the first with
    parameters go with it), any other model in two where YOPO would cut it. A Sequential's layers
    run alone; those of other models run all that comes before them too, whenever run alone.
    """
    model = uncompiled(model)
    children = in_a_row(model)
    flat = [name for name, _ in children]
    cuts = [Split(model, name).cut(x) for name in names or (None,)]  # refuses what cannot be
    if names is None:
        if not (first := cuts[0].name):
            raise ValueError(NO_LAYERS)
        names = flat[flat.index(first) : -1] if first in flat else [first]
    if all(name in flat for name in names):
        return Chain(*_grouped(children, names))
    if len(set(names)) < len(names):
        raise ValueError(f"expected different names, got {', '.join(names)}")
    return Segmented(model, x, cuts)


def _grouped(
    children: list[tuple[str, nn.Module]], names: Sequence[str]
) -> tuple[list[nn.Module], list[str]]:
    """Neighbouring children as layers that end at `names`."""
    flat = [name for name, _ in children]
    ends = [flat.index(name) + 1 for name in names]
    if ends != sorted(set(ends)):
        raise ValueError(f"expected names in the order in which they run, got {', '.join(names)}")
    layers: list[nn.Module] = []
    for begin, end in zip([0, *ends], [*ends, len(flat)], strict=True):
        modules = [module for _, module in children[begin:end]]
        layers.append(modules[0] if len(modules) == 1 else nn.Sequential(*modules))
    return layers, [*names, flat[-1]]


def _used(out: Tensor, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    if not out.requires_grad or not parameters:
        return []
    grads = torch.autograd.grad(out.sum(), parameters, allow_unused=True)
    return [p for p, grad in zip(parameters, grads, strict=True) if grad is not None]


class SharedError(ValueError):
    """Two layers have a parameter in common; they, and those between, are one layer."""

    def __init__(self, names: Sequence[str], first: int, last: int) -> None:
        super().__init__(
            f"layers {names[first]!r} and {names[last]!r} share a parameter, but each θ_t belongs "
            "to one layer; put both into one"
        )
        self.first, self.last = first, last


def refuse_sharing(names: Sequence[str], theta: Sequence[Theta]) -> None:
    """Every parameter belongs to one layer."""
    owner: dict[int, int] = {}
    for t, parameters in enumerate(theta):
        for p in parameters:
            if owner.setdefault(id(p), t) != t:
                raise SharedError(names, owner[id(p)], t)
