"""A few iterations of L-BFGS, torch's own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def lbfgs(variables: Sequence[Tensor], f: Callable[[], Tensor], n: int) -> int:
    """Move the variables down f by n iterations; return the number of its evaluations."""
    optimizer = torch.optim.LBFGS(list(variables), max_iter=n, line_search_fn="strong_wolfe")
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        with torch.enable_grad():
            value = f()
            grads = torch.autograd.grad(value, variables, allow_unused=True)
        for v, grad in zip(variables, grads, strict=True):
            v.grad = grad
        return value.detach()

    optimizer.step(closure)
    return calls
