"""A loss that hands out gradients found before it was made, to whoever calls its backward()."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from yopo.core.losses import Loss
from yopo.core.parallel import Exchanges, Gradients, fsdp, part, surrounding
from yopo.core.undo import Undo

Hooks = tuple[dict[int, Any], dict[int, Any]]  # where a tensor keeps them, and a copy


@dataclass(slots=True)
class Aside:
    """What passes left in .grad, taken from there before anybody saw it."""

    wrappers: list[DistributedDataParallel]  # in the network
    parameters: list[Tensor] = field(default_factory=list)  # that got a gradient
    grads: list[Tensor] = field(default_factory=list)
    # by id: a tensor, its own .grad, and its hooks with what was in them
    held: dict[int, tuple[Tensor, Tensor | None, list[Hooks]]] = field(default_factory=dict)

    def hold(self, p: Tensor) -> None:
        """Let passes find p without a .grad and without hooks, until all is put back."""
        if id(p) in self.held:
            return
        hooks = [(there, dict(there)) for there in _hooks(p) if there]
        self.held[id(p)] = p, p.grad, hooks
        for there, _ in hooks:
            there.clear()
        p.grad = None

    def hearing(self, loss: Loss) -> Loss:
        """The same loss; what it trains is held, also where only its code knows of it."""

        def heard(z: Tensor, y: Tensor) -> Tensor:
            out = loss(z, y)
            for p in _leaves(out, z):
                self.hold(p)
            return out

        return heard

    def put_back(self) -> None:
        """Let all that is held have its .grad and its hooks again."""
        for p, grad, hooks in self.held.values():
            p.grad = grad
            for there, theirs in hooks:
                there.update(theirs)

    def handed(self, loss: Tensor) -> Tensor:
        """`loss` (), whose backward() adds the gradients, times its own, to .grad."""
        grads, self.grads = self.grads, []  # what somebody else has would be copied there
        out: Tensor = _Handed.apply(loss, grads, *self.parameters)  # type: ignore[no-untyped-call]
        for each in self.wrappers:
            out = _announced(each, out)
        return out


@contextmanager
def put_aside(model: nn.Module, parameters: Iterable[Tensor]) -> Iterator[Aside]:
    """Passes in the block leave .grad alone; what they find is there at the block's end.

    Nobody else hears of these passes: hooks on the parameters' gradients are for the whole, and
    DistributedDataParallel, which has nothing to exchange yet, is gone round.
    """
    modules = list(model.modules())
    aside = Aside([m for m in modules if isinstance(m, DistributedDataParallel)])
    around = surrounding()
    if any(each.static_graph for each in (*aside.wrappers, *([around] if around else []))):
        raise ValueError(
            "DistributedDataParallel with static_graph=True counts the gradients of the method's "
            "own passes, and would then exchange too little; leave static_graph out"
        )
    exchanges, spread = Exchanges(modules), fsdp(modules)
    if spread and exchanges.are_off:
        raise ValueError(
            "without an exchange FSDP2 keeps gradients to itself, and method(x, y) has none to hand"
            " out; accumulate with method.backward(x, y), or leave the exchange on: "
            "model.set_requires_gradient_sync(True)"
        )
    exchanges.spread()  # a forward pass, or gathered(), may have left whole weights
    kept = Gradients(model).kept_unless_done() if spread else nullcontext()
    asking = [p for p in parameters if p.requires_grad and p.is_leaf]
    with exchanges.gone_round(), Undo(aside.put_back), kept:
        for p in asking:
            aside.hold(p)
        yield aside
        for held, _, _ in aside.held.values():
            if held.grad is not None:
                aside.parameters.append(held)
                aside.grads.append(held.grad)


def _leaves(loss: object, logits: Tensor) -> Iterator[Tensor]:
    """What `loss` was computed from besides the logits and would leave a gradient in."""
    nodes = [getattr(loss, "grad_fn", None)]
    seen = {logits.grad_fn}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # AccumulateGrad's
        if isinstance(leaf, Tensor) and leaf is not logits:
            yield leaf
        nodes += [before for before, _ in node.next_functions]


def _hooks(p: Tensor) -> tuple[dict[int, Any] | None, ...]:
    return p._backward_hooks, p._post_accumulate_grad_hooks


def check_hooks(model: nn.Module, parameters: Iterable[Tensor], method: str, passes: int) -> None:
    """Refuse hooks that run when .grad is filled, as optimizers in the backward pass do.

    Where the gradient comes in several passes, each would call them. FSDP2 calls those of its
    parameters where it reduces, which is once; DistributedDataParallel's own are meant for each.
    """
    if passes == 1 or fsdp(model.modules()):
        return
    for p in parameters:
        if any(not _is_torchs(hook) for hook in (p._post_accumulate_grad_hooks or {}).values()):
            raise ValueError(
                f"expected parameters without post-accumulate hooks, as {method}.backward makes "
                f"{passes} weight passes and each would call them, got one of shape "
                f"{tuple(p.shape)} that has some; use loss = method(x, y) and loss.backward(), "
                "which calls them once"
            )


def _is_torchs(hook: Any) -> bool:  # noqa: ANN401
    function = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(function, "__module__", "")).startswith("torch.nn.parallel.")


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
        multiply(grads, scale)
        return None, None, *grads


def multiply(grads: list[Tensor], scale: Tensor) -> None:
    """Multiply all by scale () in place: they are nobody else's."""
    if scale.is_cpu and scale.item() == 1:  # elsewhere reading it would wait for the device
        return
    there: dict[torch.device, list[Tensor]] = {}
    for g in map(part, grads):  # spread ones and whole ones do not go together
        there.setdefault(g.device, []).append(g)
    for device, those in there.items():
        torch._foreach_mul_(those, part(scale).to(device))


def _announced(wrapper: DistributedDataParallel, loss: Tensor) -> Tensor:
    """Pass the loss through its forward: it exchanges in the backward pass that follows, once."""
    inner = wrapper.module
    with Undo(lambda: setattr(wrapper, "module", inner)):
        wrapper.module = _PassesOn(inner)
        out: Tensor = wrapper.forward(loss)
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
