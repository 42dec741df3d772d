"""The inner loop where f0 is a module of its own: one compiled function, or one Triton kernel."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from yopo.core.first_layer import Cut, Split
from yopo.core.propagation import Propagation
from yopo.core.threat import Linf, Threat


class KnownCut(Split):
    """g ∘ f0 on a form of the network whose modules nobody can watch: the cut is another form's."""

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        super().__init__(model)
        self._known = cut

    def cut(self, x: Tensor) -> Cut:
        """The same for every x."""
        return self._known


class InnerLoop:
    """The n inner steps as one function of f0, which draws and keeps nothing.

    ascend: the threat's plain one. The compiler takes it into the function that it makes.
    """

    def __init__(self, f0: nn.Sequential, ascend: Callable[..., Tensor]) -> None:
        self._f0, self._ascend = f0, ascend

    def __call__(self, threat: Threat, x: Tensor, eta: Tensor, at: Propagation, n: int) -> Tensor:
        """As `Plain.inner_loop`."""
        with torch.no_grad():
            kernel = _kernel(self._f0, x) if self._ascend is Linf.ascend and n > 1 else None
            if kernel is None:
                return _compiled_loop()(self._f0, self._ascend, threat, at.p, x, eta, at.grad, n)
            return kernel(self._f0[0], at.p, x, eta, at.grad, threat.eps, threat.step, n)


def _kernel(f0: nn.Module, x: Tensor) -> Callable[..., Tensor] | None:
    """Our own kernel, if Triton is here and it is made for f0."""
    try:
        from yopo.engine import kernel
    except ImportError:
        return None
    return kernel.inner_loop if kernel.fits(f0, x) else None


@cache
def _compiled_loop() -> Callable[..., Tensor]:
    def loop(
        f0: nn.Module,
        ascend: Callable[..., Tensor],
        threat: Threat,
        p: Tensor,
        x: Tensor,
        eta: Tensor,
        grad: Tensor,
        n: int,
    ) -> Tensor:
        for s in range(n):
            if s > 0:
                pulled: Any = torch.func.vjp(f0, x + eta)[1](p)
                grad = pulled[0]
            eta = ascend(threat, eta, grad, x)
        return eta

    compiled: Any = torch.compile(loop, dynamic=False)
    return compiled  # type: ignore[no-any-return]
