"""For Lightning's Trainer: held-out accuracy under attack after each validation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor, nn

from yopo.core.threat import Threat
from yopo.integrations.held_out import HeldOut
from yopo.methods.base import Method


class RobustAccuracy(Callback):  # type: ignore[misc]
    """Logs "accuracy_clean", "accuracy_pgd-20", … of held-out images after a validation epoch.

    images: the pair (x, y), or batches of it, in [0, 1]. every: so many validations apart.
    network: takes the network out of the LightningModule; by default that of the first yopo method
    among its attributes, and if there is none the LightningModule itself.
    threat, attacks: as in `yopo.evaluate`. options: what else it takes, such as batch=500.

    The first process measures, all log the same number, so that ModelCheckpoint can monitor it.
    """

    def __init__(
        self,
        images: Iterable[Sequence[Tensor]] | tuple[Tensor, Tensor],
        threat: Threat,
        attacks: str | Sequence[str] = ("clean", "pgd-20"),
        every: int = 1,
        *,
        network: Callable[[Any], nn.Module] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.held = HeldOut(images, threat, attacks, every, options)
        self.network, self._validations = network or inner, 0

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401
        """Measure and log."""
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.held.every:
            return
        shares = self.held.measure(
            self.network(pl_module), first=trainer.is_global_zero, send=trainer.strategy.broadcast
        )
        pl_module.log_dict(shares, sync_dist=trainer.world_size > 1)  # equal everywhere

    def state_dict(self) -> dict[str, Any]:
        """How many validations there were."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._validations = state_dict["validations"]


def inner(module: nn.Module) -> nn.Module:
    """The network of the first method among a module's attributes, or the module."""
    methods = (value for value in vars(module).values() if isinstance(value, Method))
    return next((method.model for method in methods), module)
