"""A compiled network: what is done once a step instead of once a propagation."""

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from yopo.core.propagation import PLAIN, Passes, Propagation
from yopo.core.threat import Threat
from yopo.engine.inner import InnerLoop

Pairs = list[tuple[Tensor, Tensor]]  # parameters and gradients


class OneStream:
    """Weight gradients are computed and added up where they come: `overlap` without its gains."""

    def __init__(self, device: torch.device, second: bool) -> None:
        """`second` is for `overlap`."""

    def options(self) -> dict[str, Any]:
        """Settings of the compiler under which the network is compiled."""
        return {}

    def gradients(self, loss: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """∂loss by each of the leaves that it depends on."""
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    def add(self, *groups: Pairs) -> None:
        """Add gradients to .grad; the first group's came through the network."""
        for pairs in groups:
            accumulate(pairs)

    def settle(self) -> None:
        """Wait until all that was added is there."""


class Compiled(nn.Module, Passes):
    """The network, or its parts f0 and g, compiled.

    cast: under bf16 autocast, cast the weights of convolutions and linear layers once for each
    optimizer step, not in every pass; `refresh` must come after weights were changed.
    streams: `settle` must come before gradients are read. also: what else the loss may train, as
    parameters of its own. inner: the inner loop, where it can be compiled.
    """

    def __init__(
        self,
        *parts: nn.Module,
        streams: OneStream,
        cast: bool,
        also: Sequence[Tensor] = (),
        inner: InnerLoop | None = None,
    ) -> None:
        super().__init__()
        compiled: list[Any] = [torch.compile(part, dynamic=False) for part in parts]
        self.parts = nn.Sequential(*compiled)
        self.training = self.parts.training = parts[0].training  # not those of the user's modules
        self._weights: list[Tensor] = [p for p in self.parameters() if p.requires_grad]
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self._weights):
            raise ValueError("a parameter has a hook on its gradient")
        self.streams = streams
        self._inner = inner
        self._narrow: dict[str, Tensor] = {}  # cast weights by name, and the weights themselves
        self._wide: list[Tensor] = []
        if cast:
            wide = dict(self.parts.named_parameters())
            self._narrow = {
                name: wide[name].detach().bfloat16().requires_grad_()
                for name in _cast_by_autocast(self.parts)
                if wide[name].requires_grad
            }
            self._wide = [wide[name] for name in self._narrow]
        pairs = zip(self._wide, self._narrow.values(), strict=True)
        leaves = {id(wide): narrow for wide, narrow in pairs}
        self._leaves: list[Tensor] = [leaves.get(id(w), w) for w in self._weights]
        self._beside = [*self._wide, *also]  # the loss may reach these without the network
        self._hooks: list[RemovableHandle] = []

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x."""
        if not self._narrow:
            out: Tensor = self.parts(x)
            return out
        narrow: dict[str, Tensor] = self._narrow
        if not any(p.requires_grad for p in self.parts.parameters()):  # frozen for an attack
            narrow = {name: w.detach() for name, w in narrow.items()}
        out = functional_call(self.parts, narrow, (x,), tie_weights=False)
        return out

    def refresh(self) -> None:
        """Cast the weights anew."""
        if self._narrow:
            with torch.no_grad():
                torch._foreach_copy_(list(self._narrow.values()), self._wide)

    # ------------------------------------------------------------ passes

    def attack_pass(self, loss: Tensor, x: Tensor) -> Tensor:
        """The plain one, through compiled code."""
        return PLAIN.attack_pass(loss, x)

    def weight_pass(self, loss: Tensor, x: Tensor | None) -> None:
        """As loss.backward(), all additions to .grad at once."""
        leaves = [*self._leaves, *self._beside, *([] if x is None else [x])]
        grads = self.streams.gradients(loss, leaves)
        if x is not None:
            x.grad = grads[-1]
        through, past = grads[: len(self._weights)], grads[len(self._weights) :]
        self.streams.add(
            [(w, g) for w, g in zip(self._weights, through, strict=True) if g is not None],
            [(w, g) for w, g in zip(self._beside, past, strict=False) if g is not None],
        )

    def inner_loop(self, threat: Threat, x: Tensor, eta: Tensor, at: Propagation, n: int) -> Tensor:
        """One compiled function, or the plain loop through compiled code."""
        if self._inner is None:
            return PLAIN.inner_loop(threat, x, eta, at, n)
        return self._inner(threat, x, eta, at, n)

    # ------------------------------------------------------------ beside an optimizer

    def follow(self, optimizer: Optimizer, *, steps_inside: bool) -> None:
        """Let its steps wait for gradients and, where some come inside a batch, cast anew."""
        at = weakref.proxy(self)  # the optimizer may outlive this network
        settle = optimizer.register_step_pre_hook(lambda *_: at.streams.settle())
        # Before other hooks: one of them may clip gradients.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(settle.id, last=False)
        self._hooks = [settle]
        if steps_inside:  # else once, before the step
            refresh = optimizer.register_step_post_hook(lambda *_: at.refresh())
            self._hooks.append(refresh)
        for hook in self._hooks:
            weakref.finalize(self, hook.remove)

    def let_go(self) -> None:
        """Leave the optimizer alone."""
        for hook in self._hooks:
            hook.remove()


def _cast_by_autocast(module: nn.Module) -> list[str]:
    """Names of the weights that every pass under autocast would cast."""
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    layers = [n for n, m in module.named_modules() if isinstance(m, kinds)]
    names = dict(module.named_parameters())
    return [f"{n}.{kind}" for n in layers for kind in ("weight", "bias") if f"{n}.{kind}" in names]


def accumulate(pairs: Pairs) -> None:
    """Add gradients of any precision to .grad."""
    first = [(p, g) for p, g in pairs if p.grad is None]
    again = [(p.grad, g) for p, g in pairs if p.grad is not None]
    for p, _ in first:
        p.grad = torch.empty_like(p)  # laid out as the optimizer wants it
    copy, add = _compiled_sums()
    if first:
        copy([p.grad for p, _ in first], [g for _, g in first])
    if again:
        add([total for total, _ in again], [g for _, g in again])


@cache
def _compiled_sums() -> tuple[Callable[..., None], Callable[..., None]]:
    """Copies and sums of many tensors in few kernels."""

    def copy(totals: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_copy_(totals, grads)

    def add(totals: list[Tensor], grads: list[Tensor]) -> None:
        torch._foreach_add_(totals, [g.to(t.dtype) for t, g in zip(totals, grads, strict=True)])

    return torch.compile(copy, dynamic=False), torch.compile(add, dynamic=False)
