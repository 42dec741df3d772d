"""Losses on logits."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, C), targets -> scalar


def consistency(logits: Tensor, clean_logits: Tensor) -> Tensor:
    """TRADES' 𝓛: KL(clean ‖ adversarial) of the predictions, mean over the batch."""
    return F.kl_div(
        logits.log_softmax(1), clean_logits.log_softmax(1), reduction="batchmean", log_target=True
    )


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Largest wrong logit minus the true one, for each sample: positive when misclassified."""
    true = logits.gather(1, y[:, None])[:, 0]
    wrong = logits.scatter(1, y[:, None], float("-inf")).amax(1)
    return wrong - true
