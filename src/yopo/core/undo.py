"""Put back what a block of code changed, also when an interrupt comes at the worst moment.

Python may raise KeyboardInterrupt at any call: half-way through putting things back, and on the way
into `__exit__`, of which then no line runs. So a block says what puts its changes back before it
makes any (`Undo`), and a function around it looks whether that was done (`surely`): one of the two
is not interrupted. A second interrupt in those microseconds may still leave a trace.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn

F = TypeVar("F", bound=Callable[..., Any])


class _Open(threading.local):
    """The blocks of a thread whose changes stand, the innermost last."""

    def __init__(self) -> None:
        self.blocks: list[Undo] = []


_open = _Open()


class Undo:
    """`with Undo(put_back):` change things; at its end, whatever ends it, they are as before.

    put_back: may be called twice, and before anything was changed.
    """

    def __init__(self, put_back: Callable[[], object]) -> None:
        self.put_back = put_back
        self._among = _open.blocks

    def __enter__(self) -> None:
        self._among.append(self)

    def __exit__(self, *_: object) -> None:
        if self not in self._among:  # `surely` was here before
            return
        try:
            self.put_back()
        except BaseException:
            self.put_back()
            raise
        finally:
            self._among.remove(self)


def surely(work: F) -> F:
    """Let a function end with all put back that blocks inside it changed, torch's grad mode too."""

    @wraps(work)
    def run(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        many, grad = len(_open.blocks), torch.is_grad_enabled()
        try:
            return work(*args, **kwargs)
        finally:
            while len(_open.blocks) > many:
                _open.blocks.pop().put_back()
            if torch.is_grad_enabled() != grad:
                torch.set_grad_enabled(grad)

    return cast(F, run)


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Within the block the module's forward is this function."""
    own = vars(module).get("forward")

    def put_back() -> None:
        vars(module).pop("forward", None)
        vars(module).update({} if own is None else {"forward": own})

    with Undo(put_back):
        vars(module)["forward"] = forward
        yield


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., object]) -> Iterator[None]:
    """Within the block the module calls the hook when it has finished."""
    hooks = module._forward_hooks

    def put_back() -> None:
        for key in [key for key, other in hooks.items() if other is hook]:
            del hooks[key]

    with Undo(put_back):  # a handle could be lost between register and remove
        module.register_forward_hook(hook)
        yield
