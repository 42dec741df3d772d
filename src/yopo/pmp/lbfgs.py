"""A few iterations of L-BFGS, torch's own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def lbfgs(variables: Sequence[Tensor], f: Callable[[], Tensor], n: int) -> int:
    """Move the variables down f by n iterations; return the number of its evaluations.

    torch's own takes tensors in their usual order alone, so it moves such copies.
    """
    copies = [v.detach().clone(memory_format=torch.contiguous_format) for v in variables]
    optimizer = torch.optim.LBFGS(copies, max_iter=n, line_search_fn="strong_wolfe")
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        take_over()
        with torch.enable_grad():
            value = f()
            grads = torch.autograd.grad(value, variables, allow_unused=True)
        for copy, grad in zip(copies, grads, strict=True):
            copy.grad = None if grad is None else grad.contiguous()
        return value.detach()

    def take_over() -> None:
        with torch.no_grad():
            for v, copy in zip(variables, copies, strict=True):
                v.copy_(copy)

    optimizer.step(closure)
    take_over()
    return calls
