"""Numbers that change from step to step, where the device reads them: rates, radius, averaging."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from yopo.core.threat import L2, Linf, Threat
from yopo.engine.ema import EMA


class Numbers:
    """Tensors () that a captured step reads; `write` comes before each step."""

    def __init__(self, optimizer: Optimizer, ema: EMA | None, device: torch.device) -> None:
        self._optimizer, self._ema, self._device = optimizer, ema, device
        self._rates = [
            torch.tensor(float(g["lr"]), dtype=torch.float32, device=device)  # fused SGD's
            for g in optimizer.param_groups
        ]
        self._weight = torch.ones((), device=device)  # of the average's next move
        self._move: Callable[[Tensor], None] | None = ema.move if ema else None
        self._given: Threat | None = None  # the user's
        self.ball: Linf | L2 | None = None  # the same with tensors, of a kind that can have them
        self.steps = 0  # whose number nobody gave

    def take(self, threat: Threat | None) -> None:
        """Read this threat's radius and step anew at each step, if it is one of ours."""
        self._given = threat
        if isinstance(threat, Linf | L2) and type(threat) in (Linf, L2):
            eps, step = (torch.tensor(v, device=self._device) for v in (threat.eps, threat.step))
            self.ball = threat.resized(eps, step)

    def let_rates_be_tensors(self) -> None:
        """As optimizers take them on a GPU."""
        for group in self._optimizer.param_groups:
            if isinstance(self._optimizer, SGD):
                group["fused"], group["foreach"] = True, False
            elif "capturable" in group:  # Adam and its kin, which count steps on the device then
                group["capturable"] = True
                for p in group["params"]:
                    state = self._optimizer.state.get(p, {})  # [p] would make one
                    if isinstance(count := state.get("step"), Tensor):
                        state["step"] = count.to(self._device)

    def check(self, part: float) -> None:
        """Refuse what cannot be written."""
        if part != 1 and self._given is not None and self.ball is None:
            raise ValueError(
                f"part= is for yopo.Linf and yopo.L2, not {type(self._given).__name__}"
            )
        if len(self._optimizer.param_groups) != len(self._rates):
            raise ValueError("the optimizer has other parameter groups now; make a new Engine")

    def write(self, part: float, updates: int | None) -> None:
        """For the next step; updates: those made before it, by default as many as asked for so."""
        if updates is None:
            updates = self.steps
        self.steps += 1
        self.rehearse(part, updates)

    def rehearse(self, part: float = 1.0, updates: int = 0) -> None:
        """The same for a step that does not count."""
        if self.ball is not None and self._given is not None:
            ball: Any = self.ball
            ball.eps.fill_(part * self._given.eps)
            ball.step.fill_(part * self._given.step)
        if self._ema:
            self._weight.fill_(self._ema.weight(updates))
        if self._device.type == "cuda":
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if group["lr"] is not rate:  # set anew since the last step
                    rate.fill_(group["lr"])
                    group["lr"] = rate

    def compile_average(self, enabled: bool) -> None:
        """Let the average move in compiled code, or plainly."""
        if self._ema:
            move = self._ema.move
            self._move = torch.compile(move, dynamic=False) if enabled else move

    def move_average(self) -> None:
        """After the optimizer's step."""
        if self._ema and self._move:
            self._ema.pair()  # a pass may have put new tensors in the place of buffers
            self._move(self._weight)
