"""A method's optimizer step, in two forms: the plain one, and the fast one if there is one."""

from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from yopo.engine.carried import Carried
from yopo.engine.network import Compiled
from yopo.engine.numbers import Numbers
from yopo.methods.base import Method, Step


class Steps:
    """What a step does is written here once; a captured one is a recording of it."""

    def __init__(
        self,
        method: Method,
        optimizer: Optimizer,
        numbers: Numbers,
        carried: Carried,
        *,
        precision: Literal["float32", "bf16"],
    ) -> None:
        self.method, self.optimizer = method, optimizer
        self.numbers, self.carried, self.precision = numbers, carried, precision
        self.plain = self.fast = method
        self.added = 0  # batches whose gradients wait for the next step

    @property
    def parameters(self) -> list[Tensor]:
        """What the optimizer trains now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        first: Tensor = next(p for g in self.optimizer.param_groups for p in g["params"])
        return first.device

    @property
    def compiled(self) -> bool:
        """Whether the fast form runs a compiled network."""
        return isinstance(self.fast.model, Compiled)

    def let_go(self) -> None:
        """Let the plain form be all there is; the optimizer no longer knows of a compiled one."""
        if isinstance(self.fast.model, Compiled):
            self.fast.model.let_go()
        self.fast = self.plain

    def first(self, x: Tensor, y: Tensor) -> Step:
        """A fast step with the numbers of the first."""
        self.numbers.rehearse()
        self.carried.take()
        return self.take(self.fast, x, y)

    def take(self, form: Method, x: Tensor, y: Tensor) -> Step:
        """One step of the method in this form."""
        out = self.gradients(form, x, y)
        if self.added:
            self._mean()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.numbers.move_average()
        return out

    def gradients(self, form: Method, x: Tensor, y: Tensor) -> Step:
        """Those of a batch are added to .grad."""
        form.load_state_dict(self.carried.tensors)
        if isinstance(form.model, Compiled):
            form.model.refresh()
        bf16 = self.precision == "bf16"
        # No cache: casts kept across a capture would be those of old weights.
        try:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False
            ):
                out = form.run(x, y)
        except BaseException:  # as out of memory: half a gradient must not join the next
            self.optimizer.zero_grad()
            self.added = 0
            raise
        self.carried.keep(form)
        return out

    @torch.no_grad()
    def _mean(self) -> None:
        """Of the gradients of all batches since the last step."""
        if isinstance(self.fast.model, Compiled):
            self.fast.model.streams.settle()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_div_(grads, self.added + 1.0)
        self.added = 0
