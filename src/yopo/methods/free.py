"""Free-m (Shafahi et al. 2019): every pass moves both the weights and the perturbation."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from yopo.core.checks import check_at_least, check_optimizer, check_step
from yopo.core.losses import Loss
from yopo.core.parallel import check_exchanging
from yopo.core.propagation import FULL, propagate
from yopo.core.threat import Threat
from yopo.methods.base import AdversarialMethod, Step, carried_over


class Free(AdversarialMethod):
    """Replay each batch m times, stepping the optimizer after each replay.

    `backward` makes the first m − 1 optimizer steps itself and leaves the m-th gradient in .grad,
    so the training loop stays the usual one. Its loss and logits are the last replay's.
    eta goes on from one batch to the next and starts at zero. step: of the adversary, default eps.
    optimizer: of all the model's weights. model, threat, loss: as for `yopo.YOPO`.
    """

    def __init__(
        self,
        model: nn.Module,
        threat: Threat,
        *,
        optimizer: Optimizer,
        m: int = 8,
        step: float | None = None,
        loss: Loss | None = None,
    ) -> None:
        super().__init__(model, threat, loss=loss, generator=None)
        check_at_least("m", m, 1)
        self.m = m
        self.step = None if step is None else check_step(step)
        check_optimizer(optimizer, model)
        self.optimizer: Optimizer = optimizer
        self.eta: Tensor | None = None  # carried over, (B, ...)

    def _run(self, x: Tensor, y: Tensor, eta: Tensor | None) -> Step:
        check_exchanging(self.model, "Free steps its optimizer inside a batch")
        objective = self._objective(y)
        eta = self.threat.project(carried_over(self.eta, x) if eta is None else eta, x)
        for replay in range(self.m):
            if replay > 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.model.zero_grad()  # also of what another optimizer has
                torch.clear_autocast_cache()  # it holds casts of the weights just changed
            at = propagate(self.model, x + eta, objective, weights=1.0)
            eta = self.threat.ascend(eta, at.grad, x, step=self.step or self.threat.eps)
        self.eta = eta
        return Step(at.loss, at.logits, eta, self.m * FULL)

    def state_dict(self) -> dict[str, Tensor]:
        """The perturbation."""
        return {} if self.eta is None else {"eta": self.eta}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Zero if there is none."""
        self.eta = state.get("eta")
