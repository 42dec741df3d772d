"""The adversary's inner loop: eta goes up H0(eta) = p·f0(x + eta), the co-state p frozen.

The paper has two signs for p. Section 2.2 takes p = +∂loss/∂f0 and lets the adversary ascend;
section 3 takes p = −∂loss/∂f0 and lets it minimise H0. Here, as in all methods: plus, and ascend.
"""

from torch import Tensor

from yopo.core.propagation import Propagation
from yopo.core.threat import Threat


def ascend(threat: Threat, x: Tensor, eta: Tensor, at: Propagation, n: int) -> Tensor:
    """Take n steps of eta (B, ...) up H0, p frozen at the propagation `at` (made at x + eta).

    The first step needs no pass through f0: its gradient p·∂f0/∂x is the ∂loss/∂x that the
    propagation found. Where f0 is affine that is the gradient of every step.
    """
    if at.p is None:
        return threat.ascend(eta, at.grad, x, n=n)
    return at.passes.inner_loop(threat, x, eta, at, n)
