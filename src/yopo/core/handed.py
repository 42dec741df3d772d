"""A loss that hands out gradients found before it was made, to whoever calls its backward()."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from yopo.core.parallel import parallel, surrounding

Pairs = list[tuple[Tensor, Tensor]]  # a parameter and its gradient


@contextmanager
def put_aside(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[Pairs]:
    """Passes in the block leave .grad alone; what they find is in the list at the block's end.

    Nobody else hears of these passes: hooks on the parameters' gradients are for the whole, and
    DistributedDataParallel, which has nothing to exchange yet, is gone round.
    """
    around = surrounding()
    wrappers = parallel(model)
    if any(each.static_graph for each in (*wrappers, *([around] if around else []))):
        raise ValueError(
            "DistributedDataParallel with static_graph=True counts the gradients of the method's "
            "own passes, and would then exchange too little; leave static_graph out"
        )
    asking = [p for p in parameters if p.requires_grad and p.is_leaf]
    before = [p.grad for p in asking]
    own = [(h, dict(h)) for p in asking for h in (p._backward_hooks, _after(p)) if h]
    pairs: Pairs = []
    with ExitStack() as round_them:
        for each in wrappers:
            round_them.enter_context(_gone_round(each))
        try:
            for hooks, _ in own:
                hooks.clear()
            for p in asking:
                p.grad = None
            yield pairs
            pairs += [(p, p.grad) for p in asking if p.grad is not None]
        finally:
            for p, grad in zip(asking, before, strict=True):
                p.grad = grad
            for hooks, theirs in own:
                hooks.update(theirs)


def _after(p: Tensor) -> dict[int, Any] | None:
    return p._post_accumulate_grad_hooks


def handed(model: nn.Module, loss: Tensor, pairs: Pairs) -> Tensor:
    """`loss` (), whose backward() adds these gradients, times its own, to .grad."""
    parameters, grads = [p for p, _ in pairs], [g for _, g in pairs]
    pairs.clear()  # what is added to .grad must belong to nobody else, else it is copied
    out: Tensor = _Handed.apply(loss, grads, *parameters)  # type: ignore[no-untyped-call]
    for each in parallel(model):
        out = _announced(each, out)
    return out


class _Handed(torch.autograd.Function):
    """(loss, gradients, parameters) -> loss."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        loss: Tensor,
        grads: list[Tensor],
        *_parameters: Tensor,
    ) -> Tensor:
        ctx.grads = grads
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "this loss has handed out its gradients and kept none; call the method again"
            )
        if all(g.device == scale.device for g in grads):
            torch._foreach_mul_(grads, scale)  # in place: they are nobody else's
        else:
            for g in grads:
                g.mul_(scale.to(g.device))
        return None, None, *grads


@contextmanager
def _gone_round(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Passes in the block run in the module that it wraps, so that it counts no step for them."""
    own = vars(wrapper).get("forward")
    setattr(wrapper, "forward", lambda *args, **kwargs: wrapper.module(*args, **kwargs))  # noqa: B010
    try:
        yield
    finally:
        delattr(wrapper, "forward")
        if own is not None:
            setattr(wrapper, "forward", own)  # noqa: B010


def _announced(wrapper: DistributedDataParallel, loss: Tensor) -> Tensor:
    """Pass the loss through its forward: it exchanges in the backward pass that follows, once."""
    inner = wrapper.module
    wrapper.module = _PassesOn(inner)
    try:
        out: Tensor = wrapper.forward(loss)
    finally:
        wrapper.module = inner
    return out


class _PassesOn(nn.Module):
    """Has all that another module has, and gives back what it gets."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self._parameters, self._modules = other._parameters, other._modules
        self._buffers = other._buffers  # which are exchanged, too

    def forward(self, loss: Tensor) -> Tensor:
        """The same."""
        return loss
