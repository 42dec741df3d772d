"""The network under attack: in a stated precision, and counting what passes through it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from yopo.core.propagation import ATTACK_ONLY, FORWARD
from yopo.core.undo import Undo

Precision = Literal["float32", "tf32", "bf16"]


class Network(nn.Module):
    """The user's model, in float32 (float64 if its weights are) or bf16 autocast.

    `cost` counts images times passes, in full propagations; a pass that can be differentiated
    counts as forward and backward.
    """

    def __init__(self, model: nn.Module, precision: Precision, device: torch.device) -> None:
        super().__init__()
        if isinstance(model, DistributedDataParallel):  # processes take different numbers of passes
            model = model.module
        self.precision, self.device = precision, device
        self.model: Any = model
        self.compiled = False
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if precision != "bf16" and dtypes & {torch.bfloat16, torch.float16}:
            raise ValueError(
                f"expected weights in float32 for an evaluation in {precision}, got "
                f"{' and '.join(sorted(map(str, dtypes)))}; use model.float(), "
                "or ask for precision='bf16'"
            )
        self.dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
        self.cost = 0.0

    @classmethod
    def of(cls, model: nn.Module, precision: Precision, x: Tensor) -> "Network":
        """Where the model's parameters are; where the images are, if it has none."""
        return cls(model, precision, next(model.parameters(), x).device)

    def speed_up(self) -> None:
        """Compile the model from here on: it pays for long attacks."""
        self.model, self.compiled = torch.compile(self.model), True

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, C), never in half precision."""
        differentiated = torch.is_grad_enabled() and x.requires_grad
        self.cost += len(x) * (ATTACK_ONLY if differentiated else FORWARD)
        half = self.precision == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            if self.compiled:
                with torch.set_grad_enabled(differentiated):
                    logits = self._in_two_graphs(x.to(self.dtype))
            else:
                logits = self.model(x.to(self.dtype))
        if differentiated and isinstance(logits, Tensor) and not logits.requires_grad:
            # A model that leaves autograd has no gradients; attacks stand still, and a warning
            # says so.
            logits = logits + 0 * x.flatten(1).sum(1, keepdim=True)
        return logits.to(self.dtype) if isinstance(logits, Tensor) else logits

    def _in_two_graphs(self, x: Tensor) -> Tensor:
        """One for each grad mode, whatever the batch; fewer than 16 images would need their own.

        Attacks drop images one by one, and after eight graphs torch gives up compiling.
        """
        many = len(x)
        if 0 < many < 16:
            x = torch.cat([x, x[-1:].expand(16 - many, *x.shape[1:])])
        x = x if torch.is_grad_enabled() else x.detach()
        torch._dynamo.maybe_mark_dynamic(x, 0)
        logits: Tensor = self.model(x)
        return logits[:many] if isinstance(logits, Tensor) else logits


@contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Multiply float32 numbers as float32 unless TF32 is asked for; put the switches back after."""
    fast = precision == "tf32"
    b: Any = torch.backends
    try:
        tf32, matmul = b.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:  # the switches of single operators are in use; torch will not mix the two
        owners = [b.cudnn.conv, b.cudnn.rnn, b.cuda.matmul]
        owners += [b.mkldnn.conv, b.mkldnn.rnn, b.mkldnn.matmul]
        before = [owner.fp32_precision for owner in owners]

        def owners_back() -> None:
            for owner, value in zip(owners, before, strict=True):
                owner.fp32_precision = value

        with Undo(owners_back):
            for owner in owners:
                owner.fp32_precision = "tf32" if fast else "ieee"
            yield
    else:

        def both_back() -> None:
            b.cudnn.allow_tf32 = tf32
            torch.set_float32_matmul_precision(matmul)

        with Undo(both_back):
            b.cudnn.allow_tf32 = fast
            torch.set_float32_matmul_precision("high" if fast else "highest")
            yield
