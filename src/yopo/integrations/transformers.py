"""For the Trainer of transformers: held-out accuracy under attack in each evaluation."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import TrainerCallback

from yopo.core.parallel import in_group
from yopo.core.threat import Threat
from yopo.integrations.held_out import PREFIX, HeldOut


class Logits(nn.Module):
    """An image classifier of transformers as a network from images to logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """x (B, ...) in [0, 1] -> (B, C)."""
        logits: Tensor = self.classifier(pixel_values=x).logits
        return logits


class RobustAccuracy(TrainerCallback):  # type: ignore[misc]
    """Puts "eval_accuracy_clean", "eval_accuracy_pgd-20", … of held-out images into the metrics.

    images: the pair (x, y), or batches of it, in [0, 1]. every: so many evaluations apart.
    network: makes a network from images to logits of the Trainer's model; by default `Logits`.
    threat, attacks: as in `yopo.evaluate`. options: what else it takes, such as batch=500.

    So `metric_for_best_model` can choose by it, with every=1, and `state.log_history` has it.
    """

    def __init__(
        self,
        images: Iterable[Sequence[Tensor]] | tuple[Tensor, Tensor],
        threat: Threat,
        attacks: str | Sequence[str] = ("clean", "pgd-20"),
        every: int = 1,
        *,
        network: Callable[[Any], nn.Module] = Logits,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.held = HeldOut(images, threat, attacks, every, options)
        self.network, self._evaluations = network, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Refuse what the first evaluation without the metric would break off."""
        chosen = str(args.metric_for_best_model or "").removeprefix("eval_")
        if self.held.every > 1 and chosen.startswith(PREFIX):
            raise ValueError(
                f"the Trainer looks for {chosen} in every evaluation, and every={self.held.every} "
                "leaves some without; take every=1, and a larger eval_steps to measure less often"
            )

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Measure, and add to the metrics of this evaluation and its line in the history."""
        self._evaluations += 1
        if self._evaluations % self.held.every:
            return
        network = self.network(kwargs["model"])
        shares = self.held.measure(network, first=state.is_world_process_zero, send=_from_first)
        shares = {f"eval_{name}": share for name, share in shares.items()}
        kwargs["metrics"].update(shares)
        if state.log_history and state.log_history[-1]["step"] == state.global_step:
            state.log_history[-1].update(shares)


def _from_first(value: Any) -> Any:  # noqa: ANN401
    if not in_group():
        return value
    sent = [value]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]
